//! Chooses ids from distributions that are restricted to allowed ids, and renormalised over them.

use candle_core::Tensor;

use super::multinomial::DrawQuery;
use super::next_token::{AllLogProbsQuery, Entries, NextToken, NextTokenQuery, TokenRequest};
use super::sampler::Sampler;
use super::top_k::TopK;
use crate::backend;
use crate::backend::distribution::{Computed, Distribution, Visit, TILE};
use crate::backend::ranking::TopKQuery;
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::id_lists::Restriction;
use crate::tensors::log_softmax::log_sum_exp;
use crate::tensors::transfer;

/// The distribution of a position, renormalised over its allowed ids.
struct Renormalised {
    /// The log-probabilities of the allowed ids.
    log_probs: Vec<f64>,
    /// The sum of a log-probability and this is the id's logit, if there is a single component.
    logit_offset: Option<f64>,
}

impl Renormalised {
    /// Renormalises a distribution over `ids`, which ascend. Those of a single component are computed from the logits
    /// of these ids alone: the log-probabilities of a gathered decoder depend on the sets of the other positions by
    /// rounding.
    fn new(position: usize, distribution: &dyn Distribution, ids: &[u32]) -> Result<Self> {
        distribution.check(position)?;
        let (mut values, mut buffer, mut are_logits) = (Vec::with_capacity(ids.len()), Vec::new(), false);
        for ids in ids.chunk_by(|a, b| *a as usize / TILE == *b as usize / TILE) {
            let tile = ids[0] as usize / TILE;
            are_logits = distribution.logit_tile(tile, &mut buffer).is_some();
            let tile = if are_logits { &buffer } else { distribution.tile(tile, &mut buffer) };
            values.extend(ids.iter().map(|&id| tile[id as usize % TILE]));
        }
        let log_sum = log_sum_exp(values.iter().copied(), 1.0);
        if log_sum == f64::NEG_INFINITY {
            return Err(Error::Impossible { position });
        }
        values.iter_mut().for_each(|x| *x -= log_sum);
        let offset = if are_logits { Some(0.0) } else { distribution.logit_offset() };
        Ok(Renormalised { log_probs: values, logit_offset: offset.map(|offset| offset + log_sum) })
    }
}

/// A query of each position's distribution over its allowed ids. The ids of its answer are places among these.
struct RestrictedQuery<'a, V> {
    query: &'a V,
    restriction: &'a Restriction,
}

impl<V: Visit> Visit for RestrictedQuery<'_, V> {
    type Output = V::Output;

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<V::Output> {
        match self.restriction.ids(position) {
            Some(ids) => {
                let renormalised = Renormalised::new(position, distribution, ids)?;
                self.query.visit(position, &Computed::new(&renormalised.log_probs))
            }
            None => self.query.visit(position, distribution),
        }
    }
}

/// A query for the next token ids of each position among its allowed ids.
struct NextTokenWithin<'a> {
    query: NextTokenQuery<'a>,
    restriction: &'a Restriction,
    /// The token id of each entry of the distribution; `None` if the entries are those of all ids.
    token_ids: Option<&'a [u32]>,
    vocab: usize,
}

impl Visit for NextTokenWithin<'_> {
    type Output = Vec<NextToken>;

    fn needs_logits(&self) -> bool {
        self.query.needs_logits()
    }

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<Vec<NextToken>> {
        let all = || self.token_ids.map_or(Entries::all(self.vocab), |ids| Entries::some(ids, self.vocab));
        let Some(places) = self.restriction.ids(position) else {
            let (log_probs, offset) = AllLogProbsQuery.visit(position, distribution)?;
            return self.query.answer(position, &log_probs, offset, all());
        };
        let Renormalised { log_probs, logit_offset } = Renormalised::new(position, distribution, places)?;
        let token_ids: Vec<u32>;
        let ids = match self.token_ids {
            Some(ids) => {
                token_ids = places.iter().map(|&place| ids[place as usize]).collect();
                &token_ids
            }
            None => places,
        };
        self.query.answer(position, &log_probs, logit_offset.unwrap_or(0.0), Entries::some(ids, self.vocab))
    }
}

impl Mixture {
    /// Returns the `k` most probable of the allowed ids, in descending order, or fewer columns if no position has `k`
    /// allowed ids. A position with fewer than the others repeats its last id, with a log-probability of minus
    /// infinity.
    pub(crate) fn top_k_within(&self, restriction: &Restriction, k: usize) -> Result<TopK> {
        let operands = self.operands();
        let mut found = backend::visit(operands, &RestrictedQuery { query: &TopKQuery { k }, restriction })?;
        let columns_without_positions = match restriction {
            Restriction::Shared(ids) => ids.len().min(k),
            Restriction::All | Restriction::Each(_) => k,
        };
        let n = found.iter().map(Vec::len).max().unwrap_or(columns_without_positions);
        for (position, ranked) in found.iter_mut().enumerate() {
            if let Some(ids) = restriction.ids(position) {
                ranked.iter_mut().for_each(|(_, place)| *place = ids[*place as usize]);
            }
            if let Some(&(_, last)) = ranked.last() {
                ranked.resize(n, (f64::NEG_INFINITY, last));
            }
        }
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        TopK::from_ranked(&found, &[self.leading(), &[n]].concat(), dtype, operands.contexts.device())
    }

    /// Chooses the next token ids at each position among its allowed ids. The mixture's ids are entries of a vocabulary
    /// of which they are the `token_ids`, or all ids.
    pub(crate) fn next_tokens_within(
        &self,
        restriction: &Restriction,
        token_ids: Option<&[u32]>,
        vocab: usize,
        requests: &[&[&TokenRequest]],
    ) -> Result<Vec<Vec<NextToken>>> {
        let operands = self.operands();
        let query = NextTokenQuery::new(requests, operands.sizes.positions, vocab)?;
        backend::visit(operands, &NextTokenWithin { query, restriction, token_ids, vocab })
    }

    /// Draws one of the allowed ids at each position. The sampler's options must not be ancestral.
    pub(crate) fn sample_within(&self, restriction: &Restriction, sampler: &mut Sampler) -> Result<Tensor> {
        let mixture = self.tempered(sampler)?;
        let operands = mixture.operands();
        let uniform = sampler.uniform(operands.sizes.positions);
        let draw = DrawQuery { sampling: sampler.sampling(), uniform: &uniform };
        let mut ids = backend::visit(operands, &RestrictedQuery { query: &draw, restriction })?;
        for (position, id) in ids.iter_mut().enumerate() {
            if let Some(ids) = restriction.ids(position) {
                *id = ids[*id as usize];
            }
        }
        transfer::to_device(ids, self.leading(), operands.contexts.device())
    }
}
