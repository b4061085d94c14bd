//! The task that a plan is made for: what a call computes, as far as its workspace depends on it.

use crate::backend::objective::{LossTerms, Objective, Scored, TargetLoss};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::error::Result;

/// The task that a plan is made for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Task {
    pub(crate) needs_grad: NeedsGrad,
    /// Whether the mixture's log-probability of every id is needed.
    pub(crate) all_ids: bool,
    /// Whether there are soft targets: label smoothing, or a gradient of the log-probabilities.
    pub(crate) soft_targets: bool,
    /// What is scored of each position. (The CPU's workspace is as for log-probabilities, or for a loss.)
    pub(crate) scores: Option<ScoreTask>,
    /// Whether chunks of a few rows suffice.
    pub(crate) few_rows: bool,
    /// How many of each position's most probable ids are needed, and nothing else.
    pub(crate) top_k: Option<usize>,
    /// Whether it is needed if targets or candidates are the most probable ids.
    pub(crate) argmax: bool,
    /// Whether each target is an entry of its own ([`TargetLoss::own_shifts`]).
    pub(crate) own_targets: bool,
    /// Whether other ranks have the rest of the vocabulary ([`TargetLoss::shard`]).
    pub(crate) is_shard: bool,
    /// Whether the log-probabilities of a chunk, a teacher's, and derivatives by them are held too.
    pub(crate) log_prob_terms: bool,
}

/// The most ids of a position whose gradients are added one by one, without a matrix product.
const MOST_LISTED: usize = 512;

/// What the computation of scores and its workspace depend on.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
pub(crate) struct ScoreTask {
    /// Number of ids of each position
    pub(crate) candidates: usize,
    /// Whether they depend on the log-probability of every id
    pub(crate) all_ids: bool,
    /// Whether the logits of a few ids and sums over the others suffice: gradients are then computed as for a loss over
    /// hard targets, of which each position has several.
    pub(crate) of_listed: bool,
}

impl Task {
    /// Computes a loss over targets, and the gradients of the operands that need one.
    pub(crate) fn target_loss(loss: &TargetLoss, needs_grad: NeedsGrad) -> Self {
        Task {
            own_targets: loss.own_shifts.is_some(),
            is_shard: loss.shard.is_some(),
            ..Self::loss(&loss.terms, needs_grad)
        }
    }

    /// Computes a loss with these terms whose targets are ids of the vocabulary.
    pub(crate) fn loss(terms: &LossTerms, needs_grad: NeedsGrad) -> Self {
        let soft_targets = terms.label_smoothing > 0.0;
        Task { needs_grad, all_ids: soft_targets, soft_targets, argmax: terms.correct, ..Task::default() }
    }

    /// Computes log-probabilities, and in the backward pass the gradients of the operands that need one.
    pub(crate) fn log_probs(needs_grad: NeedsGrad) -> Self {
        Task { needs_grad, all_ids: true, soft_targets: needs_grad.any(), ..Task::default() }
    }

    /// Computes a function of the log-probabilities of all ids, and the gradients of the operands that need one.
    pub(crate) fn log_prob_terms(needs_grad: NeedsGrad) -> Self {
        Task { log_prob_terms: true, ..Self::log_probs(needs_grad) }
    }

    /// Computes scores or a function of them, and the gradients of the operands that need one.
    pub(crate) fn scores(scored: &Scored, operands: &Operands, needs_grad: NeedsGrad) -> Result<Self> {
        let candidates = scored.token_ids.dim(1)?;
        // A temperature divides the logits of a single softmax, and its entropy is a moment of them.
        let is_single = operands.is_single();
        let is_plain = !scored.is_tempered() || is_single && operands.softcap.is_none();
        let has_moments = !scored.entropy || is_single && !needs_grad.any();
        let are_few = candidates <= MOST_LISTED;
        let scores =
            ScoreTask { candidates, all_ids: scored.need_all_ids(), of_listed: are_few && is_plain && has_moments };
        Ok(Task { scores: Some(scores), argmax: scored.is_argmax, ..Self::log_probs(needs_grad) })
    }

    /// Reads each position's distribution, tile by tile.
    pub(crate) fn decoding() -> Self {
        Task { few_rows: true, all_ids: false, ..Self::log_probs(NeedsGrad::default()) }
    }

    /// Finds the `k` most probable ids of each position. Products of large chunks serve many rows; unlike a draw, the
    /// results may depend on the other positions by rounding.
    pub(crate) fn ranking(sizes: Sizes, k: usize) -> Self {
        /// Maximum rows for which chunks of a few rows are faster.
        const FEW_ROWS: usize = 64;
        if sizes.positions * sizes.components <= FEW_ROWS {
            Self::decoding()
        } else {
            Task { top_k: Some(k), ..Self::log_probs(NeedsGrad::default()) }
        }
    }
}

impl Objective {
    /// The task of a plan for this objective and the gradients of the operands that need one.
    pub(crate) fn task(&self, needs_grad: NeedsGrad) -> Task {
        match self {
            Objective::Targets(loss) => Task::target_loss(loss, needs_grad),
            Objective::LogProbs { .. } => Task::log_probs(needs_grad),
        }
    }
}
