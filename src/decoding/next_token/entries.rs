//! The logits that a request's token id is drawn from.

use crate::tensors::id_lists::has_bit;

/// The numbers of a position's ids: of all ids, or of some of them, which ascend.
#[derive(Clone, Copy)]
pub(crate) struct Entries<'a> {
    /// The ids that have a number; `None` if all have one.
    ids: Option<&'a [u32]>,
    vocab: usize,
}

impl<'a> Entries<'a> {
    /// The entries of all ids.
    pub(crate) fn all(vocab: usize) -> Self {
        Entries { ids: None, vocab }
    }

    /// The entries of these ids of a vocabulary, which ascend.
    pub(crate) fn some(ids: &'a [u32], vocab: usize) -> Self {
        Entries { ids: Some(ids), vocab }
    }

    /// Returns the id of an entry.
    pub(super) fn id(self, entry: usize) -> u32 {
        self.ids.map_or(entry as u32, |ids| ids[entry])
    }

    /// Returns the entry of an id, if it has one.
    pub(super) fn entry(self, id: u32) -> Option<usize> {
        match self.ids {
            None => Some(id as usize).filter(|&id| id < self.vocab),
            Some(ids) => ids.binary_search(&id).ok(),
        }
    }

    /// Returns how many ids before this one have no entry.
    pub(super) fn without_entry_before(self, id: u32) -> usize {
        self.ids.map_or(0, |ids| id as usize - ids.partition_point(|&other| other < id))
    }

    /// Makes every number minus infinity whose id has no bit in a mask: that of id i is bit `i % 32` of word `i / 32`.
    pub(super) fn mask(self, z: &mut [f64], words: &[u32]) {
        match self.ids {
            None => {
                for (z, &word) in z.chunks_mut(32).zip(words).filter(|(_, &word)| word != u32::MAX) {
                    let outside = z.iter_mut().enumerate().filter(|(i, _)| word >> i & 1 == 0);
                    outside.for_each(|(_, z)| *z = f64::NEG_INFINITY);
                }
            }
            Some(ids) => {
                let outside = ids.iter().zip(z).filter(|(&id, _)| !has_bit(words, id));
                outside.for_each(|(_, z)| *z = f64::NEG_INFINITY);
            }
        }
    }

    /// Lets `change` change the numbers of all ids; an id without one has minus infinity, and what becomes of it is
    /// ignored.
    pub(super) fn change_all(self, z: &mut [f64], change: impl FnOnce(&mut [f64])) {
        let Some(ids) = self.ids else { return change(z) };
        let mut all = vec![f64::NEG_INFINITY; self.vocab];
        ids.iter().zip(&*z).for_each(|(&id, &z)| all[id as usize] = z);
        change(&mut all);
        ids.iter().zip(z).for_each(|(&id, z)| *z = all[id as usize]);
    }
}
