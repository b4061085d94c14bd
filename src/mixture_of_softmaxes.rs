//! The paper's output layer: a mixture of K softmaxes.

use candle_core::Tensor;
use candle_nn::{Embedding, VarBuilder};

use crate::decoder::Decoder;
use crate::decoding::Sampler;
use crate::mixture::Mixture;
use crate::output_layer::OutputLayer;
use crate::projection::{Activation, MixtureConfig, MixtureTensors, Projection};
use crate::Result;

/// A mixture of K softmaxes, each over a context of its own:
///
/// ```text
/// P(v) = sum_k pi_k softmax(W c_k + b)_v,    pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// The logarithm of a sum of exponentials is not linear: the log-probabilities of all contexts can form a matrix of any rank,
/// which one softmax cannot. Cost: K times a softmax of width d, in time; nothing in memory.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(64, 32, 1000, 5), vb)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 3, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[[1u32, 2, 3], [4, 5, 6]], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// assert_eq!(vars.all_vars().iter().filter(|var| gradients.get(var).is_some()).count(), 5);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, section 2.3.
#[derive(Clone, Debug)]
pub struct MixtureOfSoftmaxes {
    projection: Projection,
    decoder: Decoder,
}

impl MixtureOfSoftmaxes {
    /// A head whose parameters are `prior.weight` `[K, hidden]`, `latent.weight` `[K * d, hidden]`, `latent.bias` `[K * d]`,
    /// `decoder.weight` `[vocab, d]` and `decoder.bias` `[vocab]`, and `prior.bias` `[K]` if so configured. They start as in the
    /// released code: the decoder uniform within 0.1, its bias zero, the others uniform within 1 / sqrt(hidden).
    ///
    /// # Errors
    ///
    /// If a size is zero, an option is out of its range, or a variable is missing or of another shape.
    pub fn new(config: &MixtureConfig, vb: VarBuilder) -> Result<Self> {
        Self::with_weight(config, None, &vb)
    }

    /// A head whose decoder shares the matrix of an embedding, `[vocab, d]`; the gradients of both uses add up.
    ///
    /// # Errors
    ///
    /// If the embedding is of another shape, or as for [`MixtureOfSoftmaxes::new`].
    pub fn tied(config: &MixtureConfig, embedding: &Embedding, vb: VarBuilder) -> Result<Self> {
        Self::with_weight(config, Some(embedding.embeddings()), &vb)
    }

    /// A head from its parameters.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other.
    pub fn from_tensors(tensors: MixtureTensors, activation: Activation) -> Result<Self> {
        let projection = Projection::from_tensors(&tensors, activation)?;
        let decoder = Decoder::from_tensors(tensors.decoder_weight, tensors.decoder_bias)?;
        Ok(MixtureOfSoftmaxes { projection, decoder })
    }

    /// The head with another probability of locked dropout on its contexts while training.
    ///
    /// # Errors
    ///
    /// If the probability is not at least 0 and below 1.
    pub fn with_dropout(self, dropout: f64) -> Result<Self> {
        Ok(MixtureOfSoftmaxes { projection: self.projection.with_dropout(dropout)?, ..self })
    }

    fn with_weight(config: &MixtureConfig, tied: Option<&Tensor>, vb: &VarBuilder) -> Result<Self> {
        let projection = Projection::new(config, vb)?;
        let decoder = Decoder::new(config.vocab, config.context, config.decoder_bias, tied, vb)?;
        Ok(MixtureOfSoftmaxes { projection, decoder })
    }
}

impl OutputLayer for MixtureOfSoftmaxes {
    fn hidden_size(&self) -> usize {
        self.projection.hidden()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab()
    }

    fn components(&self) -> usize {
        self.projection.components()
    }

    fn mixture(&self, hidden: &Tensor, train: bool) -> Result<Mixture> {
        let (contexts, log_priors) = self.projection.forward(hidden, train)?;
        let Decoder { weight, bias } = &self.decoder;
        Mixture::new(&contexts, Some(&log_priors), weight, bias.as_ref())
    }

    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        if !sampler.is_ancestral() {
            return self.mixture(hidden, false)?.sample(sampler);
        }
        // Only the contexts that were drawn are computed.
        let contexts = self.projection.forward_drawn(hidden, sampler)?;
        let Decoder { weight, bias } = &self.decoder;
        Mixture::new(&contexts, None, weight, bias.as_ref())?.sample(sampler)
    }
}
