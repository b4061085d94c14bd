//! The output layer of the paper: a mixture of K softmaxes.

use candle_core::{DType, Tensor};
use candle_nn::{Embedding, VarBuilder};

use crate::decoder::CharCnn;
use crate::decoding::{Sampler, TopK};
use crate::dropout::Dropout;
use crate::error::Result;
use crate::loss::{Loss, LossOptions};
use crate::mixture::Mixture;
use crate::mixture_config::{Activation, MixtureConfig, MixtureTensors};
use crate::mixture_head::{mixture_head, Parameters};
use crate::output_layer::{delegate_to_mixture, MixtureLayer, OutputLayer};

/// A mixture of K softmaxes, each with its own context:
///
/// ```text
/// P(v) = sum_k pi_k softmax(W c_k + b)_v,    pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// The logarithm of a sum of softmaxes is not linear in the contexts, so d does not bound the rank of the matrix of
/// log-probabilities, as it does with one softmax. Cost: the time of K softmaxes of width d, and the workspace of one; the
/// contexts `[positions, K, d]` and their gradients grow with K.
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
/// let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(64, 1000, 5).with_context(32), vb)?;
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
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, section
/// 2.3.
#[derive(Clone, Debug)]
pub struct MixtureOfSoftmaxes(Parameters);

mixture_head!(MixtureOfSoftmaxes);

impl OutputLayer for MixtureOfSoftmaxes {
    fn hidden_size(&self) -> usize {
        self.0.projection.hidden()
    }

    fn vocab_size(&self) -> usize {
        self.0.decoder.vocab()
    }

    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        self.0.loss(hidden, targets, options, |hidden, dropout| self.contexts(hidden, dropout))
    }

    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        if !sampler.is_ancestral() {
            return self.mixture(hidden, Dropout::Off)?.sample(sampler);
        }
        // Only the drawn contexts are computed.
        let Parameters { projection, decoder } = &self.0;
        let chosen = sampler.choose(&projection.detached_log_priors(hidden)?)?;
        decoder.mixture(&projection.chosen_contexts(hidden, &chosen)?, None)?.sample(sampler)
    }

    delegate_to_mixture!();
}

impl MixtureLayer for MixtureOfSoftmaxes {
    fn components(&self) -> usize {
        self.0.projection.components()
    }

    fn mixture(&self, hidden: &Tensor, dropout: Dropout) -> Result<Mixture> {
        let (contexts, log_priors) = self.contexts(hidden, dropout)?;
        self.0.decoder.mixture(&contexts, log_priors.as_ref())
    }
}

impl MixtureOfSoftmaxes {
    /// The contexts `[.., K, d]` and log-priors `[.., K]` of hidden states.
    fn contexts(&self, hidden: &Tensor, dropout: Dropout) -> Result<(Tensor, Option<Tensor>)> {
        let (contexts, log_priors) = self.0.projection.forward(hidden, dropout)?;
        Ok((contexts, Some(log_priors)))
    }
}
