//! Chooses token ids from the renormalised distribution of each position.

use candle_core::{Tensor, D};

use super::gathered_rows::{gathered, is_single};
use super::restricted_mixture::RestrictedMixture;
use crate::decoding::{Sampler, TopK};
use crate::error::{Error, OptionName, Result};
use crate::mixture::Mixture;
use crate::tensors::id_lists::{IdLists, Restriction};

impl RestrictedMixture {
    /// The `k` most probable token ids of the set at each position; among equals the lowest id comes first. No id is
    /// outside its set: if all sets have fewer than `k` ids, there are as many as the largest has, and a position with
    /// fewer repeats its last id with a log-probability of minus infinity, which
    /// [`BeamSearch`](crate::decode::BeamSearch) never chooses.
    ///
    /// # Shapes
    ///
    /// - returns ids, u32, and log-probabilities, `[.., min(k, ids of the largest set)]` each
    ///
    /// # Errors
    ///
    /// As for [`Mixture::top_k`]; [`Error::EmptySet`] if a set is empty and need not be, and [`Error::Impossible`] if
    /// all its ids have probability zero.
    pub fn top_k(&self, k: usize) -> Result<TopK> {
        TopK::check_k(k, self.mixture.operands().sizes.vocab)?;
        let (mixture, kept, ids) = self.chosen_from()?;
        let top = match kept {
            Restriction::All => mixture.top_k(k.min(mixture.operands().sizes.vocab))?,
            kept => mixture.top_k_within(&kept, k)?,
        };
        Ok(TopK { token_ids: of_places(&top.token_ids, ids.as_deref())?, ..top })
    }

    /// The most probable token id of the set at each position; among equals the lowest.
    ///
    /// # Shapes
    ///
    /// - returns `[..]`, u32
    ///
    /// # Errors
    ///
    /// As for [`RestrictedMixture::top_k`].
    pub fn argmax(&self) -> Result<Tensor> {
        Ok(self.top_k(1)?.token_ids.squeeze(D::Minus1)?)
    }

    /// Draws one token id of the set at each position. Temperature and truncation apply to the renormalised
    /// distribution.
    ///
    /// # Shapes
    ///
    /// - returns `[..]`, u32
    ///
    /// # Errors
    ///
    /// As for [`RestrictedMixture::top_k`]. Ancestral sampling of a mixture of several softmaxes is
    /// [`Error::Unsupported`]: the restricted distribution does not have its priors.
    pub fn sample(&self, sampler: &mut Sampler) -> Result<Tensor> {
        if sampler.sampling().ancestral && self.mixture.operands().sizes.components > 1 {
            return Err(Error::Unsupported { option: OptionName::Ancestral, head: "kept sets of several softmaxes" });
        }
        let (mixture, kept, ids) = self.chosen_from()?;
        let drawn = match kept {
            Restriction::All => mixture.sample(sampler)?,
            kept => mixture.sample_within(&kept, sampler)?,
        };
        of_places(&drawn, ids.as_deref())
    }

    /// A mixture and sets that are read for a choice: of a single softmax, the ids in any set, whose token ids come
    /// last.
    fn chosen_from(&self) -> Result<(Mixture, Restriction, Option<Vec<u32>>)> {
        let kept = self.kept()?;
        let union = match &kept {
            Restriction::Shared(ids) => ids.clone(),
            Restriction::Each(lists) => lists.union(),
            Restriction::All => Vec::new(),
        };
        if !is_single(&self.mixture) || union.is_empty() || union.len() == self.mixture.operands().sizes.vocab {
            return Ok((self.mixture.clone(), kept, None));
        }
        let (mixture, _) = gathered(&self.mixture.detach(), &union)?;
        let place = |id: &u32| union.binary_search(id).unwrap_or(0) as u32;
        let kept = match kept {
            Restriction::Each(lists) => {
                Restriction::Each(IdLists::new(lists.iter().map(|list| list.iter().map(place).collect())))
            }
            Restriction::All | Restriction::Shared(_) => Restriction::All,
        };
        Ok((mixture, kept, Some(union)))
    }
}

/// The token ids in these places of `ids`.
fn of_places(places: &Tensor, ids: Option<&[u32]>) -> Result<Tensor> {
    match ids {
        Some(ids) if places.elem_count() > 0 => {
            let ids = Tensor::new(ids, places.device())?;
            Ok(ids.index_select(&places.flatten_all()?, 0)?.reshape(places.shape())?)
        }
        _ => Ok(places.clone()),
    }
}
