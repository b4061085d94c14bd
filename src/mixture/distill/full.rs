//! A teacher that gives a log-probability to every id.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::options::DistillOptions;
use super::terms::{mix_objectives, DistillTerms};
use crate::backend;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::objective::Task;
use crate::backend::operands::NeedsGrad;
use crate::error::{Error, Result};
use crate::loss::CountedPositions;
use crate::mixture::Mixture;
use crate::tensors::checks::{accumulation_dtype, check_log_prob_tensor};

/// The teacher's distributions, whose log-probabilities are returned in `dtype`, the student's accumulation dtype.
#[derive(Clone)]
pub(super) enum FullTeacher {
    /// A mixture of the positions that count.
    Mixture { mixture: Mixture, dtype: DType },
    /// The log-probabilities of all positions, `[positions, vocab]`.
    LogProbs { rows: Tensor, dtype: DType, counted: CountedPositions },
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
        let targets = targets.map(|targets| targets.unsqueeze(1)).transpose()?;
        let target_nll = |targets: &Tensor| Ok::<_, Error>(log_probs.gather(targets, 1)?.squeeze(1)?.neg()?);
        let nll = targets.as_ref().map(target_nll).transpose()?;
        let terms = DivergenceTerms {
            divergence: options.divergence,
            temperature: options.temperature,
            scales: (scales * (1.0 - hard))?,
        };
        let (divergence, derivatives) = backend::divergence(log_probs, &self.chunk_log_probs(&positions)?, &terms)?;
        counted.check_finite(&positions, &divergence)?;
        if let Some(targets) = &targets {
            derivatives.scatter_add_set(targets, &(scales * -hard)?.unsqueeze(1)?, 1)?;
        }
        Ok(DistillTerms { objective: mix_objectives(divergence, nll, hard)?, derivatives })
    }
}
