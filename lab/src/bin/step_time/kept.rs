//! The time of a loss over sets of allowed ids, in turn with the loss over all ids: each with the gradients of contexts
//! and decoder.

use candle_core::{Result, Tensor};
use mos_head::sets::{AllowedIds, RestrictedMixture};
use mos_head::{Distributions, LossOptions, Mixture};

/// The sets have `n` ids at each position, with its target among them.
pub(crate) struct Kept {
    full: Mixture,
    restricted: RestrictedMixture,
    targets: Tensor,
}

impl Kept {
    pub(crate) fn new(mixture: &Mixture, targets: &Tensor, n: usize, vocab: usize) -> Result<Self> {
        let ids = targets.to_vec1::<u32>()?;
        let n = n.min(vocab);
        // The ids are scattered over the vocabulary, and are others at every position.
        let set = |(position, &target): (usize, &u32)| {
            let other =
                move |i: usize| ((target as usize + i * (vocab / n) + (i * position) % (vocab / n)) % vocab) as u32;
            (0..n).map(other)
        };
        let ids: Vec<u32> = ids.iter().enumerate().flat_map(set).collect();
        let offsets: Vec<usize> = (0..=targets.elem_count()).map(|position| position * n).collect();
        let allowed = AllowedIds::per_position(&ids, &offsets)?;
        Ok(Kept { restricted: mixture.restricted(&allowed)?, full: mixture.clone(), targets: targets.clone() })
    }

    /// Takes a step over the sets.
    pub(crate) fn run(&self) -> Result<Option<Tensor>> {
        let loss = self.restricted.loss(&self.targets, &LossOptions::new())?;
        loss.backward()?;
        Ok(Some(loss.value.detach()))
    }

    /// Takes a step over all ids.
    pub(crate) fn full(&self) -> Result<Option<Tensor>> {
        let loss = self.full.loss(&self.targets, &LossOptions::new())?;
        loss.backward()?;
        Ok(Some(loss.value.detach()))
    }
}
