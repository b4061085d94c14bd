//! The sample of the vocabulary that a loss looks at: the negatives and the targets. Noise-contrastive estimation is
//! computed here from the decoder's rows of these ids (Mnih & Teh, 2012):
//!
//! ```text
//! -log sigmoid(z'_y) - sum_{v in S} log(1 - sigmoid(z'_v)),    z' = z - log E[count]
//! ```

use candle_core::{Tensor, D};

use crate::backend::logit_function::{softplus, LogitFunction};
use crate::backend::operands::{Operands, Sizes};
use crate::error::{Error, OptionName, Result};
use crate::loss::{Negatives, Request, SampledLoss};
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::transfer::vector;

/// The ids that a loss over a sample looks at: the negatives, and then the targets that are no negatives.
pub(crate) struct Sample<'a> {
    pub(super) loss: &'a SampledLoss,
    pub(super) negatives: &'a Negatives,
    pub(super) ids: Vec<usize>,
    /// The ids on the device of the contexts.
    pub(crate) token_ids: Tensor,
    /// The target of each position; `None` where it is ignored.
    pub(super) targets: Vec<Option<usize>>,
    /// The place of each position's target among the ids: it is below the number of negatives if the target is one of
    /// them, and zero if the target is ignored.
    pub(super) target_rows: Vec<u32>,
}

impl<'a> Sample<'a> {
    /// Returns the sample of a request for a sampled loss, for contexts `[.., K, d]` and a decoder of this size and
    /// logit function; `None` if there are no positions. The targets are read on the host, which waits for their
    /// device.
    pub(crate) fn new(
        loss: &'a SampledLoss,
        contexts: &Tensor,
        vocab: usize,
        function: LogitFunction,
        request: &Request<'a>,
    ) -> Result<Option<Self>> {
        let (SampledLoss::Softmax(negatives) | SampledLoss::Nce(negatives)) = loss;
        let [.., components, _] = *contexts.dims() else {
            return Err(Error::shape("contexts", "[.., components, context_dim]", contexts.dims()));
        };
        check_support(loss, components, function, request)?;
        if request.targets.elem_count() == 0 {
            return Ok(None);
        }
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
        let token_ids = Tensor::from_iter(ids.iter().map(|&id| id as u32), contexts.device())?;
        Ok(Some(Sample { loss, negatives, ids, token_ids, targets, target_rows }))
    }

    /// Computes the loss of NCE at each position, `[positions]`, from operands whose vocabulary is the sample.
    pub(super) fn nce(&self, operands: &Operands) -> Result<Tensor> {
        let negatives = self.negatives;
        let Operands { sizes, bias, .. } = operands;
        let weight = &operands.weight.dequantised()?;
        let &Sizes { positions, context_dim, .. } = sizes;
        let accumulation = accumulation_dtype("contexts", weight.dtype())?;
        let samples = negatives.token_ids().len();
        let contexts = || operands.contexts.reshape((positions, context_dim))?.to_dtype(accumulation);
        let first = |rows: &Tensor| rows.narrow(0, 0, samples);
        let products = contexts()?.matmul(&first(weight)?.to_dtype(accumulation)?.t()?)?;
        let logits = operands.finish_logits(products, bias.as_ref().map(first).transpose()?)?;
        let numbers = |values: Vec<f64>| vector(values, accumulation, weight.device());
        let log_expected = |id: usize| negatives.expected_count(id).ln();
        let shifts = numbers(negatives.token_ids().iter().map(|&id| log_expected(id)).collect())?;
        let repeats = numbers(negatives.repeats().iter().map(|&repeats| repeats as f64).collect())?;
        let negative_terms = softplus(&logits.broadcast_sub(&shifts)?)?;
        let negative_sums = negative_terms.broadcast_mul(&repeats)?.sum(D::Minus1)?;
        let target_rows = Tensor::new(self.target_rows.as_slice(), weight.device())?;
        let own = |rows: &Tensor| rows.index_select(&target_rows, 0);
        // The gradients of equal targets are summed in the accumulation dtype.
        let products = (contexts()? * own(&weight.to_dtype(accumulation)?)?)?.sum(D::Minus1)?;
        let own_logits = operands.finish_logits(products, bias.as_ref().map(own).transpose()?)?;
        let own_shifts = numbers(self.targets.iter().map(|target| target.map_or(0.0, log_expected)).collect())?;
        let own_logits = (own_logits - own_shifts)?;
        Ok((softplus(&own_logits.neg()?)? + negative_sums)?)
    }
}

/// Returns an error if the options, the number of components or the function of the logits are not supported by a
/// sampled loss.
fn check_support(loss: &SampledLoss, components: usize, function: LogitFunction, request: &Request) -> Result<()> {
    let (name, head) = match loss {
        SampledLoss::Softmax(_) => (OptionName::SampledSoftmax, "the sampled softmax"),
        SampledLoss::Nce(_) => (OptionName::Nce, "NCE"),
    };
    request.check_support(head, &[name, OptionName::DecoderRows])?;
    let unsupported = |option, head| Err(Error::Unsupported { option, head });
    match (loss, function.option()) {
        (SampledLoss::Softmax(_), Some(function)) => unsupported(function, head),
        (SampledLoss::Nce(_), _) if components > 1 => unsupported(name, "a mixture of several softmaxes"),
        (SampledLoss::Softmax(_) | SampledLoss::Nce(_), _) => Ok(()),
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
