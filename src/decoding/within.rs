//! Chooses ids from distributions that are restricted to allowed ids, and renormalised over them.

use candle_core::{DType, Tensor};

use super::multinomial::DrawQuery;
use super::sampler::Sampler;
use super::top_k::TopK;
use crate::backend;
use crate::backend::distribution::{Computed, Distribution, Visit, TILE};
use crate::backend::operands::{accumulation_dtype, Operands};
use crate::backend::ranking::TopKQuery;
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::tensors::id_lists::Restriction;
use crate::tensors::log_softmax::log_sum_exp;
use crate::tensors::transfer;

/// A query of each position's distribution over its allowed ids. The ids of its answer are places among these.
struct RestrictedQuery<'a, V> {
    query: &'a V,
    restriction: &'a Restriction,
    /// The dtype to which the renormalised log-probabilities are rounded: f32, or f64.
    dtype: DType,
}

impl<V: Visit> Visit for RestrictedQuery<'_, V> {
    type Output = V::Output;

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<V::Output> {
        let Some(ids) = self.restriction.ids(position) else { return self.query.visit(position, distribution) };
        distribution.check(position)?;
        let (mut log_probs, mut buffer) = (Vec::with_capacity(ids.len()), Vec::new());
        for ids in ids.chunk_by(|a, b| *a as usize / TILE == *b as usize / TILE) {
            let tile = distribution.tile(ids[0] as usize / TILE, f64::NEG_INFINITY, &mut buffer);
            log_probs.extend(ids.iter().map(|&id| tile[id as usize % TILE]));
        }
        let log_mass = log_sum_exp(log_probs.iter().copied(), 1.0);
        if log_mass == f64::NEG_INFINITY {
            return Err(Error::Impossible { position });
        }
        log_probs.iter_mut().for_each(|x| *x -= log_mass);
        if self.dtype == DType::F32 {
            log_probs.iter_mut().for_each(|x| *x = f64::from(*x as f32));
        }
        self.query.visit(position, &Computed::new(&log_probs))
    }
}

/// Runs a query on each position's distribution over its allowed ids.
fn visit_within<V: Visit>(operands: &Operands, restriction: &Restriction, query: &V) -> Result<Vec<V::Output>> {
    let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
    backend::visit(operands, &RestrictedQuery { query, restriction, dtype })
}

impl Mixture {
    /// Returns the `k` most probable of the allowed ids, in descending order, or fewer columns if no position has `k`
    /// allowed ids. A position with fewer than the others repeats its last id, with a log-probability of minus
    /// infinity.
    pub(crate) fn top_k_within(&self, restriction: &Restriction, k: usize) -> Result<TopK> {
        let operands = self.operands();
        let mut found = visit_within(operands, restriction, &TopKQuery { k })?;
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

    /// Draws one of the allowed ids at each position. The sampler's options must not be ancestral.
    pub(crate) fn sample_within(&self, restriction: &Restriction, sampler: &mut Sampler) -> Result<Tensor> {
        let mixture = self.tempered(sampler)?;
        let operands = mixture.operands();
        let uniform = sampler.uniform(operands.sizes.positions);
        let draw = DrawQuery { sampling: sampler.sampling(), uniform: &uniform };
        let mut ids = visit_within(operands, restriction, &draw)?;
        for (position, id) in ids.iter_mut().enumerate() {
            if let Some(ids) = restriction.ids(position) {
                *id = ids[*id as usize];
            }
        }
        transfer::to_device(ids, self.leading(), operands.contexts.device())
    }
}
