//! The student of a distillation, a mixture or any output layer: its divergence from a teacher becomes a loss.

use std::ops::Range;

use candle_core::{Device, Tensor, D};

use super::full::FullTeacher;
use super::list::{ListScores, ListTeacher};
use super::options::{DistillOptions, Teacher, TeacherKind};
use super::positions::{CountedPositions, StudentShape};
use super::terms::{check_teacher_tensor, DistillTerms};
use crate::backend::objective::LossResults;
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::loss::Loss;
use crate::mixture::{ChunkScores, ChunkTerms, Mixture};
use crate::scores::{ScoreOptions, Scores};
use crate::tensors::checks::{check_device, check_float, leading};

/// A distillation whose arguments have been checked: the teacher at the positions that count, and the options.
#[derive(Clone)]
pub(crate) struct Distillation {
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

impl Distillation {
    /// Prepares the distillation of a head with hidden states `[.., hidden]`, and returns the hidden states of the
    /// positions that count, `[n, hidden]`, beside it.
    pub(crate) fn from_hidden(
        hidden: &Tensor,
        vocab: usize,
        teacher: &Teacher,
        options: &DistillOptions,
    ) -> Result<(Self, Tensor)> {
        let student = StudentShape { leading: leading(hidden)?, vocab, like: hidden };
        let distillation = Self::new(student, teacher, options)?;
        let rows = hidden.reshape(((), hidden.dim(D::Minus1)?))?;
        let rows = distillation.counted.select_rows(&rows)?;
        Ok((distillation, rows))
    }

    /// Checks the options and the teacher against the student.
    fn new(student: StudentShape, teacher: &Teacher, options: &DistillOptions) -> Result<Self> {
        options.validate(teacher)?;
        let StudentShape { leading, vocab, like } = student;
        let dtype = accumulation_dtype("hidden", like.dtype())?;
        let counted = CountedPositions::new(student, options)?;
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
                PreparedTeacher::Full(FullTeacher::Mixture { mixture: counted.select_mixture(mixture)?, dtype })
            }
            TeacherKind::LogProbs(log_probs) => {
                check_teacher_tensor("log_probs of the teacher", log_probs, &[leading, &[vocab]].concat(), like)?;
                check_float("log_probs of the teacher", log_probs)?;
                let rows = log_probs.reshape((leading.iter().product::<usize>(), vocab))?;
                PreparedTeacher::Full(FullTeacher::LogProbs { rows, dtype, counted: counted.clone() })
            }
            TeacherKind::TopK(list) => PreparedTeacher::List(ListTeacher::new(list, student, &counted, options)?),
        };
        Ok(Distillation { counted, teacher, options: options.clone() })
    }

    /// Computes the terms of some of the positions that count from the student's log-probabilities of all ids,
    /// `[chunk, vocab]`, which may be overwritten.
    fn full_terms(&self, teacher: &FullTeacher, positions: Range<usize>, log_probs: Tensor) -> Result<DistillTerms> {
        teacher.terms(positions.clone(), log_probs, &self.counted, self.targets(&positions)?, &self.options)
    }

    /// Returns the targets of some of the positions that count, if targets take part in the objective.
    fn targets(&self, positions: &Range<usize>) -> Result<Option<Tensor>> {
        let targets = self.counted.targets.as_ref().filter(|_| self.options.is_mixed());
        targets.map(|targets| Ok(targets.narrow(0, positions.start, positions.len())?)).transpose()
    }

    /// Computes the loss of a student without a fused operation, from its scores or its log-probabilities of all ids at
    /// the positions that count, which are differentiable.
    pub(crate) fn composed_loss(
        &self,
        log_probs: impl FnOnce() -> Result<Tensor>,
        scores: impl FnOnce(&Tensor, &ScoreOptions) -> Result<Scores>,
    ) -> Result<Loss> {
        let (log_probs, log_outside) = match &self.teacher {
            PreparedTeacher::Full(_) => {
                let log_probs = log_probs()?;
                (log_probs.to_dtype(accumulation_dtype("log_probs", log_probs.dtype())?)?, None)
            }
            PreparedTeacher::List(list) => {
                let scores = scores(&list.token_ids, &list.score_options(&self.options))?;
                (scores.log_prob, scores.log_outside)
            }
        };
        if self.counted.positions.is_empty() {
            return self.zero_loss(&log_probs);
        }
        let positions = 0..log_probs.dim(0)?;
        let (columns, terms) = match &self.teacher {
            PreparedTeacher::Full(teacher) => {
                let terms = self.full_terms(teacher, positions, log_probs.detach().copy()?)?;
                (log_probs, terms)
            }
            PreparedTeacher::List(list) => {
                let log_outside = match log_outside {
                    Some(log_outside) => log_outside,
                    None => log_probs.narrow(1, 0, 1)?.squeeze(1)?.zeros_like()?,
                };
                let scores = ListScores { log_prob: log_probs.detach(), log_outside: log_outside.detach() };
                let terms = list.terms(&positions, &scores, &self.counted, &self.options)?;
                (Tensor::cat(&[&log_probs, &log_outside.unsqueeze(1)?], 1)?, terms)
            }
        };
        let value = self.counted.weighted_sum(&terms.objective)?;
        // The gradient is that of a linear function, whose own value cancels. An id of probability zero, whose
        // log-probability is infinite, has the derivative zero and is left out.
        let has_derivative = terms.derivatives.ne(0.0)?;
        let linear = has_derivative.where_cond(&(&columns * &terms.derivatives)?, &columns.zeros_like()?)?.sum_all()?;
        let value = (&linear + (&value - linear.detach())?)?;
        let loss = Loss::new(value.clone(), value.clone(), value, terms.objective.clone());
        self.finish(loss, terms.objective)
    }

    /// Makes the loss of no positions: zero, with zero gradients for all that `scores` depend on.
    fn zero_loss(&self, scores: &Tensor) -> Result<Loss> {
        // A GPU cannot launch zero blocks.
        let zero = Tensor::zeros((), scores.dtype(), scores.device())?;
        let value = if scores.device().is_cpu() { scores.sum_all()? } else { zero.clone() };
        let nll = Tensor::zeros(0, scores.dtype(), scores.device())?;
        self.finish(Loss::new(value, zero.clone(), zero, nll.clone()), nll)
    }

    /// The places, among all positions, of those that count.
    pub(crate) fn positions(&self) -> &[u32] {
        &self.counted.positions
    }

    /// Finishes a loss whose `sum` has been divided by the denominator: multiplies it again, and sets the count, and
    /// the objective of each position in place of its negative log-likelihood.
    fn finish(&self, loss: Loss, objective: Tensor) -> Result<Loss> {
        let sum = (&loss.sum * self.counted.denominator)?;
        let count = Tensor::full(self.counted.count, (), &Device::Cpu)?;
        let count = count.to_dtype(sum.dtype())?.to_device(sum.device())?;
        Ok(Loss { sum, count, nll: objective, ..loss })
    }
}

impl Mixture {
    /// Computes the divergence of this mixture, the student, from a teacher, and its gradients, in the products of a
    /// loss. A teacher that is a mixture takes one more product, and the log-probabilities of a chunk of positions are
    /// held at a time. A teacher's list takes no more products, and only the log-probabilities of its ids are held.
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
    /// If the shapes, the vocabulary or the devices of teacher and student differ, an id is not in the vocabulary, or
    /// an option is out of range. [`Error::InfiniteDivergence`](crate::Error::InfiniteDivergence) if the divergence is
    /// infinite at a position, because an id is possible for one of student and teacher alone. On a GPU, where the
    /// values are not waited for, the loss is infinite instead.
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
        let (vocab, like) = (self.operands.sizes.vocab, &self.operands.contexts);
        let student = StudentShape { leading: &self.leading, vocab, like };
        let distillation = Distillation::new(student, teacher, options)?;
        distillation.counted.select_mixture(self)?.distill_prepared(distillation)
    }

    /// Computes the loss of a prepared distillation by the fused operation. The positions of this mixture must be those
    /// that count.
    pub(crate) fn distill_prepared(&self, distillation: Distillation) -> Result<Loss> {
        let prepared = distillation.clone();
        // The weights come in here, because the objective of each position must not have its weight: a weight that
        // underflows could not be divided out of it.
        let reduce = |results: LossResults| {
            let sum = prepared.counted.weighted_sum(&results.objective)?;
            Ok(LossResults { sum, ..results })
        };
        let (loss, objective) = match distillation.teacher.clone() {
            PreparedTeacher::Full(teacher) => {
                let bytes = distillation.options.workspace_bytes;
                let loss = self.unchecked_log_prob_loss(bytes, reduce, move |positions, log_probs| {
                    let terms = distillation.full_terms(&teacher, positions, log_probs)?;
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
                    reduce,
                    move |ChunkScores { positions, log_prob, log_outside, .. }| {
                        let scores = ListScores { log_prob, log_outside };
                        let DistillTerms { objective, derivatives } =
                            list.terms(&positions, &scores, &distillation.counted, &distillation.options)?;
                        let by_outside = derivatives.narrow(1, n, 1)?.squeeze(1)?;
                        let terms = ChunkTerms::new(objective, derivatives.narrow(1, 0, n)?);
                        Ok(terms.with_by_outside(by_outside))
                    },
                )?
            }
        };
        prepared.finish(loss, objective)
    }
}
