//! A loss on a GPU that is a function of the log-probabilities of all ids. The logits of a chunk are computed twice: for
//! its log-probabilities, and for the gradient.

use std::ops::Range;

use candle_core::{DType, Tensor};

use crate::backend::contract::{Backend, Gradients, LossResults};
use crate::backend::objective::{LogProbTerms, Objective};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::backend::task::Task;
use crate::error::{Error, Result};

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
    let of_chunk = |positions: Range<usize>| {
        let operands = operands.narrow(&positions)?;
        let plan = backend.plan(&operands, Task::log_probs(needs_grad), Some(plan.budget_bytes))?;
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
        let (of_values, of_gradients) = of_chunk(positions)?;
        values.push(of_values);
        gradients.push(of_gradients);
    }
    let objective = Tensor::cat(&values, 0)?;
    let (sum, nll) = (objective.sum_all()?, objective.clone());
    let count = Tensor::full(operands.sizes.positions as f32, (), device)?;
    let gradients = joined(gradients)?;
    Ok(LossResults { objective, nll, sum, count, is_correct: None, gradients })
}

/// The gradients of all positions: for contexts and log-priors side by side, for the decoder summed.
fn joined(of_chunks: Vec<Gradients>) -> Result<Gradients> {
    let side_by_side = |of: &dyn Fn(&Gradients) -> Option<Tensor>| {
        let of_chunks: Vec<Tensor> = of_chunks.iter().filter_map(of).collect();
        if of_chunks.is_empty() {
            Ok(None)
        } else {
            Tensor::cat(&of_chunks, 0).map(Some)
        }
    };
    let summed = |of: &dyn Fn(&Gradients) -> Option<Tensor>| {
        let mut of_chunks = of_chunks.iter().filter_map(of);
        let first = of_chunks.next();
        first.map(|first| of_chunks.try_fold(first, |sum, gradient| sum + gradient)).transpose()
    };
    Ok(Gradients {
        contexts: side_by_side(&|of| of.contexts.clone())?,
        log_priors: side_by_side(&|of| of.log_priors.clone())?,
        weight: summed(&|of| of.weight.clone())?,
        adapter: summed(&|of| of.adapter.clone())?,
        bias: summed(&|of| of.bias.clone())?,
    })
}
