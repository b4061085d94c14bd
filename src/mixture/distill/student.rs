//! The student: a mixture, or any output layer, whose divergence from a teacher is a loss.

use std::ops::Range;

use candle_core::{Device, Tensor, D};

use super::full::FullTeacher;
use super::list::ListTeacher;
use super::options::{DistillOptions, Teacher, TeacherKind};
use super::positions::Counted;
use super::terms::{check_dims, DistillTerms};
use crate::backend::contract::LossResults;
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::loss::Loss;
use crate::mixture::{ChunkScores, ChunkTerms, Mixture};
use crate::scores::{ScoreOptions, Scores};
use crate::tensors::checks::{check_device, check_float, leading};

/// A teacher and options for the positions that count.
#[derive(Clone)]
pub(crate) struct Distillation {
    counted: Counted,
    teacher: PreparedTeacher,
    options: DistillOptions,
}

#[derive(Clone)]
enum PreparedTeacher {
    Full(FullTeacher),
    List(ListTeacher),
}

impl Distillation {
    /// For hidden states `[.., hidden]`, whose rows of positions that count it returns, `[n, hidden]`.
    pub(crate) fn of_hidden(
        hidden: &Tensor,
        vocab: usize,
        teacher: &Teacher,
        options: &DistillOptions,
    ) -> Result<(Self, Tensor)> {
        let distillation = Self::new(leading(hidden)?, vocab, hidden, teacher, options)?;
        let rows = hidden.reshape(((), hidden.dim(D::Minus1)?))?;
        let rows = distillation.counted.rows(&rows)?;
        Ok((distillation, rows))
    }

    /// `like` has the device and the dtype of the student.
    fn new(
        leading: &[usize],
        vocab: usize,
        like: &Tensor,
        teacher: &Teacher,
        options: &DistillOptions,
    ) -> Result<Self> {
        options.validate(teacher)?;
        let dtype = accumulation_dtype("hidden", like.dtype())?;
        let counted = Counted::new(leading, vocab, like, dtype, options)?;
        let teacher = match &teacher.0 {
            TeacherKind::Mixture(mixture) => {
                if mixture.leading() != leading {
                    return Err(Error::shape("teacher", format!("{leading:?}"), mixture.leading()));
                }
                let of_teacher = mixture.operands().sizes.vocab;
                if of_teacher != vocab {
                    return Err(Error::config("vocab_size of the teacher", vocab.to_string(), of_teacher));
                }
                check_device("teacher", &mixture.operands().contexts, like)?;
                PreparedTeacher::Full(FullTeacher::Mixture(counted.mixture(mixture)?, dtype))
            }
            TeacherKind::LogProbs(log_probs) => {
                check_dims("log_probs of the teacher", log_probs, &[leading, &[vocab]].concat(), like)?;
                check_float("log_probs of the teacher", log_probs)?;
                let rows = log_probs.reshape((leading.iter().product::<usize>(), vocab))?;
                PreparedTeacher::Full(FullTeacher::LogProbs { rows, dtype, counted: counted.clone() })
            }
            TeacherKind::TopK { token_ids, log_probs, missing } => {
                let list = ListTeacher::new(leading, vocab, like, (token_ids, log_probs, *missing), &counted, options)?;
                PreparedTeacher::List(list)
            }
        };
        Ok(Distillation { counted, teacher, options: options.clone() })
    }

    /// The terms of positions with these log-probabilities of all ids, which it may overwrite.
    fn of_log_probs(&self, teacher: &FullTeacher, positions: Range<usize>, log_probs: Tensor) -> Result<DistillTerms> {
        teacher.terms(positions.clone(), log_probs, &self.counted, self.targets(&positions)?, &self.options)
    }

    /// The targets of some positions, if they take part in the objective.
    fn targets(&self, positions: &Range<usize>) -> Result<Option<Tensor>> {
        let targets = self.counted.targets.as_ref().filter(|_| self.options.is_mixed());
        targets.map(|targets| Ok(targets.narrow(0, positions.start, positions.len())?)).transpose()
    }

    /// The loss of a student without a fused operation, from its scores or its log-probabilities of all ids, which are
    /// differentiable.
    pub(crate) fn composed(
        &self,
        log_probs: impl FnOnce() -> Result<Tensor>,
        scores: impl FnOnce(&Tensor, &ScoreOptions) -> Result<Scores>,
    ) -> Result<Loss> {
        let none = self.counted.positions.is_empty();
        let (columns, terms) = match &self.teacher {
            PreparedTeacher::Full(teacher) => {
                let log_probs = log_probs()?;
                let rows = log_probs.to_dtype(accumulation_dtype("log_probs", log_probs.dtype())?)?;
                if none {
                    return self.zero_loss(&rows);
                }
                let terms = self.of_log_probs(teacher, 0..rows.dim(0)?, rows.detach().copy()?)?;
                (rows, terms)
            }
            PreparedTeacher::List(list) => {
                let scores = scores(&list.token_ids, &list.score_options(&self.options))?;
                if none {
                    return self.zero_loss(&scores.log_prob);
                }
                let log_outside = match &scores.log_outside {
                    Some(log_outside) => log_outside.clone(),
                    None => scores.log_prob.narrow(1, 0, 1)?.squeeze(1)?.zeros_like()?,
                };
                let columns = Tensor::cat(&[&scores.log_prob, &log_outside.unsqueeze(1)?], 1)?;
                let detached = (scores.log_prob.detach(), log_outside.detach());
                let positions = 0..columns.dim(0)?;
                let terms = list.terms(&positions, detached, &self.counted, &self.options)?;
                (columns, terms)
            }
        };
        let value = self.counted.weighted_sum(&terms.objective)?;
        // Of the linear function only the gradient counts. An impossible id has none.
        let is_finite = terms.derivatives.ne(0.0)?;
        let linear = is_finite.where_cond(&(&columns * &terms.derivatives)?, &columns.zeros_like()?)?.sum_all()?;
        let value = (&linear + (&value - linear.detach())?)?;
        let loss = Loss::new(value.clone(), value.clone(), value, terms.objective.clone());
        self.loss(loss, terms.objective)
    }

    /// The loss of no positions, with zero gradients of what their scores depend on.
    fn zero_loss(&self, scores: &Tensor) -> Result<Loss> {
        // A GPU cannot launch zero blocks.
        let zero = Tensor::zeros((), scores.dtype(), scores.device())?;
        let value = if scores.device().is_cpu() { scores.sum_all()? } else { zero.clone() };
        let nll = Tensor::zeros(0, scores.dtype(), scores.device())?;
        self.loss(Loss::new(value, zero.clone(), zero, nll.clone()), nll)
    }

    /// The positions that count.
    pub(crate) fn positions(&self) -> &[u32] {
        &self.counted.positions
    }

    /// The loss of this value, whose sum is the value times the denominator, and whose negative log-likelihoods are the
    /// objective of each position.
    fn loss(&self, loss: Loss, objective: Tensor) -> Result<Loss> {
        let sum = (&loss.sum * self.counted.denominator)?;
        let count = Tensor::full(self.counted.count, (), &Device::Cpu)?;
        let count = count.to_dtype(sum.dtype())?.to_device(sum.device())?;
        Ok(Loss { sum, count, nll: objective, ..loss })
    }
}

impl Mixture {
    /// The divergence of this mixture, the student, from a teacher, with the gradients of a loss. For a teacher that is a
    /// mixture, one product more; the log-probabilities of a chunk of positions are held at a time. For a teacher's list no
    /// product more, and no log-probabilities but the list's.
    ///
    /// [`Loss::nll`] has the objective of each position that counts, in their order, without weights.
    ///
    /// # Shapes
    ///
    /// - teacher: a mixture of contexts `[.., K, d]`, log-probabilities `[.., vocab]`, or a list `[.., n]`, with the
    ///   leading dimensions of this mixture
    /// - [`Loss::nll`]: `[positions]`, of those that count
    ///
    /// # Errors
    ///
    /// If the shapes, the vocabulary or the devices of teacher and student differ, an id is not in the vocabulary, or an
    /// option is out of range. [`Error::InfiniteDivergence`](crate::Error::InfiniteDivergence) if a divergence is infinite
    /// at a position, because student and teacher have other possible ids. On a GPU, where nothing waits for the values, the
    /// loss is infinite instead.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::distill::{DistillOptions, Divergence, Teacher};
    /// use mos_head::Mixture;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let student = Mixture::new(&contexts, None, &weight, None)?;
    /// let teacher = Mixture::new(&contexts.detach().affine(2.0, 0.0)?, None, &weight, None)?;
    /// let loss = student.distill(&Teacher::from_mixture(&teacher), &DistillOptions::new(Divergence::ReverseKl))?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn distill(&self, teacher: &Teacher, options: &DistillOptions) -> Result<Loss> {
        let vocab = self.operands.sizes.vocab;
        let distillation = Distillation::new(&self.leading, vocab, &self.operands.contexts, teacher, options)?;
        distillation.counted.mixture(self)?.distill_by(distillation)
    }

    /// The loss of a mixture of the positions that count.
    pub(crate) fn distill_by(&self, distillation: Distillation) -> Result<Loss> {
        let of_loss = distillation.clone();
        // The objective of each position has no weight: one that underflows could not be divided by.
        let reduced = |results: LossResults| {
            let sum = of_loss.counted.weighted_sum(&results.objective)?;
            Ok(LossResults { sum, ..results })
        };
        let (loss, objective) = match distillation.teacher.clone() {
            PreparedTeacher::Full(teacher) => {
                let bytes = distillation.options.workspace_bytes;
                let loss = self.log_prob_loss_of(bytes, reduced, move |positions, log_probs| {
                    let terms = distillation.of_log_probs(&teacher, positions, log_probs)?;
                    Ok((terms.objective, terms.derivatives))
                })?;
                let objective = loss.nll.clone();
                (loss, objective)
            }
            PreparedTeacher::List(list) => {
                let (ids, options) = (list.token_ids.clone(), list.score_options(&distillation.options));
                let n = ids.dim(1)?;
                self.score_loss_and_values(
                    &ids,
                    &options,
                    reduced,
                    move |ChunkScores { positions, log_prob, log_outside, .. }| {
                        let scores = (log_prob, log_outside);
                        let DistillTerms { objective, derivatives } =
                            list.terms(&positions, scores, &distillation.counted, &distillation.options)?;
                        let by_outside = derivatives.narrow(1, n, 1)?.squeeze(1)?;
                        let terms = ChunkTerms::new(objective, derivatives.narrow(1, 0, n)?);
                        Ok(terms.with_by_outside(by_outside))
                    },
                )?
            }
        };
        of_loss.loss(loss, objective)
    }
}
