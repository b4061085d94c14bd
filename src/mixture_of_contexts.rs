//! The paper's baseline with as many parameters: a mixture of K contexts under one softmax.

use candle_core::Tensor;
use candle_nn::{Embedding, VarBuilder};

use crate::decoder::Decoder;
use crate::mixture::Mixture;
use crate::output_layer::OutputLayer;
use crate::projection::{Activation, MixtureConfig, MixtureTensors, Projection};
use crate::{Error, Result};

/// One softmax over a mixture of K contexts:
///
/// ```text
/// P(v) = softmax(W (sum_k pi_k c_k) + b)_v,    pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// It has the parameters of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes), but its log-probabilities are as low in rank as
/// those of one softmax of width d: the control that shows that the mixture of softmaxes owes its gain to its rank. (Mixture of
/// contexts in the sense of Yang et al., 2018; the sparse attention of that name is something else.) Cost: one softmax of width
/// d, and the contexts.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{LossOptions, MixtureConfig, MixtureOfContexts, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = MixtureOfContexts::new(&MixtureConfig::new(64, 32, 1000, 5), vb)?;
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
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, section 2.4.
#[derive(Clone, Debug)]
pub struct MixtureOfContexts {
    projection: Projection,
    decoder: Decoder,
}

impl MixtureOfContexts {
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
    /// If the embedding is of another shape, or as for [`MixtureOfContexts::new`].
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
        Ok(MixtureOfContexts { projection, decoder })
    }

    /// The head with another probability of locked dropout on its contexts while training.
    ///
    /// # Errors
    ///
    /// If the probability is not at least 0 and below 1.
    pub fn with_dropout(self, dropout: f64) -> Result<Self> {
        Ok(MixtureOfContexts { projection: self.projection.with_dropout(dropout)?, ..self })
    }

    fn with_weight(config: &MixtureConfig, tied: Option<&Tensor>, vb: &VarBuilder) -> Result<Self> {
        let projection = Projection::new(config, vb)?;
        let decoder = Decoder::new(config.vocab, config.context, config.decoder_bias, tied, vb)?;
        Ok(MixtureOfContexts { projection, decoder })
    }
}

impl OutputLayer for MixtureOfContexts {
    fn hidden_size(&self) -> usize {
        self.projection.hidden()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab()
    }

    fn components(&self) -> usize {
        1
    }

    fn mixture(&self, hidden: &Tensor, train: bool) -> Result<Mixture> {
        let (contexts, log_priors) = self.projection.forward(hidden, train)?;
        let priors = log_priors.exp()?.to_dtype(contexts.dtype())?;
        let (leading, components, context) = match contexts.dims() {
            [leading @ .., components, context] => (leading, *components, *context),
            dims => return Err(Error::shape("contexts", "[.., components, context]", dims)),
        };
        // [rows, 1, d] = [rows, 1, K] [rows, K, d]
        let rows: usize = leading.iter().product();
        let priors = priors.reshape((rows, 1, components))?;
        let mixed = priors.matmul(&contexts.reshape((rows, components, context))?)?;
        let mixed = mixed.reshape([leading, &[1, context]].concat())?;
        let Decoder { weight, bias } = &self.decoder;
        Mixture::new(&mixed, None, weight, bias.as_ref())
    }
}
