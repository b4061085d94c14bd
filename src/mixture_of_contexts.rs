//! The baseline of the paper with as many parameters: a mixture of K contexts under one softmax.

use candle_core::{DType, Tensor};
use candle_nn::{Embedding, VarBuilder};

use crate::decoder::CharCnn;
use crate::decoding::{Sampler, TopK};
use crate::dropout::Dropout;
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions};
use crate::mixture::Mixture;
use crate::mixture_config::{Activation, MixtureConfig, MixtureTensors};
use crate::mixture_head::{mixture_head, Parameters};
use crate::output_layer::{delegate_to_mixture, MixtureLayer, OutputLayer};

/// One softmax over a mixture of K contexts:
///
/// ```text
/// P(v) = softmax(W (sum_k pi_k c_k) + b)_v,    pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// It has the parameters of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes), but the rank of one softmax of width
/// d: a control that separates the gain of the mixture's rank from the gain of its parameters. Cost: one softmax of width
/// d, and the contexts. In the examples it has most of a mixture's gain on translation (Multi30k), and is behind a softmax
/// on Penn Treebank. (The term is that of Yang et al., 2018; the sparse attention of the same name is unrelated.)
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
/// let head = MixtureOfContexts::new(&MixtureConfig::new(64, 1000, 5).with_context(32), vb)?;
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
/// 2.4.
#[derive(Clone, Debug)]
pub struct MixtureOfContexts(Parameters);

mixture_head!(MixtureOfContexts);

impl OutputLayer for MixtureOfContexts {
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
        self.mixture(hidden, Dropout::Off)?.sample(sampler)
    }

    delegate_to_mixture!();
}

impl MixtureLayer for MixtureOfContexts {
    fn components(&self) -> usize {
        1
    }

    fn mixture(&self, hidden: &Tensor, dropout: Dropout) -> Result<Mixture> {
        self.0.decoder.mixture(&self.contexts(hidden, dropout)?.0, None)
    }
}

impl MixtureOfContexts {
    /// The mixed context `[.., 1, d]` of hidden states.
    fn contexts(&self, hidden: &Tensor, dropout: Dropout) -> Result<(Tensor, Option<Tensor>)> {
        let (contexts, log_priors) = self.0.projection.forward(hidden, dropout)?;
        let priors = log_priors.exp()?.to_dtype(contexts.dtype())?;
        let (leading, components, context) = match contexts.dims() {
            [leading @ .., components, context] => (leading, *components, *context),
            dims => return Err(Error::shape("contexts", "[.., components, context]", dims)),
        };
        // [rows, 1, d] = [rows, 1, K] [rows, K, d]
        let rows: usize = leading.iter().product();
        let priors = priors.reshape((rows, 1, components))?;
        let mixed = priors.matmul(&contexts.reshape((rows, components, context))?)?;
        Ok((mixed.reshape([leading, &[1, context]].concat())?, None))
    }
}
