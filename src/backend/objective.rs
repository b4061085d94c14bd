//! What is computed of each position: a loss over targets, scores, or a function of log-probabilities.

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
    /// The part of the vocabulary that this rank has, if others have the rest.
    pub(crate) fn shard(&self) -> Option<&VocabShard> {
        match self {
            Objective::Targets(loss) => loss.shard.as_ref(),
            Objective::LogProbs { .. } => None,
        }
    }

    /// The place of the gradient that earlier losses have, if this one adds to it.
    pub(crate) fn so_far(&self) -> Option<&SoFar> {
        match self {
            Objective::Targets(loss) => loss.so_far.as_ref(),
            Objective::LogProbs { .. } => None,
        }
    }
}

/// What is asked of each position's distribution: its scores are the log-probabilities of `n` ids, its entropy, and the
/// logarithm of the mass outside these ids.
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    /// `[positions, n]`: u8, u32 or i64
    pub(crate) token_ids: Tensor,
    /// Whether the entropy is needed; if not, its column of the scores is zero.
    pub(crate) entropy: bool,
    /// Whether the logarithm of the mass outside the ids is needed; if not, its column of the scores is zero.
    pub(crate) outside: bool,
    /// Whether it is needed which of the ids is the most probable of all.
    pub(crate) is_argmax: bool,
    /// Of the mixture's distribution, after scale and softcap.
    pub(crate) temperature: f64,
}

impl Scored {
    /// Whether the temperature changes the distribution.
    pub(crate) fn is_tempered(&self) -> bool {
        self.temperature != 1.0
    }

    /// Whether the scores depend on the log-probability of every id in the mixture.
    pub(crate) fn need_all_ids(&self) -> bool {
        self.entropy || self.outside || self.is_tempered()
    }
}

/// How many columns of the scores follow the log-probabilities of ids: the entropy, and the logarithm of the mass outside
/// the ids.
pub(crate) const OF_POSITION: usize = 2;

/// Values of a chunk's positions, and their derivatives, as a function of the positions and their scores
/// `[chunk, n + 2]`: `[chunk]` and `[chunk, n + 2]`, all in the accumulation dtype.
pub(crate) type ScoreTerms = dyn Fn(Range<usize>, &Tensor) -> Result<(Tensor, Tensor)> + Send + Sync;

/// Values of a chunk's positions, and their derivatives, as a function of the positions and the log-probabilities of all
/// ids `[chunk, vocab]`, which the function may overwrite: `[chunk]` and `[chunk, vocab]`, all in the accumulation dtype.
/// Nothing else refers to the derivatives.
pub(crate) type LogProbTerms = dyn Fn(Range<usize>, Tensor) -> Result<(Tensor, Tensor)> + Send + Sync;

/// A loss over targets whose shape and dtype have been checked.
#[derive(Clone, Debug)]
pub(crate) struct TargetLoss {
    /// `[positions]`: u8, u32 or i64
    pub(crate) targets: Tensor,
    pub(crate) ignore_index: Option<i64>,
    /// `[positions]`, in the accumulation dtype
    pub(crate) position_weights: Option<Tensor>,
    /// `[vocab]`, in the accumulation dtype
    pub(crate) class_weights: Option<Tensor>,
    pub(crate) terms: LossTerms,
    pub(crate) scale: GradScale,
    /// `[positions]`, in the accumulation dtype: a sampled softmax adds these to the targets' logits. A target then is
    /// a row of the weight, from `vocab` on if the vocabulary lacks it, and competes with all ids of the vocabulary but
    /// itself:
    ///
    /// ```text
    /// log p_k(y) = z_ky + shift - log( exp(z_ky + shift) + sum_{v != y} exp z_kv )
    /// ```
    ///
    /// Such a loss has no softcap, and the target's negative log-likelihood is its only term.
    pub(crate) own_shifts: Option<Tensor>,
    /// The part of the vocabulary that this rank has, if others have the rest: the weight has its rows, while targets,
    /// and the weights of classes, are of the whole vocabulary.
    pub(crate) shard: Option<VocabShard>,
    /// The gradient of the weight that earlier losses have: it is taken, and this loss adds its own.
    pub(crate) so_far: Option<SoFar>,
}

/// The place of a variable's gradient among the gradients of earlier losses.
#[derive(Clone, Debug)]
pub(crate) struct SoFar {
    pub(crate) gradients: Arc<Mutex<GradStore>>,
    pub(crate) variable: Tensor,
}

impl SoFar {
    /// Takes the gradient, which nothing else refers to, so that a backend can write to it.
    pub(crate) fn take(&self) -> Option<Tensor> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.variable)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LossTerms {
    pub(crate) label_smoothing: f64,
    pub(crate) z_loss: f64,
    /// Whether it is needed at which positions the target is the most probable id.
    pub(crate) correct: bool,
}

/// The factor of the gradient of each position's weighted objective.
#[derive(Clone, Debug)]
pub(crate) enum GradScale {
    Constant(f64),
    /// The reciprocal of the sum of all weights; zero if the sum is zero.
    OneOverCount,
    /// `[positions]`
    Upstream(Tensor),
}
