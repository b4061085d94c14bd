//! Allocation of the large buffers: logits and gradients.

use super::simd::Float;

/// `n` zeros, in huge pages if the buffer is large. The system clears pages on first use; in pages of 4 KiB, a gradient
/// of one gigabyte spends as much time there as in a matrix product.
pub(super) fn zeros<F: Float>(n: usize) -> Vec<F> {
    let mut zeros = vec![F::zero(); n];
    advise_huge_pages(&mut zeros);
    zeros
}

/// Minimum size in bytes of a buffer in huge pages.
#[cfg(target_os = "linux")]
const LARGE: usize = 8 << 20;

#[cfg(target_os = "linux")]
fn advise_huge_pages<F>(buffer: &mut [F]) {
    if size_of_val(buffer) < LARGE {
        return;
    }
    // `madvise` takes whole pages.
    let page = 1 << 16;
    let range = buffer.as_mut_ptr_range();
    let start = (range.start as usize).next_multiple_of(page);
    let end = range.end as usize / page * page;
    // SAFETY: the pages from `start` to `end` lie within the buffer, which is borrowed, and the advice changes how they
    // are mapped, not what they contain. A failure has no effect.
    unsafe {
        libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages<F>(_: &mut [F]) {}
