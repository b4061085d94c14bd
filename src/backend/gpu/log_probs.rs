//! Log-probabilities of all ids on a GPU, and scores.

use candle_core::{DType, Tensor};

use super::chunks::Chunks;
use super::device::{Buffer, Gpu};
use super::device_scores::DeviceScores;
use crate::backend::objective::Scored;
use crate::backend::operands::Sizes;
use crate::backend::plan::Planned;
use crate::error::Result;

/// Computes the log-probabilities of all ids, `[positions, vocab]` in `dtype`.
pub(in crate::backend) fn log_probs<G: Gpu>(gpu: &G, planned: &Planned, dtype: DType) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = planned.operands.sizes;
    let to = Buffer::unwritten(gpu, positions * vocab, dtype, planned.device())?;
    let chunks = Chunks::new(gpu, planned)?;
    planned.plan.chunks().try_for_each(|positions| chunks.log_probs(positions, &to))?;
    to.shaped((positions, vocab))
}

/// Computes the scores `[positions, n + 3]` from the first product, and whether each candidate is the most probable id,
/// `[positions, n]`, if that is needed.
pub(in crate::backend) fn scores<G: Gpu>(
    gpu: &G,
    planned: &Planned,
    scored: &Scored,
) -> Result<(Tensor, Option<Tensor>)> {
    let chunks = Chunks::new(gpu, planned)?;
    let scores = DeviceScores::new(&chunks, scored)?;
    for positions in planned.plan.chunks() {
        let arguments = chunks.arguments(&positions);
        chunks.compute_logits(&positions, arguments)?;
        scores.compute(&chunks, &positions, arguments)?;
    }
    let positions = planned.operands.sizes.positions;
    Ok((scores.scores(0..positions)?, scores.are_argmax(positions)?))
}
