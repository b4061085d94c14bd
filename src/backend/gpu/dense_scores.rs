//! Scores on a GPU, composed by candle's operations from the log-probabilities of all ids, `[positions, vocab]`.

use candle_core::{DType, Tensor, Var};

use super::device::Gpu;
use super::log_probs::log_probs;
use super::loss::loss;
use crate::backend::contract::{Gradients, NeedsGrad, Objective, Operands, Scored};
use crate::backend::plan::Plan;
use crate::error::Result;
use crate::tensors::scores::composed;

pub(super) struct DenseScores {
    log_probs: Var,
    /// `[positions, n + 1]`, as a function of the log-probabilities
    pub(super) scores: Tensor,
}

impl DenseScores {
    pub(super) fn new<G: Gpu>(gpu: &G, operands: &Operands, scored: &Scored, plan: &Plan) -> Result<Self> {
        let log_probs = Var::from_tensor(&log_probs(gpu, operands, DType::F32, plan)?)?;
        let scores = composed(&log_probs, &scored.token_ids, scored.temperature, scored.entropy)?;
        Ok(DenseScores { log_probs, scores })
    }

    /// The gradients of the inner product of the scores and `upstream`.
    pub(super) fn gradients<G: Gpu>(
        self,
        gpu: &G,
        operands: &Operands,
        upstream: &Tensor,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<Gradients> {
        let of_log_probs = (&self.scores * upstream)?.sum_all()?.backward()?;
        let upstream = match of_log_probs.get(&self.log_probs) {
            Some(gradient) => gradient.clone(),
            None => self.log_probs.zeros_like()?,
        };
        Ok(loss(gpu, operands, &Objective::LogProbs { upstream }, needs_grad, plan)?.gradients)
    }
}
