//! What is asked of a backend: the objective, which is computed of each position and summed, with the results of its
//! loss, and the task that a plan is made for.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::Tensor;

use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::shard::VocabShard;
use crate::error::Result;

/// The objective whose value and gradients are computed.
#[derive(Clone)]
pub(crate) enum Objective {
    /// A loss over targets.
    Targets(TargetLoss),
    /// The inner product of the log-probabilities and `upstream`, `[positions, vocab]` in the accumulation dtype.
    LogProbs { upstream: Tensor },
    /// The sum of the values that `terms` gives for the scores of each chunk.
    Scores { scored: Scored, terms: ScoreTerms },
    /// The sum of the values that a function gives for the log-probabilities of all ids of each chunk.
    AllLogProbs(LogProbTerms),
}

impl Objective {
    /// Makes the inner product of scores and `upstream`, `[positions, n + 3]` in the accumulation dtype. Its gradients
    /// are those of the scores; its value is not computed.
    pub(crate) fn from_score_upstream(scored: Scored, upstream: Tensor) -> Self {
        // The upstream gradient of each position is known, whatever its scores are.
        let terms = move |positions: Range<usize>, scores: &Tensor| {
            Ok((scores.narrow(1, 0, 1)?.squeeze(1)?, upstream.narrow(0, positions.start, positions.len())?))
        };
        Objective::Scores { scored, terms: Arc::new(terms) }
    }

    /// Returns the task that computes this objective and the gradients of the operands that need one.
    pub(crate) fn task(&self, operands: &Operands, needs_grad: NeedsGrad) -> Result<Task> {
        match self {
            Objective::Targets(loss) => Ok(loss.task(needs_grad)),
            Objective::LogProbs { .. } => Ok(Task::LogProbs { needs_grad }),
            Objective::Scores { scored, .. } => scored.task(operands, needs_grad),
            Objective::AllLogProbs(_) => Ok(Task::LogProbTerms { needs_grad }),
        }
    }
}

/// The gradients of the operands that need one. Each has its operand's shape and the accumulation dtype; the weight's
/// may already be rounded to the weight's dtype.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gradients {
    pub(crate) contexts: Option<Tensor>,
    pub(crate) log_priors: Option<Tensor>,
    pub(crate) weight: Option<Tensor>,
    pub(crate) adapter: Option<Tensor>,
    pub(crate) bias: Option<Tensor>,
}

/// The results of a loss.
#[derive(Debug)]
pub(crate) struct LossResults {
    /// `[positions]`: each position's objective times its weight.
    pub(crate) objective: Tensor,
    /// `[positions]`: each position's negative log-likelihood.
    pub(crate) nll: Tensor,
    /// The sum of the objective.
    pub(crate) sum: Tensor,
    /// The sum of the weights, which is the denominator of a mean.
    pub(crate) count: Tensor,
    /// The mean, zero if the count is zero, where the device computes it.
    pub(crate) mean: Option<Tensor>,
    /// `[positions]`, u8: whether the target is the most probable id; `None` unless the task asks for it.
    pub(crate) is_correct: Option<Tensor>,
    pub(crate) gradients: Gradients,
}

/// The task that a plan is made for: what a call computes, as far as its workspace depends on it, and the operands
/// whose gradients it computes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// A loss over targets.
    Loss { terms: LossTerms, targets: TargetKind, needs_grad: NeedsGrad },
    /// The log-probabilities of all ids, and in the backward pass the gradients.
    LogProbs { needs_grad: NeedsGrad },
    /// A function of a chunk's log-probabilities of all ids: these, a teacher's, and the derivatives are held besides
    /// the logits.
    LogProbTerms { needs_grad: NeedsGrad },
    /// Scores, or a function of them.
    Scores { scores: ScoreTask, needs_grad: NeedsGrad },
    /// The `k` most probable ids of each position. Products of large chunks serve many rows; unlike a draw, the results
    /// may depend on the other positions by rounding.
    TopK { k: usize },
    /// A query of each position's distribution, which is read tile by tile. Chunks of a few rows suffice, and two
    /// passes are taken, in which a position has the same bits in any batch.
    Visit,
}

/// The kinds of targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// Ids of the vocabulary.
    Ids,
    /// Ids of a vocabulary that is cut among ranks ([`TargetLoss::shard`]), which exchange sums.
    SharedIds,
    /// Entries of their own ([`TargetLoss::own_shifts`]), which only one pass computes.
    Own,
}

/// The scores that a task computes.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
pub(crate) struct ScoreTask {
    /// The number of candidates of each position.
    pub(crate) candidates: usize,
    /// Whether the scores depend on the log-probability of every id.
    pub(crate) need_all_ids: bool,
    /// Whether the scores need only the logits of the candidates, and sums over the other ids: one pass computes them,
    /// and their gradients as those of a loss over hard targets, of which each position has several.
    pub(crate) need_listed_only: bool,
    /// Whether it is asked which candidate is the most probable id.
    pub(crate) needs_argmax: bool,
}

impl Task {
    /// Returns the operands whose gradients the call computes.
    pub(crate) fn needs_grad(&self) -> NeedsGrad {
        match *self {
            Task::Loss { needs_grad, .. }
            | Task::LogProbs { needs_grad }
            | Task::LogProbTerms { needs_grad }
            | Task::Scores { needs_grad, .. } => needs_grad,
            Task::TopK { .. } | Task::Visit => NeedsGrad::default(),
        }
    }

    /// Returns whether the call needs the mixture's log-probability of every id at once, so that the CPU takes two
    /// passes, and each of its threads holds a row of them.
    pub(crate) fn needs_all_ids(&self) -> bool {
        match self {
            Task::Loss { terms, .. } => terms.label_smoothing > 0.0,
            Task::LogProbs { .. } | Task::LogProbTerms { .. } | Task::Scores { .. } | Task::TopK { .. } => true,
            Task::Visit => false,
        }
    }

    /// Returns whether the targets are masses of all ids: label smoothing, or the gradient of log-probabilities. Each
    /// thread holds two more rows, and a GPU the log-probabilities of a chunk.
    pub(crate) fn has_soft_targets(&self) -> bool {
        match self {
            Task::Loss { terms, .. } => terms.label_smoothing > 0.0,
            _ => self.needs_grad().any(),
        }
    }

    /// Returns whether the call tells which targets or candidates are the most probable ids, which takes a search of
    /// its own.
    pub(crate) fn needs_argmax(&self) -> bool {
        match self {
            Task::Loss { terms, .. } => terms.needs_correct,
            Task::Scores { scores, .. } => scores.needs_argmax,
            _ => false,
        }
    }
}

/// The scores that a caller asks for of each position: the log-probabilities of `n` candidates, the entropy, the
/// logarithm of the mass outside the candidates, and that of the collision probability `sum_v Q(v)^2`.
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    /// `[positions, n]`: u8, u32 or i64.
    pub(crate) token_ids: Tensor,
    /// Whether the caller needs the entropy; if not, its column of the scores is zero.
    pub(crate) needs_entropy: bool,
    /// Whether the caller needs the logarithm of the mass outside; if not, its column of the scores is zero.
    pub(crate) needs_outside: bool,
    /// Whether the caller needs the logarithm of the collision probability; if not, its column of the scores is zero.
    pub(crate) needs_collision: bool,
    /// Whether the caller needs to know which candidate is the most probable id of all.
    pub(crate) needs_argmax: bool,
    /// The temperature of the mixture's distribution, after the logit function.
    pub(crate) temperature: f64,
}

impl Scored {
    /// Returns whether the temperature changes the distribution.
    pub(crate) fn is_tempered(&self) -> bool {
        self.temperature != 1.0
    }

    /// Returns whether the scores depend on the log-probability of every id.
    pub(crate) fn needs_all_ids(&self) -> bool {
        self.needs_entropy || self.needs_outside || self.needs_collision || self.is_tempered()
    }

    /// Returns the task that computes the scores or a function of them, and the gradients of the operands that need
    /// one.
    pub(crate) fn task(&self, operands: &Operands, needs_grad: NeedsGrad) -> Result<Task> {
        /// The most ids of a position whose gradients are added one by one, without a matrix product.
        const MOST_LISTED: usize = 512;
        let candidates = self.token_ids.dim(1)?;
        // A temperature divides the logits of a single softmax, and its entropy is a moment of them.
        let is_single = operands.is_single();
        let is_plain = !self.is_tempered() || is_single && operands.logit_function.is_identity();
        let has_moments = !self.needs_collision && (!self.needs_entropy || is_single && !needs_grad.any());
        let scores = ScoreTask {
            candidates,
            need_all_ids: self.needs_all_ids(),
            need_listed_only: candidates <= MOST_LISTED && is_plain && has_moments,
            needs_argmax: self.needs_argmax,
        };
        Ok(Task::Scores { scores, needs_grad })
    }
}

/// The number of scores of a position itself, whose columns follow those of its candidates: the entropy, the logarithm
/// of the mass outside, and the logarithm of the collision probability.
pub(crate) const POSITION_SCORES: usize = 3;

/// A function of a chunk's positions and their scores `[chunk, n + 3]`, which returns the positions' values `[chunk]`
/// and the derivatives by the scores `[chunk, n + 3]`, all in the accumulation dtype.
pub(crate) type ScoreTerms = Arc<dyn Fn(Range<usize>, &Tensor) -> Result<(Tensor, Tensor)> + Send + Sync>;

/// A function of a chunk's positions and the log-probabilities of all ids `[chunk, vocab]`, which it may overwrite. It
/// returns the positions' values `[chunk]` and the derivatives by the log-probabilities `[chunk, vocab]`, to which
/// nothing else refers, all in the accumulation dtype.
pub(crate) type LogProbTerms = Arc<dyn Fn(Range<usize>, Tensor) -> Result<(Tensor, Tensor)> + Send + Sync>;

/// A loss over targets whose shape and dtype have been checked.
#[derive(Clone, Debug)]
pub(crate) struct TargetLoss {
    /// `[positions]`: u8, u32 or i64.
    pub(crate) targets: Tensor,
    pub(crate) ignore_index: Option<i64>,
    /// `[positions]`, in the accumulation dtype.
    pub(crate) position_weights: Option<Tensor>,
    /// `[vocab]`, in the accumulation dtype.
    pub(crate) class_weights: Option<Tensor>,
    pub(crate) terms: LossTerms,
    pub(crate) scale: GradScale,
    /// `[positions]`, in the accumulation dtype: what a sampled softmax adds to the targets' logits. Each target is
    /// then an entry of its own: it is a row of the weight, from `vocab` on if the vocabulary lacks it, and competes
    /// with all ids of the vocabulary but itself:
    ///
    /// ```text
    /// log p_k(y) = z_ky + shift - log( exp(z_ky + shift) + sum_{v != y} exp z_kv )
    /// ```
    ///
    /// Such a loss has no logit function, and the target's negative log-likelihood is its only term.
    pub(crate) own_shifts: Option<Tensor>,
    /// This rank's part of the vocabulary, if the vocabulary is cut among ranks: the weight has the rows of this part,
    /// while targets and class weights refer to the whole vocabulary.
    pub(crate) shard: Option<VocabShard>,
    /// The gradient of the weight from earlier losses, to which this loss adds its own.
    pub(crate) so_far: Option<GradientSoFar>,
}

impl TargetLoss {
    /// Returns the task that computes this loss and the gradients of the operands that need one.
    pub(crate) fn task(&self, needs_grad: NeedsGrad) -> Task {
        let targets = match (&self.own_shifts, &self.shard) {
            (Some(_), _) => TargetKind::Own,
            (None, Some(_)) => TargetKind::SharedIds,
            (None, None) => TargetKind::Ids,
        };
        Task::Loss { terms: self.terms, targets, needs_grad }
    }
}

/// The gradient of a variable among the gradients of earlier losses.
#[derive(Clone, Debug)]
pub(crate) struct GradientSoFar {
    pub(crate) gradients: Arc<Mutex<GradStore>>,
    pub(crate) variable: Tensor,
}

impl GradientSoFar {
    /// Takes the gradient, which nothing else refers to, so that a backend can write to it.
    pub(crate) fn take(&self) -> Option<Tensor> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.variable)
    }
}

/// The terms of a loss over targets besides the negative log-likelihood.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LossTerms {
    /// The mass that label smoothing takes from the target and spreads over all ids.
    pub(crate) label_smoothing: f64,
    /// The factor of the squared log-sum-exps, averaged over the components.
    pub(crate) z_loss: f64,
    /// Whether the caller needs to know at which positions the target is the most probable id.
    pub(crate) needs_correct: bool,
}

/// The factor of the gradient of each position's weighted objective.
#[derive(Clone, Debug)]
pub(crate) enum GradScale {
    /// The same number for every position.
    Constant(f64),
    /// The reciprocal of the sum of all weights; zero if the sum is zero.
    OneOverCount,
    /// `[positions]`: the upstream gradient of each position.
    Upstream(Tensor),
}
