//! Constraints: they change the logits of a request before its token id is drawn.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tensors::checks::{check_ids, check_mask, check_number};

/// Changes of the logits z of a request before its token id is drawn. They are made in this order:
///
/// 1. [`bias`](Constraints::with_bias): `z_v + b_v`
/// 2. [`repetition_penalty`](Constraints::with_repetition_penalty) r, of ids in the prompt or generated: `z_v / r` if
///    it is positive, else `z_v r`
/// 3. [`frequency_penalty`](Constraints::with_frequency_penalty) f and
///    [`presence_penalty`](Constraints::with_presence_penalty) p, of ids generated n times: `z_v - f n - p`
/// 4. a [`processor`](Constraints::with_processor) of your own
/// 5. ids that are not [`allowed`](Constraints::with_allowed) or not in a [`mask`](Constraints::with_allowed_mask), that
///    are [`banned`](Constraints::with_banned), or that would end the text
///    [too early](crate::decode::TokenRequest::with_min_tokens): minus infinity
/// 6. a [`logits_processor`](Constraints::with_logits_processor) of your own, which sees all of them at once; those of
///    step 5 remain minus infinity
///
/// The penalties count the ids of the whole text, or of its last n ids
/// ([`with_penalty_window`](Constraints::with_penalty_window)).
///
/// For one softmax, z are its logits, as in other servers. A mixture of several softmaxes has no logits: z are its
/// log-probabilities, which differ from logits by a constant. The constant matters for the repetition penalty, for
/// which a log-probability is never positive, and for processors that look at the values themselves. For heads without
/// a mixture, and in [`NextToken::from_log_probs`](crate::decode::NextToken::from_log_probs), z are log-probabilities
/// too.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::decode::{Constraints, Sampling, TokenRequest};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// // Logits 4, 3, 2, 1 and 0 at every position.
/// let weight = Tensor::new(&[[4f32], [3.], [2.], [1.], [0.]], &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight, None)?;
/// let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
/// let next = |constraints| {
///     let request = TokenRequest::new(Sampling::greedy(), 42)?.with_constraints(constraints)?.with_prompt(&[0]);
///     Ok::<_, mos_head::Error>(head.next_tokens(&hidden, &[&request])?[0].token_id)
/// };
/// assert_eq!(next(Constraints::new())?, 0);
/// assert_eq!(next(Constraints::new().with_banned(&[0, 1]))?, 2);
/// assert_eq!(next(Constraints::new().with_repetition_penalty(1.5))?, 1); // 4 / 1.5 is below 3
/// assert_eq!(next(Constraints::new().with_bias(&[(4, 5.0)]))?, 4);
/// // Logits above 2.5 become minus infinity.
/// let capped = |_first: u32, z: &mut [f64]| z.iter_mut().filter(|z| **z > 2.5).for_each(|z| *z = f64::NEG_INFINITY);
/// assert_eq!(next(Constraints::new().with_processor(capped))?, 2);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - repetition penalty: Keskar et al.: CTRL: A Conditional Transformer Language Model for Controllable Generation.
///   2019, arXiv 1909.05858, section 4.1, without its mistake for negative logits.
/// - frequency and presence penalty: the parameters of these names of OpenAI's API.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Constraints {
    /// The numbers that are added to the logits of these token ids. The default is none.
    pub bias: Vec<(u32, f64)>,
    /// The factor of the repetition penalty. The default is 1, which changes nothing.
    pub repetition_penalty: f64,
    /// The number that a logit loses for each time that its id was generated. The default is 0.
    pub frequency_penalty: f64,
    /// The number that the logit of an id that was generated loses. The default is 0.
    pub presence_penalty: f64,
    /// The number of ids at the end of the text, prompt included, that the penalties count. The default is all.
    pub penalty_window: Option<usize>,
    /// The only token ids that may be drawn. The default is all.
    pub allowed: Option<Vec<u32>>,
    /// The only token ids that may be drawn, as a mask: id i may be if bit `i % 32` of word `i / 32` is set. The
    /// default is all.
    pub allowed_mask: Option<Arc<[u32]>>,
    /// Token ids that are never drawn. The default is none.
    pub banned: Vec<u32>,
    pub(super) processor: Option<Processor<TileProcessor>>,
    pub(super) logits_processor: Option<Processor<LogitsProcessor>>,
}

/// A function of the user's own that changes logits.
pub(super) struct Processor<F: ?Sized>(pub(super) Arc<F>);

impl<F: ?Sized> Clone for Processor<F> {
    fn clone(&self) -> Self {
        Processor(self.0.clone())
    }
}

/// Changes consecutive logits. Its first argument is the token id of the first one.
type TileProcessor = dyn Fn(u32, &mut [f64]) + Send + Sync;

/// Changes all logits. Its first argument is the text.
type LogitsProcessor = dyn Fn(&[u32], &mut [f64]) + Send + Sync;

impl<F: ?Sized> fmt::Debug for Processor<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Processor")
    }
}

impl Default for Constraints {
    fn default() -> Self {
        Self::new()
    }
}

impl Constraints {
    /// Constraints that change nothing.
    pub fn new() -> Self {
        Constraints {
            bias: Vec::new(),
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: None,
            allowed: None,
            allowed_mask: None,
            banned: Vec::new(),
            processor: None,
            logits_processor: None,
        }
    }

    /// Adds a number to the logit of each of these token ids. If an id occurs twice, both numbers are added. Minus
    /// infinity bans an id.
    pub fn with_bias(self, bias: &[(u32, f64)]) -> Self {
        Constraints { bias: bias.to_vec(), ..self }
    }

    /// Divides the logits of ids in the prompt or generated if they are positive, and multiplies them otherwise. A
    /// penalty above 1 makes these ids less probable.
    pub fn with_repetition_penalty(self, repetition_penalty: f64) -> Self {
        Constraints { repetition_penalty, ..self }
    }

    /// Subtracts this from the logit of an id for each time that it was generated.
    pub fn with_frequency_penalty(self, frequency_penalty: f64) -> Self {
        Constraints { frequency_penalty, ..self }
    }

    /// Subtracts this from the logit of each id that was generated.
    pub fn with_presence_penalty(self, presence_penalty: f64) -> Self {
        Constraints { presence_penalty, ..self }
    }

    /// Lets the penalties count only the last `ids` of the text, prompt included.
    pub fn with_penalty_window(self, ids: usize) -> Self {
        Constraints { penalty_window: Some(ids), ..self }
    }

    /// Draws from these token ids alone.
    pub fn with_allowed(self, token_ids: &[u32]) -> Self {
        Constraints { allowed: Some(token_ids.to_vec()), ..self }
    }

    /// Draws from the token ids of a mask alone, as grammar libraries have it: id i may be drawn if bit `i % 32` of
    /// word `i / 32` is set. There are `vocab_size / 32` words, rounded up; bits beyond the vocabulary are ignored.
    /// With [`Constraints::with_allowed`], an id must be in both.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::decode::{Constraints, Sampling, TokenRequest};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Tensor::new(&[[4f32], [3.], [2.], [1.]], &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight, None)?;
    /// let constraints = Constraints::new().with_allowed_mask([0b1100].into()); // ids 2 and 3
    /// let request = TokenRequest::new(Sampling::greedy(), 42)?.with_constraints(constraints)?;
    /// let hidden = Tensor::new(&[[1f32]], &Device::Cpu)?;
    /// assert_eq!(head.next_tokens(&hidden, &[&request])?[0].token_id, 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_allowed_mask(self, words: Arc<[u32]>) -> Self {
        Constraints { allowed_mask: Some(words), ..self }
    }

    /// Never draws these token ids.
    pub fn with_banned(self, token_ids: &[u32]) -> Self {
        Constraints { banned: token_ids.to_vec(), ..self }
    }

    /// Changes logits by a function of your own. It gets the token id of the first of up to 512 consecutive logits, and
    /// these logits. It is called in any order and from several threads for the logits of one request.
    pub fn with_processor(self, processor: impl Fn(u32, &mut [f64]) + Send + Sync + 'static) -> Self {
        Constraints { processor: Some(Processor(Arc::new(processor))), ..self }
    }

    /// Changes all logits of a position at once, by a function of your own. It gets the text, which is the request's
    /// prompt and what was generated after it, and the logits of all ids, those of ids that must not be drawn being
    /// minus infinity.
    ///
    /// # Examples
    ///
    /// Ids whose logit is less than `n` standard deviations below the largest (Tang et al.: Top-n-sigma: Not All Logits
    /// Are You Need. 2024, arXiv 2411.07641):
    ///
    /// ```
    /// # use mos_head::decode::Constraints;
    /// fn top_n_sigma(n: f64) -> Constraints {
    ///     Constraints::new().with_logits_processor(move |_text, z| {
    ///         let possible: Vec<f64> = z.iter().copied().filter(|z| *z > f64::NEG_INFINITY).collect();
    ///         let mean = possible.iter().sum::<f64>() / possible.len() as f64;
    ///         let variance = possible.iter().map(|z| (z - mean).powi(2)).sum::<f64>() / possible.len() as f64;
    ///         let largest = possible.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    ///         let least = largest - n * variance.sqrt();
    ///         z.iter_mut().filter(|z| **z < least).for_each(|z| *z = f64::NEG_INFINITY);
    ///     })
    /// }
    /// # use candle_core::{Device, Tensor};
    /// # use mos_head::decode::{Sampling, TokenRequest};
    /// # use mos_head::{OutputLayer, SoftmaxHead};
    /// # fn main() -> mos_head::Result<()> {
    /// # let head = SoftmaxHead::from_tensors(Tensor::new(&[[4f32], [3.9], [0.], [0.]], &Device::Cpu)?, None)?;
    /// # let hidden = Tensor::ones((1, 1), candle_core::DType::F32, &Device::Cpu)?;
    /// # for seed in 0..20 {
    /// #     let request = TokenRequest::new(Sampling::new().with_temperature(9.0), seed)?;
    /// #     let request = request.with_constraints(top_n_sigma(1.0))?;
    /// #     assert!(head.next_tokens(&hidden, &[&request])?[0].token_id < 2);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Ids that would repeat an n-gram of the text, of which none is drawn:
    ///
    /// ```
    /// # use mos_head::decode::Constraints;
    /// fn without_repeated_ngrams(n: usize) -> Constraints {
    ///     Constraints::new().with_logits_processor(move |text, z| {
    ///         let last = &text[(text.len() + 1).saturating_sub(n)..];
    ///         for ngram in text.windows(n).filter(|ngram| ngram[..n - 1] == *last) {
    ///             if let Some(z) = z.get_mut(ngram[n - 1] as usize) {
    ///                 *z = f64::NEG_INFINITY;
    ///             }
    ///         }
    ///     })
    /// }
    /// # use candle_core::{Device, Tensor};
    /// # use mos_head::decode::{Sampling, TokenRequest};
    /// # use mos_head::{OutputLayer, SoftmaxHead};
    /// # fn main() -> mos_head::Result<()> {
    /// # let head = SoftmaxHead::from_tensors(Tensor::new(&[[4f32], [3.], [2.]], &Device::Cpu)?, None)?;
    /// # let hidden = Tensor::ones((1, 1), candle_core::DType::F32, &Device::Cpu)?;
    /// # let request = TokenRequest::new(Sampling::greedy(), 0)?.with_constraints(without_repeated_ngrams(2))?;
    /// # let mut request = request.with_prompt(&[1, 0, 0, 1]);
    /// # assert_eq!(head.next_tokens(&hidden, &[&request])?[0].token_id, 1); // after 1, not 0 again
    /// # request.push(1);
    /// # assert_eq!(head.next_tokens(&hidden, &[&request])?[0].token_id, 2); // nor 1
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Locally typical sampling: the ids whose surprise is nearest to the entropy, as many as have the probability `p`
    /// (Meister, Pimentel, Wiher, Cotterell: Locally Typical Sampling. TACL 2023, arXiv 2202.00666):
    ///
    /// ```
    /// # use mos_head::decode::Constraints;
    /// fn typical(p: f64) -> Constraints {
    ///     Constraints::new().with_logits_processor(move |_text, z| {
    ///         let largest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    ///         let log_sum = z.iter().map(|z| (z - largest).exp()).sum::<f64>().ln() + largest;
    ///         let mut ids: Vec<usize> = (0..z.len()).filter(|&id| z[id] > f64::NEG_INFINITY).collect();
    ///         let entropy: f64 = ids.iter().map(|&id| (z[id] - log_sum).exp() * (log_sum - z[id])).sum();
    ///         let distance = |id: &usize| (log_sum - z[*id] - entropy).abs();
    ///         ids.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    ///         let mut mass = 0.0;
    ///         let outside = ids.iter().skip_while(|&&id| {
    ///             let is_in = mass < p;
    ///             mass += (z[id] - log_sum).exp();
    ///             is_in
    ///         });
    ///         outside.copied().collect::<Vec<_>>().into_iter().for_each(|id| z[id] = f64::NEG_INFINITY);
    ///     })
    /// }
    /// # use candle_core::{Device, Tensor};
    /// # use mos_head::decode::{Sampling, TokenRequest};
    /// # use mos_head::{OutputLayer, SoftmaxHead};
    /// # fn main() -> mos_head::Result<()> {
    /// # // Probabilities 0.6, 0.3 and 0.1: the entropy is 0.9, to which 1.2 is nearest, and then 0.5.
    /// # let weight = Tensor::new(&[[0.6f32], [0.3], [0.1]], &Device::Cpu)?.log()?;
    /// # let head = SoftmaxHead::from_tensors(weight, None)?;
    /// # let hidden = Tensor::ones((1, 1), candle_core::DType::F32, &Device::Cpu)?;
    /// # for seed in 0..20 {
    /// #     let request = TokenRequest::new(Sampling::new(), seed)?.with_constraints(typical(0.2))?;
    /// #     assert_eq!(head.next_tokens(&hidden, &[&request])?[0].token_id, 1);
    /// #     let request = TokenRequest::new(Sampling::new(), seed)?.with_constraints(typical(0.5))?;
    /// #     assert!(head.next_tokens(&hidden, &[&request])?[0].token_id < 2);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_logits_processor(self, processor: impl Fn(&[u32], &mut [f64]) + Send + Sync + 'static) -> Self {
        Constraints { logits_processor: Some(Processor(Arc::new(processor))), ..self }
    }

    /// Checks the ranges of the penalties and of the biases.
    pub(super) fn validate(&self) -> Result<()> {
        let penalty = self.repetition_penalty;
        check_number(penalty > 0.0 && penalty.is_finite(), "repetition_penalty", "a finite number above 0", penalty)?;
        for (name, penalty) in
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)]
        {
            check_number(penalty.is_finite(), name, "a finite number", penalty)?;
        }
        // A NaN is not below infinity either.
        match self.bias.iter().position(|(_, bias)| bias.partial_cmp(&f64::INFINITY) != Some(Ordering::Less)) {
            None => Ok(()),
            Some(index) => {
                let got = format!("{} at index {index}", self.bias[index].1);
                Err(Error::config("bias", "finite numbers or minus infinity", got))
            }
        }
    }

    /// Checks that the ids of `bias`, `allowed` and `banned` are in the vocabulary, and that a mask has its length. Ids
    /// of the text need not be: placeholders of images have no logit.
    pub(super) fn check_vocab(&self, vocab: usize) -> Result<()> {
        check_ids("bias", self.bias.iter().map(|(id, _)| id), vocab)?;
        check_ids("allowed", self.allowed.iter().flatten(), vocab)?;
        if let Some(words) = &self.allowed_mask {
            check_mask("allowed_mask", words, vocab)?;
        }
        check_ids("banned", &self.banned, vocab)
    }
}
