//! A teacher that gives a log-probability to every id.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::options::DistillOptions;
use super::terms::{mix_objectives, DistillTerms};
use crate::backend;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::objective::Task;
use crate::backend::operands::NeedsGrad;
use crate::error::Result;
use crate::loss::CountedPositions;
use crate::mixture::Mixture;
use crate::tensors::checks::{accumulation_dtype, check_log_prob_tensor};
use crate::tensors::transfer::number_like;

/// The teacher's distributions, whose log-probabilities are returned in `dtype`, the student's accumulation dtype.
#[derive(Clone)]
pub(super) enum FullTeacher {
    /// A mixture of the positions that count.
    Mixture { mixture: Mixture, dtype: DType },
    /// The log-probabilities of all positions, `[positions, vocab]`.
    LogProbs { rows: Tensor, dtype: DType, counted: CountedPositions },
}

/// The targets of some positions. On a GPU, where reading them would wait, id 0 is in place of an id that is not in the
/// vocabulary, and its numbers are NaN.
struct HardTargets {
    /// `[chunk, 1]`
    ids: Tensor,
    /// `[chunk, 1]`: the weights of the positions.
    scales: Tensor,
    /// `[chunk]`: whether each id is in the vocabulary; `None` if all are.
    are_ids: Option<Tensor>,
}

impl HardTargets {
    fn new(targets: Tensor, log_probs: &Tensor, scales: &Tensor) -> Result<Self> {
        if targets.device().is_cpu() {
            return Ok(HardTargets { ids: targets.unsqueeze(1)?, scales: scales.unsqueeze(1)?, are_ids: None });
        }
        let zeros = targets.zeros_like()?;
        let ids = targets.ge(0i64)?.where_cond(&targets, &zeros)?;
        let ids = ids.lt(log_probs.dim(1)? as i64)?.where_cond(&ids, &zeros)?;
        let are_ids = ids.eq(&targets)?;
        let scales = only_where(&are_ids, scales)?.unsqueeze(1)?;
        Ok(HardTargets { ids: ids.unsqueeze(1)?, scales, are_ids: Some(are_ids) })
    }

    /// Returns the negative log-likelihoods, `[chunk]`.
    fn nll(&self, log_probs: &Tensor) -> Result<Tensor> {
        let nll = log_probs.gather(&self.ids, 1)?.squeeze(1)?.neg()?;
        match &self.are_ids {
            Some(are_ids) => only_where(are_ids, &nll),
            None => Ok(nll),
        }
    }
}

/// Returns numbers, with NaN where a condition is zero.
fn only_where(condition: &Tensor, numbers: &Tensor) -> Result<Tensor> {
    Ok(condition.where_cond(numbers, &number_like(numbers, f64::NAN)?.broadcast_as(numbers.shape())?)?)
}

impl FullTeacher {
    /// Returns the log-probabilities of some of the positions that count, `[chunk, vocab]`.
    fn chunk_log_probs(&self, positions: &Range<usize>) -> Result<Tensor> {
        match self {
            FullTeacher::Mixture { mixture, dtype } => {
                let operands = mixture.operands().narrow(positions)?;
                let planned = backend::plan(&operands, Task::LogProbs { needs_grad: NeedsGrad::default() }, None)?;
                let computed = accumulation_dtype("teacher", operands.contexts.dtype())?;
                Ok(backend::log_probs(&planned, computed)?.to_dtype(*dtype)?)
            }
            FullTeacher::LogProbs { rows, dtype, counted } => {
                let rows = counted.chunk_rows(rows, positions)?;
                let position = |row: usize| counted.positions[positions.start + row] as usize;
                check_log_prob_tensor("log_probs of the teacher", &rows, rows.dtype(), position)?;
                Ok(rows.to_dtype(*dtype)?.contiguous()?)
            }
        }
    }

    /// Computes the terms of some of the positions that count from the student's log-probabilities, `[chunk, vocab]`,
    /// which may be overwritten, and from the targets, `[chunk]`, if they take part in the objective.
    pub(super) fn terms(
        &self,
        positions: Range<usize>,
        log_probs: Tensor,
        counted: &CountedPositions,
        targets: Option<Tensor>,
        options: &DistillOptions,
    ) -> Result<DistillTerms> {
        let scales = &counted.chunk_scales(&positions)?;
        let hard = options.hard_weight;
        let targets = targets.map(|targets| HardTargets::new(targets, &log_probs, scales)).transpose()?;
        let nll = targets.as_ref().map(|targets| targets.nll(&log_probs)).transpose()?;
        let terms = DivergenceTerms {
            divergence: options.divergence,
            temperature: options.temperature,
            scales: (scales * (1.0 - hard))?,
        };
        let (divergence, derivatives) = backend::divergence(log_probs, &self.chunk_log_probs(&positions)?, &terms)?;
        counted.check_finite(&positions, &divergence)?;
        if let Some(targets) = &targets {
            derivatives.scatter_add_set(&targets.ids, &(&targets.scales * -hard)?, 1)?;
        }
        Ok(DistillTerms { objective: mix_objectives(divergence, nll, hard)?, derivatives })
    }
}
