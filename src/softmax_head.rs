//! The ordinary output layer: one softmax.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder};

use crate::decoder::{CharCnn, Decoder, Rows};
use crate::decoding::{Sampler, TopK};
use crate::dropout::Dropout;
use crate::error::Result;
use crate::loss::{Loss, LossOptions};
use crate::mixture::Mixture;
use crate::output_layer::{delegate_to_mixture, MixtureLayer, OutputLayer};
use crate::validate::{check_logits, check_product, check_sizes, check_targets, check_vocab, leading};

/// The sizes and options of a [`SoftmaxHead`].
///
/// # Examples
///
/// A head tied to the token embedding:
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{SoftmaxConfig, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let embedding = candle_nn::embedding(1000, 64, vb.pp("embedding"))?;
/// let config = SoftmaxConfig::new(64, 1000).with_decoder_bias(false);
/// let head = SoftmaxHead::tied(&config, &embedding, vb.pp("head"))?;
/// assert_eq!(vars.all_vars().len(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "Read"))]
#[non_exhaustive]
pub struct SoftmaxConfig {
    /// Size of a hidden state.
    pub hidden: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Whether the decoder has a bias. The default is true.
    pub decoder_bias: bool,
    /// The scale of the logits, bias included, before the softcap. The default is 1.
    pub logit_scale: f64,
    /// The softcap of the logits, `z = cap tanh(z / cap)`. The default is none.
    pub softcap: Option<f64>,
}

impl SoftmaxConfig {
    /// A head of these sizes, with a bias.
    pub fn new(hidden: usize, vocab: usize) -> Self {
        SoftmaxConfig { hidden, vocab, decoder_bias: true, logit_scale: 1.0, softcap: None }
    }

    /// Sets whether the decoder has a bias.
    pub fn with_decoder_bias(self, decoder_bias: bool) -> Self {
        SoftmaxConfig { decoder_bias, ..self }
    }

    /// Sets the scale of the logits, bias included, before the softcap.
    pub fn with_logit_scale(self, logit_scale: f64) -> Self {
        SoftmaxConfig { logit_scale, ..self }
    }

    /// Bounds the logits softly: `z = cap tanh(z / cap)` (Gemma 2, 2024).
    pub fn with_softcap(self, cap: f64) -> Self {
        SoftmaxConfig { softcap: Some(cap), ..self }
    }

    fn validate(&self) -> Result<()> {
        check_sizes(&[("hidden", self.hidden)])?;
        check_vocab(self.vocab)?;
        check_product("vocab * hidden", &[self.vocab, self.hidden])?;
        check_logits(self.logit_scale, self.softcap)
    }
}

/// The configuration as deserialized: sizes are required, options default to those of `new`.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Read {
    hidden: usize,
    vocab: usize,
    decoder_bias: Option<bool>,
    logit_scale: Option<f64>,
    softcap: Option<f64>,
}

#[cfg(feature = "serde")]
impl From<Read> for SoftmaxConfig {
    fn from(read: Read) -> Self {
        let default = SoftmaxConfig::new(read.hidden, read.vocab);
        SoftmaxConfig {
            decoder_bias: read.decoder_bias.unwrap_or(default.decoder_bias),
            logit_scale: read.logit_scale.unwrap_or(default.logit_scale),
            softcap: read.softcap,
            ..default
        }
    }
}

/// One softmax over a linear map: `P(v) = softmax(W h + b)_v`.
///
/// The log-probabilities of all positions, `H W^T + 1 b^T - lse 1^T`, form a matrix of rank at most `hidden + 2`,
/// without a bias `hidden + 1`: the softmax bottleneck. Cost: one linear cross-entropy, fused: the logits of one chunk of
/// positions are held at a time.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{LossOptions, OutputLayer, SoftmaxConfig, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = SoftmaxHead::new(&SoftmaxConfig::new(64, 1000), vb)?;
/// let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// assert_eq!(vars.all_vars().iter().filter(|var| gradients.get(var).is_some()).count(), 2);
/// # Ok(())
/// # }
/// ```
///
/// From an existing `Linear`:
///
/// ```
/// # fn main() -> mos_head::Result<()> {
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let lm_head = candle_nn::linear_no_bias(64, 1000, vb.pp("lm_head"))?;
/// let head = SoftmaxHead::from(lm_head);
/// # let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
/// # let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
/// let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
/// # assert!(loss.backward()?.get(&vars.all_vars()[0]).is_some());
/// # Ok(())
/// # }
/// ```
///
/// With a computed weight, such as a low-rank adapter (LoRA), whose factors get their gradients:
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::randn(0f32, 0.1, (1000, 64), &Device::Cpu)?; // frozen
/// let a = Var::randn(0f32, 0.1, (4, 64), &Device::Cpu)?;
/// let b = Var::zeros((1000, 4), DType::F32, &Device::Cpu)?;
/// let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
/// for _step in 0..2 {
///     let adapted = (&weight + (b.matmul(&a)? * 0.5)?)?;
///     let loss = SoftmaxHead::from_tensors(adapted, None)?.loss(&hidden, &targets, &LossOptions::default())?;
///     let gradients = loss.backward()?;
///     assert!(gradients.get(&a).is_some() && gradients.get(&b).is_some());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SoftmaxHead {
    decoder: Decoder,
}

impl SoftmaxHead {
    /// A head with the variables `decoder.weight` `[vocab, hidden]`, uniform within 0.1, and `decoder.bias` `[vocab]`,
    /// zero.
    ///
    /// # Errors
    ///
    /// If a size is zero, the weight would have more than 2^40 elements or 2^32 - 1 token ids, or a variable is missing
    /// or of another shape.
    pub fn new(config: &SoftmaxConfig, vb: VarBuilder) -> Result<Self> {
        Self::with_rows(config, None, &vb)
    }

    /// A head tied to the matrix of an embedding, `[vocab, hidden]`; the gradients of both uses are summed.
    ///
    /// # Shapes
    ///
    /// - embedding: `[vocab, hidden]`
    ///
    /// # Errors
    ///
    /// If the embedding is of another shape, a size is zero, or a variable is missing or of another shape.
    pub fn tied(config: &SoftmaxConfig, embedding: &Embedding, vb: VarBuilder) -> Result<Self> {
        Self::with_rows(config, Some(Rows::Matrix(embedding.embeddings().clone())), &vb)
    }

    /// A head whose decoder's rows are computed, `[vocab, hidden]`. They are computed anew for each call: for evaluation
    /// and decoding see [`SoftmaxHead::with_rows_computed`].
    ///
    /// # Errors
    ///
    /// If the rows are of another shape, a size is zero, or a variable is missing or of another shape.
    pub fn computed(config: &SoftmaxConfig, rows: CharCnn, vb: VarBuilder) -> Result<Self> {
        Self::with_rows(config, Some(Rows::Computed(Arc::new(rows))), &vb)
    }

    /// The head with the decoder's present rows as a constant matrix, if they are computed: for evaluation and decoding.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub fn with_rows_computed(&self) -> Result<Self> {
        Ok(SoftmaxHead { decoder: self.decoder.with_rows_computed()? })
    }

    /// A head from its weight `[vocab, hidden]` and bias `[vocab]`.
    ///
    /// # Shapes
    ///
    /// - weight: `[vocab, hidden]`
    /// - bias: `[vocab]`
    ///
    /// # Errors
    ///
    /// If the shapes do not match, or a dtype is not a float type.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        Ok(SoftmaxHead { decoder: Decoder::from_tensors(weight, bias)? })
    }

    /// The head with another scale of the logits, bias included, before the softcap.
    ///
    /// # Errors
    ///
    /// If the scale is not from 1e-30 to 1e30.
    pub fn with_logit_scale(self, logit_scale: f64) -> Result<Self> {
        Ok(SoftmaxHead { decoder: self.decoder.with_logit_scale(logit_scale)? })
    }

    /// The head with softly bounded logits: `z = cap tanh(z / cap)` (Gemma 2, 2024).
    ///
    /// # Errors
    ///
    /// If the cap is not from 1e-30 to 1e30.
    pub fn with_softcap(self, cap: f64) -> Result<Self> {
        Ok(SoftmaxHead { decoder: self.decoder.with_softcap(Some(cap))? })
    }

    /// The weight, `[vocab, hidden]`.
    ///
    /// # Errors
    ///
    /// If candle fails to compute it.
    pub fn weight(&self) -> Result<Tensor> {
        self.decoder.weight()
    }

    /// The bias, `[vocab]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.decoder.bias.as_ref()
    }

    fn with_rows(config: &SoftmaxConfig, rows: Option<Rows>, vb: &VarBuilder) -> Result<Self> {
        config.validate()?;
        let &SoftmaxConfig { hidden, vocab, decoder_bias, logit_scale, softcap } = config;
        let decoder = Decoder::new(vocab, hidden, decoder_bias, rows, vb)?;
        Ok(SoftmaxHead { decoder: decoder.with_logit_scale(logit_scale)?.with_softcap(softcap)? })
    }
}

impl SoftmaxHead {
    /// The hidden states, checked, as contexts `[.., 1, hidden]`.
    fn contexts(&self, hidden: &Tensor) -> Result<Tensor> {
        self.decoder.check()?;
        self.decoder.check_hidden(hidden)?;
        Ok(hidden.unsqueeze(hidden.rank() - 1)?)
    }
}

impl From<Linear> for SoftmaxHead {
    /// The head with the parameters of a linear layer. If they are malformed, the first use is an error that names
    /// them.
    fn from(linear: Linear) -> Self {
        SoftmaxHead { decoder: Decoder::unchecked(linear.weight().clone(), linear.bias().cloned()) }
    }
}

impl OutputLayer for SoftmaxHead {
    fn hidden_size(&self) -> usize {
        self.decoder.context()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab()
    }

    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        check_targets("targets", targets, leading(hidden)?)?;
        if options.sampled_step().is_some() {
            let hidden = options.mask_hidden(hidden, targets)?;
            return self.decoder.loss_of_masked(&self.contexts(&hidden)?, None, targets, options);
        }
        self.mixture(hidden, options.dropout())?.loss(targets, options)
    }

    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        self.mixture(hidden, Dropout::Off)?.sample(sampler)
    }

    delegate_to_mixture!();
}

impl MixtureLayer for SoftmaxHead {
    fn components(&self) -> usize {
        1
    }

    fn mixture(&self, hidden: &Tensor, _: Dropout) -> Result<Mixture> {
        self.decoder.mixture(&self.contexts(hidden)?, None)
    }
}
