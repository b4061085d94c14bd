//! Losses that are functions of results which are known as tensors: the gradient of such a loss is that of a linear
//! function of these results.

use std::ops::Range;

use candle_core::{Tensor, D};

use crate::error::Result;
use crate::loss::{CountedPositions, Loss};
use crate::scores::{LogProbLoss, ScoreLoss, Scores};
use crate::tensors::autograd::attach;
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::linear::with_shape;
use crate::tensors::transfer::{number_like, sum_all};

/// Computes a loss of these scores, of positions with these leading dimensions.
pub(super) fn score_loss(loss: &ScoreLoss, leading: &[usize], scores: &Scores) -> Result<(Loss, Tensor)> {
    let positions: usize = leading.iter().product();
    let n = if loss.token_ids.dims() == leading { 1 } else { loss.token_ids.dim(leading.len())? };
    let log_prob = scores.log_prob.reshape((positions, n))?;
    let zeros = Tensor::zeros((positions, 1), log_prob.dtype(), log_prob.device())?;
    let column = |score: &Option<Tensor>| match score {
        Some(score) => score.reshape((positions, 1)),
        None => Ok(zeros.clone()),
    };
    let nll = match n {
        // Without ids there is no log-probability.
        0 => zeros.reshape(leading)?,
        // `neg` would make a minus zero.
        _ => log_prob.narrow(1, 0, 1)?.affine(-1.0, 0.0)?.reshape(leading)?,
    };
    let [entropy, log_outside, log_collision] =
        [&scores.entropy, &scores.log_outside, &scores.log_collision].map(column);
    let all = Tensor::cat(&[&log_prob, &entropy?, &log_outside?, &log_collision?], 1)?;
    // The columns that the terms depend on.
    let used = |all: &Tensor| {
        let Range { start, end } = loss.position_scores;
        Tensor::cat(&[all.narrow(1, 0, n)?, all.narrow(1, n + start, end - start)?], 1)
    };
    let terms = || {
        let (values, derivatives) = (loss.terms)(0..positions, &all.detach())?;
        Ok((values, used(&derivatives)?))
    };
    linear_loss(&used(&all)?, terms, loss.counted.as_ref(), |_| Ok(nll))
}

/// Computes a loss of these log-probabilities of all ids, `[.., vocab]`, of positions with these leading dimensions.
pub(super) fn log_prob_loss(loss: &LogProbLoss, leading: &[usize], log_probs: &Tensor) -> Result<(Loss, Tensor)> {
    let rows = with_shape(log_probs, &[leading.iter().product(), log_probs.dim(D::Minus1)?])?;
    let rows = rows.to_dtype(accumulation_dtype("log_probs", rows.dtype())?)?;
    // The terms may overwrite the log-probabilities.
    let terms = || (loss.terms)(0..rows.dim(0)?, rows.detach().copy()?);
    linear_loss(&rows, terms, loss.counted.as_ref(), |values| Ok(values.reshape(leading)?))
}

/// Computes the sum of the values that `terms` gives for the columns `[positions, n]`, with the gradient that their
/// derivatives are. `nll` makes the loss's negative log-likelihoods from the values.
fn linear_loss(
    columns: &Tensor,
    terms: impl FnOnce() -> Result<(Tensor, Tensor)>,
    counted: Option<&CountedPositions>,
    nll: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<(Loss, Tensor)> {
    let (positions, dtype, device) = (columns.dim(0)?, columns.dtype(), columns.device());
    if positions == 0 {
        // A GPU cannot launch zero blocks.
        let zero = Tensor::zeros((), dtype, device)?;
        let value = if device.is_cpu() { columns.sum_all()? } else { zero.clone() };
        let values = Tensor::zeros(0, dtype, device)?;
        return Ok((Loss::new(value, zero.clone(), zero, nll(&values)?), values));
    }
    let (values, derivatives) = terms()?;
    let sum = match counted {
        Some(counted) => counted.weighted_sum(&values)?,
        None => sum_all(&values)?,
    };
    let value = attach("loss", sum.clone(), [Some(columns), None, None], move |_, _, upstream| {
        Ok([Some(derivatives.broadcast_mul(upstream)?), None, None])
    })?;
    let count = number_like(columns, positions as f64)?;
    Ok((Loss::new(value, sum, count, nll(&values)?), values))
}
