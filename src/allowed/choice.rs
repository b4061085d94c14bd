//! Chooses token ids from the renormalised distribution of each position.

use candle_core::{Tensor, D};

use super::gathered_rows::{gathered_softmax, is_single};
use super::restricted_mixture::RestrictedMixture;
use crate::decoding::{Sampler, TopK};
use crate::error::{Error, OptionName, Result};
use crate::mixture::Mixture;
use crate::tensors::id_lists::{IdLists, Restriction};

impl RestrictedMixture {
    /// Returns the `k` most probable token ids of the set at each position; among equals the lowest id comes first. No
    /// id is outside its set: if all sets have fewer than `k` ids, there are as many as the largest has, and a position
    /// with fewer repeats its last id with a log-probability of minus infinity, which
    /// [`BeamSearch`](crate::decode::BeamSearch) never chooses.
    ///
    /// # Shapes
    ///
    /// - returns ids, u32, and log-probabilities, `[.., min(k, ids of the largest set)]` each
    ///
    /// # Errors
    ///
    /// The errors are those of [`Mixture::top_k`]; [`Error::EmptySet`] if a set is empty and an empty set does not
    /// allow all ids, and [`Error::Impossible`] if all ids of a set have probability zero.
    pub fn top_k(&self, k: usize) -> Result<TopK> {
        TopK::check_k(k, self.mixture.operands().sizes.vocab)?;
        let choices = self.choices()?;
        let mixture = &choices.mixture;
        let top = match &choices.restriction {
            Restriction::All => mixture.top_k(k.min(mixture.operands().sizes.vocab))?,
            restriction => mixture.top_k_within(restriction, k)?,
        };
        Ok(TopK { token_ids: choices.token_ids(&top.token_ids)?, ..top })
    }

    /// Returns the most probable token id of the set at each position; among equals it is the lowest.
    ///
    /// # Shapes
    ///
    /// - returns `[..]`, u32
    ///
    /// # Errors
    ///
    /// The errors are those of [`RestrictedMixture::top_k`].
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
    /// The errors are those of [`RestrictedMixture::top_k`]. Ancestral sampling of a mixture of several softmaxes is
    /// [`Error::Unsupported`]: the restricted distribution does not have its priors.
    pub fn sample(&self, sampler: &mut Sampler) -> Result<Tensor> {
        if sampler.sampling().ancestral && self.mixture.operands().sizes.components > 1 {
            return Err(Error::Unsupported { option: OptionName::Ancestral, head: "allowed ids of several softmaxes" });
        }
        let choices = self.choices()?;
        let drawn = match &choices.restriction {
            Restriction::All => choices.mixture.sample(sampler)?,
            restriction => choices.mixture.sample_within(restriction, sampler)?,
        };
        choices.token_ids(&drawn)
    }

    /// Prepares a choice of ids. A single softmax is reduced to the ids that are in any set.
    fn choices(&self) -> Result<Choices> {
        let restriction = self.restriction()?;
        let union = match &restriction {
            Restriction::Shared(ids) => ids.clone(),
            Restriction::Each(lists) => lists.union(),
            Restriction::All => Vec::new(),
        };
        if !is_single(&self.mixture) || union.is_empty() || union.len() == self.mixture.operands().sizes.vocab {
            return Ok(Choices { mixture: self.mixture.clone(), restriction, gathered_ids: None });
        }
        let (mixture, _) = gathered_softmax(&self.mixture.detach(), &union)?;
        let place = |id: &u32| union.binary_search(id).unwrap_or(0) as u32;
        let restriction = match restriction {
            Restriction::Each(lists) => {
                Restriction::Each(IdLists::new(lists.iter().map(|list| list.iter().map(place).collect())))
            }
            Restriction::All | Restriction::Shared(_) => Restriction::All,
        };
        Ok(Choices { mixture, restriction, gathered_ids: Some(union) })
    }
}

/// A mixture that ids are chosen from, and the ids that may be chosen at each position.
struct Choices {
    mixture: Mixture,
    restriction: Restriction,
    /// The token id of each row of the mixture's decoder; `None` if the rows are those of all ids.
    gathered_ids: Option<Vec<u32>>,
}

impl Choices {
    /// Returns the token ids of these rows of the mixture's decoder.
    fn token_ids(&self, rows: &Tensor) -> Result<Tensor> {
        match &self.gathered_ids {
            Some(ids) if rows.elem_count() > 0 => {
                let ids = Tensor::new(ids.as_slice(), rows.device())?;
                Ok(ids.index_select(&rows.flatten_all()?, 0)?.reshape(rows.shape())?)
            }
            _ => Ok(rows.clone()),
        }
    }
}
