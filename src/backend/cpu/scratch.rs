//! Memory for the logits or exponentials of a chunk, which the next call uses again.
//!
//! The system clears a page when it is first written, and in a virtual machine the page may first have to come from the
//! host. An allocator that reuses its pages clears them on one thread instead, for nothing: each number of a chunk is
//! written before it is read.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, OnceLock, PoisonError};

use bytemuck::Pod;
use memmap2::MmapMut;

use super::memory::{Aligned, BufferElement};
use super::pages;

/// The most bytes that are kept for the next call: as many as the default budget allows to any loss.
const MOST_KEPT: usize = 32 << 20;
/// The least bytes that come from the system. For fewer, the allocator has memory at hand.
const LEAST_MAPPED: usize = if cfg!(test) { 1 } else { 1 << 20 };

/// The memory that calls keep.
static KEEPER: Keeper = Keeper(Mutex::new(None));

/// Numbers that may be any until they are written, from the start of a cache line on.
pub(crate) struct Scratch<F> {
    memory: Memory<F>,
    len: usize,
}

enum Memory<F> {
    Allocated(Aligned<F>),
    Mapped(Mapped),
}

/// Pages of the system, which are kept unless they are too many, or as many are kept already.
struct Mapped(Option<MmapMut>);

/// Keeps the pages of one call. Calls at the same time have pages of their own.
struct Keeper(Mutex<Option<MmapMut>>);

impl Keeper {
    /// Returns the pages that are kept, if there are enough.
    fn take(&self, bytes: usize) -> Option<MmapMut> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take_if(|map| map.len() >= bytes)
    }

    /// Keeps pages, if they are not too many, unless as many are kept already.
    fn keep(&self, map: MmapMut) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if map.len() <= MOST_KEPT && kept.as_ref().is_none_or(|kept| kept.len() < map.len()) {
            *kept = Some(map);
        }
    }
}

/// Returns whether the system's own pages are used, and kept: unless the environment variable `MOS_HEAD_KEEP_MEMORY` is
/// `0`, which is read once.
fn keeps_memory() -> bool {
    static KEEPS: OnceLock<bool> = OnceLock::new();
    *KEEPS.get_or_init(|| std::env::var_os("MOS_HEAD_KEEP_MEMORY").is_none_or(|value| value != "0"))
}

impl<F: BufferElement> Scratch<F> {
    /// Returns `len` numbers.
    pub(super) fn new(len: usize) -> Self {
        let bytes = len * size_of::<F>();
        let map =
            if bytes < LEAST_MAPPED || !keeps_memory() { None } else { KEEPER.take(bytes).or_else(|| map(bytes)) };
        let Some(map) = map else { return Scratch { memory: Memory::Allocated(Aligned::zeros(len)), len } };
        #[cfg_attr(not(test), expect(unused_mut))]
        let mut scratch = Scratch { memory: Memory::Mapped(Mapped(Some(map))), len };
        // In unit tests a number that is read before it is written is none.
        #[cfg(test)]
        bytemuck::cast_slice_mut::<F, u8>(&mut scratch).fill(0xff);
        scratch
    }

    /// Returns whether the next call may have this memory.
    pub(super) fn is_kept(&self) -> bool {
        match &self.memory {
            Memory::Allocated(_) => false,
            Memory::Mapped(Mapped(map)) => map.as_ref().is_some_and(|map| map.len() <= MOST_KEPT),
        }
    }
}

/// Returns new pages, if the system has such memory.
fn map(bytes: usize) -> Option<MmapMut> {
    let mut map = MmapMut::map_anon(bytes).ok()?;
    pages::ask_for_huge(&mut map[..]);
    pages::touch(&mut map[..]);
    Some(map)
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|map| KEEPER.keep(map));
    }
}

impl<F: Pod> Deref for Scratch<F> {
    type Target = [F];

    fn deref(&self) -> &[F] {
        match &self.memory {
            Memory::Allocated(values) => values,
            Memory::Mapped(Mapped(map)) => {
                let bytes = map.as_deref().unwrap_or_default();
                bytemuck::cast_slice(&bytes[..self.len * size_of::<F>()])
            }
        }
    }
}

impl<F: Pod> DerefMut for Scratch<F> {
    fn deref_mut(&mut self) -> &mut [F] {
        match &mut self.memory {
            Memory::Allocated(values) => values,
            Memory::Mapped(Mapped(map)) => {
                let bytes = map.as_deref_mut().unwrap_or_default();
                bytemuck::cast_slice_mut(&mut bytes[..self.len * size_of::<F>()])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_pages_that_are_not_too_many_are_kept() {
        let keeper = Keeper(Mutex::new(None));
        let map = |bytes| MmapMut::map_anon(bytes).expect("pages");
        assert!(keeper.take(1).is_none());
        let (first, second) = (map(2 << 20), map(1 << 20));
        let address = first.as_ptr();
        keeper.keep(first);
        keeper.keep(second);
        keeper.keep(map(MOST_KEPT + 1));
        assert!(keeper.take((2 << 20) + 1).is_none());
        let kept = keeper.take(1 << 20).expect("the first pages");
        assert_eq!((kept.as_ptr(), kept.len()), (address, 2 << 20));
        assert!(keeper.take(1).is_none());
    }

    #[test]
    fn numbers_are_as_many_as_requested_and_start_at_a_cache_line() {
        for len in [0, 1, 1000, 3 << 20] {
            let mut scratch: Scratch<f32> = Scratch::new(len);
            assert_eq!(scratch.len(), len);
            assert_eq!(scratch.as_ptr() as usize % 64, if len == 0 { scratch.as_ptr() as usize % 64 } else { 0 });
            scratch.fill(1.);
        }
    }
}
