//! The arguments and the results of a function that computes a loss of the user's own for a chunk of positions, and the
//! node of such a loss in candle's graph.

use std::ops::Range;

use candle_core::Tensor;

use super::node::{self, KnownGradients};
use super::Mixture;
use crate::backend;
use crate::backend::objective::{LossResults, Objective};
use crate::backend::plan::Planned;
use crate::error::Result;
use crate::loss::{Loss, Reduction};

/// The scores of some positions, on the device of the contexts, in f32 (f64 for f64).
///
/// # Examples
///
/// The negative log-likelihood with a weight for each position, as the terms of
/// [`Mixture::score_loss`](crate::Mixture::score_loss):
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::score::{ChunkScores, ChunkTerms, ScoreOptions};
/// use mos_head::{LossOptions, Mixture, Reduction};
///
/// fn weighted(scores: ChunkScores, weights: &Tensor) -> mos_head::Result<ChunkTerms> {
///     let by_log_prob = weights.narrow(0, scores.positions.start, scores.positions.len())?.neg()?;
///     Ok(ChunkTerms::new((&scores.log_prob * &by_log_prob)?, by_log_prob))
/// }
///
/// # fn main() -> mos_head::Result<()> {
/// let contexts = Tensor::randn(0f32, 1., (3, 1, 8), &Device::Cpu)?; // 3 positions, K = 1, d = 8
/// let mixture = Mixture::new(&contexts, None, &Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
/// let targets = Tensor::new(&[3u32, 14, 15], &Device::Cpu)?;
/// let weights = Tensor::new(&[1f32, 0.5, 2.], &Device::Cpu)?;
/// let options = LossOptions::new().with_reduction(Reduction::Sum).with_position_weights(weights.clone());
/// let expected = mixture.loss(&targets, &options)?.value.to_scalar::<f32>()?;
/// let loss = mixture.score_loss(&targets, &ScoreOptions::new(), move |scores| weighted(scores, &weights))?;
/// assert!((loss.value.to_scalar::<f32>()? / expected - 1.0).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkScores {
    /// The chunk's positions among all, in the flattened leading dimensions.
    pub positions: Range<usize>,
    /// `[positions]`, or `[positions, n]` for `n` candidates: the log-probability of each token id.
    pub log_prob: Tensor,
    /// `[positions]`: the entropy; zeros if the options do not ask for it.
    pub entropy: Tensor,
    /// `[positions]`: the logarithm of the mass outside the token ids; zeros if the options do not ask for it.
    pub log_outside: Tensor,
}

/// The log-probabilities of some positions, on the device of the contexts, in f32 (f64 for f64).
///
/// # Examples
///
/// The entropy `-sum_v P(v) log P(v)`, with the derivatives `-P(v) (log P(v) + 1)` by the log-probabilities, as the
/// terms of [`Mixture::log_prob_loss`](crate::Mixture::log_prob_loss):
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::score::{ChunkLogProbs, ChunkTerms};
/// use mos_head::Mixture;
///
/// fn entropy(chunk: ChunkLogProbs) -> mos_head::Result<ChunkTerms> {
///     let probs = chunk.log_probs.exp()?;
///     let values = (&probs * &chunk.log_probs)?.sum(1)?.neg()?;
///     Ok(ChunkTerms::new(values, (probs * (chunk.log_probs + 1.0)?)?.neg()?))
/// }
///
/// # fn main() -> mos_head::Result<()> {
/// let contexts = Tensor::randn(0f32, 1., (3, 1, 8), &Device::Cpu)?; // 3 positions, K = 1, d = 8
/// let mixture = Mixture::new(&contexts, None, &Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
/// let sum = mixture.log_prob_loss(None, entropy)?.value.to_scalar::<f32>()?;
/// let expected = mixture.entropy()?.sum_all()?.to_scalar::<f32>()?;
/// assert!((sum - expected).abs() < 1e-4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkLogProbs {
    /// The chunk's positions among all, in the flattened leading dimensions.
    pub positions: Range<usize>,
    /// `[positions, vocab]`: the log-probability of each token id.
    pub log_probs: Tensor,
}

/// The terms of some positions, in the dtype of the scores or log-probabilities.
///
/// # Examples
///
/// The loss `-log(1 - P(a) - P(b))` of two ids a and b that a text should not have:
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use mos_head::score::{ChunkTerms, ScoreOptions};
/// use mos_head::Mixture;
///
/// # fn main() -> mos_head::Result<()> {
/// let contexts = Var::randn(0f32, 1., (3, 1, 8), &Device::Cpu)?; // 3 positions, K = 1, d = 8
/// let mixture = Mixture::new(&contexts, None, &Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
/// let unwanted = Tensor::new(&[[3u32, 5], [8, 2], [0, 99]], &Device::Cpu)?;
/// let options = ScoreOptions::new().with_outside(true);
/// let loss = mixture.score_loss(&unwanted, &options, |scores| {
///     let values = scores.log_outside.neg()?;
///     let by_outside = values.ones_like()?.neg()?;
///     Ok(ChunkTerms::new(values, scores.log_prob.zeros_like()?).with_by_outside(by_outside))
/// })?;
/// let log_probs = mixture.log_prob(&unwanted)?;
/// let expected = log_probs.exp()?.sum(1)?.affine(-1.0, 1.0)?.log()?.sum_all()?.neg()?.to_scalar::<f32>()?;
/// assert!((loss.value.to_scalar::<f32>()? - expected).abs() < 1e-4);
/// assert_eq!(loss.backward()?.get(&contexts).expect("a gradient").dims(), [3, 1, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkTerms {
    /// `[positions]`: the values, whose sum over all positions is the loss.
    pub values: Tensor,
    /// `[positions]`, `[positions, n]`, or `[positions, vocab]`: the derivatives of the values by the
    /// log-probabilities.
    pub by_log_prob: Tensor,
    /// `[positions]`: the derivatives of the values by the entropies; `None` if they do not depend on them.
    pub by_entropy: Option<Tensor>,
    /// `[positions]`: the derivatives of the values by the logarithms of the mass outside; `None` if they do not depend
    /// on them.
    pub by_outside: Option<Tensor>,
}

impl ChunkTerms {
    /// Makes the terms of values that depend on the log-probabilities alone.
    ///
    /// # Shapes
    ///
    /// - values: `[positions]`
    /// - by_log_prob: `[positions]`, `[positions, n]` for `n` candidates, or `[positions, vocab]` for all ids
    pub fn new(values: Tensor, by_log_prob: Tensor) -> Self {
        ChunkTerms { values, by_log_prob, by_entropy: None, by_outside: None }
    }

    /// Sets the derivatives by the entropies.
    ///
    /// # Shapes
    ///
    /// - by_entropy: `[positions]`
    pub fn with_by_entropy(self, by_entropy: Tensor) -> Self {
        ChunkTerms { by_entropy: Some(by_entropy), ..self }
    }

    /// Sets the derivatives by the logarithms of the mass outside.
    ///
    /// # Shapes
    ///
    /// - by_outside: `[positions]`
    pub fn with_by_outside(self, by_outside: Tensor) -> Self {
        ChunkTerms { by_outside: Some(by_outside), ..self }
    }
}

impl Mixture {
    /// Makes the loss whose value is the sum of these results of an objective. The first backward pass takes their
    /// gradients; a second one computes them again.
    pub(super) fn loss_from_results(
        &self,
        results: LossResults,
        planned: Planned,
        objective: Objective,
    ) -> Result<Loss> {
        let (value, decoder) = (results.sum.clone(), Some(self.operands.weight.clone()).filter(Tensor::is_variable));
        let value = if planned.needs_grad.any() {
            let known = Some(KnownGradients { gradients: results.gradients, is_sum: false });
            node::attach_loss(value, planned, Reduction::Sum, known, move |planned, _| {
                Ok(backend::loss(planned, &objective)?.gradients)
            })?
        } else {
            value
        };
        let nll = results.nll.reshape(self.leading.as_slice())?;
        Ok(Loss { decoder, ..Loss::new(value, results.sum, results.count, nll) })
    }
}
