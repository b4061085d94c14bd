//! A decoder in the shape of Llama (Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models",
//! arXiv:2302.13971), without its output layer. candle-transformers computes the same by fused operations, which have
//! no gradients; here are those that have: `RmsNorm::forward_diff`, `rope_slow`, `ops::softmax`.

use candle_core::{Result, Tensor, D};
use candle_nn::ops::{silu, softmax};
use candle_nn::rotary_emb::rope_slow;
use candle_nn::{linear_no_bias, rms_norm, Embedding, Linear, Module, RmsNorm, VarBuilder};

/// The sizes of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) inner: usize,
    /// The most positions of a text.
    pub(crate) positions: usize,
    /// Added to mean squares in the norms.
    pub(crate) rms_epsilon: f64,
    /// Base of the wavelengths of rotary positions.
    pub(crate) rope_theta: f64,
}

struct Layer {
    input_norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    inner_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(config: Config, vb: VarBuilder) -> Result<Self> {
        let Config { hidden, inner, rms_epsilon, .. } = config;
        let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        Ok(Self {
            input_norm: rms_norm(hidden, rms_epsilon, vb.pp("input_layernorm"))?,
            query: linear_no_bias(hidden, hidden, attention.pp("q_proj"))?,
            key: linear_no_bias(hidden, hidden, attention.pp("k_proj"))?,
            value: linear_no_bias(hidden, hidden, attention.pp("v_proj"))?,
            output: linear_no_bias(hidden, hidden, attention.pp("o_proj"))?,
            inner_norm: rms_norm(hidden, rms_epsilon, vb.pp("post_attention_layernorm"))?,
            gate: linear_no_bias(hidden, inner, mlp.pp("gate_proj"))?,
            up: linear_no_bias(hidden, inner, mlp.pp("up_proj"))?,
            down: linear_no_bias(inner, hidden, mlp.pp("down_proj"))?,
        })
    }
}

/// The layers below the output layer, with variables that are named as in Hugging Face's Llama.
pub(crate) struct Llama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    heads: usize,
    /// Cosines and sines of the rotary positions, each `[positions, hidden / heads / 2]`.
    rotations: (Tensor, Tensor),
    /// Minus infinity above the diagonal, `[positions, positions]`.
    mask: Tensor,
}

impl Llama {
    /// Makes the layers. `vb` is the prefix `model` of a checkpoint; the embedding `[vocab, hidden]` is also the
    /// decoder of the output layer.
    pub(crate) fn new(config: Config, embedding: Tensor, vb: VarBuilder) -> Result<Self> {
        let Config { hidden, layers, heads, positions, .. } = config;
        let layers = (0..layers).map(|i| Layer::new(config, vb.pp("layers").pp(i))).collect::<Result<_>>()?;
        let half = hidden / heads / 2;
        let angle = |t: usize, i: usize| t as f64 / config.rope_theta.powf(i as f64 / half as f64);
        let table = |function: fn(f64) -> f64| {
            let values = (0..positions).flat_map(|t| (0..half).map(move |i| function(angle(t, i)) as f32));
            Tensor::from_iter(values, vb.device())?.reshape((positions, half))
        };
        let mask =
            (0..positions).flat_map(|i| (0..positions).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 }));
        Ok(Self {
            embedding: Embedding::new(embedding, hidden),
            layers,
            norm: rms_norm(hidden, config.rms_epsilon, vb.pp("norm"))?,
            heads,
            rotations: (table(f64::cos)?, table(f64::sin)?),
            mask: Tensor::from_iter(mask, vb.device())?.reshape((positions, positions))?,
        })
    }

    /// Computes the hidden states `[batch, positions, hidden]` of token ids `[batch, positions]`.
    pub(crate) fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut hidden = self.embedding.forward(tokens)?;
        for layer in &self.layers {
            let attended = self.attention(layer, &layer.input_norm.forward_diff(&hidden)?)?;
            hidden = (hidden + attended)?;
            let inner = layer.inner_norm.forward_diff(&hidden)?;
            let inner = (silu(&layer.gate.forward(&inner)?)? * layer.up.forward(&inner)?)?;
            hidden = (hidden + layer.down.forward(&inner)?)?;
        }
        self.norm.forward_diff(&hidden)
    }

    fn attention(&self, layer: &Layer, inputs: &Tensor) -> Result<Tensor> {
        let (batch, positions, hidden) = inputs.dims3()?;
        let size = hidden / self.heads;
        let split = |linear: &Linear| {
            let values = linear.forward(inputs)?.reshape((batch, positions, self.heads, size))?;
            values.transpose(1, 2)?.contiguous()
        };
        let (cosines, sines) = &self.rotations;
        let queries = (rope_slow(&split(&layer.query)?, cosines, sines)? * (size as f64).sqrt().recip())?;
        let keys = rope_slow(&split(&layer.key)?, cosines, sines)?;
        let mask = self.mask.narrow(0, 0, positions)?.narrow(1, 0, positions)?;
        let scores = queries.matmul(&keys.t()?)?.broadcast_add(&mask)?;
        let attended = softmax(&scores, D::Minus1)?.matmul(&split(&layer.value)?)?;
        layer.output.forward(&attended.transpose(1, 2)?.reshape((batch, positions, hidden))?)
    }
}
