//! The distributions of some positions, of which results are asked.
//!
//! [`Distributions`] has all results. A [`Mixture`](crate::Mixture) computes some by its fused operations
//! ([`mixture`]), and knows the components' part in a target ([`responsibilities`]); what a kind of distributions does
//! not override follows from its scores or its log-probabilities, as everything does for distributions that are given
//! as log-probabilities ([`given`]).

mod given;
mod linear;
mod linear_cross_entropy;
mod mixture;
mod responsibilities;

use candle_core::{DType, Tensor, D};

use crate::decoding::{NextToken, Sampler, TokenRequest, TopK};
use crate::error::{Error, Result};
use crate::loss::{CountedPositions, Loss, LossOptions, OutputShape, Request};
use crate::mixture::{DistillLoss, DistillOptions, Distillation, Teacher};
use crate::scores::policy::{PolicyBatch, PolicyOptions, PolicyTerms};
use crate::scores::{ChunkLogProbs, ChunkScores, ChunkTerms, LogProbLoss, ScoreLoss, ScoreOptions, Scores};
use crate::tensors::transfer::accurate_dtype;
pub(crate) use given::GivenLogProbs;
pub use linear_cross_entropy::linear_cross_entropy;

/// The distributions over the vocabulary at some positions, of which results are asked.
///
/// A [`Mixture`](crate::Mixture), a [`RestrictedMixture`](crate::sets::RestrictedMixture) and a
/// [`VocabParallelMixture`](crate::distributed::VocabParallelMixture) are distributions, and every head has those of
/// its hidden states, [`OutputLayer::distributions`](crate::OutputLayer::distributions). A result that one of them
/// cannot compute is [`Error::Unsupported`](crate::Error::Unsupported). The trait cannot be implemented outside of this
/// crate: a head of your own implements [`OutputLayer`](crate::OutputLayer).
///
/// # Shapes
///
/// Token ids, targets and results have the leading dimensions `[..]` of the contexts or hidden states, such as
/// `[batch, seq]`.
///
/// # Examples
///
/// Several results of one projection:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::{Distributions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 3, 8), &Device::Cpu)?; // [batch, seq, hidden]
/// let distributions = head.distributions(&hidden, None)?;
/// assert_eq!(distributions.top_k(5)?.token_ids.dims(), [2, 3, 5]);
/// assert_eq!(distributions.entropy()?.dims(), [2, 3]);
/// # Ok(())
/// # }
/// ```
pub trait Distributions: Sealed {
    /// Computes the loss of the targets, with the gradients of everything that depends on a variable.
    ///
    /// A mixture computes both in the same three matrix products, for the logits of one chunk of positions at a time:
    /// see [`Plan`](crate::Plan). For what is restricted to allowed ids, see
    /// [`RestrictedMixture`](crate::sets::RestrictedMixture).
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If the shape or dtype of the targets is wrong, a target is not in the vocabulary, or an option is out of range.
    /// On a GPU a target that is not in the vocabulary makes its loss NaN instead, because reading it would wait for
    /// the device; [`Loss::sum_and_count`] waits and names the target.
    ///
    /// # Numerics
    ///
    /// The loss is computed in f32 (f64 for f64) for every dtype, in log space, without a floor under the
    /// probabilities. On CUDA the gradient of the logits is rounded to the dtype of the contexts, as an operand of the
    /// products. A target of probability zero has an infinite loss and, for K > 1, NaN gradients. With label smoothing,
    /// ids of probability zero make the loss infinite and are skipped in the gradient. If a logit of a position is NaN
    /// or plus infinity, or all are minus infinity, the loss of this position and all gradients are NaN; the losses of
    /// other positions are not affected. If the priors of a position sum to more than one, a target may have a
    /// probability above one: its negative log-likelihood is then reported as zero, while the gradient remains the
    /// formula's. On the CPU, a gradient of a logit below 1e-18 of the scale of its position (f64: 1e-148), or below
    /// 1e-30 (f64: 1e-290), is zero: products with subnormal numbers are up to 20 times slower on some processors.
    ///
    /// An ignored position has no part in the gradients of these distributions' operands. What has made the operands,
    /// such as a projection of hidden states, may turn a NaN there into one of its parameters' gradients: the loss of
    /// the head masks hidden states first.
    fn loss(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let request = Request::new(self.shape(), targets, options).map_err(|error| self.announce(error))?;
        self.request_loss(&request)
    }

    /// Computes log-probabilities `[.., vocab]` in the dtype of the contexts or hidden states. They are differentiable.
    ///
    /// # Errors
    ///
    /// The errors of [`Distributions::log_probs_as`].
    fn log_probs(&self) -> Result<Tensor> {
        self.log_probs_as(self.shape().like.dtype())
    }

    /// Computes log-probabilities `[.., vocab]` in another dtype: those of a half-precision mixture are not rounded if
    /// it is f32. They are differentiable.
    ///
    /// # Errors
    ///
    /// If the dtype is none of f16, bf16, f32 and f64, the result would have more than 2^40 elements, or there are no
    /// kernels for the device.
    fn log_probs_as(&self, dtype: DType) -> Result<Tensor>;

    /// Computes the log-probability of given token ids at each position and, if the options ask for them, the entropy,
    /// the mass outside the ids, the collision probability, the mean logit, and whether an id is the most probable of
    /// all. The scores are differentiable. A mixture computes them from one product and without a tensor of the
    /// vocabulary's size, and their backward pass takes three products.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::score`](crate::OutputLayer::score).
    fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        options.refuse_mean_logit(self.name())?;
        Scores::from_rounded(&accurate_log_probs(self)?, self.shape().like.dtype(), token_ids, options)
    }

    /// Computes the log-probability of given token ids `[..]` or `[.., n]`, in their shape; see
    /// [`Distributions::score`].
    ///
    /// # Errors
    ///
    /// The errors of [`Distributions::score`].
    fn log_prob(&self, token_ids: &Tensor) -> Result<Tensor> {
        Ok(self.score(token_ids, &ScoreOptions::new())?.log_prob)
    }

    /// Computes the entropy of each position's distribution, `-sum_v P(v) log P(v)`: `[..]` in nats, f32 (f64 for f64).
    /// It is differentiable; see [`Distributions::score`].
    ///
    /// # Errors
    ///
    /// The errors of [`Distributions::score`].
    fn entropy(&self) -> Result<Tensor> {
        let OutputShape { leading, like, .. } = self.shape();
        let no_ids = Tensor::zeros([leading, &[0]].concat(), DType::U32, like.device())?;
        let scores = self.score(&no_ids, &ScoreOptions::new().with_entropy(true))?;
        // The options ask for the entropy, so that there is one.
        Ok(scores.entropy.unwrap_or(scores.log_prob))
    }

    /// Finds the `k` most probable token ids at each position and their log-probabilities, `[.., k]`, in descending
    /// order; among equals the lowest id comes first.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::top_k`](crate::OutputLayer::top_k).
    fn top_k(&self, k: usize) -> Result<TopK> {
        TopK::from_rounded(&accurate_log_probs(self)?, self.shape().like.dtype(), k)
    }

    /// Finds the most probable token id at each position, `[..]` (u32); among equals it is the lowest.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::argmax`](crate::OutputLayer::argmax).
    fn argmax(&self) -> Result<Tensor> {
        Ok(self.top_k(1)?.token_ids.squeeze(D::Minus1)?)
    }

    /// Draws one token id at each position, `[..]` (u32).
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::sample`](crate::OutputLayer::sample).
    fn sample(&self, sampler: &mut Sampler) -> Result<Tensor>;

    /// Chooses the next token id at each position as its request says.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens).
    fn next_tokens(&self, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
        let requests: Vec<_> = requests.chunks(1).collect();
        Ok(self.next_tokens_per_position(&requests)?.into_iter().flatten().collect())
    }

    /// Chooses several next token ids at each position, one for each request of its list.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::next_tokens_per_position`](crate::OutputLayer::next_tokens_per_position).
    fn next_tokens_per_position(&self, requests: &[&[&TokenRequest]]) -> Result<Vec<Vec<NextToken>>> {
        NextToken::from_rounded(&accurate_log_probs(self)?, self.shape().like.dtype(), requests)
    }

    /// Computes the sum of values that depend on the log-probabilities of token ids, on the entropy and on the mass
    /// outside the ids at each position, with gradients, for a mixture from three products. `terms` gets the scores of
    /// a chunk of positions and returns the values and their derivatives, before the gradient of the chunk's logits
    /// replaces them. (A function of scores from [`Distributions::score`] costs a fourth product.)
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the contexts, or `[.., n]` for `n` candidates at each position;
    ///   u8, u32 or i64
    /// - `terms`: from [`ChunkScores`] to [`ChunkTerms`], whose fields have the shapes
    /// - [`Loss::nll`]: `[..]`, that of the first id at each position
    ///
    /// # Errors
    ///
    /// The errors of the ids are those of the targets of [`Distributions::loss`]. It is an error too if an option is
    /// out of range, or if `terms` fails or returns other shapes. [`Error::Unsupported`] for
    /// [`ScoreOptions::is_argmax`], which has no derivative.
    ///
    /// # Examples
    ///
    /// The policy gradient of REINFORCE (Williams: Simple Statistical Gradient-Following Algorithms for Connectionist
    /// Reinforcement Learning. Machine Learning 8, 1992) with an entropy bonus:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::{ChunkTerms, ScoreOptions};
    /// use mos_head::{Distributions, Mixture};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let mixture = Mixture::new(&contexts, None, &weight, None)?;
    /// let token_ids = Tensor::new(&[3u32, 14, 15, 92], &Device::Cpu)?;
    /// let rewards = Tensor::new(&[1f32, 0., 0., 1.], &Device::Cpu)?;
    /// let options = ScoreOptions::new().with_entropy(true);
    /// let loss = mixture.score_loss(&token_ids, &options, move |scores| {
    ///     let rewards = rewards.narrow(0, scores.positions.start, scores.positions.len())?;
    ///     let values = ((&rewards * &scores.log_prob)?.neg()? - (&scores.entropy * 0.01)?)?;
    ///     let by_entropy = scores.entropy.zeros_like()?.affine(1.0, -0.01)?;
    ///     Ok(ChunkTerms::new(values, rewards.neg()?).with_by_entropy(by_entropy))
    /// })?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The divergence `sum_v T(v) (log T(v) - log P(v))` from a teacher T whose most probable ids are known:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::{ChunkTerms, ScoreOptions};
    /// use mos_head::{Distributions, Mixture};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let student = Mixture::new(&contexts, None, &weight, None)?;
    /// let teacher = Mixture::new(&contexts.detach().affine(2.0, 0.0)?, None, &weight, None)?.top_k(16)?;
    /// let log_teacher = teacher.log_probs.clone(); // [4, 16]
    /// let loss = student.score_loss(&teacher.token_ids, &ScoreOptions::new(), move |scores| {
    ///     let log_teacher = log_teacher.narrow(0, scores.positions.start, scores.positions.len())?;
    ///     let p = log_teacher.exp()?;
    ///     let values = ((log_teacher - scores.log_prob)? * &p)?.sum(1)?;
    ///     Ok(ChunkTerms::new(values, p.neg()?))
    /// })?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    fn score_loss<F>(&self, token_ids: &Tensor, options: &ScoreOptions, terms: F) -> Result<Loss>
    where
        F: Fn(ChunkScores) -> Result<ChunkTerms> + Send + Sync + 'static,
        Self: Sized,
    {
        let OutputShape { leading, like, .. } = self.shape();
        let loss = ScoreLoss::new(token_ids, leading, like, options, terms).map_err(|error| self.announce(error))?;
        Ok(self.loss_from_scores(&loss)?.0)
    }

    /// Computes the sum of values that depend on the log-probabilities of all ids at each position, with gradients, for
    /// a mixture from three products (on a GPU four). `terms` gets the log-probabilities of a chunk of positions and
    /// returns the values and their derivatives, before the gradient of the chunk's logits replaces them, so that the
    /// log-probabilities of all positions are never in memory at once. `workspace_bytes` is the budget of the
    /// workspace, as in [`LossOptions::with_workspace_bytes`](crate::LossOptions::with_workspace_bytes).
    ///
    /// # Shapes
    ///
    /// - `terms`: from log-probabilities `[positions, vocab]` of a chunk to values `[positions]` and derivatives
    ///   `[positions, vocab]`
    /// - [`Loss::nll`]: `[..]`, the leading dimensions of the contexts: the values
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device, the budget cannot hold one position, or `terms` fails or returns other
    /// shapes.
    ///
    /// # Examples
    ///
    /// The probability that two draws are equal, `sum_v P(v)^2`, and its derivative by log P(v), `2 P(v)^2`:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::ChunkTerms;
    /// use mos_head::{Distributions, Mixture};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let mixture = Mixture::new(&contexts, None, &weight, None)?;
    /// let loss = mixture.log_prob_loss(None, |chunk| {
    ///     let squares = (chunk.log_probs * 2.0)?.exp()?;
    ///     Ok(ChunkTerms::new(squares.sum(1)?, (squares * 2.0)?))
    /// })?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    fn log_prob_loss<F>(&self, workspace_bytes: Option<usize>, terms: F) -> Result<Loss>
    where
        F: Fn(ChunkLogProbs) -> Result<ChunkTerms> + Send + Sync + 'static,
        Self: Sized,
    {
        Ok(self.loss_from_log_probs(&LogProbLoss::new(workspace_bytes, self.shape().like, terms)?)?.0)
    }

    /// Computes the loss of a policy gradient over sampled tokens.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::policy_loss`](crate::OutputLayer::policy_loss).
    fn policy_loss(&self, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Loss> {
        let OutputShape { leading, like, .. } = self.shape();
        let terms = PolicyTerms::new(leading, like, batch, options).map_err(|error| self.announce(error))?;
        self.select(terms.positions())?.loss_from_policy(terms)
    }

    /// Computes the divergence of the student, whose distributions these are, from a teacher, and its gradients: for a
    /// mixture in the products of a loss. A teacher that is a mixture takes one more product, and the log-probabilities
    /// of a chunk of positions are held at a time. A teacher's list takes no more products, and only the
    /// log-probabilities of its ids are held. On a GPU the logits are computed twice, unless the teacher is a list.
    ///
    /// [`Loss::nll`] has the objective of each position that counts, in their order, without weights.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::distill`](crate::OutputLayer::distill).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::distill::{DistillOptions, Divergence, Teacher};
    /// use mos_head::{Distributions, Mixture};
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
    fn distill(&self, teacher: &Teacher, options: &DistillOptions) -> Result<Loss> {
        let distillation = Distillation::new(self.shape(), teacher, options).map_err(|error| self.announce(error))?;
        self.select(distillation.positions())?.loss_from_teacher(&distillation)
    }

    /// Computes the loss of a request, whose positions are those of the distributions.
    #[doc(hidden)]
    fn request_loss(&self, request: &Request) -> Result<Loss>;

    /// Computes the policy loss of tokens, whose positions are those of the distributions.
    #[doc(hidden)]
    fn loss_from_policy(&self, terms: PolicyTerms) -> Result<Loss> {
        let positions = terms.positions().to_vec();
        let loss = self.loss_from_scores(&terms.into_score_loss());
        Ok(loss.map_err(|error| error.with_position_from(&positions))?.0)
    }

    /// Computes the loss of a distillation, whose positions that count are those of the student's distributions.
    #[doc(hidden)]
    fn loss_from_teacher(&self, distillation: &Distillation) -> Result<Loss> {
        let (loss, objective) = match distillation.student_loss() {
            DistillLoss::LogProbs(loss) => {
                self.check_hard_targets(distillation)?;
                self.loss_from_log_probs(&loss)
            }
            DistillLoss::Scores(loss) => self.loss_from_scores(&loss),
        }?;
        distillation.finish(loss, objective)
    }

    /// Computes a loss that is a function of scores. Beside the loss it returns the terms' value at each position.
    #[doc(hidden)]
    fn loss_from_scores(&self, loss: &ScoreLoss) -> Result<(Loss, Tensor)> {
        let scores = self.score(&loss.token_ids, &loss.options);
        linear::score_loss(loss, self.shape().leading, &at_counted_positions(scores, &loss.counted)?)
    }

    /// Computes a loss that is a function of the log-probabilities of all ids. Beside the loss it returns the terms'
    /// value at each position.
    #[doc(hidden)]
    fn loss_from_log_probs(&self, loss: &LogProbLoss) -> Result<(Loss, Tensor)> {
        linear::log_prob_loss(loss, self.shape().leading, &at_counted_positions(self.log_probs(), &loss.counted)?)
    }
}

/// What distributions know of themselves. Only this crate can implement it, and [`Distributions`] with it.
#[doc(hidden)]
pub trait Sealed {
    /// Returns the positions and the vocabulary.
    fn shape(&self) -> OutputShape<'_>;

    /// Selects some of the positions, which ascend. The leading dimensions of the result are `[n]`.
    fn select(&self, positions: &[u32]) -> Result<Box<dyn Distributions + '_>>;

    /// Returns what errors call the distributions whose scores are computed from log-probabilities.
    fn name(&self) -> &'static str {
        "these distributions"
    }

    /// Checks the targets of a distillation from the log-probabilities of all ids, at the positions that count.
    fn check_hard_targets(&self, _: &Distillation) -> Result<()> {
        Ok(())
    }

    /// Returns an error that is found before a result is asked for. Ranks that share the vocabulary tell each other.
    fn announce(&self, error: Error) -> Error {
        error
    }
}

/// Replaces the position in an error of a result at the positions that count by its place among all positions.
fn at_counted_positions<T>(result: Result<T>, counted: &Option<CountedPositions>) -> Result<T> {
    let positions = counted.as_ref().map_or(&[][..], |counted| &counted.positions);
    result.map_err(|error| error.with_position_from(positions))
}

/// Returns the log-probabilities of distributions in f32 (f64 for f64), which half precision has not rounded.
fn accurate_log_probs(distributions: &(impl Distributions + ?Sized)) -> Result<Tensor> {
    distributions.log_probs_as(accurate_dtype(distributions.shape().like))
}
