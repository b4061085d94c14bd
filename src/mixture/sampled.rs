//! Losses that look at a sample of the vocabulary: the decoder's rows of the negatives and of the targets.
//!
//! ```text
//! sampled softmax: -log sum_k pi_k exp(z'_ky) / sum_{v in {y} + S} exp(z'_kv),    z' = z - log E[count]
//! NCE:             -log sigmoid(z'_y) - sum_{v in S} log(1 - sigmoid(z'_v))
//! ```
//!
//! Sampled softmax: Jean et al., 2015; Jozefowicz et al., 2016. NCE: Mnih & Teh, 2012.

use candle_core::{DType, Tensor, Var, D};

use crate::backend::contract::{accumulation_dtype, Operands, Sizes};
use crate::error::{Error, Result};
use crate::loss::{DecoderRows, LossOptions, Negatives};
use crate::validate::read_ids;

/// What a loss over a sample reads of the decoder.
pub(super) struct Sample<'a> {
    operands: &'a Operands,
    negatives: &'a Negatives,
    /// Of each position; `None` where ignored.
    targets: Vec<Option<usize>>,
    /// The place of each target in `rows`: below the number of negatives if it is one of them. Zero where ignored.
    places: Vec<u32>,
    /// `[negatives + other targets, d]`
    rows: Tensor,
    /// `[negatives + other targets]`
    bias: Option<Tensor>,
    pub(super) leaves: Option<DecoderRows>,
}

/// A loss over a small vocabulary, of all positions in one dimension.
pub(super) struct SmallLoss {
    pub(super) operands: Operands,
    pub(super) targets: Tensor,
    pub(super) options: LossOptions,
}

impl<'a> Sample<'a> {
    /// Reads the targets, which waits for their device.
    pub(super) fn new(
        operands: &'a Operands,
        negatives: &'a Negatives,
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
        let ids = Tensor::new(ids, operands.weight.device())?;
        let (rows, bias, leaves) = match options.decoder_rows {
            false => (rows_of(&operands.weight, &ids)?, select(&operands.bias, &ids)?, None),
            true => {
                let leaf = |tensor: Tensor| Ok::<_, Error>(Var::from_tensor(&tensor)?);
                let weight = leaf(rows_of(&operands.weight.detach(), &ids)?)?;
                let bias = select(&operands.bias.as_ref().map(Tensor::detach), &ids)?.map(leaf).transpose()?;
                (weight.as_tensor().clone(), bias.as_deref().cloned(), Some(DecoderRows { ids, weight, bias }))
            }
        };
        Ok(Sample { operands, negatives, targets, places, rows, bias, leaves })
    }

    /// The sampled softmax as a loss over the negatives and one more id, which is each position's own target if that is
    /// not among the negatives. The logit of that id is a further element of the contexts.
    pub(super) fn softmax(&self, options: &LossOptions) -> Result<SmallLoss> {
        let Sample { operands, negatives, targets, places, rows, bias, .. } = self;
        let &Operands { sizes: Sizes { positions, components, context, .. }, softcap, logit_scale, .. } = *operands;
        if softcap.is_some() {
            return Err(Error::Unsupported { option: "softcap", head: "the sampled softmax" });
        }
        let (device, dtype) = (rows.device(), rows.dtype());
        let accumulation = accumulation_dtype("contexts", dtype)?;
        let samples = negatives.ids().len();

        // Logits are scaled once they are complete.
        let own_bias = self.of_positions(|id| -self.log_expected(id) / logit_scale)?;
        let own = (self.own_logits()? + own_bias.reshape((positions, 1))?.broadcast_as((positions, components))?)?;
        let is_sampled: Vec<u8> = places.iter().map(|&place| u8::from((place as usize) < samples)).collect();
        let is_sampled = Tensor::from_vec(is_sampled, (positions, 1), device)?.broadcast_as(own.shape())?;
        // Low enough to vanish beside any other logit; f16 holds it too.
        let absent = Tensor::full(if dtype == DType::F16 { -6e4f32 } else { -1e9 }, own.shape(), device)?;
        let mut columns = parts(is_sampled.where_cond(&absent.to_dtype(accumulation)?, &own)?, dtype)?;
        let mut constants = vec![vec![0f32; samples]; columns.len()];
        constants.iter_mut().for_each(|column| column.push(1.0));

        // An id that was drawn n times counts n times, but not where it is the target.
        for (place, &repeats) in negatives.repeats().iter().enumerate().filter(|(_, repeats)| **repeats > 1) {
            if !places.iter().zip(targets).any(|(&own, target)| own as usize == place && target.is_some()) {
                continue;
            }
            let values = places.iter().map(|&own| if own as usize == place { -(repeats as f64).ln() } else { 0.0 });
            let values = (Tensor::from_iter(values, device)? / logit_scale)?.to_dtype(accumulation)?;
            let column = values.reshape((positions, 1))?.broadcast_as((positions, components))?.contiguous()?;
            for part in parts(column, dtype)? {
                columns.push(part);
                let mut constant = vec![0f32; samples + 1];
                constant[place] = 1.0;
                constants.push(constant);
            }
        }

        let added = columns.len();
        let columns = columns.iter().map(|column| column.unsqueeze(2)).collect::<candle_core::Result<Vec<_>>>()?;
        let contexts = Tensor::cat(&[std::slice::from_ref(&operands.contexts), &columns].concat(), 2)?;
        let constants = Tensor::from_vec(constants.concat(), (added, samples + 1), device)?.t()?.to_dtype(dtype)?;
        let negative_rows = rows.narrow(0, 0, samples)?;
        let no_row = Tensor::zeros((1, context), dtype, device)?;
        let weight = Tensor::cat(&[&Tensor::cat(&[&negative_rows, &no_row], 0)?, &constants], 1)?;

        let ids = negatives.ids().iter().zip(negatives.repeats());
        let shift = ids.map(|(&id, &repeats)| ((repeats as f64).ln() - self.log_expected(id)) / logit_scale);
        let mut small_bias = Tensor::from_iter(shift, device)?.to_dtype(accumulation)?;
        if let Some(bias) = bias {
            small_bias = (small_bias + bias.narrow(0, 0, samples)?)?;
        }
        let small_bias = Tensor::cat(&[&small_bias, &Tensor::zeros(1, accumulation, device)?], 0)?;

        let ids = places.iter().zip(targets).map(|(&place, target)| match target {
            Some(_) => i64::from(place).min(samples as i64),
            None => IGNORED,
        });
        let sizes = Sizes { positions, components, context: context + added, vocab: samples + 1 };
        Ok(SmallLoss {
            operands: Operands {
                sizes,
                contexts,
                log_priors: operands.log_priors.clone(),
                weight,
                bias: Some(small_bias),
                logit_scale,
                softcap: None,
            },
            targets: Tensor::from_iter(ids, device)?,
            options: self.weighted(options)?.with_ignore_index(IGNORED),
        })
    }

    /// The objective of NCE at each position, `[positions]`.
    pub(super) fn nce(&self) -> Result<Tensor> {
        let Sample { operands, negatives, rows, bias, .. } = self;
        let Sizes { positions, components, context, .. } = operands.sizes;
        if components != 1 {
            return Err(Error::Unsupported { option: "nce", head: "a mixture of several softmaxes" });
        }
        let accumulation = accumulation_dtype("contexts", rows.dtype())?;
        let samples = negatives.ids().len();
        let bounded = |z: Tensor| {
            let z = (z * operands.logit_scale)?;
            match operands.softcap {
                Some(cap) => (z / cap)?.tanh()? * cap,
                None => Ok(z),
            }
        };
        let contexts = operands.contexts.reshape((positions, context))?.to_dtype(accumulation)?;
        let mut logits = contexts.matmul(&rows.narrow(0, 0, samples)?.to_dtype(accumulation)?.t()?)?;
        if let Some(bias) = bias {
            logits = logits.broadcast_add(&bias.narrow(0, 0, samples)?)?;
        }
        let device = rows.device();
        let per_id = |f: &dyn Fn(usize, usize) -> f64| {
            let ids = negatives.ids().iter().zip(negatives.repeats());
            Tensor::from_iter(ids.map(|(&id, &repeats)| f(id, repeats)), device)?.to_dtype(accumulation)
        };
        let expected = per_id(&|id, _| self.log_expected(id))?;
        let repeats = per_id(&|_, repeats| repeats as f64)?;
        let noise = softplus(&bounded(logits)?.broadcast_sub(&expected)?)?.broadcast_mul(&repeats)?.sum(D::Minus1)?;
        let own = bounded(self.own_logits()?.squeeze(1)?)?;
        let own = (own - self.of_positions(|id| self.log_expected(id))?)?;
        Ok((softplus(&own.neg()?)? + noise)?)
    }

    /// The options with the weights of classes multiplied into those of positions, `[positions]`.
    fn weighted(&self, options: &LossOptions) -> Result<LossOptions> {
        let mut options = options.clone();
        let mut weights = options.position_weights.take().map(|weights| weights.flatten_all()).transpose()?;
        if let Some(of_classes) = options.class_weights.take() {
            let of_classes = of_classes.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let of_classes = self.of_positions(|id| of_classes[id])?;
            weights = Some(match weights {
                Some(weights) => (weights.to_dtype(of_classes.dtype())? * of_classes)?,
                None => of_classes,
            });
        }
        options.position_weights = weights;
        Ok(options)
    }

    /// `c . W[y] + b[y]`, `[positions, K]`, in the accumulation dtype.
    fn own_logits(&self) -> Result<Tensor> {
        let Sizes { positions, components, .. } = self.operands.sizes;
        let accumulation = accumulation_dtype("contexts", self.rows.dtype())?;
        if positions == 0 {
            return Ok(Tensor::zeros((0, components), accumulation, self.rows.device())?);
        }
        let places = Tensor::new(self.places.as_slice(), self.rows.device())?;
        let rows = self.rows.index_select(&places, 0)?.to_dtype(accumulation)?.unsqueeze(2)?;
        let products = self.operands.contexts.to_dtype(accumulation)?.matmul(&rows)?.squeeze(2)?;
        Ok(match &self.bias {
            Some(bias) => products.broadcast_add(&bias.index_select(&places, 0)?.unsqueeze(1)?)?,
            None => products,
        })
    }

    /// A number for the target of each position, zero where it is ignored: `[positions]`, in the accumulation dtype.
    fn of_positions(&self, f: impl Fn(usize) -> f64) -> Result<Tensor> {
        let values = self.targets.iter().map(|target| target.map_or(0.0, &f));
        let accumulation = accumulation_dtype("contexts", self.rows.dtype())?;
        Ok(Tensor::from_iter(values, &candle_core::Device::Cpu)?
            .to_dtype(accumulation)?
            .to_device(self.rows.device())?)
    }

    fn log_expected(&self, id: usize) -> f64 {
        self.negatives.expected_count(id).ln()
    }
}

/// The target of an ignored position of a small loss.
const IGNORED: i64 = -1;

/// The rows of a matrix, which may be the transpose of a contiguous one.
fn rows_of(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    Ok(match weight.is_contiguous() {
        true => weight.index_select(ids, 0)?,
        false => weight.t()?.index_select(ids, 1)?.t()?.contiguous()?,
    })
}

fn select(bias: &Option<Tensor>, ids: &Tensor) -> Result<Option<Tensor>> {
    Ok(bias.as_ref().map(|bias| bias.index_select(ids, 0)).transpose()?)
}

/// Tensors of a dtype whose sum is `values`, to its precision. The gradient is that of the first.
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
