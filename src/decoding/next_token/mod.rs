//! The next token ids of several texts, each of which has settings of its own, from one read of the decoder.
//!
//! [`TokenRequest`] has the settings of one text. The query that answers it collects the log-probabilities of all ids
//! or of some ([`entries`]), changes them by the request's [`Constraints`] ([`changes`]), and draws an id with noise
//! that is a function of seed, step and id.

mod changes;
mod constraints;
mod draw;
mod entries;
mod history;
mod noise;
mod request;

use candle_core::{DType, Tensor};

use crate::backend::distribution::{Computed, Distribution, Visit, TASK_TILES, TILE};
use crate::backend::parallel;
use crate::backend::ranking::top_k;
use crate::error::{Error, Result};
use crate::tensors::checks::check_elements;
pub use constraints::Constraints;
use draw::{draw, Drawn};
pub(crate) use entries::Entries;
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
    /// The most probable token ids under the model and their log-probabilities, as many as asked for, or all that are
    /// allowed if these are fewer; among equals the lowest id comes first.
    pub best: Vec<(u32, f64)>,
    /// The entropy of the model's distribution, if asked for.
    pub entropy: Option<f64>,
    /// The place of the token id in the order of probabilities under the model, if asked for: the most probable id has
    /// 1; among equals the lowest id comes first.
    pub rank: Option<usize>,
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
        let requests: Vec<_> = requests.chunks(1).collect();
        Ok(Self::from_rounded(log_probs, log_probs.dtype(), &requests)?.into_iter().flatten().collect())
    }

    /// Draws as [`NextToken::from_log_probs`] does, for a list of requests at each position, from log-probabilities
    /// that were rounded to the dtype `rounded` before they were given in another one.
    pub(crate) fn from_rounded(
        log_probs: &Tensor,
        rounded: DType,
        requests: &[&[&TokenRequest]],
    ) -> Result<Vec<Vec<Self>>> {
        let dims = log_probs.dims();
        let &[ref leading @ .., vocab] = dims else { return Err(Error::shape("log_probs", "[.., vocab]", dims)) };
        let query = NextTokenQuery::new(requests, check_elements("log_probs", leading)?, vocab)?;
        super::log_probs::visit(log_probs, rounded, &query)
    }
}

/// A query for the next token ids of each position, with a list of requests for each.
pub(crate) struct NextTokenQuery<'a> {
    requests: &'a [&'a [&'a TokenRequest]],
}

impl<'a> NextTokenQuery<'a> {
    /// Checks that there is a list for each position, and each request against the vocabulary.
    pub(crate) fn new(requests: &'a [&'a [&'a TokenRequest]], positions: usize, vocab: usize) -> Result<Self> {
        if requests.len() != positions {
            return Err(Error::config("requests", format!("one for each of {positions} positions"), requests.len()));
        }
        for (index, request) in requests.iter().copied().flatten().enumerate() {
            request.check(vocab).map_err(|error| Error::Request { index, error: Box::new(error) })?;
        }
        Ok(NextTokenQuery { requests })
    }
}

impl Visit for NextTokenQuery<'_> {
    type Output = Vec<NextToken>;

    fn needs_logits(&self) -> bool {
        self.requests.iter().copied().flatten().any(|request| request.constraints.need_logits())
    }

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<Vec<NextToken>> {
        let (log_probs, offset) = AllLogProbsQuery.visit(position, distribution)?;
        self.answer(position, &log_probs, offset, Entries::all(log_probs.len()))
    }
}

/// A query for the log-probabilities of all ids, and for the offset: its sum with a log-probability is the id's logit.
pub(crate) struct AllLogProbsQuery;

impl Visit for AllLogProbsQuery {
    type Output = (Vec<f64>, f64);

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<Self::Output> {
        distribution.check(position)?;
        Ok((read_all_ids(distribution), distribution.logit_offset().unwrap_or(0.0)))
    }
}

impl NextTokenQuery<'_> {
    /// Answers the requests of a position from the log-probabilities of these entries. The sum of a log-probability and
    /// the `offset` is the id's logit.
    pub(crate) fn answer(
        &self,
        position: usize,
        log_probs: &[f64],
        offset: f64,
        entries: Entries<'_>,
    ) -> Result<Vec<NextToken>> {
        let requests = self.requests[position];
        // What depends on the distribution alone is computed once.
        let most = requests.iter().map(|request| request.best).max().unwrap_or(0);
        let mut best = if most > 0 { top_k(&Computed::new(log_probs), most) } else { Vec::new() };
        best.iter_mut().for_each(|(_, entry)| *entry = entries.id(*entry as usize));
        let entropy = requests.iter().any(|request| request.entropy).then(|| entropy(log_probs));
        let answer = |request: &&TokenRequest| {
            let Drawn { entry, log_prob } = match request.forced {
                // An id without an entry is impossible.
                Some(id) => Drawn { entry: entries.entry(id).unwrap_or(usize::MAX), log_prob: 0.0 },
                None => request.draw(log_probs, offset, entries, position)?,
            };
            let log_p = log_probs.get(entry).copied().unwrap_or(f64::NEG_INFINITY);
            let token_id = request.forced.unwrap_or_else(|| entries.id(entry));
            Ok(NextToken {
                token_id,
                log_prob: log_p,
                sampled_log_prob: log_prob,
                best: best.iter().take(request.best).map(|&(log_p, id)| (id, log_p)).collect(),
                entropy: entropy.filter(|_| request.entropy),
                rank: request.rank.then(|| rank(log_probs, entries, log_p, token_id)),
            })
        };
        requests.iter().map(answer).collect()
    }
}

impl TokenRequest {
    /// Draws an entry, after the changes of the constraints.
    fn draw(&self, log_probs: &[f64], offset: f64, entries: Entries<'_>, position: usize) -> Result<Drawn> {
        let changed = self.constraints.apply(log_probs, offset, entries, &self.history, self.early_ends());
        let z = changed.as_deref().unwrap_or(log_probs);
        if changed.is_some() {
            check_changed_logits(z, entries, position)?;
        }
        draw(z, entries, changed.is_none(), &self.sampling, self.noise()).ok_or(Error::EmptySet { position })
    }
}

/// Returns the place of an id with this log-probability in the order of probabilities, from 1 on. Ids without an entry,
/// which are impossible, come in the order of the ids too.
fn rank(log_probs: &[f64], entries: Entries<'_>, log_p: f64, id: u32) -> usize {
    let precedes = |(entry, &other): (usize, &f64)| other > log_p || other == log_p && entries.id(entry) < id;
    let among_entries = log_probs.iter().enumerate().filter(|&entry| precedes(entry)).count();
    let without_entry = if log_p == f64::NEG_INFINITY { entries.without_entry_before(id) } else { 0 };
    1 + among_entries + without_entry
}

/// Checks that constraints have made no logit NaN or plus infinity, and not all of them minus infinity.
fn check_changed_logits(z: &[f64], entries: Entries<'_>, position: usize) -> Result<()> {
    let mut is_possible = false;
    for (entry, &z) in z.iter().enumerate() {
        if z.is_nan() || z == f64::INFINITY {
            let index = entries.id(entry) as usize;
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
    // The sum may be minus zero, which zero is added to.
    tile_sums.iter().flatten().sum::<f64>().clamp(0.0, (log_probs.len() as f64).ln()) + 0.0
}
