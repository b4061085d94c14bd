//! Allocation of the large buffers, logits and gradients, and prefetching.

use std::ops::{Deref, DerefMut};

use bytemuck::{zeroed_vec, Pod};

use super::pages;
#[cfg(target_arch = "x86_64")]
use super::processor::Processor;

/// The elements of a buffer. The default is zero, which has no bit that is set.
pub(crate) trait BufferElement: Default + Pod + Send + Sync {}
impl<F: Default + Pod + Send + Sync> BufferElement for F {}

/// The size of a workspace, in bytes.
pub(super) struct Workspace {
    /// What each row of a chunk needs.
    pub(super) per_row: usize,
    /// What a chunk of any size needs.
    pub(super) fixed: usize,
    /// What each thread that computes needs.
    pub(super) per_thread: usize,
}

/// Returns `n` zeros, in huge pages if the buffer is large. The system clears pages on first use: a gradient of one
/// gigabyte in pages of 4 KiB takes a fifth of a second on two threads, in huge pages a third of that. (`vec!` asks for
/// cleared pages for the standard library's numbers alone, and writes others, such as bf16, on one thread.)
pub(super) fn zeros<F: BufferElement>(n: usize) -> Vec<F> {
    let mut values = zeroed_vec(n);
    pages::ask_for_huge(&mut values);
    pages::touch(&mut values);
    values
}

/// Returns `n` zeros like [`zeros`], whose pages the system provides when they are first written.
pub(super) fn untouched_zeros<F: BufferElement>(n: usize) -> Vec<F> {
    let mut values = zeroed_vec(n);
    pages::ask_for_huge(&mut values);
    values
}

/// A buffer that starts at a cache line, so that none of its vectors lies on two.
#[derive(Default)]
pub(crate) struct Aligned<F> {
    values: Vec<F>,
    first: usize,
    len: usize,
}

impl<F: BufferElement> Aligned<F> {
    /// Returns a buffer of `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        let values: Vec<F> = zeros(if len == 0 { 0 } else { len + CACHE_LINE / size_of::<F>() });
        let first = values.as_ptr().align_offset(CACHE_LINE);
        Aligned { first: if first < values.len() { first } else { 0 }, values, len }
    }

    /// Returns the first `len` elements. If the buffer has fewer, a larger one of zeros replaces it.
    pub(super) fn at_least(&mut self, len: usize) -> &mut [F] {
        if self.len < len {
            *self = Self::zeros(len);
        }
        &mut self[..len]
    }
}

/// The bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// Prefetches the cache line of an address, which need not be valid.
#[inline(always)]
pub(super) fn prefetch<F>(address: *const F) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a prefetch is a hint; it does not dereference the pointer.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Returns whether memory that is read in order, once, is better prefetched into the second-level cache than into the
/// first: an Intel Xeon waits less then, since there is room for more requests. Other processors have not been
/// measured.
pub(super) fn streams_through_second_level() -> bool {
    #[cfg(target_arch = "x86_64")]
    return Processor::this() == Processor::Intel;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Prefetches like [`prefetch`], but only into the second-level cache.
#[inline(always)]
pub(super) fn prefetch_to_second_level<F>(address: *const F) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T1};
        // SAFETY: a prefetch is a hint; it does not dereference the pointer.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

impl<F> Deref for Aligned<F> {
    type Target = [F];

    fn deref(&self) -> &[F] {
        &self.values[self.first..self.first + self.len]
    }
}

impl<F> DerefMut for Aligned<F> {
    fn deref_mut(&mut self) -> &mut [F] {
        &mut self.values[self.first..self.first + self.len]
    }
}
