//! The ordinary output layer: one softmax, whose context is the hidden state.

use std::sync::Arc;

use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{Module, Tensor};
use candle_nn::{Linear, VarBuilder};

use super::head::Head;
use super::mixture_layer::MixtureLayer;
use super::projection::{Configured, Projection};
use crate::backend::logit_function::{check_logits, LogitFunction};
use crate::decoder::{Decoder, DecoderConfig};
use crate::error::{Error, Result};
use crate::tensors::checks::{check_product, check_sizes, check_vocab};
use crate::tensors::dropout::DropoutMasks;

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
#[non_exhaustive]
pub struct SoftmaxConfig {
    /// The size of a hidden state.
    pub hidden_size: usize,
    /// The number of token ids.
    pub vocab_size: usize,
    /// Whether the decoder has a bias. The default is true.
    #[cfg_attr(feature = "serde", serde(default = "super::config::default_true"))]
    pub decoder_bias: bool,
    /// The scale of the logits, bias included, before their function. The default is 1.
    #[cfg_attr(feature = "serde", serde(default = "super::config::default_scale"))]
    pub logit_scale: f64,
    /// The function of the logits. The default is the identity.
    #[cfg_attr(feature = "serde", serde(default, alias = "softcap"))]
    #[cfg_attr(feature = "serde", serde(deserialize_with = "super::config::function_or_cap"))]
    pub logit_function: LogitFunction,
}

impl SoftmaxConfig {
    /// Makes the configuration of a head of these sizes, with a bias.
    pub fn new(hidden_size: usize, vocab_size: usize) -> Self {
        let logit_function = LogitFunction::Identity;
        SoftmaxConfig { hidden_size, vocab_size, decoder_bias: true, logit_scale: 1.0, logit_function }
    }

    /// Sets whether the decoder has a bias.
    pub fn with_decoder_bias(self, decoder_bias: bool) -> Self {
        SoftmaxConfig { decoder_bias, ..self }
    }

    /// Sets the scale of the logits, bias included, before their function.
    pub fn with_logit_scale(self, logit_scale: f64) -> Self {
        SoftmaxConfig { logit_scale, ..self }
    }

    /// Bounds the logits softly: `z = cap tanh(z / cap)` (Gemma Team: Gemma 2: Improving Open Language Models at a
    /// Practical Size. 2024, arXiv 2408.00118).
    pub fn with_softcap(self, cap: f64) -> Self {
        self.with_logit_function(LogitFunction::Softcap(cap))
    }

    /// Sets the function of the logits.
    pub fn with_logit_function(self, logit_function: LogitFunction) -> Self {
        SoftmaxConfig { logit_function, ..self }
    }

    /// Checks the sizes and options.
    fn validate(&self) -> Result<()> {
        check_sizes(&[("hidden_size", self.hidden_size)])?;
        check_vocab(self.vocab_size)?;
        check_product("vocab_size * hidden_size", &[self.vocab_size, self.hidden_size])?;
        check_logits(self.logit_scale, self.logit_function)
    }
}

/// One softmax over a linear map: `P(v) = softmax(W h + b)_v`.
///
/// The log-probabilities of all positions, `H W^T + 1 b^T - lse 1^T`, form a matrix of rank at most `hidden + 2`, or
/// `hidden + 1` without a bias: the softmax bottleneck. It costs one linear cross-entropy, which is fused: only the
/// logits of one chunk of positions are held at a time.
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
/// A head from an existing `Linear`:
///
/// ```
/// # fn main() -> mos_head::Result<()> {
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let lm_head = candle_nn::linear_no_bias(64, 1000, vb.pp("lm_head"))?;
/// let head = SoftmaxHead::try_from(lm_head)?;
/// # let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
/// # let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
/// let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
/// let logits = hidden.apply(&head)?; // as before, where a model needs them
/// # assert_eq!(logits.dims(), [4, 1000]);
/// # assert!(loss.backward()?.get(&vars.all_vars()[0]).is_some());
/// # Ok(())
/// # }
/// ```
///
/// A head with a computed weight, whose parameters get their gradients (for a low-rank adapter see
/// [`LowRankAdapter`](crate::parts::LowRankAdapter), which does not compute the weight):
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::randn(0f32, 0.1, (1000, 64), &Device::Cpu)?; // frozen
/// let gain = Var::ones(64, DType::F32, &Device::Cpu)?;
/// let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
/// for _step in 0..2 {
///     let scaled = weight.broadcast_mul(&gain)?;
///     let loss = SoftmaxHead::from_tensors(scaled, None)?.loss(&hidden, &targets, &LossOptions::default())?;
///     assert!(loss.backward()?.get(&gain).is_some());
/// }
/// # Ok(())
/// # }
/// ```
pub type SoftmaxHead = Head<Identity>;

/// The projection of a [`SoftmaxHead`]: the hidden state itself is the one context.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::parts::Projection;
/// use mos_head::{DropoutMasks, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let (contexts, log_priors) = head.projection().forward(&hidden, DropoutMasks::Off)?;
/// assert_eq!(contexts.dims(), [2, 3, 1, 8]);
/// assert!(log_priors.is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Identity {
    hidden_size: usize,
}

impl Projection for Identity {
    fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    fn context_dim(&self) -> usize {
        self.hidden_size
    }

    fn components(&self) -> usize {
        1
    }

    fn forward(&self, hidden: &Tensor, _: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        Ok((hidden.unsqueeze(hidden.rank() - 1)?, None))
    }

    fn has_parameters(&self) -> bool {
        false
    }

    fn is_identity(&self) -> bool {
        true
    }
}

impl Configured for Identity {
    type Config = SoftmaxConfig;

    fn new(config: &SoftmaxConfig, _: &VarBuilder) -> Result<Self> {
        config.validate()?;
        Ok(Identity { hidden_size: config.hidden_size })
    }

    fn decoder(config: &SoftmaxConfig) -> DecoderConfig {
        let &SoftmaxConfig { hidden_size, vocab_size, decoder_bias, logit_scale, logit_function } = config;
        DecoderConfig { bias: decoder_bias, logit_scale, logit_function, ..DecoderConfig::new(vocab_size, hidden_size) }
    }
}

impl Head<Identity> {
    /// Makes a head from its weight `[vocab, hidden]` and bias `[vocab]`.
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
        let decoder = Decoder::from_tensors(weight, bias)?;
        Self::from_decoder(decoder)
    }

    /// Makes a head with the rows of a quantised tensor, which are read where they lie, and a bias `[vocab]`.
    ///
    /// # Shapes
    ///
    /// - weight: `[vocab, hidden]`
    /// - bias: `[vocab]`
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::from_quantised`], which says what such a head computes.
    ///
    /// # Examples
    ///
    /// The head of a GGUF file, whose model is loaded elsewhere:
    ///
    /// ```no_run
    /// use std::fs::File;
    /// use std::sync::Arc;
    ///
    /// use candle_core::quantized::gguf_file::Content;
    /// use candle_core::Device;
    /// use mos_head::SoftmaxHead;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut file = File::open("model.gguf")?;
    /// let content = Content::read(&mut file)?;
    /// let tied = !content.tensor_infos.contains_key("output.weight");
    /// let name = if tied { "token_embd.weight" } else { "output.weight" };
    /// let weight = content.tensor(&mut file, name, &Device::Cpu)?;
    /// let head = SoftmaxHead::from_quantised(Arc::new(weight), None)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_quantised(weight: Arc<QTensor>, bias: Option<Tensor>) -> Result<Self> {
        Self::from_decoder(Decoder::from_quantised(weight, bias)?)
    }

    /// Makes the head of a decoder.
    fn from_decoder(decoder: Decoder) -> Result<Self> {
        Head::from_parts(Identity { hidden_size: decoder.context_dim() }, decoder)
    }
}

impl Module for Head<Identity> {
    /// Computes the logits `[.., vocab]` of hidden states `[.., hidden]`, in their dtype, where a model calls its last
    /// linear layer: `hidden.apply(&head)`. They are differentiable. A loss needs none of them:
    /// [`OutputLayer::loss`](crate::OutputLayer::loss).
    fn forward(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.mixture(hidden, DropoutMasks::Off).and_then(|mixture| mixture.logits());
        logits.map_err(candle_core::Error::wrap)?.to_dtype(hidden.dtype())
    }
}

impl TryFrom<QMatMul> for Head<Identity> {
    type Error = Error;

    /// Makes the head with the rows of candle's product, `[vocab, hidden]`: those of a quantised tensor are read where
    /// they lie. Its errors are those of [`Head::from_quantised`] and [`Head::from_tensors`].
    fn try_from(product: QMatMul) -> Result<Self> {
        match product {
            QMatMul::QTensor(weight) => Self::from_quantised(weight, None),
            QMatMul::Tensor(weight) | QMatMul::TensorF16(weight) => Self::from_tensors(weight, None),
        }
    }
}

impl TryFrom<Linear> for Head<Identity> {
    type Error = Error;

    /// Makes the head with the parameters of a linear layer, `[vocab, hidden]` and `[vocab]`. Its errors are those of
    /// [`Head::from_tensors`].
    fn try_from(linear: Linear) -> Result<Self> {
        Self::from_tensors(linear.weight().clone(), linear.bias().cloned())
    }
}
