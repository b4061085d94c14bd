//! Draws token ids as [`Sampling`] specifies, with a seeded generator of random numbers.

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::log_probs::{check_distributions, check_host_log_probs};
use super::multinomial::{find_by_mass, DrawQuery};
use super::sampling::Sampling;
use crate::backend::logit_function::LogitFunction;
use crate::error::{Error, OptionName, Result};
use crate::mixture::Mixture;
use crate::tensors::transfer;

/// Draws token ids as [`Sampling`] specifies, with a seeded generator of random numbers. The same seed draws the same
/// ids on the same device with the same version of this crate.
///
/// Each position takes its own numbers, in the order of the positions: on the CPU, a batch draws the same ids at once
/// and in parts, one after the other ([`decode`](crate::decode)). A call that fails may have taken numbers: to draw as
/// if it had not been made, make it with a clone.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::decode::{Sampler, Sampling};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((4, 8), DType::F32, &Device::Cpu)?;
/// let mut sampler = Sampler::new(Sampling::new().with_temperature(0.8).with_top_p(0.95), 42)?;
/// let tokens = head.sample(&hidden, &mut sampler)?;
/// assert_eq!(tokens.dims(), [4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    /// A generator for each [`Stage`].
    generators: [StdRng; 3],
}

/// The stages of a draw. Each has a generator of its own, from which a position takes one number: which numbers a
/// position gets does not depend on the stages of the other positions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    /// The draw of a token id, or of an entry of the first level.
    Id,
    /// The draw of a component, before that of an id.
    Component,
    /// The draw of an id within a cluster.
    WithinCluster,
}

impl Sampler {
    /// Makes a sampler with a seed.
    ///
    /// # Errors
    ///
    /// If a number is out of range, or options exclude each other.
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self> {
        sampling.validate()?;
        let ids = StdRng::seed_from_u64(seed);
        let mut seeds = ids.clone();
        let (components, within_clusters) = (StdRng::from_rng(&mut seeds), StdRng::from_rng(&mut seeds));
        Ok(Sampler { sampling, generators: [ids, components, within_clusters] })
    }

    /// The options of the draws.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Draws one token id from each distribution of log-probabilities `[.., vocab]`, in nats: for models without an
    /// output layer of this crate. [`OutputLayer::sample`](crate::OutputLayer::sample) of a mixture reads the
    /// distributions in tiles instead.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[.., vocab]`, a float type
    /// - returns `[..]`, u32
    ///
    /// # Errors
    ///
    /// If the options need components (ancestral sampling, component temperature), or a log-probability is NaN or plus
    /// infinity ([`Error::Distribution`]), or one is above zero by more than rounding ([`Error::Value`]), or all those
    /// of a position are minus infinity ([`Error::Impossible`]).
    pub fn sample(&mut self, log_probs: &Tensor) -> Result<Tensor> {
        self.sample_rounded(log_probs, log_probs.dtype())
    }

    /// Draws as [`Sampler::sample`] does, from log-probabilities that were rounded to the dtype `rounded` before they
    /// were given in another one.
    pub(crate) fn sample_rounded(&mut self, log_probs: &Tensor, rounded: DType) -> Result<Tensor> {
        self.reject_components("log-probabilities")?;
        let leading = &log_probs.dims()[..log_probs.rank().saturating_sub(1)];
        let uniform = self.uniform(check_distributions(log_probs)?);
        let draw = DrawQuery { sampling: &self.sampling, uniform: &uniform };
        let ids = super::log_probs::visit(log_probs, rounded, &draw)?;
        transfer::to_device(ids, leading, log_probs.device())
    }

    /// Returns an error that names `head`, which has no components, if the options need them.
    pub(crate) fn reject_components(&self, head: &'static str) -> Result<()> {
        let Sampling { ancestral, component_temperature, .. } = self.sampling;
        match (ancestral, component_temperature != 1.0) {
            (true, _) => Err(Error::Unsupported { option: OptionName::Ancestral, head }),
            (_, true) => Err(Error::Unsupported { option: OptionName::ComponentTemperature, head }),
            _ => Ok(()),
        }
    }

    /// Draws `n` numbers from 0 to below 1. They are drawn before the work is split, so that the number of threads does
    /// not matter.
    pub fn uniform(&mut self, n: usize) -> Vec<f64> {
        self.stage_uniform(Stage::Id, n)
    }

    /// Draws a number from 0 to below 1 for this stage of the draw at each of `n` positions.
    pub(crate) fn stage_uniform(&mut self, stage: Stage, n: usize) -> Vec<f64> {
        let generator = &mut self.generators[stage as usize];
        (0..n).map(|_| generator.random()).collect()
    }

    /// Draws one component from each row of log-priors `[rows, n]`, which were computed in this dtype.
    pub(crate) fn draw_components(&mut self, log_priors: &Tensor, dtype: DType) -> Result<Vec<u32>> {
        let rows = transfer::read_matrix(log_priors)?;
        check_host_log_probs("log_priors", &rows, dtype)?;
        let uniform = self.stage_uniform(Stage::Component, rows.len());
        let draw = |(position, (row, u)): (usize, (&Vec<f64>, f64))| {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            let drawn = find_by_mass(row.iter().map(|x| x.exp()), u * sum);
            drawn.map(|(component, _)| component as u32).ok_or(Error::Impossible { position })
        };
        rows.iter().zip(uniform).enumerate().map(draw).collect()
    }
}

impl Mixture {
    /// Divides the logits of all components by `temperature`, after their function. The priors do not change.
    ///
    /// # Errors
    ///
    /// If the temperature is not from 1e-30 to 1e30, or the logits' scale or softcap is not when it is divided by it,
    /// or the logits have the function [`Sigsoftmax`](crate::parts::LogitFunction::Sigsoftmax).
    pub fn with_component_temperature(&self, temperature: f64) -> Result<Mixture> {
        Sampling::new().with_component_temperature(temperature).validate()?;
        let operands = self.operands();
        let function = match operands.logit_function {
            LogitFunction::Identity => LogitFunction::Identity,
            // cap tanh(z / cap) / T = (cap / T) tanh((z / T) / (cap / T))
            LogitFunction::Softcap(cap) => LogitFunction::Softcap(cap / temperature),
            LogitFunction::Sigsoftmax => {
                let head = "logits with sigsoftmax";
                return Err(Error::Unsupported { option: OptionName::ComponentTemperature, head });
            }
        };
        let tempered = self.clone().with_logits(operands.logit_scale / temperature, function);
        let expected = "a temperature that the scale and the softcap of the logits can be divided by";
        tempered.map_err(|_| Error::config("component_temperature", expected, temperature))
    }

    /// Returns the mixture at the sampler's temperature of components.
    pub(crate) fn tempered(&self, sampler: &Sampler) -> Result<Mixture> {
        match sampler.sampling.component_temperature {
            1.0 => Ok(self.clone()),
            temperature => self.with_component_temperature(temperature),
        }
    }

    /// Draws one component at each position from its priors, and returns the mixture of these components alone.
    pub(crate) fn draw_component(&self, sampler: &mut Sampler) -> Result<Mixture> {
        match &self.operands().log_priors {
            Some(log_priors) => {
                self.select_components(sampler.draw_components(log_priors, self.operands().contexts.dtype())?, 1, false)
            }
            None => Ok(self.clone()),
        }
    }
}
