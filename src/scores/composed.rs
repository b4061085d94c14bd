//! Scores of log-probabilities from candle's operations, which have gradients.

use candle_core::{DType, Tensor, D};

use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// The scores `[positions, n + 2]` of the distributions `[positions, vocab]`.
pub(crate) fn composed(log_probs: &Tensor, scored: &Scored) -> Result<Tensor> {
    let &Scored { token_ids: ref ids, needs_entropy, needs_outside, temperature, .. } = scored;
    let dtype = if log_probs.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let (positions, vocab) = log_probs.dims2()?;
    let mut log_probs = log_probs.to_dtype(dtype)?;
    if positions == 0 {
        return Ok(Tensor::zeros((0, ids.dim(1)? + POSITION_SCORES), dtype, log_probs.device())?);
    }
    if temperature != 1.0 {
        let tempered = (log_probs / temperature)?;
        let largest = tempered.max_keepdim(D::Minus1)?.detach();
        let relative = tempered.broadcast_sub(&largest)?;
        log_probs = relative.broadcast_sub(&relative.exp()?.sum_keepdim(D::Minus1)?.log()?)?;
    }
    // Reading the ids waits for the device; one that is not in the vocabulary is an error.
    let n = ids.dim(1)?;
    let read: Vec<usize> = match n {
        0 => Vec::new(),
        _ => read_ids("token_ids", ids, None, vocab)?.into_iter().flatten().collect(),
    };
    let of_ids = match n {
        0 => None,
        n => {
            let ids = read.iter().map(|&id| id as u32).collect::<Vec<_>>();
            Some(log_probs.gather(&Tensor::from_vec(ids, (positions, n), log_probs.device())?, 1)?)
        }
    };
    let of_entropy = if needs_entropy {
        // An id of probability zero adds nothing, and has no gradient.
        let is_possible = log_probs.gt(f64::NEG_INFINITY)?;
        let is_number = log_probs.eq(&log_probs)?;
        let is_zero = (is_number.eq(1u8)? - &is_possible)?;
        let possible = is_zero.where_cond(&log_probs.zeros_like()?, &log_probs)?;
        let terms = is_zero.where_cond(&log_probs.zeros_like()?, &(possible.exp()? * &possible)?)?;
        terms.sum_keepdim(D::Minus1)?.affine(-1.0, 0.0)?
    } else {
        Tensor::zeros((positions, 1), dtype, log_probs.device())?
    };
    let log_outside = if needs_outside {
        let mut is_outside = vec![1u8; positions * vocab];
        read.iter().enumerate().for_each(|(i, &id)| is_outside[i / n * vocab + id] = 0);
        let is_outside = Tensor::from_vec(is_outside, (positions, vocab), log_probs.device())?;
        let impossible = (log_probs.zeros_like()? + f64::NEG_INFINITY)?;
        let others = is_outside.where_cond(&log_probs, &impossible)?;
        // Relative to the largest: all of them may be below the smallest number.
        let largest = others.detach().max_keepdim(D::Minus1)?;
        let largest = largest.eq(f64::NEG_INFINITY)?.where_cond(&largest.zeros_like()?, &largest)?;
        let sum = others.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
        // No mass has no gradient.
        let nothing = sum.eq(0.0)?;
        let some = nothing.where_cond(&sum.ones_like()?, &sum)?;
        nothing.where_cond(&impossible.narrow(1, 0, 1)?, &(some.log()? + largest)?)?
    } else {
        Tensor::zeros((positions, 1), dtype, log_probs.device())?
    };
    Ok(Tensor::cat(&of_ids.into_iter().chain([of_entropy, log_outside]).collect::<Vec<_>>(), 1)?)
}

/// Whether each id is the most probable of the distributions `[positions, vocab]`, `[positions, n]` in u8, if it is asked
/// for: the lowest of equals is.
pub(crate) fn are_argmax(log_probs: &Tensor, scored: &Scored) -> Result<Option<Tensor>> {
    if !scored.needs_argmax {
        return Ok(None);
    }
    let (log_probs, shape) = (log_probs.detach(), scored.token_ids.dims2()?);
    let device = log_probs.device();
    if scored.token_ids.elem_count() == 0 {
        return Ok(Some(Tensor::zeros(shape, DType::U8, device)?));
    }
    let (positions, vocab) = log_probs.dims2()?;
    let largest = log_probs.max_keepdim(D::Minus1)?;
    // A row with a NaN, or without a probability, has none.
    let is_valid = (largest.gt(f64::NEG_INFINITY)? * log_probs.sum_keepdim(D::Minus1)?.le(f64::INFINITY)?)?;
    let is_largest = (log_probs.broadcast_eq(&largest)? * is_valid.broadcast_as(log_probs.shape())?)?;
    let ids = Tensor::arange(0, vocab as u32, device)?.broadcast_as((positions, vocab))?.contiguous()?;
    let nothing = Tensor::full(u32::MAX, (positions, vocab), device)?;
    let argmax = is_largest.where_cond(&ids, &nothing)?.min_keepdim(D::Minus1)?.to_dtype(DType::I64)?;
    Ok(Some(scored.token_ids.to_dtype(DType::I64)?.broadcast_eq(&argmax)?))
}
