//! The settings of one text: how its next token id is drawn, and which other results are returned.

use std::hash::{Hash, Hasher};

use super::constraints::{Constraints, History};
use super::noise::Noise;
use crate::decoding::Sampling;
use crate::error::{Error, OptionName, Result};

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
    /// The number of most probable ids that are returned.
    pub(super) best: usize,
    /// Whether the entropy is returned.
    pub(super) entropy: bool,
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
        let (constraints, history) = (Constraints::new(), History::default());
        Ok(TokenRequest { sampling, seed, constraints, history, best: 0, entropy: false })
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

    /// Adds the token ids of the prompt, for the repetition penalty. Ids outside the vocabulary, such as the
    /// placeholders of an image, have no logit to penalise, and change nothing.
    pub fn with_prompt(mut self, token_ids: &[u32]) -> Self {
        token_ids.iter().for_each(|&id| self.history.add_to_prompt(id));
        self
    }

    /// Also returns the `n` most probable token ids.
    pub fn with_best(self, n: usize) -> Self {
        TokenRequest { best: n, ..self }
    }

    /// Sets whether the entropy is returned.
    pub fn with_entropy(self, entropy: bool) -> Self {
        TokenRequest { entropy, ..self }
    }

    /// Adds a generated token id to the text: it counts in the penalties, and the noise of the next draw is that of the
    /// next step. An id outside the vocabulary has no logit to penalise.
    pub fn push(&mut self, token_id: u32) {
        self.history.add_generated(token_id);
    }

    /// The number of token ids that were generated.
    pub fn generated(&self) -> u64 {
        self.history.generated
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

    /// The noise of the next draw.
    pub(super) fn noise(&self) -> Noise {
        Noise::new(self.seed, self.history.generated)
    }

    /// Hashes the request, except for its processor, so that ranks can compare theirs.
    pub(crate) fn hash(&self, state: &mut impl Hasher) {
        let TokenRequest { sampling, seed, constraints, history, best, entropy } = self;
        (seed, best, entropy, format!("{sampling:?} {constraints:?}")).hash(state);
        history.hash(state);
    }

    /// Checks the request against a vocabulary, before it joins a batch: its error would be an error of the whole
    /// batch.
    ///
    /// # Errors
    ///
    /// If an id of `bias`, `allowed` or `banned` is not in the vocabulary, or more of the most probable ids are asked
    /// for than it has. [`next_tokens`](crate::OutputLayer::next_tokens) has the same error, as [`Error::Request`] with
    /// the place of the request.
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
        if self.best <= vocab_size {
            Ok(())
        } else {
            Err(Error::config("best", format!("at most vocab_size {vocab_size}"), self.best))
        }
    }
}
