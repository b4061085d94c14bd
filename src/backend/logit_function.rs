//! The function of the logits that comes before the softmax: between the product of contexts and decoder and everything
//! that is computed of it.

use candle_core::Tensor;

use crate::error::{OptionName, Result};
use crate::tensors::checks::check_number;

/// A function of each logit, after bias and scale and before the softmax. It is a part of the model: losses, gradients
/// and decoding have the same one.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::parts::LogitFunction;
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::new(&[[0f32], [1.], [-2.]], &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight, None)?.with_logit_function(LogitFunction::Sigsoftmax)?;
/// let probs = head.log_probs(&Tensor::ones((1, 1), candle_core::DType::F32, &Device::Cpu)?)?.exp()?.to_vec2::<f32>()?;
/// // P(v) ~ exp(z) sigma(z)
/// let terms = [0f32, 1., -2.].map(|z| z.exp() / (1.0 + (-z).exp()));
/// let sum: f32 = terms.iter().sum();
/// assert!(probs[0].iter().zip(terms).all(|(p, term)| (p - term / sum).abs() < 1e-6));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LogitFunction {
    /// The logits as they are.
    #[default]
    Identity,
    /// The softcap: `z` becomes `cap tanh(z / cap)`, for this cap, from 1e-30 to 1e30 (Gemma Team: Gemma 2: Improving
    /// Open Language Models at a Practical Size. 2024, arXiv 2408.00118).
    Softcap(f64),
    /// Sigsoftmax: `z` becomes `z + log sigma(z) = 2 z - log(1 + exp(z))`, so that `P(v) ~ exp(z_v) sigma(z_v)`. The
    /// log-probabilities of a single softmax are then no longer of a rank at most `d + 2` (`d + 1` without a bias;
    /// Kanai, Fujiwara, Yamanaka, Adachi: Sigsoftmax: Reanalysis of the Softmax Bottleneck. NeurIPS 2018, arXiv
    /// 1805.10829). In a mixture, it is the function of each component.
    ///
    /// A sampled softmax and a temperature of components do not support it.
    Sigsoftmax,
}

impl LogitFunction {
    /// Returns whether the logits stay as they are.
    pub(crate) fn is_identity(self) -> bool {
        self == LogitFunction::Identity
    }

    /// Returns the name of the function as an option, if it is one.
    pub(crate) fn option(self) -> Option<OptionName> {
        match self {
            LogitFunction::Identity => None,
            LogitFunction::Softcap(_) => Some(OptionName::Softcap),
            LogitFunction::Sigsoftmax => Some(OptionName::Sigsoftmax),
        }
    }

    /// Applies the function by candle's operations, differentiably.
    pub(crate) fn composed(self, z: Tensor) -> Result<Tensor> {
        match self {
            LogitFunction::Identity => Ok(z),
            LogitFunction::Softcap(cap) => Ok(((z / cap)?.tanh()? * cap)?),
            LogitFunction::Sigsoftmax => Ok((&z - softplus(&z.neg()?)?)?),
        }
    }
}

/// Checks the scale and the function of logits.
pub(crate) fn check_logits(logit_scale: f64, function: LogitFunction) -> Result<()> {
    // Numbers in this range are numbers in f32 too.
    let is_valid = |x: f64| (1e-30..=1e30).contains(&x);
    check_number(is_valid(logit_scale), "logit_scale", "from 1e-30 to 1e30", logit_scale)?;
    match function {
        LogitFunction::Softcap(cap) => check_number(is_valid(cap), "softcap", "from 1e-30 to 1e30", cap),
        LogitFunction::Identity | LogitFunction::Sigsoftmax => Ok(()),
    }
}

/// Computes `log(1 + exp(x))` by candle's operations, differentiably.
pub(crate) fn softplus(x: &Tensor) -> Result<Tensor> {
    // Infinite values have no gradient.
    let infinite = x.gt(1e30)?;
    let finite = infinite.where_cond(&x.zeros_like()?, x)?;
    // The largest is a constant, so that the derivative at zero is one half.
    let largest = finite.detach().relu()?;
    let value = ((&finite - &largest)?.exp()? + largest.neg()?.exp()?)?.log()?.add(&largest)?;
    Ok(infinite.where_cond(&x.detach(), &value)?)
}
