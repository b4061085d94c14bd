//! Losses and their gradients. The targets of a loss are known before the first chunk, or they follow from the scores
//! or the log-probabilities of each chunk. A loss takes one pass or two, as planned.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::inputs::Inputs;
use super::memory::zeros;
use super::objective::components::PositionLoss;
use super::objective::results::{results, BufferedGradients, WeightBuffer};
use super::objective::targets::{Candidates, Targets};
use super::one_pass::OnePassRequest;
use super::plan::{logit_tiles, one_pass, Served};
use super::products::multiplier::Multiplier;
use super::two_pass::TwoPasses;
use super::vector::simd::Float;
use crate::backend::objective::{GradientSoFar, LogProbTerms, LossResults, Objective, ScoreTerms, Scored, TargetLoss};
use crate::backend::operands::Real;
use crate::backend::plan::{Computation, Planned, Steps};
use crate::error::Result;
use crate::tensors::autograd::take_values;

/// Computes an objective, and the gradients of the operands that need one.
pub(super) fn loss<F: Served>(multiplier: Multiplier, planned: &Planned, objective: &Objective) -> Result<LossResults> {
    let operands = &planned.operands;
    match objective {
        Objective::Targets(loss) => {
            let targets = Targets::from_ids(loss, operands.sizes, operands.weight_rows()?)?;
            target_loss::<F>(multiplier, planned, &targets, Some(loss))
        }
        Objective::LogProbs { upstream } => {
            let upstream = upstream.flatten_all()?.to_vec1()?;
            let targets = Targets::from_log_prob_upstream(upstream, 0, operands.sizes.vocab);
            target_loss::<F>(multiplier, planned, &targets, None)
        }
        Objective::Scores { scored, terms } => score_loss::<F>(multiplier, planned, scored, terms),
        Objective::AllLogProbs(terms) => log_prob_loss::<F>(multiplier, planned, terms),
    }
}

/// Computes a loss whose targets are known before the first chunk: those of `loss`, or the upstream gradients of
/// log-probabilities.
fn target_loss<F: Served>(
    multiplier: Multiplier,
    planned: &Planned,
    targets: &Targets<F>,
    loss: Option<&TargetLoss>,
) -> Result<LossResults> {
    Inputs::with(&planned.operands, |inputs: Inputs<'_, F>| {
        let shard = loss.and_then(|loss| loss.shard.as_ref());
        let so_far = loss.and_then(|loss| loss.so_far.as_ref());
        let gradients = BufferedGradients::new(planned, weight_buffer::<F>(planned, so_far)?)?;
        let (losses, mut gradients, ranks) = match planned.plan.computation {
            Computation::OnePass => {
                let request = OnePassRequest::Loss { targets, shard };
                let mut pass = one_pass(multiplier, inputs, request, gradients, planned);
                pass.run_loss(planned)?;
                pass.finish()
            }
            Computation::TwoPasses => {
                let mut passes =
                    TwoPasses::for_targets(logit_tiles(multiplier), inputs, targets, shard, gradients, &planned.plan);
                passes.run_loss(planned)?;
                (passes.losses, passes.gradients, passes.ranks)
            }
        };
        if let Some(mut ranks) = ranks {
            ranks.finish_sum(&mut gradients.contexts)?;
        }
        results(planned, Some(targets), &losses, gradients)
    })
}

/// Chooses the buffer of the weight's gradient: the gradient of earlier losses, if this loss adds to it. Otherwise a
/// single chunk in one pass rounds the gradient of a weight in bf16 at once, if that has no rows of targets outside the
/// vocabulary. One in f16 is rounded after it is multiplied by the upstream gradient, which may be a loss scale.
fn weight_buffer<F: Served>(
    Planned { operands, needs_grad, plan }: &Planned,
    so_far: Option<&GradientSoFar>,
) -> Result<WeightBuffer<F>> {
    if let Some(so_far) = so_far.filter(|_| needs_grad.weight).and_then(GradientSoFar::take) {
        return Ok(WeightBuffer::SoFar(take_values(&so_far.to_dtype(F::DTYPE)?)?));
    }
    let is_single_chunk = plan.chunks().nth(1).is_none();
    let is_whole = operands.weight_rows()? == operands.sizes.vocab;
    let is_bf16 = operands.weight.dense().is_some_and(|weight| weight.dtype() == DType::BF16);
    let is_rounded = plan.computation == Computation::OnePass && is_single_chunk && is_whole && is_bf16;
    Ok(if is_rounded { WeightBuffer::Rounded } else { WeightBuffer::Zeros })
}

/// Computes a loss whose terms are known once the scores of a chunk are. One pass serves it if the logits of the
/// candidates, and sums over the other ids, suffice. Other scores depend on the log-probabilities of all ids.
fn score_loss<F: Served>(
    multiplier: Multiplier,
    planned: &Planned,
    scored: &Scored,
    terms: &ScoreTerms,
) -> Result<LossResults> {
    let Planned { operands, needs_grad, plan } = planned;
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let candidates = Candidates::new(scored, operands.sizes.vocab)?;
        let gradients = BufferedGradients::new(planned, WeightBuffer::Zeros)?;
        let mut losses = Vec::with_capacity(operands.sizes.positions);
        let gradients = match plan.computation {
            Computation::OnePass => {
                let inputs = inputs.tempered(scored.temperature);
                let request = OnePassRequest::Scores { candidates: &candidates, scored };
                let mut pass = one_pass(multiplier, inputs, request, gradients, planned);
                for positions in plan.chunks() {
                    pass.first_product(positions.clone())?;
                    let scores = pass.scores(&candidates, scored);
                    let upstream: Vec<F> = add_losses(terms, positions.clone(), scores, &mut losses)?;
                    if needs_grad.any() {
                        let (first, power) = (positions.start, F::from_f64(1.0));
                        let targets = Targets::from_score_upstream(scored, &candidates, &upstream, first, power);
                        pass.objective_rows(&targets);
                        pass.chunk_gradients(positions, *needs_grad)?;
                    }
                }
                pass.finish().1
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::for_chunk_targets(logit_tiles(multiplier), inputs, gradients, plan);
                for positions in plan.chunks() {
                    passes.first_product(positions.clone())?;
                    let (scores, _) = passes.score_rows(positions.clone(), &candidates, scored);
                    let upstream: Vec<F> = add_losses(terms, positions.clone(), scores, &mut losses)?;
                    if needs_grad.any() {
                        let (first, power) = (positions.start, F::from_f64(1.0 / scored.temperature));
                        let targets = Targets::from_score_upstream(scored, &candidates, &upstream, first, power);
                        passes.objective_rows(&targets, positions.clone())?;
                        passes.chunk_gradients(positions, *needs_grad)?;
                    }
                }
                passes.gradients
            }
        };
        results(planned, None, &losses, gradients)
    })
}

/// Evaluates the terms of a chunk's positions, which have these scores. Adds the values to the losses, and returns the
/// upstream gradients of the scores.
fn add_losses<F: Float>(
    terms: &ScoreTerms,
    positions: Range<usize>,
    scores: Vec<F>,
    losses: &mut Vec<PositionLoss>,
) -> Result<Vec<F>> {
    let columns = scores.len() / positions.len().max(1);
    let nll: Vec<f64> = scores.chunks_exact(columns).map(|scores| -Real::f64(scores[0])).collect();
    let (values, upstream) =
        terms(positions.clone(), &Tensor::from_vec(scores, (positions.len(), columns), &Device::Cpu)?)?;
    let values = values.to_vec1::<F>()?.into_iter().map(Real::f64).zip(nll);
    losses.extend(values.map(|(objective, nll)| PositionLoss { objective, nll, ..PositionLoss::default() }));
    Ok(upstream.flatten_all()?.to_vec1()?)
}

/// Computes the loss that `terms` defines: for each chunk it is given the log-probabilities of all ids, and returns the
/// values of the positions and their derivatives by the log-probabilities.
fn log_prob_loss<F: Served>(multiplier: Multiplier, planned: &Planned, terms: &LogProbTerms) -> Result<LossResults> {
    let Planned { operands, needs_grad, plan } = planned;
    let sizes = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let gradients = BufferedGradients::new(planned, WeightBuffer::Zeros)?;
        let mut losses = Vec::with_capacity(sizes.positions);
        let mut passes = TwoPasses::for_chunk_targets(logit_tiles(multiplier), inputs, gradients, plan);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            let mut log_probs = zeros::<F>(positions.len() * sizes.vocab);
            passes.log_prob_rows::<F>(positions.clone(), &mut log_probs);
            let log_probs = Tensor::from_vec(log_probs, (positions.len(), sizes.vocab), &Device::Cpu)?;
            let (values, upstream) = terms(positions.clone(), log_probs)?;
            let values = values.to_vec1::<F>()?.into_iter().map(Real::f64);
            losses.extend(values.map(|value| PositionLoss { nll: value, objective: value, ..PositionLoss::default() }));
            if needs_grad.any() {
                let upstream = take_values(&upstream)?;
                let targets = Targets::from_log_prob_upstream(upstream, positions.start, sizes.vocab);
                passes.objective_rows(&targets, positions.clone())?;
                passes.chunk_gradients(positions, *needs_grad)?;
            }
        }
        results(planned, None, &losses, passes.gradients)
    })
}
