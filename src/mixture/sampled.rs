//! Losses that look at a sample of the vocabulary: the decoder's rows of the negatives and of the targets.
//!
//! ```text
//! sampled softmax: -log sum_k pi_k exp(z'_ky) / sum_{v in {y} + S} exp(z'_kv),    z' = z - log E[count]
//! NCE:             -log sigmoid(z'_y) - sum_{v in S} log(1 - sigmoid(z'_v))
//! ```
//!
//! Sampled softmax: Jean et al., 2015; Jozefowicz et al., 2016. NCE: Mnih & Teh, 2012.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, Var, D};

use crate::backend::contract::{accumulation_dtype, Gradients, NeedsGrad, Operands, Sizes};
use crate::error::{Error, Result};
use crate::loss::{DecoderRows, Loss, LossOptions, Negatives, Reduction};
use crate::validate::read_ids;

/// What a loss over a sample reads.
pub(super) struct Sample {
    /// The weight and the bias are those of the negatives, then of the other targets.
    pub(super) operands: Operands,
    negatives: Negatives,
    /// Of each position; `None` where ignored.
    targets: Vec<Option<usize>>,
    /// The place of each target in the weight: below the number of negatives if it is one of them. Zero where ignored.
    places: Vec<u32>,
    pub(super) leaves: Option<DecoderRows>,
}

impl Sample {
    /// `rows` are those of some ids `[n]`: the weight of the operands is not read. Reads the targets, which waits for
    /// their device.
    pub(super) fn new(
        operands: &Operands,
        rows: impl Fn(&Tensor) -> Result<Tensor>,
        negatives: &Negatives,
        targets: &Tensor,
        options: &LossOptions,
    ) -> Result<Self> {
        let vocab = operands.sizes.vocab;
        if negatives.proposal().vocab() != vocab {
            let expected = format!("{vocab}, the size of the vocabulary");
            return Err(Error::config("vocab of the negatives", expected, negatives.proposal().vocab()));
        }
        let targets = read_ids(targets, options.ignore_index, vocab)?;
        if let Some(id) = targets.iter().flatten().find(|id| negatives.proposal().probability(**id) == 0.0) {
            return Err(Error::config("proposal", format!("a positive probability of the target {id}"), 0));
        }
        let sampled = negatives.ids();
        let mut others: Vec<usize> = targets.iter().flatten().copied().collect();
        others.retain(|id| sampled.binary_search(id).is_err());
        others.sort_unstable();
        others.dedup();
        let place = |id: usize| match (sampled.binary_search(&id), others.binary_search(&id)) {
            (Ok(place), _) => place,
            (_, Ok(place)) | (_, Err(place)) => sampled.len() + place,
        };
        let places = targets.iter().map(|target| target.map_or(0, place) as u32).collect();
        let ids: Vec<u32> = sampled.iter().chain(&others).map(|&id| id as u32).collect();
        let sizes = Sizes { vocab: ids.len(), ..operands.sizes };
        let ids = Tensor::new(ids, operands.weight.device())?;
        let (weight, bias, leaves) = match options.decoder_rows {
            false => (rows(&ids)?, select(&operands.bias, &ids)?, None),
            true => {
                let leaf = |tensor: Tensor| Ok::<_, Error>(Var::from_tensor(&tensor)?);
                let weight = leaf(rows(&ids)?.detach())?;
                let bias = select(&operands.bias.as_ref().map(Tensor::detach), &ids)?.map(leaf).transpose()?;
                (weight.as_tensor().clone(), bias.as_deref().cloned(), Some(DecoderRows { ids, weight, bias }))
            }
        };
        let operands = Operands { sizes, weight, bias, ..operands.clone() };
        Ok(Sample { operands, negatives: negatives.clone(), targets, places, leaves })
    }

    /// The objective of NCE at each position, `[positions]`.
    pub(super) fn nce(&self) -> Result<Tensor> {
        let Sample { operands, negatives, .. } = self;
        let Operands { sizes, weight, bias, logit_scale, softcap, .. } = operands;
        let &Sizes { positions, components, context, .. } = sizes;
        if components != 1 {
            return Err(Error::Unsupported { option: "nce", head: "a mixture of several softmaxes" });
        }
        let accumulation = accumulation_dtype("contexts", weight.dtype())?;
        let samples = negatives.ids().len();
        let bounded = |z: Tensor| {
            let z = (z * *logit_scale)?;
            match softcap {
                Some(cap) => (z / *cap)?.tanh()? * *cap,
                None => Ok(z),
            }
        };
        let contexts = operands.contexts.reshape((positions, context))?.to_dtype(accumulation)?;
        let mut logits = contexts.matmul(&weight.narrow(0, 0, samples)?.to_dtype(accumulation)?.t()?)?;
        if let Some(bias) = bias {
            logits = logits.broadcast_add(&bias.narrow(0, 0, samples)?)?;
        }
        let of_ids = |f: &dyn Fn(usize, usize) -> f64| {
            let ids = negatives.ids().iter().zip(negatives.repeats());
            vector(ids.map(|(&id, &repeats)| f(id, repeats)), accumulation, weight.device())
        };
        let log_expected = |id: usize| negatives.expected_count(id).ln();
        let noise = softplus(&bounded(logits)?.broadcast_sub(&of_ids(&|id, _| log_expected(id))?)?)?;
        let noise = noise.broadcast_mul(&of_ids(&|_, repeats| repeats as f64)?)?.sum(D::Minus1)?;
        let own = bounded(own_logits(&operands.contexts, weight, bias.as_ref(), &self.places)?.squeeze(1)?)?;
        let shift = self.targets.iter().map(|target| target.map_or(0.0, log_expected));
        let own = (own - vector(shift, accumulation, weight.device())?)?;
        Ok((softplus(&own.neg()?)? + noise)?)
    }
}

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
        if sample.operands.softcap.is_some() {
            return Err(Error::Unsupported { option: "softcap", head: "the sampled softmax" });
        }
        let numbers = |weights: &Option<Tensor>| {
            weights
                .as_ref()
                .map(|weights| weights.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1())
        };
        let of_positions = numbers(&options.position_weights).transpose()?;
        let of_classes = numbers(&options.class_weights).transpose()?;
        let weight = |(position, target): (usize, &Option<usize>)| match target {
            Some(id) => {
                of_positions.as_ref().map_or(1.0, |weights| weights[position])
                    * of_classes.as_ref().map_or(1.0, |weights| weights[*id])
            }
            None => 0.0,
        };
        let mut options = options.clone().with_ignore_index(IGNORED);
        (options.position_weights, options.class_weights) = (None, None);
        Ok(SampledSoftmax {
            negatives: sample.negatives.clone(),
            targets: sample.targets.clone(),
            places: sample.places.clone(),
            weights: sample.targets.iter().enumerate().map(weight).collect(),
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
        loss: &impl Fn(SmallLoss) -> Result<Loss>,
    ) -> Result<(Sampled, Gradients)> {
        let positions = operands.sizes.positions;
        let (device, accumulation) =
            (operands.weight.device(), accumulation_dtype("contexts", operands.weight.dtype())?);
        let count: f64 = self.weights.iter().sum();
        let divisor = if self.options.reduction == Reduction::Mean && count != 0.0 { count } else { 1.0 };
        let factors = vector(self.weights.iter().map(|weight| weight / divisor), accumulation, device)?;
        let factors = match upstream {
            Some(upstream) => (factors * upstream)?,
            None => factors,
        };

        let leaf = |tensor: &Tensor, is_needed: bool| match is_needed {
            true => Ok::<_, Error>(Var::from_tensor(&tensor.detach())?.into_inner()),
            false => Ok(tensor.detach()),
        };
        let weight = leaf(&operands.weight, needs_grad.weight)?;
        let bias = operands.bias.as_ref().map(|bias| leaf(bias, needs_grad.bias)).transpose()?;
        let zeros = |tensor: &Tensor, is_needed: bool| is_needed.then(|| tensor.detach().zeros_like()).transpose();
        let mut gradients = Gradients {
            contexts: zeros(&operands.contexts, needs_grad.contexts)?,
            log_priors: operands
                .log_priors
                .as_ref()
                .and_then(|t| zeros(t, needs_grad.log_priors).transpose())
                .transpose()?,
            weight: zeros(&operands.weight.to_dtype(accumulation)?, needs_grad.weight)?,
            bias: operands.bias.as_ref().and_then(|bias| zeros(bias, needs_grad.bias).transpose()).transpose()?,
        };
        let mut nll = Vec::new();
        let step = positions_at_a_time(operands.sizes, operands.contexts.dtype());
        for first in (0..positions).step_by(step) {
            let group = first..positions.min(first + step);
            let narrow = |tensor: &Tensor| tensor.detach().narrow(0, first, group.len())?.contiguous();
            let contexts = leaf(&narrow(&operands.contexts)?, needs_grad.contexts)?;
            let log_priors =
                operands.log_priors.as_ref().map(|t| leaf(&narrow(t)?, needs_grad.log_priors)).transpose()?;
            let of_group = Operands {
                sizes: Sizes { positions: group.len(), ..operands.sizes },
                contexts: contexts.clone(),
                log_priors: log_priors.clone(),
                weight: weight.clone(),
                bias: bias.clone(),
                ..*operands
            };
            let found = loss(self.small(of_group, group.clone(), narrow(&factors)?)?)?;
            nll.push(found.nll.clone());
            if !needs_grad.any() {
                continue;
            }
            let found = found.backward()?;
            for (to, leaf) in [(&gradients.contexts, Some(&contexts)), (&gradients.log_priors, log_priors.as_ref())] {
                if let (Some(to), Some(part)) = (to, leaf.and_then(|leaf| found.get(leaf))) {
                    to.slice_set(&part.contiguous()?, 0, first)?;
                }
            }
            for (to, leaf) in [(&mut gradients.weight, Some(&weight)), (&mut gradients.bias, bias.as_ref())] {
                if let (Some(sum), Some(part)) = (to.as_mut(), leaf.and_then(|leaf| found.get(leaf))) {
                    // Detached: the sum must not keep the graphs of the groups alive.
                    *sum = (&*sum + part.detach().to_dtype(accumulation)?)?;
                }
            }
        }
        let nll = match nll.is_empty() {
            true => Tensor::zeros(0, accumulation, device)?,
            false => Tensor::cat(&nll, 0)?,
        };
        let weights = vector(self.weights.iter().copied(), accumulation, device)?;
        // A weight of zero removes even an infinite loss.
        let objective = weights.ne(0f64)?.where_cond(&(&nll * &weights)?, &nll.zeros_like()?)?;
        let count = Tensor::new(count, &Device::Cpu)?.to_dtype(accumulation)?.to_device(device)?;
        Ok((Sampled { sum: objective.sum_all()?, count, objective, nll }, gradients))
    }

    /// The loss of a group of positions, `group`, whose operands these are, times `factors`.
    fn small(&self, operands: Operands, group: Range<usize>, factors: Tensor) -> Result<SmallLoss> {
        let SampledSoftmax { negatives, targets, places, options, .. } = self;
        let (targets, places) = (&targets[group.clone()], &places[group]);
        let Operands { sizes, contexts, log_priors, weight, bias, logit_scale, .. } = operands;
        let Sizes { positions, components, context, .. } = sizes;
        let (device, dtype) = (weight.device(), weight.dtype());
        let accumulation = accumulation_dtype("contexts", dtype)?;
        let samples = negatives.ids().len();
        // Logits are scaled once they are complete.
        let shift = |id: usize| -negatives.expected_count(id).ln() / logit_scale;

        let own = own_logits(&contexts, &weight, bias.as_ref(), places)?;
        let own_shift = vector(targets.iter().map(|target| target.map_or(0.0, shift)), accumulation, device)?;
        let own = own.broadcast_add(&own_shift.unsqueeze(1)?)?;
        let is_sampled: Vec<u8> = places.iter().map(|&place| u8::from((place as usize) < samples)).collect();
        let is_sampled = Tensor::from_vec(is_sampled, (positions, 1), device)?.broadcast_as(own.shape())?;
        // Low enough to vanish beside any other logit; f16 holds it too.
        let absent = Tensor::full(if dtype == DType::F16 { -6e4f32 } else { -1e9 }, own.shape(), device)?;
        let mut columns = parts(is_sampled.where_cond(&absent.to_dtype(accumulation)?, &own)?, dtype)?;
        // Of each column, the elements of the small vocabulary's rows.
        let mut elements = vec![vec![0f32; samples]; columns.len()];
        elements.iter_mut().for_each(|elements| elements.push(1.0));

        // An id that was drawn n times counts n times, but not where it is the target.
        for (place, &repeats) in negatives.repeats().iter().enumerate().filter(|(_, repeats)| **repeats > 1) {
            let is_target = |(&own, target): (&u32, &Option<usize>)| own as usize == place && target.is_some();
            if !places.iter().zip(targets).any(is_target) {
                continue;
            }
            let excess = -(repeats as f64).ln() / logit_scale;
            let values = places.iter().map(|&own| if own as usize == place { excess } else { 0.0 });
            let column = vector(values, accumulation, device)?.reshape((positions, 1))?;
            for part in parts(column.broadcast_as((positions, components))?.contiguous()?, dtype)? {
                columns.push(part);
                elements.push((0..=samples).map(|row| f32::from(u8::from(row == place))).collect());
            }
        }

        let added = columns.len();
        let columns = columns.iter().map(|column| column.unsqueeze(2)).collect::<candle_core::Result<Vec<_>>>()?;
        let contexts = Tensor::cat(&[&[contexts], &columns[..]].concat(), 2)?;
        let elements = Tensor::from_vec(elements.concat(), (added, samples + 1), device)?.t()?.to_dtype(dtype)?;
        let no_row = Tensor::zeros((1, context), dtype, device)?;
        let rows = Tensor::cat(&[&weight.narrow(0, 0, samples)?, &no_row], 0)?;

        let ids = negatives.ids().iter().zip(negatives.repeats());
        let shifts = ids.map(|(&id, &repeats)| shift(id) + (repeats as f64).ln() / logit_scale);
        let shifts = vector(shifts.chain([0.0]), accumulation, device)?;
        let small_bias = match bias {
            Some(bias) => (bias.narrow(0, 0, samples)?.pad_with_zeros(0, 0, 1)? + shifts)?,
            None => shifts,
        };
        let ids = places.iter().zip(targets).map(|(&place, target)| match target {
            Some(_) => i64::from(place).min(samples as i64),
            None => IGNORED,
        });
        let sizes = Sizes { context: context + added, vocab: samples + 1, ..sizes };
        let weight = Tensor::cat(&[&rows, &elements], 1)?;
        Ok(SmallLoss {
            operands: Operands {
                sizes,
                contexts,
                log_priors,
                weight,
                bias: Some(small_bias),
                logit_scale,
                softcap: None,
            },
            targets: Tensor::from_vec(ids.collect::<Vec<_>>(), positions, device)?,
            options: options.clone().with_reduction(Reduction::Sum).with_position_weights(factors),
        })
    }
}

/// Positions whose contexts are extended at a time.
fn positions_at_a_time(sizes: Sizes, dtype: DType) -> usize {
    let Sizes { positions, components, context, .. } = sizes;
    (GROUP_BYTES / (components * context * dtype.size_in_bytes())).clamp(1, positions.max(1))
}

/// The sizes of the small loss of the first group.
pub(super) fn group(sizes: Sizes, dtype: DType, negatives: &Negatives) -> Sizes {
    let positions = positions_at_a_time(sizes, dtype).min(sizes.positions);
    let columns = if matches!(dtype, DType::F32 | DType::F64) { 1 } else { PARTS };
    Sizes { positions, context: sizes.context + columns, vocab: negatives.ids().len() + 1, ..sizes }
}

/// The target of an ignored position of a small loss.
const IGNORED: i64 = -1;

/// The rows of a matrix, which may be the transpose of a contiguous one.
pub(super) fn rows_of(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    Ok(match weight.is_contiguous() {
        true => weight.index_select(ids, 0)?,
        false => weight.t()?.index_select(ids, 1)?.t()?.contiguous()?,
    })
}

/// `c . W[y] + b[y]`, `[positions, K]`, in the accumulation dtype; the rows of the targets are in these places of the
/// weight.
fn own_logits(contexts: &Tensor, weight: &Tensor, bias: Option<&Tensor>, places: &[u32]) -> Result<Tensor> {
    let accumulation = accumulation_dtype("contexts", weight.dtype())?;
    let (positions, components, _) = contexts.dims3()?;
    if positions == 0 {
        return Ok(Tensor::zeros((0, components), accumulation, weight.device())?);
    }
    let places = Tensor::new(places, weight.device())?;
    let rows = weight.index_select(&places, 0)?.to_dtype(accumulation)?.unsqueeze(2)?;
    let products = contexts.to_dtype(accumulation)?.matmul(&rows)?.squeeze(2)?;
    Ok(match bias {
        Some(bias) => products.broadcast_add(&bias.index_select(&places, 0)?.unsqueeze(1)?)?,
        None => products,
    })
}

/// Numbers in a dtype on a device.
fn vector(values: impl Iterator<Item = f64>, dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::new(values.collect::<Vec<_>>(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
}

fn select(bias: &Option<Tensor>, ids: &Tensor) -> Result<Option<Tensor>> {
    Ok(bias.as_ref().map(|bias| bias.index_select(ids, 0)).transpose()?)
}

/// Numbers of half precision that one of single precision is the sum of.
const PARTS: usize = 3;

/// Tensors of a dtype, one or [`PARTS`], whose sum is `values`, to its precision. The gradient is that of the first.
fn parts(values: Tensor, dtype: DType) -> Result<Vec<Tensor>> {
    let first = values.to_dtype(dtype)?;
    if values.dtype() == dtype {
        return Ok(vec![first]);
    }
    let rest = (values.detach() - first.detach().to_dtype(values.dtype())?)?;
    let second = rest.to_dtype(dtype)?;
    let third = (&rest - second.to_dtype(rest.dtype())?)?.to_dtype(dtype)?;
    Ok(vec![first, second, third])
}

/// `log(1 + exp(x))`
fn softplus(x: &Tensor) -> Result<Tensor> {
    // A constant, so that the derivative at zero is that of the formula.
    let largest = x.detach().relu()?;
    Ok(((x - &largest)?.exp()? + largest.neg()?.exp()?)?.log()?.add(&largest)?)
}
