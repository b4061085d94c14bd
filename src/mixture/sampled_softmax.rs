//! The sampled softmax as a loss over a small vocabulary (Jean et al., 2015; Jozefowicz et al., 2016):
//!
//! ```text
//! -log sum_k pi_k exp(z'_ky) / sum_{v in {y} + S} exp(z'_kv),    z' = z - log E[count]
//! ```

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::sample::{own_logits, own_rows, vector, Sample};
use super::sampled_gradients::SampledGradients;
use crate::backend::contract::{accumulation_dtype, Gradients, LossResults, NeedsGrad, Operands, Sizes};
use crate::error::Result;
use crate::loss::{LossOptions, Negatives, Reduction};

/// A loss over a small vocabulary, of positions in one dimension.
pub(super) struct SmallLoss {
    pub(super) operands: Operands,
    pub(super) targets: Tensor,
    pub(super) options: LossOptions,
}

/// The results of a sampled softmax.
pub(super) struct Sampled {
    /// `[positions]`, weighted
    pub(super) objective: Tensor,
    /// `[positions]`
    pub(super) nll: Tensor,
    pub(super) sum: Tensor,
    pub(super) count: Tensor,
}

/// The sampled softmax as a loss over the negatives and one more id, which is each position's own target if that is not
/// among the negatives. The logit of that id is a further element of the contexts.
pub(super) struct SampledSoftmax {
    negatives: Negatives,
    targets: Vec<Option<usize>>,
    places: Vec<u32>,
    /// Of the positions, those of their targets' classes included; zero where ignored.
    weights: Vec<f64>,
    options: LossOptions,
}

/// Rows of contexts that are copied at a time, to be extended, in bytes.
const GROUP_BYTES: usize = 16 << 20;

impl SampledSoftmax {
    /// `options` are those of the exact loss.
    pub(super) fn new(sample: &Sample, options: &LossOptions) -> Result<Self> {
        let weights = options.weights_of(&sample.targets)?;
        let mut options = options.clone().with_ignore_index(IGNORED);
        (options.position_weights, options.class_weights) = (None, None);
        Ok(SampledSoftmax {
            negatives: sample.negatives.clone(),
            targets: sample.targets.clone(),
            places: sample.places.clone(),
            weights,
            options,
        })
    }

    /// The results, and the gradients of the operands that need one, by `loss`; `upstream` `[positions]` is the gradient
    /// of each position's objective if there is no reduction. A group of positions at a time: their extended contexts
    /// are copies.
    pub(super) fn run(
        &self,
        operands: &Operands,
        upstream: Option<&Tensor>,
        needs_grad: NeedsGrad,
        loss: &impl Fn(SmallLoss, NeedsGrad) -> Result<LossResults>,
    ) -> Result<(Sampled, Gradients)> {
        let positions = operands.sizes.positions;
        let accumulation = accumulation_dtype("contexts", operands.weight.dtype())?;
        let device = operands.weight.device();
        let count: f64 = self.weights.iter().sum();
        let share = match self.options.reduction {
            Reduction::Mean if count == 0.0 => 0.0,
            Reduction::Mean => 1.0 / count,
            _ => 1.0,
        };
        let mut factors = vector(self.weights.iter().map(|weight| weight * share), accumulation, device)?;
        if let Some(upstream) = upstream {
            factors = (factors * upstream)?;
        }
        let step = positions_at_a_time(operands.sizes, operands.contexts.dtype(), &self.negatives);
        let mut nll = Vec::new();
        let element = element(operands.logit_scale, operands.weight.dtype());
        let mut gradients = SampledGradients::new(self.negatives.ids().len(), element, needs_grad);
        for first in (0..positions).step_by(step) {
            let group = first..positions.min(first + step);
            let narrow = |tensor: &Tensor| tensor.detach().narrow(0, first, group.len());
            let of_group = Operands {
                sizes: Sizes { positions: group.len(), ..operands.sizes },
                contexts: narrow(&operands.contexts)?,
                log_priors: operands.log_priors.as_ref().map(|t| narrow(t)?.contiguous()).transpose()?,
                weight: operands.weight.detach(),
                bias: operands.bias.as_ref().map(Tensor::detach),
                ..*operands
            };
            let places = &self.places[group.clone()];
            let own = own_rows(&of_group.weight, places)?;
            let small = self.small(&of_group, group.clone(), &own, narrow(&factors)?.contiguous()?)?;
            let found = loss(small, gradients.of_small())?;
            nll.push(found.nll);
            gradients.add(found.gradients, &of_group, &own, places)?;
        }
        let nll = Tensor::cat(&nll, 0)?;
        // The logit of an impossible target is the smallest of the own column.
        let infinite = nll.ge(-0.5 * smallest(operands.weight.dtype()))?;
        let nll = infinite.where_cond(&(nll.ones_like()? * f64::INFINITY)?, &nll)?;
        let weights = vector(self.weights.iter().copied(), accumulation, device)?;
        // A weight of zero removes even an infinite loss.
        let objective = weights.ne(0f64)?.where_cond(&(&nll * &weights)?, &nll.zeros_like()?)?;
        let count = Tensor::new(count, &Device::Cpu)?.to_dtype(accumulation)?.to_device(device)?;
        Ok((Sampled { sum: objective.sum_all()?, count, objective, nll }, gradients.into_gradients()?))
    }

    /// The loss of a group of positions, `group`, whose operands these are, times `factors`; `own` are the rows of the
    /// targets.
    fn small(&self, operands: &Operands, group: Range<usize>, own: &Tensor, factors: Tensor) -> Result<SmallLoss> {
        let SampledSoftmax { negatives, targets, places, options, .. } = self;
        let (targets, places) = (&targets[group.clone()], &places[group]);
        let Operands { sizes, contexts, log_priors, weight, bias, logit_scale, .. } = operands;
        let (&Sizes { positions, components, context, .. }, &logit_scale) = (sizes, logit_scale);
        let (device, dtype) = (weight.device(), weight.dtype());
        let accumulation = accumulation_dtype("contexts", dtype)?;
        let samples = negatives.ids().len();
        let log_expected = |id: usize| negatives.expected_count(id).ln();

        // A column of the contexts times an element of a row is a logit before its scale.
        let element = element(logit_scale, dtype);
        let own = (own_logits(contexts, own, bias.as_ref(), places)? * logit_scale)?;
        let shift = targets.iter().map(|target| target.map_or(0.0, log_expected));
        let own = own.broadcast_sub(&vector(shift, accumulation, device)?.unsqueeze(1)?)?;
        let own = (own / (logit_scale * element))?;
        let is_sampled = places.iter().map(|&place| u8::from((place as usize) < samples)).collect::<Vec<_>>();
        let is_sampled = Tensor::from_vec(is_sampled, (positions, 1), device)?.broadcast_as(own.shape())?;
        let smallest = (own.ones_like()? * smallest(dtype))?;
        let own = own.lt(&smallest)?.where_cond(&smallest, &own)?;
        let mut columns = parts(is_sampled.where_cond(&smallest, &own)?, dtype)?;
        // Of each column, the elements of the small vocabulary's rows.
        let of_row = |row: usize| (0..=samples).map(move |i| if i == row { element as f32 } else { 0.0 });
        let mut elements: Vec<f32> = columns.iter().flat_map(|_| of_row(samples)).collect();

        // An id that was drawn n times counts n times, but not where it is the target.
        for (place, &repeats) in negatives.repeats().iter().enumerate().filter(|(_, repeats)| **repeats > 1) {
            let is_target = |(&own, target): (&u32, &Option<usize>)| own as usize == place && target.is_some();
            if !places.iter().zip(targets).any(is_target) {
                continue;
            }
            let excess = -(repeats as f64).ln() / (logit_scale * element);
            let values = places.iter().map(|&own| if own as usize == place { excess } else { 0.0 });
            let column = vector(values, accumulation, device)?.reshape((positions, 1))?;
            for part in parts(column.broadcast_as((positions, components))?.contiguous()?, dtype)? {
                columns.push(part);
                elements.extend(of_row(place));
            }
        }

        let added = columns.len();
        let columns = columns.iter().map(|column| column.unsqueeze(2)).collect::<candle_core::Result<Vec<_>>>()?;
        let contexts = Tensor::cat(&[std::slice::from_ref(contexts), &columns[..]].concat(), 2)?;
        let elements = Tensor::from_vec(elements, (added, samples + 1), device)?.t()?.contiguous()?.to_dtype(dtype)?;
        let no_row = Tensor::zeros((1, context), dtype, device)?;
        let rows = Tensor::cat(&[&weight.narrow(0, 0, samples)?, &no_row], 0)?;

        let ids = negatives.ids().iter().zip(negatives.repeats());
        let shifts = ids.map(|(&id, &repeats)| ((repeats as f64).ln() - log_expected(id)) / logit_scale);
        let shifts = vector(shifts.chain([0.0]), accumulation, device)?;
        let small_bias = match bias {
            Some(bias) => (bias.narrow(0, 0, samples)?.pad_with_zeros(0, 0, 1)? + shifts)?,
            None => shifts,
        };
        let ids = places.iter().zip(targets).map(|(&place, target)| match target {
            Some(_) => i64::from(place).min(samples as i64),
            None => IGNORED,
        });
        Ok(SmallLoss {
            operands: Operands {
                sizes: Sizes { context: context + added, vocab: samples + 1, ..*sizes },
                contexts,
                log_priors: log_priors.clone(),
                weight: Tensor::cat(&[&rows, &elements], 1)?,
                bias: Some(small_bias),
                logit_scale,
                softcap: None,
            },
            targets: Tensor::from_vec(ids.collect::<Vec<_>>(), positions, device)?,
            options: options.clone().with_reduction(Reduction::Sum).with_position_weights(factors),
        })
    }
}

/// Upper limit of the columns by which contexts are extended.
fn most_columns(negatives: &Negatives, dtype: DType) -> usize {
    let parts = if matches!(dtype, DType::F32 | DType::F64) { 1 } else { PARTS };
    parts * (1 + negatives.repeats().iter().filter(|repeats| **repeats > 1).count())
}

/// Positions whose contexts are extended at a time.
fn positions_at_a_time(sizes: Sizes, dtype: DType, negatives: &Negatives) -> usize {
    let Sizes { positions, components, context, .. } = sizes;
    let row = (context + most_columns(negatives, dtype)) * dtype.size_in_bytes();
    (GROUP_BYTES / (components * row)).clamp(1, positions.max(1))
}

/// The sizes of the small loss of the first group.
pub(super) fn group(sizes: Sizes, dtype: DType, negatives: &Negatives) -> Sizes {
    let positions = positions_at_a_time(sizes, dtype, negatives).min(sizes.positions);
    let context = sizes.context + most_columns(negatives, dtype);
    Sizes { positions, context, vocab: negatives.ids().len() + 1, ..sizes }
}

/// Low enough for a logit to vanish beside any other; f16 holds it too.
fn smallest(dtype: DType) -> f64 {
    if dtype == DType::F16 {
        -6e4
    } else {
        -1e9
    }
}

/// The element of a row that a column of the contexts is multiplied by: a power of two that makes up for the scale of
/// the logits, so that the column is about as large as the logit.
fn element(logit_scale: f64, dtype: DType) -> f64 {
    let exponent = -logit_scale.log2().round();
    match dtype {
        DType::F16 => exponent.clamp(-14.0, 15.0),
        _ => exponent.clamp(-100.0, 100.0),
    }
    .exp2()
}

/// The target of an ignored position of a small loss.
const IGNORED: i64 = -1;

/// Numbers of half precision that one of single precision is the sum of.
const PARTS: usize = 3;

/// Tensors of a dtype, one or [`PARTS`], whose sum is `values`, to its precision.
fn parts(values: Tensor, dtype: DType) -> Result<Vec<Tensor>> {
    let first = values.to_dtype(dtype)?;
    if values.dtype() == dtype {
        return Ok(vec![first]);
    }
    let rest = (&values - first.to_dtype(values.dtype())?)?;
    let second = rest.to_dtype(dtype)?;
    let third = (&rest - second.to_dtype(rest.dtype())?)?.to_dtype(dtype)?;
    Ok(vec![first, second, third])
}
