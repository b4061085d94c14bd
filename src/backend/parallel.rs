//! Parallel loops over items, on the threads of rayon.
//!
//! rayon compiles its scheduler, some thirty functions, anew for each loop and each type in it. These loops pass it a
//! pointer to what they do, and so it is compiled once. Items are as large as a position or a tile: the pointer costs
//! nothing beside them. Loops over smaller items are rayon's own.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

/// What a thread does with an item, whose number it is given, in buffers of its own.
type Worker<'a> = Box<dyn FnMut(usize) + 'a>;

/// Calls workers, at most as many as there are threads, with some of the numbers below `n` each, until all have been
/// taken. If a thread starts late or is interrupted, the others hardly wait for it: a worker takes neighbours, which may
/// read the same memory, but fewer the fewer are left.
fn run<'a>(n: usize, worker: &(dyn Fn() -> Worker<'a> + Sync)) {
    let threads = n.min(rayon::current_num_threads());
    let part = |next: usize| (n - next).div_ceil(2 * threads);
    let next = AtomicUsize::new(0);
    let take = || next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| (next < n).then(|| next + part(next)));
    (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
        let mut worker = worker();
        while let Ok(first) = take() {
            (first..first + part(first)).for_each(&mut worker);
        }
    });
}

/// Calls `f` with each item.
pub(crate) fn for_each<T: Send>(items: impl IntoIterator<Item = T>, f: impl Fn(T) + Sync) {
    for_each_with(items, || (), |(), item| f(item));
}

/// Calls `f` with each item, and with buffers that the items of a thread share.
pub(crate) fn for_each_with<T: Send, B>(
    items: impl IntoIterator<Item = T>,
    buffers: impl Fn() -> B + Sync,
    f: impl Fn(&mut B, T) + Sync,
) {
    // Here and below a loop takes the place of `collect`, of which each instance is a dozen functions.
    let mut slots = Vec::new();
    for item in items {
        slots.push(Some(item));
    }
    let places = Places(slots.as_mut_ptr());
    run(slots.len(), &|| {
        let (places, f, mut buffers) = (&places, &f, buffers());
        Box::new(move |i| {
            // SAFETY: `run` passes each number below the number of slots to one call, and none of them is used
            // meanwhile.
            if let Some(item) = unsafe { places.at(i) }.take() {
                f(&mut buffers, item);
            }
        })
    });
}

/// The places of a vector's elements, each of which one thread uses. (A mutex for each is thirty functions more.)
struct Places<T>(*mut T);

// SAFETY: an element moves to the thread that uses it.
unsafe impl<T: Send> Sync for Places<T> {}

impl<T> Places<T> {
    /// Borrows an element.
    ///
    /// # Safety
    ///
    /// The vector has so many elements, and nothing else uses this one.
    #[allow(clippy::mut_from_ref)]
    unsafe fn at(&self, i: usize) -> &mut T {
        // SAFETY: as the caller guarantees.
        unsafe { &mut *self.0.add(i) }
    }
}

/// Returns what `f` returns for each item, in order.
pub(crate) fn map<T: Send, R: Send>(items: impl IntoIterator<Item = T>, f: impl Fn(T) -> R + Sync) -> Vec<R> {
    map_with(items, || (), |(), item| f(item))
}

/// As [`map`], with buffers that the items of a thread share.
pub(crate) fn map_with<T: Send, B, R: Send>(
    items: impl IntoIterator<Item = T>,
    buffers: impl Fn() -> B + Sync,
    f: impl Fn(&mut B, T) -> R + Sync,
) -> Vec<R> {
    let mut slots = Vec::new();
    for item in items {
        slots.push((Some(item), None));
    }
    let places = Places(slots.as_mut_ptr());
    run(slots.len(), &|| {
        let (places, f, mut buffers) = (&places, &f, buffers());
        Box::new(move |i| {
            // SAFETY: as in `for_each_with`.
            let (item, result) = unsafe { places.at(i) };
            if let Some(item) = item.take() {
                *result = Some(f(&mut buffers, item));
            }
        })
    });
    let mut results = Vec::with_capacity(slots.len());
    for (_, result) in slots {
        if let Some(result) = result {
            results.push(result);
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_mapped_once_and_in_order() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().expect("four threads");
        for n in [0, 1, 7, 1000] {
            let mut items: Vec<usize> = (0..n).collect();
            pool.install(|| for_each(&mut items, |item| *item += 1));
            assert!(items.iter().copied().eq(1..n + 1));
            let count = |calls: &mut usize, item: usize| {
                *calls += 1;
                (item, *calls)
            };
            let mapped = pool.install(|| map_with(items, || 0, count));
            assert!(mapped.iter().map(|(item, _)| *item).eq(1..n + 1));
            // An item has the buffers of its worker's earlier items.
            assert!(mapped.iter().all(|(_, calls)| (1..=n).contains(calls)));
        }
    }

    #[test]
    fn a_panic_of_an_item_goes_on() {
        let result = std::panic::catch_unwind(|| for_each(0..10, |i| assert!(i != 7, "the seventh item")));
        assert!(result.is_err());
    }
}
