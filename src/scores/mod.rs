//! Scores of token ids, with gradients: their log-probabilities, the entropy of the distribution, the mass outside the
//! ids, the collision probability and the mean logit; their sums over sequences; and the policy losses, which are
//! functions of scores ([`policy`]).

mod by_sequence;
mod chunk_terms;
mod composed;
pub(crate) mod policy;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, LossOptions, Reduction};
use crate::tensors::autograd;
use crate::tensors::checks::{
    check_elements, check_float, check_log_prob_tensor, check_number, check_targets, check_vocab,
};
use crate::tensors::linear::with_shape;
pub use chunk_terms::{ChunkLogProbs, ChunkScores, ChunkTerms};
pub(crate) use chunk_terms::{LogProbLoss, ScoreLoss};
pub(crate) use composed::{are_argmax, compose_scores};

/// Options of [`OutputLayer::score`](crate::OutputLayer::score) and
/// [`Distributions::score`](crate::Distributions::score).
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::score::ScoreOptions;
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::new(&[[0f32], [3.], [1.], [2.]], &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight, None)?;
/// let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
/// let token_ids = Tensor::new(&[[1u32, 2]], &Device::Cpu)?; // two candidates
/// let options = ScoreOptions::new().with_temperature(0.5).with_outside(true).with_is_argmax(true);
/// let scores = head.score(&hidden, &token_ids, &options)?;
/// // The logits 6 and 2, of the four logits 0, 6, 2 and 4 at this temperature.
/// let log_prob = scores.log_prob.to_vec2::<f32>()?;
/// assert!((log_prob[0][0] - log_prob[0][1] - 4.0).abs() < 1e-5);
/// // The candidates and all other ids together have probability one.
/// let outside = scores.log_outside.expect("asked for").to_vec1::<f32>()?[0];
/// assert!((log_prob[0][0].exp() + log_prob[0][1].exp() + outside.exp() - 1.0).abs() < 1e-6);
/// assert_eq!(scores.is_argmax.expect("asked for").to_vec2::<u8>()?, [[1, 0]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ScoreOptions {
    /// The temperature of the distribution, after scale and function of the logits: the mixture's log-probabilities are
    /// divided by it and normalised again. The default is 1.
    pub temperature: f64,
    /// Whether the entropy is computed. The default is false.
    pub entropy: bool,
    /// Whether the mass outside the token ids is computed. The default is false.
    pub outside: bool,
    /// Whether the collision probability is computed. The default is false.
    pub collision: bool,
    /// Whether the mean logit is computed. The default is false.
    pub mean_logit: bool,
    /// Whether it is told which ids are the most probable of the vocabulary. The default is false.
    pub is_argmax: bool,
    /// The budget of the workspace in bytes; by default the device decides. See
    /// [`LossOptions::with_workspace_bytes`](crate::LossOptions::with_workspace_bytes).
    pub workspace_bytes: Option<usize>,
}

impl Default for ScoreOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ScoreOptions {
    /// The options for log-probabilities alone, at temperature 1.
    pub fn new() -> Self {
        ScoreOptions {
            temperature: 1.0,
            entropy: false,
            outside: false,
            collision: false,
            mean_logit: false,
            is_argmax: false,
            workspace_bytes: None,
        }
    }

    /// Sets the temperature: from 1e-6 to 1e6.
    pub fn with_temperature(self, temperature: f64) -> Self {
        ScoreOptions { temperature, ..self }
    }

    /// Sets whether the entropy is computed.
    pub fn with_entropy(self, entropy: bool) -> Self {
        ScoreOptions { entropy, ..self }
    }

    /// Sets whether the mass outside the token ids is computed, which is the sum of the probabilities of all other ids.
    pub fn with_outside(self, outside: bool) -> Self {
        ScoreOptions { outside, ..self }
    }

    /// Sets whether the collision probability is computed, [`Scores::log_collision`]. A mixture computes it from the
    /// log-probabilities of all ids of a chunk of positions, which a policy's log-probabilities alone do not need.
    pub fn with_collision(self, collision: bool) -> Self {
        ScoreOptions { collision, ..self }
    }

    /// Sets whether the mean logit is computed, [`Scores::mean_logit`]. It costs one more reading of the decoder, and
    /// its gradient one writing of the decoder's gradient, but no product with the size of the vocabulary.
    /// [`Error::Unsupported`] for what has no such mean of its decoder: logits with a function, heads of two levels,
    /// allowed ids, a vocabulary that ranks share, log-probabilities that are given, and losses of scores.
    pub fn with_mean_logit(self, mean_logit: bool) -> Self {
        ScoreOptions { mean_logit, ..self }
    }

    /// Sets whether it is told which ids are the most probable of the vocabulary, [`Scores::is_argmax`].
    pub fn with_is_argmax(self, is_argmax: bool) -> Self {
        ScoreOptions { is_argmax, ..self }
    }

    /// Sets the budget of the workspace in bytes.
    pub fn with_workspace_bytes(self, bytes: usize) -> Self {
        ScoreOptions { workspace_bytes: Some(bytes), ..self }
    }

    /// Makes the query for the scores of these ids, `[positions, n]`.
    pub(crate) fn scored(&self, token_ids: Tensor) -> Scored {
        Scored {
            token_ids,
            needs_entropy: self.entropy,
            needs_outside: self.outside,
            needs_collision: self.collision,
            needs_argmax: self.is_argmax,
            temperature: self.temperature,
        }
    }

    /// Returns the options of the loss whose values are the negated log-probabilities of one id at each position.
    pub(crate) fn loss_options(&self) -> LossOptions {
        let options = LossOptions::new().with_reduction(Reduction::None).with_correct(self.is_argmax);
        LossOptions { workspace_bytes: self.workspace_bytes, ..options }
    }

    /// Returns whether the scores are log-probabilities at temperature 1, and what needs no other ids.
    pub(crate) fn is_plain(&self) -> bool {
        !self.entropy && !self.outside && !self.collision && self.temperature == 1.0
    }

    /// Refuses the mean logit, for what has no logits or no mean of its decoder.
    pub(crate) fn refuse_mean_logit(&self, head: &'static str) -> Result<()> {
        if self.mean_logit {
            return Err(Error::Unsupported { option: OptionName::MeanLogit, head });
        }
        Ok(())
    }

    /// Checks the range of the temperature.
    pub(crate) fn validate(&self) -> Result<()> {
        let temperature = self.temperature;
        check_number((1e-6..=1e6).contains(&temperature), "temperature", "from 1e-6 to 1e6", temperature)
    }
}

/// Scores in nats, f32 (f64 for heads in f64). They are differentiable, except for `is_argmax`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::score::ScoreOptions;
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 8), DType::F32, &Device::Cpu)?;
/// let token_ids = Tensor::new(&[[3u32, 5, 7], [1, 0, 99]], &Device::Cpu)?; // three candidates for each position
/// let options = ScoreOptions::new().with_entropy(true).with_collision(true);
/// let scores = head.score(&hidden, &token_ids, &options)?;
/// assert_eq!(scores.log_prob.dims(), [2, 3]);
/// let entropy = scores.entropy.expect("asked for").to_vec1::<f32>()?;
/// assert!(entropy.iter().all(|h| (h - 100f32.ln()).abs() < 1e-5));
/// // Two draws are equal with a probability of one in a hundred.
/// let log_collision = scores.log_collision.expect("asked for").to_vec1::<f32>()?;
/// assert!(log_collision.iter().all(|c| (c + 100f32.ln()).abs() < 1e-5));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Scores {
    /// The log-probability of each id, of the ids' shape.
    pub log_prob: Tensor,
    /// The entropy of each position, `[..]`, if it was asked for.
    pub entropy: Option<Tensor>,
    /// The logarithm of the mass outside the token ids at each position, `[..]`, if it was asked for. It is summed over
    /// the other ids, so that it is exact where these have hardly any mass; minus infinity if there are no others.
    pub log_outside: Option<Tensor>,
    /// The logarithm of the collision probability at each position, `[..]`, if it was asked for: `log sum_v P(v)^2`,
    /// where the sum is the probability that two draws are equal. It is the negated collision entropy (the Renyi
    /// entropy of order 2: Renyi, On Measures of Entropy and Information. 1961), from minus the logarithm of the
    /// vocabulary's size to zero, and at a temperature that of the tempered distribution.
    pub log_collision: Option<Tensor>,
    /// The mean logit at each position, `[..]`, if it was asked for: `1/V sum_v z_v`, where the logits z are those
    /// after the scale and without the temperature. For a mixture it is that of its components, weighted by their
    /// priors: `sum_k pi_k 1/V sum_v z_kv`. It is minus infinity where a logit is.
    pub mean_logit: Option<Tensor>,
    /// Whether each id is the most probable of the vocabulary at its position, of the ids' shape in u8, if it was asked
    /// for: one for the id that `argmax` returns, which is the lowest among equals, and zero for other ids. (If the
    /// log-probabilities of two ids differ by less than their rounding, `argmax` and this may name either.) All are zero
    /// where the distribution is NaN.
    pub is_argmax: Option<Tensor>,
}

impl Scores {
    /// Computes the gradients of a scalar that depends on these scores, as `value.backward()` does, with one copy less
    /// of the decoder's gradient, the largest.
    ///
    /// # Shapes
    ///
    /// - value: a scalar
    ///
    /// # Errors
    ///
    /// If the value is not a scalar, the backward pass of another operation fails, or memory runs out.
    ///
    /// # Examples
    ///
    /// A loss of the difference of two candidates, as in preference learning:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::ScoreOptions;
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let hidden = Tensor::randn(0f32, 1., (4, 8), &Device::Cpu)?;
    /// let token_ids = Tensor::new(&[[3u32, 5], [1, 0], [8, 9], [2, 7]], &Device::Cpu)?; // preferred, rejected
    /// let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
    /// // The sigmoid of a difference is the softmax of the two, whose logarithm does not overflow.
    /// let log_sigmoid = candle_nn::ops::log_softmax(&scores.log_prob, 1)?.narrow(1, 0, 1)?;
    /// let loss = log_sigmoid.mean_all()?.neg()?;
    /// let gradients = scores.backward(&loss)?;
    /// assert_eq!(gradients.get(&weight).expect("a gradient").dims(), [100, 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn backward(&self, value: &Tensor) -> Result<GradStore> {
        match value.rank() {
            0 => autograd::backward(value, None),
            _ => Err(Error::shape("value", "a scalar", value.dims())),
        }
    }

    /// Computes the scores of distributions that are given as log-probabilities, for an output layer of your own.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[.., vocab]`, at most zero; a float type
    /// - token_ids: `[..]`, or `[.., n]` for several candidates; u8, u32 or i64
    /// - returns log-probabilities and `is_argmax` of the shape of `token_ids`, and `[..]` each the entropy, the
    ///   logarithm of the mass outside, and that of the collision probability
    ///
    /// # Errors
    ///
    /// If the shapes or dtypes do not match, or the temperature is out of range. [`Error::Unsupported`] for the mean
    /// logit, which log-probabilities do not have. On the CPU [`Error::Value`] if a number is above zero by more than
    /// rounding in its dtype, such as a raw logit.
    pub fn from_log_probs(log_probs: &Tensor, token_ids: &Tensor, options: &ScoreOptions) -> Result<Self> {
        options.refuse_mean_logit("log-probabilities that are given")?;
        Self::from_rounded(log_probs, log_probs.dtype(), token_ids, options)
    }

    /// Makes the scores of one id at each position from the loss of these ids, which has no reduction.
    pub(crate) fn from_loss(loss: Result<Loss>) -> Result<Self> {
        let loss = loss.map_err(|error| error.renamed("targets", "token_ids"))?;
        // `neg` would make a minus zero.
        let log_prob = loss.value.affine(-1.0, 0.0)?;
        let is_argmax = loss.is_correct;
        Ok(Scores { log_prob, entropy: None, log_outside: None, log_collision: None, mean_logit: None, is_argmax })
    }

    /// Computes the scores as [`Scores::from_log_probs`] does, from log-probabilities that were rounded to the dtype
    /// `rounded` before they were given in another one.
    pub(crate) fn from_rounded(
        log_probs: &Tensor,
        rounded: DType,
        token_ids: &Tensor,
        options: &ScoreOptions,
    ) -> Result<Self> {
        options.validate()?;
        check_float("log_probs", log_probs)?;
        let &[ref leading @ .., vocab] = log_probs.dims() else {
            return Err(Error::shape("log_probs", "[.., vocab]", log_probs.dims()));
        };
        check_vocab(vocab)?;
        let n = candidate_count("token_ids", token_ids, leading)?;
        let positions: usize = leading.iter().product();
        let (rows, ids) = (with_shape(log_probs, &[positions, vocab])?, token_ids.reshape((positions, n))?);
        check_log_prob_tensor("log_probs", &rows, rounded, |row| row)?;
        Self::from_rows(&rows, ids, token_ids.dims(), leading, options)
    }

    /// Computes the scores of `n` ids at each position from log-probabilities `[positions, entries]`, among which the
    /// ids have the `places` `[positions, n]`. `ids_shape` is the shape of the ids, and `leading` that of the
    /// positions.
    pub(crate) fn from_rows(
        rows: &Tensor,
        places: Tensor,
        ids_shape: &[usize],
        leading: &[usize],
        options: &ScoreOptions,
    ) -> Result<Self> {
        let scored = options.scored(places);
        let is_argmax = are_argmax(rows, &scored)?.map(|is_argmax| is_argmax.reshape(ids_shape)).transpose()?;
        Ok(Scores { is_argmax, ..Self::from_columns(&compose_scores(rows, &scored)?, ids_shape, leading, options)? })
    }

    /// Splits the columns `[positions, n + 3]` that the backend returns: the log-probabilities of `n` ids, the entropy,
    /// and the logarithms of the mass outside the ids and of the collision probability.
    pub(crate) fn from_columns(
        scores: &Tensor,
        ids_shape: &[usize],
        leading: &[usize],
        options: &ScoreOptions,
    ) -> Result<Self> {
        let n = scores.dim(1)? - POSITION_SCORES;
        // If there are no positions, each column is read as the first: another offset would lie beyond the memory.
        let is_empty = scores.dim(0)? == 0;
        let column = |i: usize| scores.narrow(1, if is_empty { 0 } else { n + i }, 1)?.reshape(leading);
        Ok(Scores {
            log_prob: scores.narrow(1, 0, n)?.reshape(ids_shape)?,
            entropy: options.entropy.then(|| column(0)).transpose()?,
            log_outside: options.outside.then(|| column(1)).transpose()?,
            log_collision: options.collision.then(|| column(2)).transpose()?,
            mean_logit: None,
            is_argmax: None,
        })
    }
}

/// Checks the shape of the ids of a score, `[..]` or `[.., n]` with these leading dimensions, and returns their number
/// at each position.
pub(crate) fn candidate_count(argument: &'static str, token_ids: &Tensor, leading: &[usize]) -> Result<usize> {
    match token_ids.dims() {
        [outer @ .., n] if outer == leading => {
            check_elements(argument, token_ids.dims())?;
            check_targets(argument, token_ids, token_ids.dims())?;
            Ok(*n)
        }
        _ => check_targets(argument, token_ids, leading).map(|()| 1),
    }
}
