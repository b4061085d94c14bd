//! A distillation whose arguments have been checked: the divergence from a teacher as a loss of the student's scores,
//! or of its log-probabilities of all ids.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use super::full::FullTeacher;
use super::list::{ListScores, ListTeacher};
use super::options::{DistillOptions, Teacher, TeacherKind};
use super::terms::DistillTerms;
use crate::error::{Error, Result};
use crate::loss::{CountedPositions, Loss, OutputShape, PositionOptions, Reduction};
use crate::scores::{LogProbLoss, ScoreLoss};
use crate::tensors::checks::{accumulation_dtype, check_device, check_weights};
use crate::tensors::transfer::number_like;

/// A distillation whose arguments have been checked: the teacher at the positions that count, and the options.
#[derive(Clone)]
pub struct Distillation {
    counted: CountedPositions,
    teacher: PreparedTeacher,
    options: DistillOptions,
}

/// The teacher at the positions that count: with the log-probabilities of all ids, or of a list.
#[derive(Clone)]
enum PreparedTeacher {
    Full(FullTeacher),
    List(ListTeacher),
}

/// What a distillation asks of the student at the positions that count.
pub(crate) enum DistillLoss {
    LogProbs(LogProbLoss),
    Scores(ScoreLoss),
}

impl Distillation {
    /// Checks the options and the teacher against the student.
    pub(crate) fn new(student: OutputShape, teacher: &Teacher, options: &DistillOptions) -> Result<Self> {
        options.validate(teacher)?;
        let OutputShape { leading, vocab, like } = student;
        let dtype = accumulation_dtype("hidden", like.dtype())?;
        let counted = options.counted(student)?;
        let teacher = match &teacher.0 {
            TeacherKind::Mixture(mixture) => {
                if mixture.leading() != leading {
                    return Err(Error::shape("teacher", format!("{leading:?}"), mixture.leading()));
                }
                let teacher_vocab = mixture.operands().sizes.vocab;
                if teacher_vocab != vocab {
                    return Err(Error::config("vocab_size of the teacher", vocab.to_string(), teacher_vocab));
                }
                check_device("teacher", &mixture.operands().contexts, like)?;
                PreparedTeacher::Full(FullTeacher::Mixture {
                    mixture: mixture.with_positions(&counted.positions)?,
                    dtype,
                })
            }
            TeacherKind::LogProbs(log_probs) => {
                check_weights("log_probs of the teacher", log_probs, &[leading, &[vocab]].concat(), like)?;
                let rows = log_probs.reshape((leading.iter().product::<usize>(), vocab))?;
                PreparedTeacher::Full(FullTeacher::LogProbs { rows, dtype, counted: counted.clone() })
            }
            TeacherKind::TopK(list) => PreparedTeacher::List(ListTeacher::new(list, student, &counted, options)?),
        };
        Ok(Distillation { counted, teacher, options: options.clone() })
    }

    /// Returns the places, among all positions, of those that count.
    pub(crate) fn positions(&self) -> &[u32] {
        &self.counted.positions
    }

    /// Returns what is asked of the student, whose positions must be those that count.
    pub(crate) fn student_loss(&self) -> DistillLoss {
        let (distillation, counted) = (self.clone(), Some(self.counted.clone()));
        match self.teacher.clone() {
            PreparedTeacher::Full(teacher) => {
                let terms = move |positions: Range<usize>, log_probs| {
                    let targets = distillation.targets(&positions)?;
                    let Distillation { counted, options, .. } = &distillation;
                    let terms = teacher.terms(positions, log_probs, counted, targets, options)?;
                    Ok((terms.objective, terms.derivatives))
                };
                let workspace_bytes = self.options.workspace_bytes;
                DistillLoss::LogProbs(LogProbLoss { workspace_bytes, terms: Arc::new(terms), counted })
            }
            PreparedTeacher::List(list) => {
                let (token_ids, options) = (list.token_ids.clone(), list.score_options(&self.options));
                let terms = move |positions: Range<usize>, scores: &Tensor| {
                    let n = list.token_ids.dim(1)?;
                    let scores = ListScores {
                        log_prob: scores.narrow(1, 0, n)?,
                        log_outside: scores.narrow(1, n + 1, 1)?.squeeze(1)?,
                    };
                    let Distillation { counted, options, .. } = &distillation;
                    let DistillTerms { objective, derivatives } = list.terms(&positions, &scores, counted, options)?;
                    // The entropy and the collision probability, whose columns are on both sides of that of the mass
                    // outside, take no part.
                    let zero = objective.zeros_like()?.unsqueeze(1)?;
                    let by_outside = derivatives.narrow(1, n, 1)?;
                    let columns = [derivatives.narrow(1, 0, n)?, zero.clone(), by_outside, zero];
                    Ok((objective, Tensor::cat(&columns, 1)?))
                };
                DistillLoss::Scores(ScoreLoss {
                    token_ids,
                    options,
                    terms: Arc::new(terms),
                    position_scores: 1..2,
                    counted,
                })
            }
        }
    }

    /// Returns the targets of some of the positions that count, if targets take part in the objective.
    fn targets(&self, positions: &Range<usize>) -> Result<Option<Tensor>> {
        let targets = self.counted.targets.as_ref().filter(|_| self.options.is_mixed());
        targets.map(|targets| Ok(targets.narrow(0, positions.start, positions.len())?)).transpose()
    }

    /// Returns the targets of the positions that count, if they take part in the objective.
    pub(crate) fn hard_targets(&self) -> Result<Option<Tensor>> {
        self.targets(&(0..self.positions().len()))
    }

    /// Finishes a loss whose value has been divided by the denominator: sets the sum, which is not, the count, and the
    /// objective of each position in place of its negative log-likelihood. A mean of weights whose sum is zero is zero.
    pub(crate) fn finish(&self, loss: Loss, objective: Tensor) -> Result<Loss> {
        let PositionOptions { reduction, denominator, .. } = &self.options.positions;
        let is_zero = *reduction == Reduction::Mean && denominator.is_none() && self.counted.count == 0.0;
        let sum = (loss.value.detach() * self.counted.denominator)?;
        let count = number_like(&sum, self.counted.count)?;
        // A product with a tensor, because candle's product with the number zero has no backward pass.
        let value = if is_zero { (&loss.value * loss.value.zeros_like()?)? } else { loss.value };
        Ok(Loss { value, sum, count, nll: objective, ..loss })
    }
}
