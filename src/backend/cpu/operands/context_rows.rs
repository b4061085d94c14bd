//! Contexts as the rows of inner products.

use std::ops::Range;

use crate::backend::cpu::memory::{Aligned, BufferElement, CACHE_LINE};

/// Contexts that start `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct ContextRows<'a, F> {
    /// `[rows, stride]`
    pub(crate) values: &'a [F],
    pub(crate) stride: usize,
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

/// Copies of some columns of contexts, `[rows, stride]`.
pub(crate) struct PaddedRows<F> {
    values: Aligned<F>,
    stride: usize,
}

/// Returns the distance of copied contexts of `d` elements: whole cache lines, and one more. Without it, contexts of a
/// power of two would lie in the same sets of the first-level cache.
pub(crate) fn padded_stride<F>(d: usize) -> usize {
    ((d * size_of::<F>()).div_ceil(CACHE_LINE) + 1) * CACHE_LINE / size_of::<F>()
}

impl<F: BufferElement> PaddedRows<F> {
    /// Copies some columns of contexts `[rows, d]`.
    pub(crate) fn new(contexts: &[F], d: usize, columns: Range<usize>) -> Self {
        let stride = padded_stride::<F>(columns.len());
        let mut values: Aligned<F> = Aligned::zeros(contexts.len() / d * stride);
        for (to, context) in values.chunks_exact_mut(stride).zip(contexts.chunks_exact(d)) {
            to[..columns.len()].copy_from_slice(&context[columns.clone()]);
        }
        PaddedRows { values, stride }
    }

    /// Returns the rows.
    pub(crate) fn view(&self) -> ContextRows<'_, F> {
        ContextRows { values: &self.values, stride: self.stride }
    }
}
