//! The stacks of an encoder and of a decoder.

use super::attention::{causal_mask, Attention, KeysValues};
use crate::{layers::dropout::dropout, Result};
use candle_core::Tensor;
use candle_nn::{layer_norm_no_bias, linear_no_bias, LayerNorm, Linear, Module, VarBuilder};
use rand::rngs::StdRng;

/// The sizes of a stack, and its dropout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransformerSizes {
    /// The number of layers.
    pub layers: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The number of attention heads, of which `width` must be a multiple.
    pub heads: usize,
    /// The width within the feed-forward networks.
    pub inner: usize,
    /// The dropout of what each sublayer adds.
    pub dropout: f64,
}

/// Adds a small number to the variance of what is normalised.
const EPSILON: f64 = 1e-5;

/// Without a bias, candle's `LayerNorm` is composed of operations that have gradients; with one it is a fused operation
/// that has none.
fn norm(width: usize, vb: VarBuilder) -> Result<LayerNorm> {
    Ok(layer_norm_no_bias(width, EPSILON, vb)?)
}

/// A feed-forward network with a rectifier (section 3.3).
struct FeedForward {
    norm: LayerNorm,
    inner: Linear,
    outer: Linear,
}

impl FeedForward {
    fn new(sizes: TransformerSizes, vb: VarBuilder) -> Result<Self> {
        let TransformerSizes { width, inner, .. } = sizes;
        Ok(Self {
            norm: norm(width, vb.pp("norm"))?,
            inner: linear_no_bias(width, inner, vb.pp("inner"))?,
            outer: linear_no_bias(inner, width, vb.pp("outer"))?,
        })
    }

    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        Ok(self.outer.forward(&self.inner.forward(&self.norm.forward(inputs)?)?.relu()?)?)
    }
}

/// Attention over the normalised inputs of a sublayer.
struct NormedAttention {
    norm: LayerNorm,
    attention: Attention,
}

impl NormedAttention {
    fn new(sizes: TransformerSizes, vb: VarBuilder) -> Result<Self> {
        let TransformerSizes { width, heads, .. } = sizes;
        Ok(Self { norm: norm(width, vb.pp("norm"))?, attention: Attention::new(width, heads, vb)? })
    }
}

/// `values` and what a sublayer adds to them, with dropout if a generator for its masks is given.
fn add(values: &Tensor, sublayer: Tensor, rate: f64, rng: Option<&mut StdRng>) -> Result<Tensor> {
    Ok((values + dropout(sublayer, rate, rng)?)?)
}

/// The layers of an encoder, and the normalisation of their outputs.
pub struct Encoder {
    layers: Vec<(NormedAttention, FeedForward)>,
    norm: LayerNorm,
    dropout: f64,
}

impl Encoder {
    /// Makes the layers, with variables `0.attention.query.weight`, ..
    pub fn new(sizes: TransformerSizes, vb: VarBuilder) -> Result<Self> {
        let layer = |i: usize| {
            let attention = NormedAttention::new(sizes, vb.pp(i).pp("attention"))?;
            Ok((attention, FeedForward::new(sizes, vb.pp(i).pp("feed_forward"))?))
        };
        let layers = (0..sizes.layers).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, norm: norm(sizes.width, vb.pp("norm"))?, dropout: sizes.dropout })
    }

    /// Computes outputs from inputs, both `[batch, positions, width]`. The mask is added to the scores `[batch, heads,
    /// positions, positions]`. Dropout is applied if a generator for its masks is given.
    pub fn forward(&self, inputs: &Tensor, mask: Option<&Tensor>, mut rng: Option<&mut StdRng>) -> Result<Tensor> {
        let mut values = inputs.clone();
        for (NormedAttention { norm, attention }, feed_forward) in &self.layers {
            let normed = norm.forward(&values)?;
            let attended = attention.forward(&normed, &attention.attended(&normed)?, mask)?;
            values = add(&values, attended, self.dropout, rng.as_deref_mut())?;
            values = add(&values, feed_forward.forward(&values)?, self.dropout, rng.as_deref_mut())?;
        }
        Ok(self.norm.forward(&values)?)
    }
}

struct DecoderLayer {
    itself: NormedAttention,
    source: NormedAttention,
    feed_forward: FeedForward,
}

/// The layers of a decoder, and the normalisation of their outputs.
pub struct Decoder {
    layers: Vec<DecoderLayer>,
    norm: LayerNorm,
    dropout: f64,
}

/// The state of a decoder is what it has read: the keys and values of each layer.
#[derive(Clone)]
pub struct DecoderState {
    /// The keys and values of the positions so far; `None` before the first.
    past: Vec<Option<KeysValues>>,
    /// The keys and values of the encoder's outputs.
    source: Vec<KeysValues>,
    /// Hides positions of the source, as in [`Attention::forward`].
    mask: Tensor,
}

impl DecoderState {
    /// Returns the number of positions so far.
    pub fn positions(&self) -> Result<usize> {
        self.past.first().and_then(Option::as_ref).map_or(Ok(0), KeysValues::positions)
    }

    /// Returns the states of these rows of the batch.
    pub fn select(&self, rows: &Tensor) -> Result<Self> {
        let select = |layer: &KeysValues| layer.select(rows);
        Ok(Self {
            past: self.past.iter().map(|past| past.as_ref().map(select).transpose()).collect::<Result<_>>()?,
            source: self.source.iter().map(select).collect::<Result<_>>()?,
            mask: self.mask.index_select(rows, 0)?,
        })
    }
}

impl Decoder {
    /// Makes the layers, with variables `0.itself.query.weight`, `0.source.query.weight`, ..
    pub fn new(sizes: TransformerSizes, vb: VarBuilder) -> Result<Self> {
        let layer = |i: usize| {
            Ok(DecoderLayer {
                itself: NormedAttention::new(sizes, vb.pp(i).pp("itself"))?,
                source: NormedAttention::new(sizes, vb.pp(i).pp("source"))?,
                feed_forward: FeedForward::new(sizes, vb.pp(i).pp("feed_forward"))?,
            })
        };
        let layers = (0..sizes.layers).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, norm: norm(sizes.width, vb.pp("norm"))?, dropout: sizes.dropout })
    }

    /// Returns the state before the first position, after the encoder's outputs `[batch, positions, width]`; the mask
    /// hides those of padding, `[batch, 1, 1, positions]`.
    pub fn start(&self, source: &Tensor, mask: Tensor) -> Result<DecoderState> {
        let source = self.layers.iter().map(|layer| layer.source.attention.attended(source)).collect::<Result<_>>()?;
        Ok(DecoderState { past: vec![None; self.layers.len()], source, mask })
    }

    /// Computes outputs from the next inputs, both `[batch, steps, width]`. Each output depends on the inputs up to its
    /// own. Advances `state`. Dropout is applied if a generator for its masks is given.
    pub fn forward(&self, inputs: &Tensor, state: &mut DecoderState, mut rng: Option<&mut StdRng>) -> Result<Tensor> {
        let steps = inputs.dim(1)?;
        let causal = if steps > 1 { Some(causal_mask(steps, state.positions()?, inputs)?) } else { None };
        let mut values = inputs.clone();
        for (layer, (past, source)) in self.layers.iter().zip(state.past.iter_mut().zip(&state.source)) {
            let DecoderLayer { itself, source: source_attention, feed_forward } = layer;
            let normed = itself.norm.forward(&values)?;
            let here = itself.attention.attended(&normed)?;
            let so_far = past.take().map_or(Ok(here.clone()), |past| past.extended(&here))?;
            let attended = itself.attention.forward(&normed, &so_far, causal.as_ref())?;
            *past = Some(so_far);
            values = add(&values, attended, self.dropout, rng.as_deref_mut())?;
            let normed = source_attention.norm.forward(&values)?;
            let attended = source_attention.attention.forward(&normed, source, Some(&state.mask))?;
            values = add(&values, attended, self.dropout, rng.as_deref_mut())?;
            values = add(&values, feed_forward.forward(&values)?, self.dropout, rng.as_deref_mut())?;
        }
        Ok(self.norm.forward(&values)?)
    }
}
