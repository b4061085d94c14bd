//! The settings of one text: how its next token id is drawn, and which other results are returned.

use std::hash::{Hash, Hasher};

use super::constraints::Constraints;
use super::history::History;
use super::noise::Noise;
use crate::decoding::Sampling;
use crate::error::{Error, OptionName, Result};
use crate::tensors::checks::check_ids;

/// The request of a text that is being generated: how its next token id is drawn, and which other results are returned
/// ([`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens)).
///
/// A draw is a function of the distribution, the seed and the number of token ids generated so far: the same request
/// draws the same ids alone and in any batch, on any number of threads.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::{Constraints, Sampling, TokenRequest};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
/// let constraints = Constraints::new().with_repetition_penalty(1.1).with_banned(&[0]);
/// let mut request = TokenRequest::new(Sampling::new().with_temperature(0.8).with_top_p(0.95), 42)?
///     .with_constraints(constraints)?
///     .with_prompt(&[17, 4])
///     .with_best(5);
/// for _ in 0..3 {
///     let hidden = Tensor::randn(0f32, 1., (1, 8), &Device::Cpu)?; // from your model: one text, one position
///     let token = &head.next_tokens(&hidden, &[&request])?[0];
///     println!("{} {:.3}, rather than {:?}", token.token_id, token.log_prob, token.best);
///     request.push(token.token_id);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TokenRequest {
    pub(super) sampling: Sampling,
    seed: u64,
    pub(super) constraints: Constraints,
    pub(super) history: History,
    /// The ids that end the text.
    ends: Vec<u32>,
    /// The number of ids that are generated before one of them may end the text.
    min_tokens: usize,
    /// The id that is taken in place of a draw.
    pub(super) forced: Option<u32>,
    /// The number of most probable ids that are returned.
    pub(super) best: usize,
    /// Whether the entropy is returned.
    pub(super) entropy: bool,
    /// Whether the rank is returned.
    pub(super) rank: bool,
}

impl TokenRequest {
    /// Makes a request without constraints, prompt or alternatives.
    ///
    /// # Errors
    ///
    /// If a number is out of range, such as a negative temperature (zero takes the most probable id) or a `top_p` above
    /// 1; [`Error::Unsupported`] for the temperature of components, which belongs to the mixture
    /// ([`Mixture::with_component_temperature`](crate::Mixture::with_component_temperature)), and for ancestral
    /// sampling, which computes no probabilities under the mixture.
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self> {
        sampling.validate()?;
        let unsupported = |option| Err(Error::Unsupported { option, head: "requests" });
        if sampling.ancestral {
            return unsupported(OptionName::Ancestral);
        }
        if sampling.component_temperature != 1.0 {
            return unsupported(OptionName::ComponentTemperature);
        }
        Ok(Self::with(sampling, seed, None))
    }

    /// Makes a request that draws nothing: the next token is this id, whatever its probability is, such as the next id
    /// of a prompt that is scored. It has no constraints, and [`NextToken::sampled_log_prob`](crate::decode::NextToken)
    /// is zero. [`OutputLayer::prompt_log_probs`](crate::OutputLayer::prompt_log_probs) makes such requests for a whole
    /// prompt; a server can mix them with those of other texts in one call.
    pub fn forced(token_id: u32) -> Self {
        Self::with(Sampling::greedy(), 0, Some(token_id))
    }

    /// Makes a request without a text.
    fn with(sampling: Sampling, seed: u64, forced: Option<u32>) -> Self {
        TokenRequest {
            sampling,
            seed,
            constraints: Constraints::new(),
            history: History::default(),
            ends: Vec::new(),
            min_tokens: 0,
            forced,
            best: 0,
            entropy: false,
            rank: false,
        }
    }

    /// Sets the constraints, which change the logits before a token id is drawn.
    ///
    /// # Errors
    ///
    /// If a penalty or a bias is out of range. Ids outside the vocabulary are an error of [`TokenRequest::check`] and
    /// [`next_tokens`](crate::OutputLayer::next_tokens), which know the vocabulary.
    pub fn with_constraints(mut self, constraints: Constraints) -> Result<Self> {
        self.set_constraints(constraints)?;
        Ok(self)
    }

    /// Sets the constraints from now on, such as the ids that a grammar allows next. The text that was generated stays.
    ///
    /// # Errors
    ///
    /// The errors are those of [`TokenRequest::with_constraints`]; the request is unchanged then.
    pub fn set_constraints(&mut self, constraints: Constraints) -> Result<()> {
        constraints.validate()?;
        self.constraints = constraints;
        Ok(())
    }

    /// Adds the token ids of the prompt, for the repetition penalty and a processor of all logits. Ids outside the
    /// vocabulary, such as the placeholders of an image, have no logit to penalise, and change nothing but the place of
    /// others in a penalty's window.
    pub fn with_prompt(mut self, token_ids: &[u32]) -> Self {
        self.history.add_to_prompt(token_ids);
        self
    }

    /// Sets the ids that end the text, of which many models have several. They decide whether the text
    /// [has ended](TokenRequest::has_ended), and [`verify`](crate::OutputLayer::verify) accepts no draft after them.
    pub fn with_ends(self, token_ids: &[u32]) -> Self {
        TokenRequest { ends: token_ids.to_vec(), ..self }
    }

    /// Draws none of the [ends](TokenRequest::with_ends) before `n` ids have been generated.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use mos_head::decode::{Sampling, TokenRequest};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Tensor::new(&[[4f32], [3.], [2.]], &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight, None)?;
    /// let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
    /// let mut request = TokenRequest::new(Sampling::greedy(), 42)?.with_ends(&[0, 1]).with_min_tokens(2);
    /// let mut text = Vec::new();
    /// while !request.has_ended() {
    ///     text.push(head.next_tokens(&hidden, &[&request])?[0].token_id);
    ///     request.push(text[text.len() - 1]);
    /// }
    /// assert_eq!(text, [2, 2, 0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_min_tokens(self, n: usize) -> Self {
        TokenRequest { min_tokens: n, ..self }
    }

    /// Also returns the `n` most probable token ids.
    pub fn with_best(self, n: usize) -> Self {
        TokenRequest { best: n, ..self }
    }

    /// Sets whether the entropy is returned.
    pub fn with_entropy(self, entropy: bool) -> Self {
        TokenRequest { entropy, ..self }
    }

    /// Sets whether the rank of the token id is returned.
    pub fn with_rank(self, rank: bool) -> Self {
        TokenRequest { rank, ..self }
    }

    /// Adds a generated token id to the text: it counts in the penalties, and the noise of the next draw is that of the
    /// next step. An id outside the vocabulary has no logit to penalise.
    pub fn push(&mut self, token_id: u32) {
        self.history.add_generated(token_id);
    }

    /// The number of token ids that were generated.
    pub fn generated(&self) -> u64 {
        self.history.generated() as u64
    }

    /// Whether the last generated id is one of the [ends](TokenRequest::with_ends).
    pub fn has_ended(&self) -> bool {
        self.history.last_generated().is_some_and(|id| self.ends_at(id))
    }

    /// The ids that end the text.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The number of ids that are generated before the text may end.
    pub fn min_tokens(&self) -> usize {
        self.min_tokens
    }

    /// Whether this id ends the text.
    pub(crate) fn ends_at(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// The ids that would end the text too early.
    pub(super) fn early_ends(&self) -> &[u32] {
        if self.history.generated() < self.min_tokens {
            &self.ends
        } else {
            &[]
        }
    }

    /// The options of the draw.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// The seed of the draws.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The constraints, which change the logits before a token id is drawn.
    pub fn constraints(&self) -> &Constraints {
        &self.constraints
    }

    /// The number of most probable token ids that are returned.
    pub fn best(&self) -> usize {
        self.best
    }

    /// Whether the entropy is returned.
    pub fn entropy(&self) -> bool {
        self.entropy
    }

    /// Whether the rank of the token id is returned.
    pub fn rank(&self) -> bool {
        self.rank
    }

    /// The noise of the next draw.
    pub(super) fn noise(&self) -> Noise {
        Noise::new(self.seed, self.generated())
    }

    /// Hashes the request, except for its processors, so that ranks can compare theirs.
    pub(crate) fn hash(&self, state: &mut impl Hasher) {
        let TokenRequest { sampling, seed, constraints, history, ends, min_tokens, forced, best, entropy, rank } = self;
        (seed, ends, min_tokens, forced, best, entropy, rank, format!("{sampling:?} {constraints:?}")).hash(state);
        history.hash(state);
    }

    /// Checks the request against a vocabulary, before it joins a batch: its error would be an error of the whole
    /// batch.
    ///
    /// # Errors
    ///
    /// If an id of `bias`, `allowed`, `banned`, the ends or a forced one is not in the vocabulary, a mask is of another
    /// length, or more of the most probable ids are asked for than it has.
    /// [`next_tokens`](crate::OutputLayer::next_tokens) has the same error, as [`Error::Request`] with the place of the
    /// request.
    ///
    /// # Examples
    ///
    /// ```
    /// use mos_head::decode::{Constraints, Sampling, TokenRequest};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let constraints = Constraints::new().with_bias(&[(17, 2.0), (50_000, -100.0)]);
    /// let request = TokenRequest::new(Sampling::new(), 42)?.with_constraints(constraints)?;
    /// let error = request.check(32_000).unwrap_err();
    /// assert_eq!(error.to_string(), "bias: expected token ids below vocab_size 32000, got 50000 at index 1");
    /// assert!(request.check(64_000).is_ok());
    /// # Ok(())
    /// # }
    /// ```
    pub fn check(&self, vocab_size: usize) -> Result<()> {
        self.constraints.check_vocab(vocab_size)?;
        check_ids("ends", &self.ends, vocab_size)?;
        check_ids("forced", &self.forced, vocab_size)?;
        if self.best <= vocab_size {
            Ok(())
        } else {
            Err(Error::config("best", format!("at most vocab_size {vocab_size}"), self.best))
        }
    }
}
