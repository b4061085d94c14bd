//! The task that a plan is made for: what a call computes, as far as its workspace depends on it.

use crate::backend::objective::{LossTerms, Objective, Scored, TargetLoss};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::error::Result;

/// The task that a plan is made for. The default computes a loss over hard targets, without gradients.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Task {
    /// The operands whose gradients the call computes.
    pub(crate) needs_grad: NeedsGrad,
    /// The call needs the mixture's log-probability of every id, so that the CPU takes two passes, and each of its threads
    /// holds a row of them.
    pub(crate) needs_all_ids: bool,
    /// The targets are masses of all ids: label smoothing, or the gradient of log-probabilities. Each thread holds two more
    /// rows, and a GPU the log-probabilities of a chunk.
    pub(crate) has_soft_targets: bool,
    /// The call computes scores, alone or with their gradients.
    pub(crate) scores: Option<ScoreTask>,
    /// The call runs a query on each position's distribution. It accumulates no gradient, so that chunks of a few rows
    /// suffice, and it takes two passes, in which a position has the same bits in any batch.
    pub(crate) is_decoding: bool,
    /// The call finds so many of each position's most probable ids, and nothing else.
    pub(crate) top_k: Option<usize>,
    /// The call tells whether targets or candidates are the most probable ids, which takes a search of its own.
    pub(crate) needs_argmax: bool,
    /// Each target is an entry of its own ([`TargetLoss::own_shifts`]), which only one pass computes.
    pub(crate) has_own_targets: bool,
    /// The vocabulary is cut among ranks ([`TargetLoss::shard`]), which exchange sums.
    pub(crate) is_shard: bool,
    /// A function of a chunk's log-probabilities is part of the call: these, a teacher's, and the derivatives are held
    /// besides the logits.
    pub(crate) has_log_prob_terms: bool,
}

/// The most ids of a position whose gradients are added one by one, without a matrix product.
const MOST_LISTED: usize = 512;

/// The part of a task that computes scores.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
pub(crate) struct ScoreTask {
    /// The number of candidates of each position.
    pub(crate) candidates: usize,
    /// The scores depend on the log-probability of every id.
    pub(crate) needs_all_ids: bool,
    /// The scores need only the logits of the candidates, and sums over the other ids: one pass computes them, and their
    /// gradients as those of a loss over hard targets, of which each position has several.
    pub(crate) needs_listed_only: bool,
}

impl Task {
    /// Makes the task of computing a loss over targets, and the gradients of the operands that need one.
    pub(crate) fn for_targets(loss: &TargetLoss, needs_grad: NeedsGrad) -> Self {
        Task {
            has_own_targets: loss.own_shifts.is_some(),
            is_shard: loss.shard.is_some(),
            ..Self::for_loss(&loss.terms, needs_grad)
        }
    }

    /// Makes the task of computing a loss with these terms whose targets are ids of the vocabulary.
    pub(crate) fn for_loss(terms: &LossTerms, needs_grad: NeedsGrad) -> Self {
        let is_smoothed = terms.label_smoothing > 0.0;
        Task {
            needs_grad,
            needs_all_ids: is_smoothed,
            has_soft_targets: is_smoothed,
            needs_argmax: terms.needs_correct,
            ..Task::default()
        }
    }

    /// Makes the task of computing log-probabilities, and in the backward pass the gradients of the operands that need
    /// one.
    pub(crate) fn for_log_probs(needs_grad: NeedsGrad) -> Self {
        Task { needs_grad, needs_all_ids: true, has_soft_targets: needs_grad.any(), ..Task::default() }
    }

    /// Makes the task of computing a function of the log-probabilities of all ids, and the gradients of the operands that
    /// need one.
    pub(crate) fn for_log_prob_terms(needs_grad: NeedsGrad) -> Self {
        Task { has_log_prob_terms: true, ..Self::for_log_probs(needs_grad) }
    }

    /// Makes the task of computing scores or a function of them, and the gradients of the operands that need one.
    pub(crate) fn for_scores(scored: &Scored, operands: &Operands, needs_grad: NeedsGrad) -> Result<Self> {
        let candidates = scored.token_ids.dim(1)?;
        // A temperature divides the logits of a single softmax, and its entropy is a moment of them.
        let is_single = operands.is_single();
        let is_plain = !scored.is_tempered() || is_single && operands.softcap.is_none();
        let has_moments = !scored.needs_entropy || is_single && !needs_grad.any();
        let are_few = candidates <= MOST_LISTED;
        let scores = ScoreTask {
            candidates,
            needs_all_ids: scored.needs_all_ids(),
            needs_listed_only: are_few && is_plain && has_moments,
        };
        Ok(Task { scores: Some(scores), needs_argmax: scored.needs_argmax, ..Self::for_log_probs(needs_grad) })
    }

    /// Makes the task of reading each position's distribution, tile by tile.
    pub(crate) fn for_decoding() -> Self {
        Task { is_decoding: true, needs_all_ids: false, ..Self::for_log_probs(NeedsGrad::default()) }
    }

    /// Makes the task of finding the `k` most probable ids of each position. Products of large chunks serve many rows;
    /// unlike a draw, the results may depend on the other positions by rounding.
    pub(crate) fn for_ranking(sizes: Sizes, k: usize) -> Self {
        /// The most rows for which chunks of a few rows are faster.
        const FEW_ROWS: usize = 64;
        if sizes.positions * sizes.components <= FEW_ROWS {
            Self::for_decoding()
        } else {
            Task { top_k: Some(k), ..Self::for_log_probs(NeedsGrad::default()) }
        }
    }
}

impl Objective {
    /// Returns the task that computes this objective and the gradients of the operands that need one.
    pub(crate) fn task(&self, needs_grad: NeedsGrad) -> Task {
        match self {
            Objective::Targets(loss) => Task::for_targets(loss, needs_grad),
            Objective::LogProbs { .. } => Task::for_log_probs(needs_grad),
        }
    }
}
