//! The next token ids of several texts, each of which has settings of its own, from one read of the decoder.
//!
//! [`TokenRequest`] has the settings of one text. The query that answers it collects the log-probabilities of all ids,
//! changes them by the request's [`Constraints`], and draws an id with noise that is a function of seed, step and id.

mod constraints;
mod draw;
mod noise;
mod request;

use candle_core::{DType, Tensor};

use crate::backend::distribution::{Computed, Distribution, Visit, TASK_TILES, TILE};
use crate::backend::parallel;
use crate::backend::ranking::top_k;
use crate::error::{Error, Result};
use crate::tensors::checks::check_elements;
pub use constraints::Constraints;
use draw::draw;
pub use request::TokenRequest;

/// The next token id of a text, and the other results that its request asks for, from
/// [`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens). Log-probabilities and entropy are in nats.
///
/// # Examples
///
/// From the log-probabilities of another model:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::{NextToken, Sampling, TokenRequest};
///
/// # fn main() -> mos_head::Result<()> {
/// let log_probs = Tensor::new(&[[0.1f32, 0.6, 0.3]], &Device::Cpu)?.log()?; // one position
/// let request = TokenRequest::new(Sampling::new().with_top_k(2), 42)?.with_best(2).with_entropy(true);
/// let next = &NextToken::from_log_probs(&log_probs, &[&request])?[0];
/// assert_eq!([next.best[0].0, next.best[1].0], [1, 2]);
/// // It was drawn from two ids, whose probabilities sum to 0.9.
/// assert!((next.log_prob - next.sampled_log_prob - 0.9f64.ln()).abs() < 1e-6);
/// let entropy = -[0.1f64, 0.6, 0.3].map(|p| p * p.ln()).iter().sum::<f64>();
/// assert!((next.entropy.expect("asked for") - entropy).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NextToken {
    /// The drawn token id.
    pub token_id: u32,
    /// Its log-probability under the model.
    pub log_prob: f64,
    /// Its log-probability under the distribution that it was drawn from: after constraints, temperature and
    /// truncation.
    pub sampled_log_prob: f64,
    /// The most probable token ids under the model and their log-probabilities, as many as asked for; among equals the
    /// lowest id comes first.
    pub best: Vec<(u32, f64)>,
    /// The entropy of the model's distribution, if asked for.
    pub entropy: Option<f64>,
}

impl NextToken {
    /// Draws a token id from each distribution of log-probabilities `[.., vocab]`, for models without an output layer
    /// of this crate. Constraints change the log-probabilities, not logits.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[.., vocab]`, a float type; as many distributions as requests
    ///
    /// # Errors
    ///
    /// The errors are those of [`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens), and [`Error::Value`] if a
    /// log-probability is above zero by more than rounding, as a logit may be.
    pub fn from_log_probs(log_probs: &Tensor, requests: &[&TokenRequest]) -> Result<Vec<Self>> {
        Self::from_rounded(log_probs, log_probs.dtype(), requests)
    }

    /// Draws as [`NextToken::from_log_probs`] does, from log-probabilities that were rounded to the dtype `rounded`
    /// before they were given in another one.
    pub(crate) fn from_rounded(log_probs: &Tensor, rounded: DType, requests: &[&TokenRequest]) -> Result<Vec<Self>> {
        let dims = log_probs.dims();
        let &[ref leading @ .., vocab] = dims else { return Err(Error::shape("log_probs", "[.., vocab]", dims)) };
        let query = NextTokenQuery::new(requests, check_elements("log_probs", leading)?, vocab)?;
        super::log_probs::visit(log_probs, rounded, &query)
    }
}

/// A query for the next token id of each position, with a request for each.
pub(crate) struct NextTokenQuery<'a> {
    requests: &'a [&'a TokenRequest],
}

impl<'a> NextTokenQuery<'a> {
    /// Checks that there is a request for each position, and each request against the vocabulary.
    pub(crate) fn new(requests: &'a [&'a TokenRequest], positions: usize, vocab: usize) -> Result<Self> {
        if requests.len() != positions {
            return Err(Error::config("requests", format!("one for each of {positions} positions"), requests.len()));
        }
        for (index, request) in requests.iter().enumerate() {
            request.check(vocab).map_err(|error| Error::Request { index, error: Box::new(error) })?;
        }
        Ok(NextTokenQuery { requests })
    }
}

impl Visit for NextTokenQuery<'_> {
    type Output = NextToken;

    fn needs_logits(&self) -> bool {
        self.requests.iter().any(|request| request.constraints.need_logits())
    }

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<NextToken> {
        let (log_probs, offset) = AllLogProbsQuery.visit(position, distribution)?;
        self.answer(position, &log_probs, offset)
    }
}

/// A query for the log-probabilities of all ids, and for the offset: its sum with a log-probability is the id's logit.
pub(crate) struct AllLogProbsQuery;

impl Visit for AllLogProbsQuery {
    type Output = (Vec<f64>, f64);

    fn needs_logits(&self) -> bool {
        true
    }

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<Self::Output> {
        distribution.check(position)?;
        Ok((read_all_ids(distribution), distribution.logit_offset().unwrap_or(0.0)))
    }
}

impl NextTokenQuery<'_> {
    /// Answers the request of a position from the log-probabilities of all ids. The sum of a log-probability and the
    /// `offset` is the id's logit.
    pub(crate) fn answer(&self, position: usize, log_probs: &[f64], offset: f64) -> Result<NextToken> {
        let request = self.requests[position];
        let best = match request.best {
            0 => Vec::new(),
            n => top_k(&Computed::new(log_probs), n).into_iter().map(|(log_p, id)| (id, log_p)).collect(),
        };
        let changed = request.constraints.apply(log_probs, offset, &request.history);
        let z = changed.as_deref().unwrap_or(log_probs);
        if changed.is_some() {
            check_changed_logits(z, position)?;
        }
        let drawn = draw(z, changed.is_none(), &request.sampling, request.noise());
        let drawn = drawn.ok_or(Error::EmptySet { position })?;
        Ok(NextToken {
            token_id: drawn.id,
            log_prob: log_probs[drawn.id as usize],
            sampled_log_prob: drawn.log_prob,
            best,
            entropy: request.entropy.then(|| entropy(log_probs)),
        })
    }
}

/// Checks that constraints have made no logit NaN or plus infinity, and not all of them minus infinity.
fn check_changed_logits(z: &[f64], position: usize) -> Result<()> {
    let mut is_possible = false;
    for (index, &z) in z.iter().enumerate() {
        if z.is_nan() || z == f64::INFINITY {
            let (argument, expected) = ("logits after constraints", "numbers or minus infinity");
            return Err(Error::Value { argument, expected, position, index, got: z });
        }
        is_possible |= z > f64::NEG_INFINITY;
    }
    if is_possible {
        Ok(())
    } else {
        Err(Error::EmptySet { position })
    }
}

/// Reads the log-probabilities of all ids, tile by tile.
fn read_all_ids(distribution: &dyn Distribution) -> Vec<f64> {
    let mut log_probs = vec![0.0; distribution.vocab()];
    let tasks = log_probs.chunks_mut(TASK_TILES * TILE).enumerate();
    parallel::for_each_with(tasks, Vec::new, |buffer, (task, to)| {
        for (tile, to) in (task * TASK_TILES..).zip(to.chunks_mut(TILE)) {
            let from = distribution.tile(tile, buffer);
            to.copy_from_slice(from);
        }
    });
    log_probs
}

/// Computes `-sum_v p(v) log p(v)`. Rounding does not move it below 0 or above `ln vocab`.
fn entropy(log_probs: &[f64]) -> f64 {
    let term = |&log_p: &f64| if log_p == f64::NEG_INFINITY { 0.0 } else { -log_p.exp() * log_p };
    let tile_sums =
        |log_probs: &[f64]| -> Vec<f64> { log_probs.chunks(TILE).map(|tile| tile.iter().map(term).sum()).collect() };
    let tile_sums = parallel::map(log_probs.chunks(TASK_TILES * TILE), tile_sums);
    tile_sums.iter().flatten().sum::<f64>().clamp(0.0, (log_probs.len() as f64).ln())
}
