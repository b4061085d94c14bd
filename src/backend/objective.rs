//! The objective, which is computed of each position and summed: a loss over targets, scores, or a function of
//! log-probabilities.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::Tensor;

use crate::backend::shard::VocabShard;
use crate::error::Result;

/// The objective whose value and gradients are computed.
#[derive(Clone, Debug)]
pub(crate) enum Objective {
    /// A loss over targets.
    Targets(TargetLoss),
    /// The inner product of the log-probabilities and `upstream`, `[positions, vocab]` in the accumulation dtype.
    LogProbs { upstream: Tensor },
}

impl Objective {
    /// Returns this rank's part of the vocabulary, if the vocabulary is cut among ranks.
    pub(crate) fn shard(&self) -> Option<&VocabShard> {
        match self {
            Objective::Targets(loss) => loss.shard.as_ref(),
            Objective::LogProbs { .. } => None,
        }
    }

    /// Returns where the gradient of earlier losses is, if this loss adds to it.
    pub(crate) fn so_far(&self) -> Option<&GradientSoFar> {
        match self {
            Objective::Targets(loss) => loss.so_far.as_ref(),
            Objective::LogProbs { .. } => None,
        }
    }
}

/// The scores that a caller asks for of each position: the log-probabilities of `n` candidates, the entropy, and the
/// logarithm of the mass outside the candidates.
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    /// `[positions, n]`: u8, u32 or i64.
    pub(crate) token_ids: Tensor,
    /// Whether the caller needs the entropy; if not, its column of the scores is zero.
    pub(crate) needs_entropy: bool,
    /// Whether the caller needs the logarithm of the mass outside; if not, its column of the scores is zero.
    pub(crate) needs_outside: bool,
    /// Whether the caller needs to know which candidate is the most probable id of all.
    pub(crate) needs_argmax: bool,
    /// The temperature of the mixture's distribution, after scale and softcap.
    pub(crate) temperature: f64,
}

impl Scored {
    /// Returns whether the temperature changes the distribution.
    pub(crate) fn is_tempered(&self) -> bool {
        self.temperature != 1.0
    }

    /// Returns whether the scores depend on the log-probability of every id.
    pub(crate) fn needs_all_ids(&self) -> bool {
        self.needs_entropy || self.needs_outside || self.is_tempered()
    }
}

/// The number of scores of a position itself, whose columns follow those of its candidates: the entropy, and the
/// logarithm of the mass outside.
pub(crate) const POSITION_SCORES: usize = 2;

/// A function of a chunk's positions and their scores `[chunk, n + 2]`, which returns the positions' values `[chunk]` and
/// the derivatives by the scores `[chunk, n + 2]`, all in the accumulation dtype.
pub(crate) type ScoreTerms = dyn Fn(Range<usize>, &Tensor) -> Result<(Tensor, Tensor)> + Send + Sync;

/// A function of a chunk's positions and the log-probabilities of all ids `[chunk, vocab]`, which it may overwrite. It
/// returns the positions' values `[chunk]` and the derivatives by the log-probabilities `[chunk, vocab]`, to which nothing
/// else refers, all in the accumulation dtype.
pub(crate) type LogProbTerms = dyn Fn(Range<usize>, Tensor) -> Result<(Tensor, Tensor)> + Send + Sync;

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
    /// `[positions]`, in the accumulation dtype: what a sampled softmax adds to the targets' logits. Each target is then an
    /// entry of its own: it is a row of the weight, from `vocab` on if the vocabulary lacks it, and competes with all ids
    /// of the vocabulary but itself:
    ///
    /// ```text
    /// log p_k(y) = z_ky + shift - log( exp(z_ky + shift) + sum_{v != y} exp z_kv )
    /// ```
    ///
    /// Such a loss has no softcap, and the target's negative log-likelihood is its only term.
    pub(crate) own_shifts: Option<Tensor>,
    /// This rank's part of the vocabulary, if the vocabulary is cut among ranks: the weight has the rows of this part, while
    /// targets and class weights refer to the whole vocabulary.
    pub(crate) shard: Option<VocabShard>,
    /// The gradient of the weight from earlier losses, to which this loss adds its own.
    pub(crate) so_far: Option<GradientSoFar>,
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
