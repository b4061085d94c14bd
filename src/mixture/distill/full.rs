//! A teacher whose log-probabilities of all ids are known.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::options::DistillOptions;
use super::positions::Counted;
use super::terms::{mixed, DistillTerms};
use crate::backend;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::operands::{accumulation_dtype, NeedsGrad};
use crate::backend::task::Task;
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::tensors::checks::check_log_prob_tensor;

#[derive(Clone)]
pub(super) enum FullTeacher {
    /// Of the positions that count. The log-probabilities are in this dtype, the student's.
    Mixture(Mixture, DType),
    /// Of all positions, `[positions, vocab]`.
    LogProbs { rows: Tensor, dtype: DType, counted: Counted },
}

impl FullTeacher {
    /// The log-probabilities of some of the positions that count, `[chunk, vocab]`.
    fn log_probs(&self, positions: &Range<usize>) -> Result<Tensor> {
        match self {
            FullTeacher::Mixture(mixture, dtype) => {
                let operands = mixture.operands().narrow(positions)?;
                let plan = backend::plan(&operands, Task::log_probs(NeedsGrad::default()), None)?;
                let computed = accumulation_dtype("teacher", operands.contexts.dtype())?;
                Ok(backend::log_probs(&operands, computed, &plan)?.to_dtype(*dtype)?)
            }
            FullTeacher::LogProbs { rows, dtype, counted } => {
                let rows = counted.rows_of(rows, positions)?;
                let position = |row: usize| counted.positions[positions.start + row] as usize;
                check_log_prob_tensor("log_probs of the teacher", &rows, rows.dtype(), position)?;
                Ok(rows.to_dtype(*dtype)?.contiguous()?)
            }
        }
    }

    /// The terms of positions with these log-probabilities of the student, which may be overwritten, and targets.
    pub(super) fn terms(
        &self,
        positions: Range<usize>,
        log_probs: Tensor,
        counted: &Counted,
        targets: Option<Tensor>,
        options: &DistillOptions,
    ) -> Result<DistillTerms> {
        let scales = &counted.scales(&positions)?;
        let hard = options.hard_weight;
        let targets = targets.map(|targets| targets.unsqueeze(1)).transpose()?;
        let of_targets = |targets: &Tensor| Ok::<_, Error>(log_probs.gather(targets, 1)?.squeeze(1)?.neg()?);
        let nll = targets.as_ref().map(of_targets).transpose()?;
        let terms = DivergenceTerms {
            divergence: options.divergence,
            temperature: options.temperature,
            scales: (scales * (1.0 - hard))?,
        };
        let (divergence, derivatives) = backend::divergence(log_probs, &self.log_probs(&positions)?, &terms)?;
        counted.check_finite(&positions, &divergence)?;
        if let Some(targets) = &targets {
            derivatives.scatter_add_set(targets, &(scales * -hard)?.unsqueeze(1)?, 1)?;
        }
        Ok(DistillTerms { objective: mixed(divergence, nll, hard)?, derivatives })
    }
}
