//! Memory for the large buffers: gradients and logits.

use super::simd::Float;

/// `n` zeros. Where the buffer is large, the system is asked for large pages: it clears them on first use, and a gradient of
/// a gigabyte in pages of 4 KiB costs as much time in the system as in a matrix product.
pub(super) fn zeros<F: Float>(n: usize) -> Vec<F> {
    let mut zeros = vec![F::zero(); n];
    large_pages(&mut zeros);
    zeros
}

/// From this size on large pages are asked for.
#[cfg(target_os = "linux")]
const LARGE: usize = 8 << 20;

#[cfg(target_os = "linux")]
fn large_pages<F>(buffer: &mut [F]) {
    if size_of_val(buffer) < LARGE {
        return;
    }
    // madvise takes whole pages.
    let page = 1 << 16;
    let range = buffer.as_mut_ptr_range();
    let start = (range.start as usize).next_multiple_of(page);
    let end = range.end as usize / page * page;
    // SAFETY: the pages from `start` to `end` lie within the buffer, which is borrowed, and the advice changes how they are
    // mapped, never what they hold. If the system cannot follow it, nothing is lost.
    unsafe {
        libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn large_pages<F>(_: &mut [F]) {}
