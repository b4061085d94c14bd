//! What token ids are chosen from the renormalised distribution of each position.

use candle_core::Tensor;

use super::gathered_rows::{gathered_softmax, is_single, FrozenRows};
use crate::error::Result;
use crate::mixture::Mixture;
use crate::tensors::id_lists::{IdLists, Restriction};

/// A mixture that ids are chosen from, and the ids that may be chosen at each position.
pub(super) struct Choices {
    pub(super) mixture: Mixture,
    pub(super) restriction: Restriction,
    /// The token id of each row of the mixture's decoder; `None` if the rows are those of all ids.
    pub(super) gathered_ids: Option<Vec<u32>>,
}

impl Choices {
    /// Prepares a choice of ids. A single softmax is reduced to the ids that are in any set.
    pub(super) fn new(mixture: &Mixture, restriction: Restriction, frozen: Option<&FrozenRows>) -> Result<Self> {
        let frozen = frozen.filter(|_| matches!(restriction, Restriction::Shared(_)));
        let union = match &restriction {
            Restriction::Shared(ids) => ids.clone(),
            Restriction::Each(lists) => lists.union(),
            Restriction::All => Vec::new(),
        };
        if !is_single(mixture) || union.is_empty() || union.len() == mixture.operands().sizes.vocab {
            return Ok(Choices { mixture: mixture.clone(), restriction, gathered_ids: None });
        }
        let mixture = gathered_softmax(&mixture.detach(), &union, frozen)?;
        let place = |id: &u32| union.binary_search(id).unwrap_or(0) as u32;
        let restriction = match restriction {
            Restriction::Each(lists) => {
                Restriction::Each(IdLists::new(lists.iter().map(|list| list.iter().map(place).collect())))
            }
            Restriction::All | Restriction::Shared(_) => Restriction::All,
        };
        Ok(Choices { mixture, restriction, gathered_ids: Some(union) })
    }

    /// Returns the token ids of these rows of the mixture's decoder.
    pub(super) fn token_ids(&self, rows: &Tensor) -> Result<Tensor> {
        match &self.gathered_ids {
            Some(ids) if rows.elem_count() > 0 => {
                let ids = Tensor::new(ids.as_slice(), rows.device())?;
                Ok(ids.index_select(&rows.flatten_all()?, 0)?.reshape(rows.shape())?)
            }
            _ => Ok(rows.clone()),
        }
    }
}
