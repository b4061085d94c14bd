//! The listed ids of a chunk: each row has the logits of a few ids one by one, the targets or candidates of its
//! position. Their exponentials are left out of the sums and products over the other ids.

use crate::backend::cpu::objective::listed_ids::ListedIds;

/// A listed id of a row, once the row's gradient is known.
#[derive(Clone, Copy, Default)]
pub(super) struct ListedId<F> {
    pub(super) id: usize,
    /// The gradient of its logit, negated.
    pub(super) mass: F,
}

/// The listed ids of a chunk's rows. Each row has an entry for each of its ids. The entries of all rows lie side by
/// side: those of the K rows of a position after each other, each with the ids of the position in ascending order.
pub(super) struct ChunkIds<'a> {
    components: usize,
    /// `[positions]`
    ids: Vec<&'a [usize]>,
    /// `[positions + 1]`: the first entry of each position
    starts: Vec<usize>,
}

impl<'a> ChunkIds<'a> {
    /// Lists the ids of these positions, none of which is ignored.
    pub(super) fn new(listed: ListedIds<'a>, positions: &[usize], components: usize) -> Self {
        let ids: Vec<&[usize]> = positions.iter().map(|&t| listed.at(t).unwrap_or_default()).collect();
        let mut starts = vec![0];
        starts.extend(ids.iter().scan(0, |end, ids| {
            *end += components * ids.len();
            Some(*end)
        }));
        ChunkIds { components, ids, starts }
    }

    /// Returns the number of entries.
    pub(super) fn entries(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns the ids of the chunk's `i`-th position.
    pub(super) fn position_ids(&self, i: usize) -> &'a [usize] {
        self.ids[i]
    }

    /// Returns the index of a row's first entry, and the row's ids.
    pub(super) fn row_ids(&self, row: usize) -> (usize, &'a [usize]) {
        let (i, k) = (row / self.components, row % self.components);
        let ids = self.ids[i];
        (self.starts[i] + k * ids.len(), ids)
    }
}
