//! Losses that are functions of scores or of all log-probabilities, chunk by chunk: what a function of the user's own
//! gets and returns ([`ChunkScores`], [`ChunkLogProbs`], [`ChunkTerms`]), and the losses of such functions.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use super::{candidate_count, ScoreOptions};
use crate::backend::objective::{LogProbTerms, ScoreTerms, POSITION_SCORES};
use crate::error::{Error, OptionName, Result};
use crate::loss::CountedPositions;
use crate::tensors::checks::accumulation_dtype;

/// The scores of some positions, on the device of the contexts, in f32 (f64 for f64).
///
/// # Examples
///
/// The negative log-likelihood with a weight for each position, as the terms of
/// [`Distributions::score_loss`](crate::Distributions::score_loss):
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::score::{ChunkScores, ChunkTerms, ScoreOptions};
/// use mos_head::{Distributions, LossOptions, Mixture, Reduction};
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
    /// `[positions]`: the logarithm of the collision probability; zeros if the options do not ask for it.
    pub log_collision: Tensor,
}

/// The log-probabilities of some positions, on the device of the contexts, in f32 (f64 for f64).
///
/// # Examples
///
/// The entropy `-sum_v P(v) log P(v)`, with the derivatives `-P(v) (log P(v) + 1)` by the log-probabilities, as the
/// terms of [`Distributions::log_prob_loss`](crate::Distributions::log_prob_loss):
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::score::{ChunkLogProbs, ChunkTerms};
/// use mos_head::{Distributions, Mixture};
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
/// use mos_head::{Distributions, Mixture};
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
    /// `[positions]`: the derivatives of the values by the logarithms of the collision probability; `None` if they do
    /// not depend on them.
    pub by_collision: Option<Tensor>,
}

impl ChunkTerms {
    /// Makes the terms of values that depend on the log-probabilities alone.
    ///
    /// # Shapes
    ///
    /// - values: `[positions]`
    /// - by_log_prob: `[positions]`, `[positions, n]` for `n` candidates, or `[positions, vocab]` for all ids
    pub fn new(values: Tensor, by_log_prob: Tensor) -> Self {
        ChunkTerms { values, by_log_prob, by_entropy: None, by_outside: None, by_collision: None }
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

    /// Sets the derivatives by the logarithms of the collision probability.
    ///
    /// # Shapes
    ///
    /// - by_collision: `[positions]`
    pub fn with_by_collision(self, by_collision: Tensor) -> Self {
        ChunkTerms { by_collision: Some(by_collision), ..self }
    }
}

/// What the error of an option calls a loss of scores.
const LOSS_OF_SCORES: &str = "a loss of scores";

/// A loss that is a function of the scores of each position.
pub struct ScoreLoss {
    /// `[..]` or `[.., n]`: the ids whose log-probabilities are scores.
    pub(crate) token_ids: Tensor,
    /// What else is scored.
    pub(crate) options: ScoreOptions,
    pub(crate) terms: ScoreTerms,
    /// Which of a position's own scores the terms depend on, among the entropy, the mass outside and the collision
    /// probability.
    pub(crate) position_scores: Range<usize>,
    /// The weights that the value sums the terms with; without them the value is their sum.
    pub(crate) counted: Option<CountedPositions>,
}

impl ScoreLoss {
    /// Makes the loss of a function of the user's own, for positions with these leading dimensions. `like` has the
    /// dtype of the hidden states or contexts.
    pub(crate) fn new(
        token_ids: &Tensor,
        leading: &[usize],
        like: &Tensor,
        options: &ScoreOptions,
        terms: impl Fn(ChunkScores) -> Result<ChunkTerms> + Send + Sync + 'static,
    ) -> Result<Self> {
        options.validate()?;
        let dtype = accumulation_dtype("contexts", like.dtype())?;
        if options.is_argmax {
            return Err(Error::Unsupported { option: OptionName::IsArgmax, head: LOSS_OF_SCORES });
        }
        options.refuse_mean_logit(LOSS_OF_SCORES)?;
        let n = candidate_count("token_ids", token_ids, leading)?;
        let has_candidates = token_ids.dims() != leading;
        let terms = move |positions: Range<usize>, scores: &Tensor| {
            let log_prob = scores.narrow(1, 0, n)?;
            let log_prob = if has_candidates { log_prob } else { log_prob.squeeze(1)? };
            let column = |i| scores.narrow(1, n + i, 1)?.squeeze(1);
            let (entropy, log_outside, log_collision) = (column(0)?, column(1)?, column(2)?);
            let chunk = ChunkScores { positions, log_prob, entropy, log_outside, log_collision };
            let (values, derivatives) = join_derivatives(terms(chunk.clone())?, n, &chunk.log_prob, &chunk.entropy)?;
            Ok((values.detach().to_dtype(dtype)?, derivatives.to_dtype(dtype)?.detach()))
        };
        Ok(ScoreLoss {
            token_ids: token_ids.clone(),
            options: options.clone(),
            terms: Arc::new(terms),
            position_scores: 0..POSITION_SCORES,
            counted: None,
        })
    }
}

/// A loss that is a function of the log-probabilities of all ids at each position.
pub struct LogProbLoss {
    pub(crate) workspace_bytes: Option<usize>,
    pub(crate) terms: LogProbTerms,
    /// The weights that the value sums the terms with; without them the value is their sum.
    pub(crate) counted: Option<CountedPositions>,
}

impl LogProbLoss {
    /// Makes the loss of a function of the user's own. `like` has the dtype of the hidden states or contexts.
    pub(crate) fn new(
        workspace_bytes: Option<usize>,
        like: &Tensor,
        terms: impl Fn(ChunkLogProbs) -> Result<ChunkTerms> + Send + Sync + 'static,
    ) -> Result<Self> {
        let dtype = accumulation_dtype("contexts", like.dtype())?;
        let terms = move |positions: Range<usize>, log_probs: Tensor| {
            let (n, dims) = (positions.len(), log_probs.dims().to_vec());
            let ChunkTerms { values, by_log_prob, .. } = terms(ChunkLogProbs { positions, log_probs })?;
            for (argument, tensor, expected) in [("values", &values, &[n][..]), ("by_log_prob", &by_log_prob, &dims)] {
                if tensor.dims() != expected {
                    return Err(Error::shape(argument, format!("{expected:?}"), tensor.dims()));
                }
            }
            // The derivatives are copied, because the function may have kept a reference to them.
            Ok((values.detach().to_dtype(dtype)?, by_log_prob.detach().to_dtype(dtype)?.copy()?))
        };
        Ok(LogProbLoss { workspace_bytes, terms: Arc::new(terms), counted: None })
    }
}

/// Checks the shapes of a chunk's terms against those of its scores for `n` ids, and returns the values, `[chunk]`, and
/// all derivatives as columns, `[chunk, n + 3]`.
fn join_derivatives(terms: ChunkTerms, n: usize, log_prob: &Tensor, entropy: &Tensor) -> Result<(Tensor, Tensor)> {
    let zero = entropy.zeros_like()?;
    let ChunkTerms { values, by_log_prob, by_entropy, by_outside, by_collision } = terms;
    let [by_entropy, by_outside, by_collision] =
        [by_entropy, by_outside, by_collision].map(|derivatives| derivatives.unwrap_or(zero.clone()));
    for (argument, tensor, expected) in [
        ("values", &values, entropy),
        ("by_log_prob", &by_log_prob, log_prob),
        ("by_entropy", &by_entropy, entropy),
        ("by_outside", &by_outside, entropy),
        ("by_collision", &by_collision, entropy),
    ] {
        if tensor.dims() != expected.dims() {
            return Err(Error::shape(argument, format!("{:?}", expected.dims()), tensor.dims()));
        }
    }
    let by_log_prob = by_log_prob.reshape((entropy.dim(0)?, n))?;
    let by_scores = Tensor::stack(&[by_entropy, by_outside, by_collision], 1)?;
    Ok((values, Tensor::cat(&[by_log_prob, by_scores], 1)?))
}
