//! After the last chunk: the accumulated gradients and the results of a loss, as tensors.

use candle_core::{Device, Tensor};

use super::dtype::Element;
use super::memory::zeros;
use super::rows::{weighted, PositionLoss};
use super::simd::Float;
use super::targets::Targets;
use crate::backend::contract::{Gradients, LossResults, NeedsGrad, Sizes};
use crate::error::{Error, Result};

/// The gradients accumulated over the chunks; empty where not needed.
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
    /// Whether `weight` already holds the contribution of an earlier chunk.
    pub(super) weight_started: bool,
    weight_rows: usize,
}

impl<T: Element> BufferedGradients<T> {
    pub(super) fn new(sizes: Sizes, weight_rows: usize, needs_grad: NeedsGrad) -> Self {
        let Sizes { positions, components, context, .. } = sizes;
        let rows = positions * components;
        BufferedGradients {
            needed: needs_grad.any(),
            contexts: zeros(if needs_grad.contexts { rows * context } else { 0 }),
            log_priors: zeros(if needs_grad.any() { rows } else { 0 }),
            weight: zeros(if needs_grad.weight { weight_rows * context } else { 0 }),
            bias: needs_grad.bias.then(|| zeros(weight_rows)),
            weight_started: false,
            weight_rows,
        }
    }

    fn into_tensors(self, sizes: Sizes, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Sizes { positions, components, context, .. } = sizes;
        let rows = self.weight_rows;
        let mut gradients = Gradients::default();
        if needs_grad.contexts {
            gradients.contexts = Some(Tensor::from_vec(self.contexts, (positions, components, context), &Device::Cpu)?);
        }
        if needs_grad.log_priors {
            gradients.log_priors = Some(Tensor::from_vec(self.log_priors, (positions, components), &Device::Cpu)?);
        }
        if needs_grad.weight {
            gradients.weight = Some(Tensor::from_vec(self.weight, (rows, context), &Device::Cpu)?);
        }
        if let Some(bias) = self.bias {
            gradients.bias = Some(Tensor::from_vec(bias, rows, &Device::Cpu)?);
        }
        Ok(gradients)
    }
}

/// The results of a loss.
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
    let hits = losses.iter().filter(|loss| loss.hit).count();
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
        hits: if targets.hits { Some(scalar(hits as f64)?) } else { None },
        dropped_mass: if targets.has_filter() { Some(scalar(share)?) } else { None },
        gradients: gradients.into_tensors(sizes, needs_grad)?,
    })
}
