//! Scores of log-probabilities from candle's operations, which have gradients.

use candle_core::{DType, Tensor, D};

use super::checks::read_ids;
use crate::error::Result;

/// The log-probabilities of ids `[positions, n]` and the entropy (or zero), `[positions, n + 1]`, of the distributions
/// `[positions, vocab]` at a temperature.
pub(crate) fn composed(log_probs: &Tensor, ids: &Tensor, temperature: f64, entropy: bool) -> Result<Tensor> {
    let dtype = if log_probs.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let (positions, vocab) = log_probs.dims2()?;
    let mut log_probs = log_probs.to_dtype(dtype)?;
    if positions == 0 {
        return Ok(Tensor::zeros((0, ids.dim(1)? + 1), dtype, log_probs.device())?);
    }
    if temperature != 1.0 {
        let tempered = (log_probs / temperature)?;
        let largest = tempered.max_keepdim(D::Minus1)?.detach();
        let relative = tempered.broadcast_sub(&largest)?;
        log_probs = relative.broadcast_sub(&relative.exp()?.sum_keepdim(D::Minus1)?.log()?)?;
    }
    // Reading the ids waits for the device; one that is not in the vocabulary is an error.
    let of_ids = match ids.dim(1)? {
        0 => None,
        n => {
            let read = read_ids(ids, None, vocab)?.into_iter().flatten().map(|id| id as u32).collect::<Vec<_>>();
            Some(log_probs.gather(&Tensor::from_vec(read, (positions, n), log_probs.device())?, 1)?)
        }
    };
    let of_entropy = match entropy {
        true => {
            // An id of probability zero adds nothing, and has no gradient.
            let is_possible = log_probs.gt(f64::NEG_INFINITY)?;
            let is_number = log_probs.eq(&log_probs)?;
            let is_zero = (is_number.eq(1u8)? - &is_possible)?;
            let possible = is_zero.where_cond(&log_probs.zeros_like()?, &log_probs)?;
            let terms = is_zero.where_cond(&log_probs.zeros_like()?, &(possible.exp()? * &possible)?)?;
            terms.sum_keepdim(D::Minus1)?.affine(-1.0, 0.0)?
        }
        false => Tensor::zeros((positions, 1), dtype, log_probs.device())?,
    };
    Ok(Tensor::cat(&of_ids.into_iter().chain([of_entropy]).collect::<Vec<_>>(), 1)?)
}
