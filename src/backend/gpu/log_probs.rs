//! Log-probabilities of all ids on a GPU.

use candle_core::{DType, Tensor};

use super::chunks::Chunks;
use super::device::{Buffer, Gpu};
use crate::backend::operands::{Operands, Sizes};
use crate::backend::plan::Plan;
use crate::error::Result;

/// Computes the log-probabilities of all ids, `[positions, vocab]` in `dtype`.
pub(super) fn log_probs<G: Gpu>(gpu: &G, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    let to = Buffer::zeros(gpu, positions * vocab, dtype, operands.contexts.device())?;
    let chunks = Chunks::new(gpu, operands, plan)?;
    plan.chunks().try_for_each(|positions| chunks.log_probs(positions, &to))?;
    Ok(to.tensor.narrow(0, 0, positions * vocab)?.reshape((positions, vocab))?)
}
