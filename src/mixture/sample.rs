//! What a loss over a sample of the vocabulary reads: the decoder's rows of the negatives and of the targets. And
//! noise-contrastive estimation, which is computed from these alone (Mnih & Teh, 2012):
//!
//! ```text
//! -log sigmoid(z'_y) - sum_{v in S} log(1 - sigmoid(z'_v)),    z' = z - log E[count]
//! ```

use candle_core::{DType, Device, Tensor, D};

use crate::backend::operands::{accumulation_dtype, Operands, Sizes};
use crate::error::{Error, Result};
use crate::loss::{DecoderRows, Negatives, Request};
use crate::tensors::autograd::into_variable;

/// What a loss over a sample reads.
pub(super) struct Sample {
    /// The weight and the bias have the rows of the negatives, then of the other targets.
    pub(super) operands: Operands,
    pub(super) negatives: Negatives,
    /// The token ids of the rows of the weight.
    pub(super) ids: Vec<usize>,
    /// Of each position; `None` where ignored.
    pub(super) targets: Vec<Option<usize>>,
    /// The place of each target in the weight: below the number of negatives if it is one of them. Zero where ignored.
    pub(super) places: Vec<u32>,
    pub(super) leaves: Option<DecoderRows>,
}

impl Sample {
    /// `rows` returns the weight's rows of some ids `[n]`: the weight of the operands is not read. Reads the targets,
    /// which waits for their device.
    pub(super) fn new(
        operands: &Operands,
        rows: impl Fn(&Tensor) -> Result<Tensor>,
        negatives: &Negatives,
        request: &Request,
    ) -> Result<Self> {
        let vocab = operands.sizes.vocab;
        if negatives.noise().vocab_size() != vocab {
            let expected = format!("{vocab}, the size of the vocabulary");
            return Err(Error::config("vocab_size of the negatives", expected, negatives.noise().vocab_size()));
        }
        let targets = request.read_ids(vocab)?;
        let is_impossible = |id: &usize| negatives.noise().probability(*id) == 0.0;
        let impossible = targets.iter().enumerate().find_map(|(at, id)| id.filter(is_impossible).map(|id| (at, id)));
        if let Some((position, id)) = impossible {
            let expected = format!("a positive probability of the target {id} at position {position}");
            return Err(Error::config("noise", expected, 0));
        }
        let sampled = negatives.token_ids();
        let mut others: Vec<usize> = targets.iter().flatten().copied().collect();
        others.retain(|id| sampled.binary_search(id).is_err());
        others.sort_unstable();
        others.dedup();
        let place = |id: usize| match (sampled.binary_search(&id), others.binary_search(&id)) {
            (Ok(place), _) => place,
            (_, Ok(place)) | (_, Err(place)) => sampled.len() + place,
        };
        let places = targets.iter().map(|target| target.map_or(0, place) as u32).collect();
        let all: Vec<usize> = sampled.iter().chain(&others).copied().collect();
        let sizes = Sizes { vocab: all.len(), ..operands.sizes };
        let ids = Tensor::from_iter(all.iter().map(|&id| id as u32), operands.weight.device())?;
        let rows = |ids: &Tensor| match &operands.adapter {
            Some(adapter) => Ok::<_, Error>(Tensor::cat(&[rows(ids)?, adapter.index_select(ids, 0)?], 1)?),
            None => rows(ids),
        };
        let (weight, bias, leaves) = if !request.options.decoder_rows {
            (rows(&ids)?, select(&operands.bias, &ids)?, None)
        } else {
            let weight = into_variable(rows(&ids)?.detach())?;
            let bias = select(&operands.bias.as_ref().map(Tensor::detach), &ids)?.map(into_variable).transpose()?;
            (weight.as_tensor().clone(), bias.as_deref().cloned(), Some(DecoderRows { token_ids: ids, weight, bias }))
        };
        let operands = Operands { sizes, weight, adapter: None, bias, ..operands.clone() };
        Ok(Sample { operands, negatives: negatives.clone(), ids: all, targets, places, leaves })
    }

    /// The objective of NCE at each position, `[positions]`.
    pub(super) fn nce(&self) -> Result<Tensor> {
        let Sample { operands, negatives, .. } = self;
        let Operands { sizes, weight, bias, logit_scale, softcap, .. } = operands;
        let &Sizes { positions, context_dim, .. } = sizes;
        let accumulation = accumulation_dtype("contexts", weight.dtype())?;
        let samples = negatives.token_ids().len();
        let bounded = |z: Tensor| {
            let z = (z * *logit_scale)?;
            match softcap {
                Some(cap) => (z / *cap)?.tanh()? * *cap,
                None => Ok(z),
            }
        };
        let contexts = operands.contexts.reshape((positions, context_dim))?.to_dtype(accumulation)?;
        let mut logits = contexts.matmul(&weight.narrow(0, 0, samples)?.to_dtype(accumulation)?.t()?)?;
        if let Some(bias) = bias {
            logits = logits.broadcast_add(&bias.narrow(0, 0, samples)?)?;
        }
        let of_ids = |f: &dyn Fn(usize, usize) -> f64| {
            let ids = negatives.token_ids().iter().zip(negatives.repeats());
            vector(ids.map(|(&id, &repeats)| f(id, repeats)), accumulation, weight.device())
        };
        let log_expected = |id: usize| negatives.expected_count(id).ln();
        let noise = softplus(&bounded(logits)?.broadcast_sub(&of_ids(&|id, _| log_expected(id))?)?)?;
        let noise = noise.broadcast_mul(&of_ids(&|_, repeats| repeats as f64)?)?.sum(D::Minus1)?;
        let rows = own_rows(weight, &self.places)?;
        let own = bounded(own_logits(&operands.contexts, &rows, bias.as_ref(), &self.places)?.squeeze(1)?)?;
        let shift = self.targets.iter().map(|target| target.map_or(0.0, log_expected));
        let own = (own - vector(shift, accumulation, weight.device())?)?;
        Ok((softplus(&own.neg()?)? + noise)?)
    }
}

/// The rows in these places of the weight, in the accumulation dtype, so that the gradient of a row is summed in it.
fn own_rows(weight: &Tensor, places: &[u32]) -> Result<Tensor> {
    let accumulation = accumulation_dtype("contexts", weight.dtype())?;
    Ok(weight.to_dtype(accumulation)?.index_select(&Tensor::new(places, weight.device())?, 0)?)
}

/// `c . W[y] + b[y]`, `[positions, K]`, in the accumulation dtype; `rows` belong to the targets, which are in these
/// places of the bias.
fn own_logits(contexts: &Tensor, rows: &Tensor, bias: Option<&Tensor>, places: &[u32]) -> Result<Tensor> {
    let contexts = contexts.to_dtype(rows.dtype())?;
    let products = match contexts.dim(1)? {
        // A matrix product for each position is slower.
        1 => (contexts * rows.unsqueeze(1)?)?.sum(2)?,
        _ => contexts.matmul(&rows.unsqueeze(2)?)?.squeeze(2)?,
    };
    Ok(match bias {
        Some(bias) => {
            let places = Tensor::new(places, bias.device())?;
            products.broadcast_add(&bias.index_select(&places, 0)?.unsqueeze(1)?)?
        }
        None => products,
    })
}

/// Numbers in a dtype on a device.
pub(super) fn vector(values: impl Iterator<Item = f64>, dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::new(values.collect::<Vec<_>>(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
}

fn select(bias: &Option<Tensor>, ids: &Tensor) -> Result<Option<Tensor>> {
    Ok(bias.as_ref().map(|bias| bias.index_select(ids, 0)).transpose()?)
}

/// `log(1 + exp(x))`
fn softplus(x: &Tensor) -> Result<Tensor> {
    // Infinite values have no gradient.
    let infinite = x.gt(1e30)?;
    let finite = infinite.where_cond(&x.zeros_like()?, x)?;
    // A constant, so that the derivative at zero is one half.
    let largest = finite.detach().relu()?;
    let value = ((&finite - &largest)?.exp()? + largest.neg()?.exp()?)?.log()?.add(&largest)?;
    Ok(infinite.where_cond(&x.detach(), &value)?)
}
