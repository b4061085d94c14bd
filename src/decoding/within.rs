//! Chooses from the distributions over some ids, renormalised.

use candle_core::Tensor;

use super::multinomial::Draw;
use super::sampler::Sampler;
use super::top_k::TopK;
use crate::backend;
use crate::backend::distribution::{Computed, Distribution, Real, Visit, TILE};
use crate::backend::operands::accumulation_dtype;
use crate::backend::ranking::TopKQuery;
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::tensors::id_lists::Restriction;
use crate::tensors::transfer;

/// A query of each position's distribution over the ids that are kept. Its ids are places among these.
struct Within<'a, V> {
    visit: &'a V,
    kept: &'a Restriction,
}

impl<V: Visit> Visit for Within<'_, V> {
    type Output = V::Output;

    fn visit<F: Real>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<V::Output> {
        let Some(ids) = self.kept.ids(position) else { return self.visit.visit(position, distribution) };
        distribution.check(position)?;
        let (mut log_probs, mut buffer) = (Vec::with_capacity(ids.len()), Vec::new());
        for ids in ids.chunk_by(|a, b| *a as usize / TILE == *b as usize / TILE) {
            let tile = distribution.tile(ids[0] as usize / TILE, F::neg_infinity(), &mut buffer);
            log_probs.extend(ids.iter().map(|&id| tile[id as usize % TILE]));
        }
        let largest = log_probs.iter().fold(f64::NEG_INFINITY, |largest, x| largest.max(x.f64()));
        if largest == f64::NEG_INFINITY {
            return Err(Error::Impossible { position });
        }
        let sum: f64 = log_probs.iter().map(|x| (x.f64() - largest).exp()).sum();
        let of_all = largest + sum.ln();
        log_probs.iter_mut().for_each(|x| *x = <F as candle_core::WithDType>::from_f64(x.f64() - of_all));
        self.visit.visit(position, &Computed::new(&log_probs))
    }
}

impl Mixture {
    /// The `k` most probable of the ids that are kept, in descending order; fewer columns if all positions keep fewer.
    /// A position with fewer than the others repeats its last id, with a log-probability of minus infinity.
    pub(crate) fn top_k_within(&self, kept: &Restriction, k: usize) -> Result<TopK> {
        let operands = self.operands();
        let mut found = backend::visit(operands, &Within { visit: &TopKQuery { k }, kept })?;
        let of_none = match kept {
            Restriction::Shared(ids) => ids.len().min(k),
            Restriction::All | Restriction::Each(_) => k,
        };
        let n = found.iter().map(Vec::len).max().unwrap_or(of_none);
        for (position, ranked) in found.iter_mut().enumerate() {
            if let Some(ids) = kept.ids(position) {
                ranked.iter_mut().for_each(|(_, place)| *place = ids[*place as usize]);
            }
            if let Some(&(_, last)) = ranked.last() {
                ranked.resize(n, (f64::NEG_INFINITY, last));
            }
        }
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        TopK::from_ranked(&found, &[self.leading(), &[n]].concat(), dtype, operands.contexts.device())
    }

    /// Draws one of the ids that are kept at each position. The sampler draws no components.
    pub(crate) fn sample_within(&self, kept: &Restriction, sampler: &mut Sampler) -> Result<Tensor> {
        let mixture = match sampler.sampling().component_temperature {
            1.0 => self.clone(),
            temperature => self.with_component_temperature(temperature)?,
        };
        let operands = mixture.operands();
        let uniform = sampler.uniform(operands.sizes.positions);
        let draw = Draw { sampling: sampler.sampling(), uniform: &uniform };
        let mut ids = backend::visit(operands, &Within { visit: &draw, kept })?;
        for (position, id) in ids.iter_mut().enumerate() {
            if let Some(ids) = kept.ids(position) {
                *id = ids[*id as usize];
            }
        }
        transfer::to_device(ids, self.leading(), operands.contexts.device())
    }
}
