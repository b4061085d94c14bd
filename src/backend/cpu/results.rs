//! The accumulated gradients and the results of a loss, as tensors, after the last chunk.

use candle_core::{Device, Tensor};

use super::components::PositionLoss;
use super::dtype::Element;
use super::math::weighted;
use super::memory::zeros;
use super::simd::Float;
use super::targets::Targets;
use crate::backend::contract::{Gradients, LossResults, NeedsGrad, Sizes};
use crate::error::{Error, Result};

/// The gradients accumulated over the chunks; empty unless they are needed.
pub(super) struct BufferedGradients<T: Element> {
    pub(super) needed: bool,
    /// `[positions, K, d]`
    pub(super) contexts: Vec<T::Acc>,
    /// `[positions, K]`
    pub(super) log_priors: Vec<T::Acc>,
    /// `[rows of the weight, d]`
    pub(super) weight: Vec<T::Acc>,
    /// `[rows of the weight]`
    pub(super) bias: Option<Vec<T::Acc>>,
    /// Whether `weight` already holds the contribution of an earlier chunk or loss.
    pub(super) weight_started: bool,
    weight_rows: usize,
}

impl<T: Element> BufferedGradients<T> {
    /// `so_far` is the weight's gradient of earlier losses.
    pub(super) fn new(sizes: Sizes, weight_rows: usize, needs_grad: NeedsGrad, so_far: Option<Vec<T::Acc>>) -> Self {
        let Sizes { positions, components, context_dim, .. } = sizes;
        let rows = positions * components;
        let weight = || zeros(if needs_grad.weight { weight_rows * context_dim } else { 0 });
        BufferedGradients {
            needed: needs_grad.any(),
            contexts: zeros(if needs_grad.contexts { rows * context_dim } else { 0 }),
            log_priors: zeros(if needs_grad.any() { rows } else { 0 }),
            weight_started: so_far.is_some(),
            weight: so_far.unwrap_or_else(weight),
            bias: needs_grad.bias.then(|| zeros(weight_rows)),
            weight_rows,
        }
    }

    fn into_tensors(self, sizes: Sizes, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Sizes { positions, components, context_dim, .. } = sizes;
        let tensor = |is_needed: bool, values: Vec<T::Acc>, shape: &[usize]| {
            is_needed.then(|| Tensor::from_vec(values, shape, &Device::Cpu)).transpose()
        };
        Ok(Gradients {
            contexts: tensor(needs_grad.contexts, self.contexts, &[positions, components, context_dim])?,
            log_priors: tensor(needs_grad.log_priors, self.log_priors, &[positions, components])?,
            weight: tensor(needs_grad.weight, self.weight, &[self.weight_rows, context_dim])?,
            bias: tensor(needs_grad.bias, self.bias.unwrap_or_default(), &[self.weight_rows])?,
        })
    }
}

pub(super) fn results<T: Element>(
    sizes: Sizes,
    needs_grad: NeedsGrad,
    targets: &Targets<T::Acc>,
    losses: &[PositionLoss],
    gradients: BufferedGradients<T>,
) -> Result<LossResults> {
    // The sum of no numbers is minus zero.
    let scalar = |value: f64| Ok::<_, Error>(Tensor::from_vec(vec![T::Acc::of(value + 0.0)], (), &Device::Cpu)?);
    let vector = |values: &[f64]| {
        let values: Vec<T::Acc> = values.iter().map(|&x| T::Acc::of(x)).collect();
        Ok::<_, Error>(Tensor::from_vec(values, sizes.positions, &Device::Cpu)?)
    };
    let enumerated = || losses.iter().enumerate();
    let objective: Vec<f64> =
        enumerated().map(|(t, loss)| weighted(targets.position_weight(t), loss.objective)).collect();
    let nll: Vec<f64> = losses.iter().map(|loss| loss.nll).collect();
    let count: f64 = (0..sizes.positions).map(|t| targets.count(t)).sum();
    let correct = losses.iter().filter(|loss| loss.is_correct).count();
    let total = |of: fn(&PositionLoss) -> f64| {
        enumerated().map(|(t, loss)| weighted(targets.position_weight(t).abs(), of(loss))).sum()
    };
    let (dropped, mass): (f64, f64) = (total(|loss| loss.dropped), total(|loss| loss.mass));
    let share = if mass == 0.0 { 0.0 } else { dropped / mass };
    Ok(LossResults {
        objective: vector(&objective)?,
        nll: vector(&nll)?,
        sum: scalar(objective.iter().sum())?,
        count: scalar(count)?,
        correct: if targets.terms.correct { Some(scalar(correct as f64)?) } else { None },
        dropped_mass: if targets.has_filter() { Some(scalar(share)?) } else { None },
        gradients: gradients.into_tensors(sizes, needs_grad)?,
    })
}
