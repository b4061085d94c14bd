//! Scores of distributions that are given as log-probabilities, from candle's operations, which have gradients.

use candle_core::{DType, Tensor, D};

use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::ranking::argmax;
use crate::error::Result;
use crate::tensors::checks::read_ids;
use crate::tensors::log_softmax::tempered;
use crate::tensors::transfer::{accurate_dtype, sum_rows};

/// Computes the scores `[positions, n + 3]` of the distributions `[positions, vocab]`: the log-probabilities of `n`
/// ids, the entropy, and the logarithms of the mass outside the ids and of the collision probability. Reading the ids
/// waits for the device; one that is not in the vocabulary is an error.
pub(crate) fn compose_scores(log_probs: &Tensor, scored: &Scored) -> Result<Tensor> {
    let &Scored { ref token_ids, needs_entropy, needs_outside, needs_collision, temperature, .. } = scored;
    let dtype = accurate_dtype(log_probs);
    let (positions, vocab) = log_probs.dims2()?;
    let n = token_ids.dim(1)?;
    let log_probs = log_probs.to_dtype(dtype)?;
    if positions == 0 {
        return Ok(Tensor::zeros((0, n + POSITION_SCORES), dtype, log_probs.device())?);
    }
    let log_probs = tempered(&log_probs, temperature)?;
    let ids: Vec<usize> = match n {
        0 => Vec::new(),
        _ => read_ids("token_ids", token_ids, None, vocab)?.into_iter().flatten().collect(),
    };
    let mut columns = Vec::with_capacity(1 + POSITION_SCORES);
    if n > 0 {
        let ids = ids.iter().map(|&id| id as u32).collect::<Vec<_>>();
        columns.push(log_probs.gather(&Tensor::from_vec(ids, (positions, n), log_probs.device())?, 1)?);
    }
    let zeros = || -> Result<Tensor> { Ok(Tensor::zeros((positions, 1), dtype, log_probs.device())?) };
    columns.push(if needs_entropy { entropies(&log_probs)? } else { zeros()? });
    columns.push(if needs_outside { log_masses_outside(&log_probs, &ids)? } else { zeros()? });
    columns.push(if needs_collision { log_sum_exp(&(&log_probs * 2.0)?)? } else { zeros()? });
    Ok(Tensor::cat(&columns, 1)?)
}

/// Computes the entropy of each distribution `[positions, vocab]`, `[positions, 1]`.
fn entropies(log_probs: &Tensor) -> Result<Tensor> {
    // An id of probability zero adds nothing, and has no gradient.
    let is_possible = log_probs.gt(f64::NEG_INFINITY)?;
    let is_number = log_probs.eq(log_probs)?;
    let is_zero = (is_number.eq(1u8)? - &is_possible)?;
    let possible = is_zero.where_cond(&log_probs.zeros_like()?, log_probs)?;
    let terms = is_zero.where_cond(&log_probs.zeros_like()?, &(possible.exp()? * &possible)?)?;
    Ok(sum_rows(&terms)?.unsqueeze(D::Minus1)?.affine(-1.0, 0.0)?)
}

/// Computes the logarithm of the mass outside the ids of each position, `[positions, 1]`. `ids` are those of all
/// positions, one position after another.
fn log_masses_outside(log_probs: &Tensor, ids: &[usize]) -> Result<Tensor> {
    let (positions, vocab) = log_probs.dims2()?;
    let n = ids.len() / positions;
    let mut is_outside = vec![1u8; positions * vocab];
    ids.iter().enumerate().for_each(|(i, &id)| is_outside[i / n * vocab + id] = 0);
    let is_outside = Tensor::from_vec(is_outside, (positions, vocab), log_probs.device())?;
    let impossible = (log_probs.zeros_like()? + f64::NEG_INFINITY)?;
    log_sum_exp(&is_outside.where_cond(log_probs, &impossible)?)
}

/// Computes the logarithm of the sum of the exponentials of each row, `[positions, 1]`.
fn log_sum_exp(rows: &Tensor) -> Result<Tensor> {
    // The exponentials are relative to the largest, because all of them may be too small for a number.
    let largest = rows.detach().max_keepdim(D::Minus1)?;
    let largest = largest.eq(f64::NEG_INFINITY)?.where_cond(&largest.zeros_like()?, &largest)?;
    let sum = sum_rows(&rows.broadcast_sub(&largest)?.exp()?)?.unsqueeze(D::Minus1)?;
    // A sum of zero has no gradient.
    let is_zero = sum.eq(0.0)?;
    let positive = is_zero.where_cond(&sum.ones_like()?, &sum)?;
    let impossible = (sum.zeros_like()? + f64::NEG_INFINITY)?;
    Ok(is_zero.where_cond(&impossible, &(positive.log()? + largest)?)?)
}

/// Returns whether each scored id is the argmax of its position's distribution, `[positions, n]` in u8, from
/// log-probabilities `[positions, vocab]`; `None` if this is not asked for.
pub(crate) fn are_argmax(log_probs: &Tensor, scored: &Scored) -> Result<Option<Tensor>> {
    if !scored.needs_argmax {
        return Ok(None);
    }
    if scored.token_ids.elem_count() == 0 {
        return Ok(Some(Tensor::zeros(scored.token_ids.dims2()?, DType::U8, log_probs.device())?));
    }
    Ok(Some(scored.token_ids.to_dtype(DType::I64)?.broadcast_eq(&argmax(&log_probs.detach())?)?))
}
