//! Constraints: they change the logits of a request before its token id is drawn.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::backend::distribution::TILE;
use crate::backend::parallel;
use crate::error::{Error, Result};
use crate::tensors::checks::check_number;

/// Changes of the logits z of a request before its token id is drawn. They are made in this order:
///
/// 1. [`bias`](Constraints::with_bias): `z_v + b_v`
/// 2. [`repetition_penalty`](Constraints::with_repetition_penalty) r, of ids in the prompt or generated: `z_v / r` if
///    it is positive, else `z_v r`
/// 3. [`frequency_penalty`](Constraints::with_frequency_penalty) f and
///    [`presence_penalty`](Constraints::with_presence_penalty) p, of ids generated n times: `z_v - f n - p`
/// 4. a [`processor`](Constraints::with_processor) of your own
/// 5. ids that are not [`allowed`](Constraints::with_allowed), or are [`banned`](Constraints::with_banned): minus
///    infinity
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
    /// The only token ids that may be drawn. The default is all.
    pub allowed: Option<Vec<u32>>,
    /// Token ids that are never drawn. The default is none.
    pub banned: Vec<u32>,
    processor: Option<Processor>,
}

/// A function of the user's own that changes logits.
#[derive(Clone)]
struct Processor(Arc<ChangeLogits>);

/// Changes consecutive logits. Its first argument is the token id of the first one.
type ChangeLogits = dyn Fn(u32, &mut [f64]) + Send + Sync;

impl fmt::Debug for Processor {
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
            allowed: None,
            banned: Vec::new(),
            processor: None,
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

    /// Draws from these token ids alone.
    pub fn with_allowed(self, token_ids: &[u32]) -> Self {
        Constraints { allowed: Some(token_ids.to_vec()), ..self }
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

    /// Checks that the ids of `bias`, `allowed` and `banned` are in the vocabulary. Ids of the text need not be:
    /// placeholders of images have no logit.
    pub(super) fn check_vocab(&self, vocab: usize) -> Result<()> {
        check_ids("bias", self.bias.iter().map(|(id, _)| id), vocab)?;
        check_ids("allowed", self.allowed.iter().flatten(), vocab)?;
        check_ids("banned", &self.banned, vocab)
    }

    /// Whether a penalty may change a logit.
    fn has_penalty(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Whether the result depends on the logits themselves, not only on their differences.
    pub(super) fn need_logits(&self) -> bool {
        self.repetition_penalty != 1.0 || self.processor.is_some()
    }

    /// Returns the changed logits of all ids, or `None` if nothing changes. A logit before the changes is the sum of an
    /// id's log-probability and the `offset`.
    pub(super) fn apply(&self, log_probs: &[f64], offset: f64, history: &History) -> Option<Vec<f64>> {
        // Ids outside the vocabulary have no logit.
        let has_logit = |id: &u32| (*id as usize) < log_probs.len();
        let is_penalised = self.has_penalty() && history.occurrences.keys().any(has_logit);
        let has_no_ids = self.bias.is_empty() && self.allowed.is_none() && self.banned.is_empty();
        if has_no_ids && !is_penalised && self.processor.is_none() {
            return None;
        }
        let mut z: Vec<f64> = log_probs.iter().map(|log_p| log_p + offset).collect();
        for &(id, bias) in &self.bias {
            z[id as usize] += bias;
        }
        for (id, occurrence) in history.occurrences.iter().filter(|(id, _)| is_penalised && has_logit(id)) {
            let z = &mut z[*id as usize];
            if self.repetition_penalty != 1.0 {
                *z = if *z > 0.0 { *z / self.repetition_penalty } else { *z * self.repetition_penalty };
            }
            if occurrence.generated > 0 {
                *z -= self.frequency_penalty * f64::from(occurrence.generated) + self.presence_penalty;
            }
        }
        if let Some(Processor(processor)) = &self.processor {
            parallel::for_each(z.chunks_mut(TILE).enumerate(), |(tile, z)| processor((tile * TILE) as u32, z));
        }
        if let Some(allowed) = &self.allowed {
            let unrestricted = std::mem::replace(&mut z, vec![f64::NEG_INFINITY; log_probs.len()]);
            allowed.iter().for_each(|&id| z[id as usize] = unrestricted[id as usize]);
        }
        for &id in &self.banned {
            z[id as usize] = f64::NEG_INFINITY;
        }
        Some(z)
    }
}

/// The token ids of a request's text, as far as penalties and noise depend on them.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    occurrences: HashMap<u32, Occurrence>,
    /// The number of ids that were generated.
    pub(super) generated: u64,
}

/// The occurrences of a token id in a text.
#[derive(Clone, Copy, Debug, Default)]
struct Occurrence {
    /// The number of times that it was generated; zero if it is in the prompt alone.
    generated: u32,
}

impl History {
    /// Adds an id of the prompt.
    pub(super) fn add_to_prompt(&mut self, id: u32) {
        self.occurrences.entry(id).or_default();
    }

    /// Adds a generated id.
    pub(super) fn add_generated(&mut self, id: u32) {
        let occurrence = self.occurrences.entry(id).or_default();
        occurrence.generated = occurrence.generated.saturating_add(1);
        self.generated += 1;
    }

    /// Hashes the text, so that ranks can compare theirs.
    pub(super) fn hash(&self, state: &mut impl Hasher) {
        let count = |(id, occurrence): (&u32, &Occurrence)| (*id, occurrence.generated);
        let mut occurrences: Vec<_> = self.occurrences.iter().map(count).collect();
        occurrences.sort_unstable();
        (self.generated, occurrences).hash(state);
    }
}

/// Returns an error that names the first id that is not in the vocabulary.
fn check_ids<'a>(argument: &'static str, ids: impl IntoIterator<Item = &'a u32>, vocab: usize) -> Result<()> {
    match ids.into_iter().enumerate().find(|(_, &id)| id as usize >= vocab) {
        Some((index, id)) => Err(Error::config(
            argument,
            format!("token ids below vocab_size {vocab}"),
            format!("{id} at index {index}"),
        )),
        None => Ok(()),
    }
}
