//! Multi-head attention.

use crate::Result;
use candle_core::{Tensor, D};
use candle_nn::{linear_no_bias, ops::softmax, Linear, Module, VarBuilder};

/// Multi-head attention (Vaswani et al., 2017, section 3.2.2).
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
}

/// The keys and values of the positions that are attended to, each `[batch, heads, positions, width / heads]`.
#[derive(Clone)]
pub struct KeysValues {
    keys: Tensor,
    values: Tensor,
}

impl KeysValues {
    /// Returns the number of positions.
    pub fn positions(&self) -> Result<usize> {
        Ok(self.keys.dim(2)?)
    }

    /// Returns these positions and `later` ones.
    pub fn extended(&self, later: &KeysValues) -> Result<Self> {
        let both = |earlier: &Tensor, later: &Tensor| Tensor::cat(&[earlier, later], 2);
        Ok(Self { keys: both(&self.keys, &later.keys)?, values: both(&self.values, &later.values)? })
    }

    /// Returns the keys and values of these rows of the batch.
    pub fn select(&self, rows: &Tensor) -> Result<Self> {
        Ok(Self { keys: self.keys.index_select(rows, 0)?, values: self.values.index_select(rows, 0)? })
    }
}

impl Attention {
    /// Makes attention of `heads` heads, of which `width` must be a multiple, with variables `query.weight`, ..
    pub fn new(width: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
        if !width.is_multiple_of(heads) {
            return Err(format!("a width of {width} is no multiple of {heads} attention heads").into());
        }
        let linear = |name| linear_no_bias(width, width, vb.pp(name));
        Ok(Self {
            query: linear("query")?,
            key: linear("key")?,
            value: linear("value")?,
            output: linear("output")?,
            heads,
        })
    }

    /// Returns the keys and values of inputs `[batch, positions, width]`.
    pub fn attended(&self, inputs: &Tensor) -> Result<KeysValues> {
        let heads = |linear: &Linear| self.split(&linear.forward(inputs)?);
        Ok(KeysValues { keys: heads(&self.key)?, values: heads(&self.value)? })
    }

    /// Computes outputs from inputs `[batch, steps, width]` and what they attend to, in the inputs' shape. The mask is
    /// added to the scores `[batch, heads, steps, positions]`: minus infinity hides a position, or a number so low that
    /// its weight vanishes.
    pub fn forward(&self, inputs: &Tensor, attended: &KeysValues, mask: Option<&Tensor>) -> Result<Tensor> {
        let (batch, steps, width) = inputs.dims3()?;
        let scale = ((width / self.heads) as f64).sqrt().recip();
        let queries = (self.split(&self.query.forward(inputs)?)? * scale)?;
        let scores = queries.matmul(&attended.keys.t()?)?;
        let scores = match mask {
            Some(mask) => scores.broadcast_add(mask)?,
            None => scores,
        };
        // `softmax_last_dim` is faster, and has no gradient.
        let outputs = softmax(&scores, D::Minus1)?.matmul(&attended.values)?;
        Ok(self.output.forward(&outputs.transpose(1, 2)?.reshape((batch, steps, width))?)?)
    }

    /// Splits `[batch, steps, width]` into `[batch, heads, steps, width / heads]`.
    fn split(&self, values: &Tensor) -> Result<Tensor> {
        let (batch, steps, width) = values.dims3()?;
        let heads = values.reshape((batch, steps, self.heads, width / self.heads))?;
        Ok(heads.transpose(1, 2)?.contiguous()?)
    }
}

/// Returns the mask of `steps` positions after `before` others, each of which attends to itself and to all before it;
/// `[steps, before + steps]`, in the dtype and on the device of `like`.
pub fn causal_mask(steps: usize, before: usize, like: &Tensor) -> Result<Tensor> {
    let is_hidden = |step: usize, position: usize| position > before + step;
    let row =
        |step| (0..before + steps).map(move |position| if is_hidden(step, position) { f32::NEG_INFINITY } else { 0.0 });
    let mask = Tensor::from_iter((0..steps).flat_map(row), like.device())?;
    Ok(mask.reshape((steps, before + steps))?.to_dtype(like.dtype())?)
}
