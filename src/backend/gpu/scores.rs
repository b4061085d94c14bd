//! Scores on a GPU, and losses that are functions of them: the masses of a chunk's ids are known once its scores are.

use candle_core::{DType, Tensor};

use super::chunks::Chunks;
use super::device::Gpu;
use super::device_scores::DeviceScores;
use super::loss::{DeviceTargets, LossChunks};
use super::objective::DeviceObjective;
use crate::backend::contract::LossResults;
use crate::backend::objective::{ScoreTerms, Scored};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::error::Result;

/// Computes the scores `[positions, n + 2]` from the first product, and whether each candidate is the most probable id,
/// `[positions, n]`, if that is needed.
pub(super) fn scores<G: Gpu>(
    gpu: &G,
    operands: &Operands,
    scored: &Scored,
    plan: &Plan,
) -> Result<(Tensor, Option<Tensor>)> {
    let chunks = Chunks::new(gpu, operands, plan)?;
    let scores = DeviceScores::new(&chunks, scored)?;
    for positions in plan.chunks() {
        let arguments = chunks.arguments(&positions);
        chunks.compute_logits(&positions, arguments)?;
        scores.compute(&chunks, &positions, arguments)?;
    }
    let positions = operands.sizes.positions;
    Ok((scores.scores(0..positions)?, scores.are_argmax(positions)?))
}

/// Computes a loss that is a function of scores, and its gradients. Nothing waits for the device, unless `terms` do.
pub(super) fn score_loss<G: Gpu>(
    gpu: &G,
    operands: &Operands,
    scored: &Scored,
    terms: &ScoreTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let chunks = Chunks::new(gpu, operands, plan)?;
    let scores = DeviceScores::new(&chunks, scored)?;
    let objective = DeviceObjective::from_scores(gpu, scored, operands)?;
    let mut loss = LossChunks::new(chunks, objective, DeviceTargets::Scored(&scores), None, needs_grad)?;
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
            loss.chunk_gradients(positions, needs_grad)?;
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
    let gradients = loss.into_gradients(needs_grad)?;
    Ok(LossResults { objective, nll, sum, count, is_correct: None, gradients })
}
