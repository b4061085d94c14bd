//! Contexts as the rows of inner products.

use std::ops::Range;

use crate::backend::cpu::memory::CACHE_LINE;

/// Contexts that start `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct ContextRows<'a, F> {
    /// `[rows, stride]`
    pub(crate) values: &'a [F],
    pub(crate) stride: usize,
}

/// Returns the distance of copied contexts of `d` elements: whole cache lines, and one more. Without it, contexts of a
/// power of two would lie in the same sets of the first-level cache.
pub(crate) fn padded_stride<F>(d: usize) -> usize {
    ((d * size_of::<F>()).div_ceil(CACHE_LINE) + 1) * CACHE_LINE / size_of::<F>()
}

impl<'a, F: Copy> ContextRows<'a, F> {
    /// Returns the number of contexts.
    pub(crate) fn len(self) -> usize {
        self.values.len() / self.stride
    }

    /// Returns at most `most` contexts, from the `first` on.
    pub(crate) fn block(self, first: usize, most: usize) -> Self {
        let end = self.len().min(first + most);
        ContextRows { values: &self.values[first * self.stride..end * self.stride], ..self }
    }

    /// Returns some columns of a context.
    #[inline(always)]
    pub(crate) fn part(self, row: usize, columns: Range<usize>) -> &'a [F] {
        &self.values[row * self.stride..][columns]
    }
}
