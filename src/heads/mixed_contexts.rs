//! The baseline of Yang et al. (2018, arXiv 1711.03953), section 2.4, with the parameters of a mixture of softmaxes: a
//! mixture of K contexts under one softmax.

use candle_core::Tensor;
use candle_nn::VarBuilder;

use super::contexts::Contexts;
use super::head::Head;
use super::projection::{Configured, Projection};
use crate::decoder::DecoderConfig;
use crate::error::{Error, Result};
use crate::tensors::dropout::DropoutMasks;

/// One softmax over a mixture of K contexts:
///
/// ```text
/// P(v) = softmax(W (sum_k pi_k c_k) + b)_v,    pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// It has the parameters of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes), but the rank of one softmax of width
/// d: a control that separates the gain of the mixture's rank from the gain of its parameters. It costs one softmax of
/// width d, and the contexts. In the lab's runs it has most of a mixture's gain on translation (Multi30k); on Penn
/// Treebank it is behind a softmax after 4 epochs (two seeds) and ahead after 8 (one seed). (Yang et al., 2018, coined
/// the term; the sparse attention of the same name is unrelated.)
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
/// let head = MixtureOfContexts::new(&MixtureConfig::new(64, 1000, 5).with_context_dim(32), vb)?;
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
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, arXiv
/// 1711.03953, section 2.4.
pub type MixtureOfContexts = Head<MixedContexts<Contexts>>;

/// The mean of another projection's contexts, weighted by their priors: one context.
///
/// ```text
/// c = sum_k pi_k c_k
/// ```
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use mos_head::parts::{Configured, Contexts, MixedContexts, Projection};
/// use mos_head::{DropoutMasks, MixtureConfig};
///
/// # fn main() -> mos_head::Result<()> {
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let contexts = Contexts::new(&MixtureConfig::new(64, 1000, 5).with_context_dim(32), &vb)?;
/// let hidden = Tensor::zeros((2, 7, 64), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let (mean, log_priors) = MixedContexts(contexts).forward(&hidden, DropoutMasks::Off)?;
/// assert_eq!(mean.dims(), [2, 7, 1, 32]);
/// assert!(log_priors.is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MixedContexts<P>(pub P);

impl<P: Projection> Projection for MixedContexts<P> {
    fn hidden_size(&self) -> usize {
        self.0.hidden_size()
    }

    fn context_dim(&self) -> usize {
        self.0.context_dim()
    }

    fn components(&self) -> usize {
        1
    }

    fn forward(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        let (contexts, log_priors) = self.0.forward(hidden, dropout)?;
        let Some(log_priors) = log_priors else { return Ok((contexts, None)) };
        let priors = log_priors.exp()?.to_dtype(contexts.dtype())?;
        let (leading, components, context_dim) = match contexts.dims() {
            [leading @ .., components, context_dim] => (leading, *components, *context_dim),
            dims => return Err(Error::shape("contexts", "[.., components, context_dim]", dims)),
        };
        // [positions, 1, d] = [positions, 1, K] [positions, K, d]
        let positions: usize = leading.iter().product();
        let priors = priors.reshape((positions, 1, components))?;
        let mixed = priors.matmul(&contexts.reshape((positions, components, context_dim))?)?;
        Ok((mixed.reshape([leading, &[1, context_dim]].concat())?, None))
    }

    fn has_parameters(&self) -> bool {
        self.0.has_parameters()
    }

    fn frozen(&self) -> Result<Box<dyn Projection + '_>> {
        Ok(Box::new(MixedContexts(self.0.frozen()?)))
    }
}

impl<P: Configured> Configured for MixedContexts<P> {
    type Config = P::Config;

    fn new(config: &P::Config, vb: &VarBuilder) -> Result<Self> {
        Ok(MixedContexts(P::new(config, vb)?))
    }

    fn decoder(config: &P::Config) -> DecoderConfig {
        P::decoder(config)
    }
}

impl From<Contexts> for MixedContexts<Contexts> {
    fn from(contexts: Contexts) -> Self {
        MixedContexts(contexts)
    }
}

impl AsRef<Contexts> for MixedContexts<Contexts> {
    fn as_ref(&self) -> &Contexts {
        &self.0
    }
}
