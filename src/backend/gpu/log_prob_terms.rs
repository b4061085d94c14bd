//! A loss on a GPU that is a function of the log-probabilities of all ids. The logits of a chunk are computed twice:
//! for its log-probabilities, and for the gradient.

use std::ops::Range;

use candle_core::{DType, Tensor};

use crate::backend::contract::{Backend, Gradients, LossResults};
use crate::backend::objective::{LogProbTerms, Objective};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::backend::task::Task;
use crate::error::{Error, Result};

/// Computes the loss that `terms` defines on the log-probabilities of all ids, chunk by chunk, and its gradients.
pub(super) fn log_prob_loss(
    backend: &impl Backend,
    operands: &Operands,
    terms: &LogProbTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let device = operands.contexts.device();
    if operands.sizes.positions == 0 {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
        let upstream = zeros(&[0, operands.sizes.vocab])?;
        let gradients = backend.loss(operands, &Objective::LogProbs { upstream }, needs_grad, plan)?.gradients;
        let (objective, nll, sum, count) = (zeros(&[0])?, zeros(&[0])?, zeros(&[])?, zeros(&[])?);
        return Ok(LossResults { objective, nll, sum, count, is_correct: None, gradients });
    }
    let (mut values, mut gradients) = (Vec::new(), Vec::new());
    let chunk_loss = |positions: Range<usize>| {
        let operands = operands.narrow(&positions)?;
        let plan = backend.plan(&operands, Task::for_log_probs(needs_grad), Some(plan.budget_bytes))?;
        let log_probs = backend.log_probs(&operands, DType::F32, &plan)?;
        let (values, upstream) = terms(positions, log_probs)?;
        let gradients = if needs_grad.any() {
            backend.loss(&operands, &Objective::LogProbs { upstream }, needs_grad, &plan)?.gradients
        } else {
            Gradients::default()
        };
        Ok::<_, Error>((values, gradients))
    };
    for positions in plan.chunks() {
        let (chunk_values, chunk_gradients) = chunk_loss(positions)?;
        values.push(chunk_values);
        gradients.push(chunk_gradients);
    }
    let objective = Tensor::cat(&values, 0)?;
    let (sum, nll) = (objective.sum_all()?, objective.clone());
    let count = Tensor::full(operands.sizes.positions as f32, (), device)?;
    let gradients = joined(gradients)?;
    Ok(LossResults { objective, nll, sum, count, is_correct: None, gradients })
}

/// Joins the gradients of chunks into those of all positions: for contexts and log-priors side by side, for the decoder
/// summed.
fn joined(chunks: Vec<Gradients>) -> Result<Gradients> {
    let side_by_side = |operand: fn(&Gradients) -> &Option<Tensor>| {
        let gradients: Vec<&Tensor> = chunks.iter().filter_map(|chunk| operand(chunk).as_ref()).collect();
        if gradients.is_empty() {
            Ok(None)
        } else {
            Tensor::cat(&gradients, 0).map(Some)
        }
    };
    let summed = |operand: fn(&Gradients) -> &Option<Tensor>| {
        let mut gradients = chunks.iter().filter_map(|chunk| operand(chunk).clone());
        let first = gradients.next();
        first.map(|first| gradients.try_fold(first, |sum, gradient| sum + gradient)).transpose()
    };
    Ok(Gradients {
        contexts: side_by_side(|chunk| &chunk.contexts)?,
        log_priors: side_by_side(|chunk| &chunk.log_priors)?,
        weight: summed(|chunk| &chunk.weight)?,
        adapter: summed(|chunk| &chunk.adapter)?,
        bias: summed(|chunk| &chunk.bias)?,
    })
}
