//! Allocation of the large buffers, logits and gradients, and prefetching.

use std::ops::{Deref, DerefMut};

use bytemuck::{zeroed_vec, Zeroable};

#[cfg(target_arch = "x86_64")]
use super::processor::Processor;

/// The elements of a buffer. The default is zero, which has no bit that is set.
pub(crate) trait BufferElement: Copy + Default + Zeroable + Send + Sync {}
impl<F: Copy + Default + Zeroable + Send + Sync> BufferElement for F {}

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
    huge_pages::provide(&mut values);
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

#[cfg(not(target_os = "linux"))]
mod huge_pages {
    /// Does nothing: other systems choose the pages themselves.
    pub(super) fn provide<F>(_: &mut [F]) {}
}

#[cfg(target_os = "linux")]
mod huge_pages {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::time::{Duration, Instant};

    use crate::backend::parallel;

    /// The minimum size in bytes of a buffer in huge pages.
    const LARGE: usize = 8 << 20;
    /// The bytes of a huge page on most machines.
    const PAGE: usize = 2 << 20;
    /// The time after which a huge page counts as slow. The system clears one in a quarter of a millisecond.
    const SLOW: Duration = Duration::from_millis(2);

    /// Whether a huge page took long. In a virtual machine, the hypervisor may have taken back the memory behind free
    /// huge pages, and returns it in pieces of 4 KiB, which takes 20 times longer: then this process uses no more.
    static ARE_SLOW: AtomicBool = AtomicBool::new(false);

    /// Asks for huge pages for a buffer, and touches each of them until one takes long.
    pub(super) fn provide<F: Copy + Send + Sync>(buffer: &mut [F]) {
        if size_of_val(buffer) < LARGE || ARE_SLOW.load(Relaxed) {
            return;
        }
        advise(buffer, libc::MADV_HUGEPAGE);
        parallel::for_each(buffer.chunks_mut(PAGE / size_of::<F>()), |page| {
            if ARE_SLOW.load(Relaxed) {
                return;
            }
            let start = Instant::now();
            // SAFETY: the element is borrowed. The compiler must keep this write, for which the system needs the page.
            unsafe { std::ptr::write_volatile(&mut page[0], page[0]) };
            if start.elapsed() > SLOW {
                ARE_SLOW.store(true, Relaxed);
            }
        });
        if ARE_SLOW.load(Relaxed) {
            advise(buffer, libc::MADV_NOHUGEPAGE);
        }
    }

    /// Gives the system advice about the whole pages of a buffer.
    fn advise<F>(buffer: &mut [F], advice: libc::c_int) {
        // `madvise` takes whole pages, which have at most 64 KiB.
        let page = 1 << 16;
        let range = buffer.as_mut_ptr_range();
        let start = (range.start as usize).next_multiple_of(page);
        let end = range.end as usize / page * page;
        // SAFETY: the pages from `start` to `end`, if there are any, lie within the buffer, which is borrowed, and the
        // advice changes how they are mapped, not what they contain. A failure has no effect.
        unsafe {
            libc::madvise(start as *mut libc::c_void, end.saturating_sub(start), advice);
        }
    }
}
