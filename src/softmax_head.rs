//! The ordinary output layer: one softmax.

use candle_core::Tensor;
use candle_nn::{Embedding, VarBuilder};

use crate::check::{check_hidden, check_sizes};
use crate::decoder::Decoder;
use crate::mixture::Mixture;
use crate::output_layer::OutputLayer;
use crate::Result;

/// The sizes and options of a [`SoftmaxHead`].
///
/// # Examples
///
/// A head that shares its matrix with the embedding of the token ids:
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
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SoftmaxConfig {
    /// Size of a hidden state.
    pub hidden: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Whether the decoder has a bias. It has by default.
    pub decoder_bias: bool,
}

impl SoftmaxConfig {
    /// A head of these sizes, with a bias.
    pub fn new(hidden: usize, vocab: usize) -> Self {
        SoftmaxConfig { hidden, vocab, decoder_bias: true }
    }

    /// Sets whether the decoder has a bias.
    pub fn with_decoder_bias(self, decoder_bias: bool) -> Self {
        SoftmaxConfig { decoder_bias, ..self }
    }
}

/// One softmax over a linear map: `P(v) = softmax(W h + b)_v`.
///
/// The log-probabilities of all contexts form a matrix of rank at most `hidden + 1`: the softmax bottleneck. Cost: one linear
/// cross-entropy, fused, without the `[.., vocab]` logits.
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
#[derive(Clone, Debug)]
pub struct SoftmaxHead {
    decoder: Decoder,
}

impl SoftmaxHead {
    /// A head whose parameters are `decoder.weight` `[vocab, hidden]`, uniform within 0.1, and `decoder.bias` `[vocab]`, zero.
    ///
    /// # Errors
    ///
    /// If a size is zero, or a variable is missing or of another shape.
    pub fn new(config: &SoftmaxConfig, vb: VarBuilder) -> Result<Self> {
        Self::with_weight(config, None, &vb)
    }

    /// A head that shares the matrix of an embedding, `[vocab, hidden]`; the gradients of both uses add up.
    ///
    /// # Errors
    ///
    /// If the embedding is of another shape, a size is zero, or a variable is missing or of another shape.
    pub fn tied(config: &SoftmaxConfig, embedding: &Embedding, vb: VarBuilder) -> Result<Self> {
        Self::with_weight(config, Some(embedding.embeddings()), &vb)
    }

    /// A head from its weight `[vocab, hidden]` and bias `[vocab]`.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        Ok(SoftmaxHead { decoder: Decoder::from_tensors(weight, bias)? })
    }

    fn with_weight(config: &SoftmaxConfig, tied: Option<&Tensor>, vb: &VarBuilder) -> Result<Self> {
        let &SoftmaxConfig { hidden, vocab, decoder_bias } = config;
        check_sizes(&[("hidden", hidden), ("vocab", vocab)])?;
        Ok(SoftmaxHead { decoder: Decoder::new(vocab, hidden, decoder_bias, tied, vb)? })
    }
}

impl OutputLayer for SoftmaxHead {
    fn hidden_size(&self) -> usize {
        self.decoder.weight.dims()[1]
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab()
    }

    fn components(&self) -> usize {
        1
    }

    fn mixture(&self, hidden: &Tensor, _train: bool) -> Result<Mixture> {
        let Decoder { weight, bias } = &self.decoder;
        check_hidden(hidden, self.hidden_size(), weight)?;
        Mixture::new(&hidden.unsqueeze(hidden.rank() - 1)?, None, weight, bias.as_ref())
    }
}
