//! Losses on a GPU and their gradients: over targets, or as functions of scores or log-probabilities.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::chunks::Chunks;
use super::device::{Buffer, Gpu};
use super::device_scores::DeviceScores;
use super::gradients::Sums;
use super::log_probs::log_probs;
use super::loss_chunks::{DeviceTargets, LossChunks};
use super::objective::DeviceObjective;
use super::own_targets::OwnTargets;
use super::plan::plan;
use super::shared_targets::{sum_context_gradients, SharedTargets};
use crate::backend::objective::{
    Gradients, LogProbTerms, LossResults, Objective, ScoreTerms, Scored, TargetLoss, Task,
};
use crate::backend::plan::{Planned, Steps};
use crate::error::{Error, Result};

/// Computes an objective and its gradients.
pub(in crate::backend) fn loss<G: Gpu>(gpu: &G, planned: &Planned, objective: &Objective) -> Result<LossResults> {
    match objective {
        Objective::Targets(loss) => target_loss(gpu, planned, loss),
        Objective::LogProbs { upstream } => log_prob_gradients(gpu, planned, upstream, Sums::Final),
        Objective::Scores { scored, terms } => score_loss(gpu, planned, scored, terms),
        Objective::AllLogProbs(terms) => log_prob_loss(gpu, planned, terms),
    }
}

/// Computes a loss over targets and its gradients.
fn target_loss<G: Gpu>(gpu: &G, planned: &Planned, loss: &TargetLoss) -> Result<LossResults> {
    let operands = &planned.operands;
    let objective = DeviceObjective::from_targets(gpu, loss, operands)?;
    let (own, shared) = (OwnTargets::new(operands, loss)?, SharedTargets::new(loss)?);
    let chunks = Chunks::new(gpu, planned)?;
    let targets = match (&own, shared) {
        (Some(own), _) => DeviceTargets::Own(Buffer::new(gpu, own.logits.flatten_all()?)?),
        (None, Some(shared)) => DeviceTargets::Shared(shared),
        (None, None) if objective.has_soft_masses() => DeviceTargets::Soft(chunks.log_prob_rows()?),
        (None, None) => DeviceTargets::Hard,
    };
    let sums = if own.is_some() || loss.shard.is_some() { Sums::Continued } else { Sums::Final };
    let mut chunks = LossChunks::new(chunks, objective, targets, sums, loss.so_far.as_ref())?;
    chunks.run_loss(planned)?;

    let results = chunks.results()?;
    let own_gradient = chunks.own_gradient()?;
    let gradients = chunks.into_gradients()?;
    let gradients = match own.zip(own_gradient) {
        Some((own, logit_gradient)) => own.add_to(gradients, &logit_gradient, operands)?,
        None => gradients,
    };
    let gradients = match &loss.shard {
        Some(shard) => sum_context_gradients(shard, gradients)?,
        None => gradients,
    };
    Ok(LossResults { gradients, ..results })
}

/// Computes the gradients of the inner product of log-probabilities and `upstream`.
fn log_prob_gradients<G: Gpu>(gpu: &G, planned: &Planned, upstream: &Tensor, sums: Sums) -> Result<LossResults> {
    let objective = DeviceObjective::from_upstream(gpu, upstream, &planned.operands)?;
    let chunks = Chunks::new(gpu, planned)?;
    let targets = DeviceTargets::Soft(chunks.log_prob_rows()?);
    let mut chunks = LossChunks::new(chunks, objective, targets, sums, None)?;
    chunks.run_loss(planned)?;
    let results = chunks.results()?;
    Ok(LossResults { gradients: chunks.into_gradients()?, ..results })
}

/// Computes a loss that is a function of scores, and its gradients. Nothing waits for the device, unless `terms` do.
fn score_loss<G: Gpu>(gpu: &G, planned: &Planned, scored: &Scored, terms: &ScoreTerms) -> Result<LossResults> {
    let Planned { operands, needs_grad, plan } = planned;
    let chunks = Chunks::new(gpu, planned)?;
    let scores = DeviceScores::new(&chunks, scored)?;
    let objective = DeviceObjective::from_scores(gpu, scored, operands)?;
    let mut loss = LossChunks::new(chunks, objective, DeviceTargets::Scored(&scores), Sums::Final, None)?;
    let mut values = Vec::new();
    for positions in plan.chunks() {
        loss.first_product(positions.clone())?;
        scores.compute(&loss.chunks, &positions, loss.arguments(&positions))?;
        let (chunk_values, upstream) = terms(positions.clone(), &scores.scores(positions.clone())?)?;
        values.push(chunk_values);
        if needs_grad.any() {
            let mass_bounds = scores.take_upstream(&loss.chunks, &positions, upstream, &loss.objective)?;
            loss.objective.normalize(gpu, &mass_bounds, operands)?;
            loss.objective(positions.clone())?;
            loss.chunk_gradients(positions, *needs_grad)?;
        }
    }
    let (positions, device) = (operands.sizes.positions, operands.contexts.device());
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
    // A GPU cannot launch zero blocks.
    let (objective, nll, sum) = match positions {
        0 => (zeros(&[0])?, zeros(&[0])?, zeros(&[])?),
        _ => {
            let objective = Tensor::cat(&values, 0)?;
            let sum = objective.sum_all()?;
            (objective, scores.scores(0..positions)?.narrow(1, 0, 1)?.squeeze(1)?.affine(-1.0, 0.0)?, sum)
        }
    };
    let count = Tensor::full(positions as f32, (), device)?;
    let gradients = loss.into_gradients()?;
    Ok(LossResults { objective, nll, sum, count, mean: None, is_correct: None, gradients })
}

/// Computes the loss that `terms` defines on the log-probabilities of all ids, chunk by chunk, and its gradients. The
/// logits of a chunk are computed twice: for its log-probabilities, and for the gradient.
fn log_prob_loss<G: Gpu>(gpu: &G, planned: &Planned, terms: &LogProbTerms) -> Result<LossResults> {
    let Planned { operands, needs_grad, .. } = planned;
    let device = operands.device();
    if operands.sizes.positions == 0 {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
        let upstream = zeros(&[0, operands.sizes.vocab])?;
        let gradients = log_prob_gradients(gpu, planned, &upstream, Sums::Continued)?.gradients;
        let (objective, nll, sum, count) = (zeros(&[0])?, zeros(&[0])?, zeros(&[])?, zeros(&[])?);
        return Ok(LossResults { objective, nll, sum, count, mean: None, is_correct: None, gradients });
    }
    let (mut values, mut gradients) = (Vec::new(), Vec::new());
    let chunk_loss = |positions: Range<usize>| {
        let operands = operands.narrow(&positions)?;
        let budget = Some(planned.plan.budget_bytes);
        let mut planned = plan(gpu, &operands, Task::LogProbs { needs_grad: *needs_grad }, budget)?;
        // All chunks have the precision of the loss.
        planned.operands.precision = operands.precision;
        let (values, upstream) = terms(positions, log_probs(gpu, &planned, DType::F32)?)?;
        let gradients = if needs_grad.any() {
            log_prob_gradients(gpu, &planned, &upstream, Sums::Continued)?.gradients
        } else {
            Gradients::default()
        };
        Ok::<_, Error>((values, gradients))
    };
    for positions in planned.plan.chunks() {
        let (chunk_values, chunk_gradients) = chunk_loss(positions)?;
        values.push(chunk_values);
        gradients.push(chunk_gradients);
    }
    let objective = Tensor::cat(&values, 0)?;
    let (sum, nll) = (objective.sum_all()?, objective.clone());
    let count = Tensor::full(operands.sizes.positions as f32, (), device)?;
    let gradients = joined(gradients)?;
    Ok(LossResults { objective, nll, sum, count, mean: None, is_correct: None, gradients })
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
