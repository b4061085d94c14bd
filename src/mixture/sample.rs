//! The operands of a loss over a sample of the vocabulary: the decoder's rows of the negatives and of the targets.
//! Noise-contrastive estimation is computed here from these rows (Mnih & Teh, 2012):
//!
//! ```text
//! -log sigmoid(z'_y) - sum_{v in S} log(1 - sigmoid(z'_v)),    z' = z - log E[count]
//! ```

use candle_core::{DType, Device, Tensor, D};

use crate::backend::operands::{accumulation_dtype, Operands, Sizes};
use crate::error::{Error, Result};
use crate::loss::{DecoderRows, Negatives, Request};
use crate::tensors::autograd::into_variable;

/// The operands of a loss over a sample, and the places of the targets in them.
pub(super) struct Sample {
    /// The mixture's operands, but the weight and the bias have the rows of the negatives, and then those of the
    /// targets that are no negatives.
    pub(super) operands: Operands,
    pub(super) negatives: Negatives,
    /// The token id of each row of the weight.
    pub(super) ids: Vec<usize>,
    /// The target of each position; `None` where it is ignored.
    pub(super) targets: Vec<Option<usize>>,
    /// The row of each position's target in the weight: it is below the number of negatives if the target is one of
    /// them, and zero if the target is ignored.
    pub(super) target_rows: Vec<u32>,
    /// The rows of the weight and the bias as variables, if the options ask for them.
    pub(super) decoder_rows: Option<DecoderRows>,
}

impl Sample {
    /// Reads the decoder's rows of negatives and targets. `weight_rows` returns the weight's rows of some ids `[n]`:
    /// the weight of the operands itself is not read. The targets are read on the host, which waits for their device.
    pub(super) fn new(
        operands: &Operands,
        weight_rows: impl Fn(&Tensor) -> Result<Tensor>,
        negatives: &Negatives,
        request: &Request,
    ) -> Result<Self> {
        let vocab = operands.sizes.vocab;
        if negatives.noise().vocab_size() != vocab {
            let expected = format!("{vocab}, the size of the vocabulary");
            return Err(Error::config("vocab_size of the negatives", expected, negatives.noise().vocab_size()));
        }
        let targets = request.positions.read_ids(vocab)?;
        check_possible(&targets, negatives)?;
        let negative_ids = negatives.token_ids();
        let mut others: Vec<usize> = targets.iter().flatten().copied().collect();
        others.retain(|id| negative_ids.binary_search(id).is_err());
        others.sort_unstable();
        others.dedup();
        let row = |id: usize| match (negative_ids.binary_search(&id), others.binary_search(&id)) {
            (Ok(row), _) => row,
            (_, Ok(row)) | (_, Err(row)) => negative_ids.len() + row,
        };
        let target_rows = targets.iter().map(|target| target.map_or(0, row) as u32).collect();
        let ids: Vec<usize> = negative_ids.iter().chain(&others).copied().collect();
        let sizes = Sizes { vocab: ids.len(), ..operands.sizes };
        let token_ids = Tensor::from_iter(ids.iter().map(|&id| id as u32), operands.weight.device())?;
        let weight = match &operands.adapter {
            Some(adapter) => Tensor::cat(&[weight_rows(&token_ids)?, adapter.index_select(&token_ids, 0)?], 1)?,
            None => weight_rows(&token_ids)?,
        };
        let (weight, bias, decoder_rows) = if !request.options.decoder_rows {
            (weight, select(&operands.bias, &token_ids)?, None)
        } else {
            let weight = into_variable(weight.detach())?;
            let bias =
                select(&operands.bias.as_ref().map(Tensor::detach), &token_ids)?.map(into_variable).transpose()?;
            (weight.as_tensor().clone(), bias.as_deref().cloned(), Some(DecoderRows { token_ids, weight, bias }))
        };
        let operands = Operands { sizes, weight, adapter: None, bias, ..operands.clone() };
        Ok(Sample { operands, negatives: negatives.clone(), ids, targets, target_rows, decoder_rows })
    }

    /// Computes the loss of NCE at each position, `[positions]`.
    pub(super) fn nce(&self) -> Result<Tensor> {
        let Sample { operands, negatives, .. } = self;
        let Operands { sizes, weight, bias, logit_scale, softcap, .. } = operands;
        let &Sizes { positions, context_dim, .. } = sizes;
        let accumulation = accumulation_dtype("contexts", weight.dtype())?;
        let samples = negatives.token_ids().len();
        let scale_and_bound = |z: Tensor| {
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
        let numbers = |values: &mut dyn Iterator<Item = f64>| vector(values, accumulation, weight.device());
        let log_expected = |id: usize| negatives.expected_count(id).ln();
        let shifts = numbers(&mut negatives.token_ids().iter().map(|&id| log_expected(id)))?;
        let repeats = numbers(&mut negatives.repeats().iter().map(|&repeats| repeats as f64))?;
        let negative_terms = softplus(&scale_and_bound(logits)?.broadcast_sub(&shifts)?)?;
        let negative_sums = negative_terms.broadcast_mul(&repeats)?.sum(D::Minus1)?;
        let rows = own_rows(weight, &self.target_rows)?;
        let own_logits = own_logits(&operands.contexts, &rows, bias.as_ref(), &self.target_rows)?;
        let own_logits = scale_and_bound(own_logits.squeeze(1)?)?;
        let own_shifts = numbers(&mut self.targets.iter().map(|target| target.map_or(0.0, log_expected)))?;
        let own_logits = (own_logits - own_shifts)?;
        Ok((softplus(&own_logits.neg()?)? + negative_sums)?)
    }
}

/// Returns an error if the noise distribution never draws a target, whose expected count is then zero.
fn check_possible(targets: &[Option<usize>], negatives: &Negatives) -> Result<()> {
    let is_impossible = |id: &usize| negatives.noise().probability(*id) == 0.0;
    let mut targets = targets.iter().enumerate();
    match targets.find_map(|(position, id)| id.filter(is_impossible).map(|id| (position, id))) {
        Some((position, id)) => {
            let expected = format!("a positive probability of the target {id} at position {position}");
            Err(Error::config("noise", expected, 0))
        }
        None => Ok(()),
    }
}

/// Gathers the targets' rows of the weight, `[positions, d]`, in the accumulation dtype, in which the gradients of
/// equal targets are then summed.
fn own_rows(weight: &Tensor, target_rows: &[u32]) -> Result<Tensor> {
    let accumulation = accumulation_dtype("contexts", weight.dtype())?;
    Ok(weight.to_dtype(accumulation)?.index_select(&Tensor::new(target_rows, weight.device())?, 0)?)
}

/// Computes the targets' logits `c . W[y] + b[y]`, `[positions, K]`, in the accumulation dtype. `weight_rows` are the
/// targets' rows of the weight, and `target_rows` their places in the bias.
fn own_logits(contexts: &Tensor, weight_rows: &Tensor, bias: Option<&Tensor>, target_rows: &[u32]) -> Result<Tensor> {
    let contexts = contexts.to_dtype(weight_rows.dtype())?;
    let products = match contexts.dim(1)? {
        // With one component, a matrix product for each position would be slower.
        1 => (contexts * weight_rows.unsqueeze(1)?)?.sum(2)?,
        _ => contexts.matmul(&weight_rows.unsqueeze(2)?)?.squeeze(2)?,
    };
    Ok(match bias {
        Some(bias) => {
            let target_rows = Tensor::new(target_rows, bias.device())?;
            products.broadcast_add(&bias.index_select(&target_rows, 0)?.unsqueeze(1)?)?
        }
        None => products,
    })
}

/// Makes a vector of numbers in a dtype on a device.
pub(super) fn vector(values: impl Iterator<Item = f64>, dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::new(values.collect::<Vec<_>>(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
}

/// Selects the bias of some ids, if there is a bias.
fn select(bias: &Option<Tensor>, ids: &Tensor) -> Result<Option<Tensor>> {
    Ok(bias.as_ref().map(|bias| bias.index_select(ids, 0)).transpose()?)
}

/// Computes `log(1 + exp(x))`.
fn softplus(x: &Tensor) -> Result<Tensor> {
    // Infinite values have no gradient.
    let infinite = x.gt(1e30)?;
    let finite = infinite.where_cond(&x.zeros_like()?, x)?;
    // The largest is a constant, so that the derivative at zero is one half.
    let largest = finite.detach().relu()?;
    let value = ((&finite - &largest)?.exp()? + largest.neg()?.exp()?)?.log()?.add(&largest)?;
    Ok(infinite.where_cond(&x.detach(), &value)?)
}
