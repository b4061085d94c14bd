//! The pages of large buffers: huge ones are asked for, and those that nothing reads again are given back.

#[cfg(target_os = "linux")]
pub(super) use linux::{ask_for_huge, touch, Finished};

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::{ask_for_huge, touch, Finished};

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    /// Does nothing: other systems choose the pages themselves.
    pub(in crate::backend::cpu) fn ask_for_huge<F>(_: &mut [F]) {}

    /// Does nothing.
    pub(in crate::backend::cpu) fn touch<F>(_: &mut [F]) {}

    /// A buffer whose pages are given back on Linux.
    pub(in crate::backend::cpu) struct Finished;

    impl Finished {
        pub(in crate::backend::cpu) fn new<F>(_: &mut [F]) -> Self {
            Finished
        }

        /// Does nothing.
        ///
        /// # Safety
        ///
        /// As on Linux.
        pub(in crate::backend::cpu) unsafe fn finish<F>(&self, _: &mut [F]) {}
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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

    fn is_huge<F>(buffer: &[F]) -> bool {
        size_of_val(buffer) >= LARGE && !ARE_SLOW.load(Ordering::Relaxed)
    }

    /// Asks for huge pages for a buffer, if it is large.
    pub(in crate::backend::cpu) fn ask_for_huge<F>(buffer: &mut [F]) {
        if is_huge(buffer) {
            advise(addresses(buffer), libc::MADV_HUGEPAGE);
        }
    }

    /// Touches each page of a buffer for which huge ones were asked, until one takes long.
    pub(in crate::backend::cpu) fn touch<F: Copy + Send + Sync>(buffer: &mut [F]) {
        if !is_huge(buffer) {
            return;
        }
        parallel::for_each(buffer.chunks_mut(PAGE / size_of::<F>()), |page| {
            if ARE_SLOW.load(Ordering::Relaxed) {
                return;
            }
            let start = Instant::now();
            // SAFETY: the element is borrowed. The compiler must keep this write, for which the system needs the page.
            unsafe { std::ptr::write_volatile(&mut page[0], page[0]) };
            if start.elapsed() > SLOW {
                ARE_SLOW.store(true, Ordering::Relaxed);
            }
        });
        if ARE_SLOW.load(Ordering::Relaxed) {
            advise(addresses(buffer), libc::MADV_NOHUGEPAGE);
        }
    }

    /// The huge pages of a buffer whose parts are finished one after the other, in any order, and perhaps at once. The
    /// system has back each page whose parts are all finished.
    pub(in crate::backend::cpu) struct Finished {
        /// The address of the first page.
        first: usize,
        /// The bytes of each page that are not finished.
        unfinished: Vec<AtomicUsize>,
    }

    impl Finished {
        /// Starts with a buffer of which nothing is finished. A small one gives no page back.
        pub(in crate::backend::cpu) fn new<F>(buffer: &mut [F]) -> Self {
            let Range { start, end } = addresses(buffer);
            let first = start.next_multiple_of(PAGE);
            let pages = if size_of_val(buffer) < LARGE { 0 } else { end.saturating_sub(first) / PAGE };
            Finished { first, unfinished: (0..pages).map(|_| AtomicUsize::new(PAGE)).collect() }
        }

        /// Finishes a part of the buffer, whose numbers become zeros, or stay, when all of a page is finished.
        ///
        /// # Safety
        ///
        /// Until the buffer's next use as a whole, nothing reads or writes the part, and no other part contains any of
        /// it.
        pub(in crate::backend::cpu) unsafe fn finish<F>(&self, part: &mut [F]) {
            let Range { start, end } = addresses(part);
            let pages = start.saturating_sub(self.first) / PAGE..end.saturating_sub(self.first).div_ceil(PAGE);
            for (i, unfinished) in self.unfinished.iter().enumerate().take(pages.end).skip(pages.start) {
                let page = self.first + i * PAGE..self.first + (i + 1) * PAGE;
                let finished = end.min(page.end).saturating_sub(start.max(page.start));
                // Each thread sees what the others did with their parts before the page is given back.
                if finished > 0 && unfinished.fetch_sub(finished, Ordering::AcqRel) == finished {
                    advise(page, libc::MADV_DONTNEED);
                }
            }
        }
    }

    /// The addresses of a buffer's bytes.
    fn addresses<F>(buffer: &mut [F]) -> Range<usize> {
        let Range { start, end } = buffer.as_mut_ptr_range();
        start as usize..end as usize
    }

    /// Gives the system advice about the whole pages among these addresses, which are those of a buffer. Huge pages
    /// change how the buffer is mapped; pages that are not needed have zeros when they are next used, or are unchanged.
    fn advise(Range { start, end }: Range<usize>, advice: libc::c_int) {
        // `madvise` takes whole pages, which have at most 64 KiB.
        let page = 1 << 16;
        let (start, end) = (start.next_multiple_of(page), end / page * page);
        // SAFETY: the pages from `start` to `end`, if there are any, lie within a buffer that the callers have borrowed
        // or are the last to use, and any bits are numbers. A failure has no effect.
        unsafe {
            libc::madvise(start as *mut libc::c_void, end.saturating_sub(start), advice);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_page_is_given_back_once_all_of_its_parts_are_finished() {
            let mut buffer = vec![1u8; 5 * LARGE / 4];
            let finished = Finished::new(&mut buffer);
            let first = finished.first - buffer.as_ptr() as usize;
            assert_eq!(finished.unfinished.len(), (buffer.len() - first) / PAGE);
            let zeros = |buffer: &[u8]| buffer.iter().filter(|&&x| x == 0).count();
            let (mut at, mut parts) = (0, vec![]);
            for length in [first + PAGE / 2, PAGE / 4, 2 * PAGE, 100, PAGE / 4 - 100] {
                parts.push(at..at + length);
                at += length;
            }
            // The second page is within one part; the first and the third have two parts more.
            for (part, pages) in [(2, 1), (0, 1), (4, 1), (1, 2), (3, 3)] {
                // SAFETY: the parts are disjoint, and nothing writes them.
                unsafe { finished.finish(&mut buffer[parts[part].clone()]) };
                assert_eq!(zeros(&buffer), pages * PAGE, "part {part}");
            }
        }
    }
}
