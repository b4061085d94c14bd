//! The first product for a few rows, as inner products. Its whole cost is reading the decoder: so the decoder's rows
//! stay as they are stored, half precision is widened in registers, and each loaded register serves the sums of several
//! contexts and ids.

use num_traits::Zero;

use crate::backend::cpu::memory::{prefetch, prefetch_to_second_level, streams_through_second_level, CACHE_LINE};
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::vector::simd::{Kernel, Vector};

/// The number of contexts that pass over the decoder together: they stay in the second-level cache.
const MOST_CONTEXTS: usize = 96;
/// The number of contexts whose sums stay in registers.
const ROWS: usize = 6;
/// The maximum number of contexts whose products are so much faster than the reads of the decoder that it may come from
/// the second-level cache.
const MOST_STREAMED: usize = 2 * ROWS;

/// Computes `to[row, id] = contexts[row] . decoder[id]`.
pub(crate) struct DecoderDots<'a, 'b, T: Element> {
    pub(crate) contexts: ContextRows<'a, T::Acc>,
    /// `[ids, d]`
    pub(crate) decoder: &'a [T],
    pub(crate) d: usize,
    /// Whether the products are added to what `to` holds, or replace it.
    pub(crate) is_added: bool,
    pub(crate) to: &'a mut ViewMut<'b, T::Acc>,
}

impl<T: Element> Kernel<T::Acc> for DecoderDots<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<T::Acc>>(self, v: V) {
        let DecoderDots { contexts, decoder, d, is_added, to } = self;
        let ids = decoder.len() / d;
        let is_streamed = streams_through_second_level();
        for first_row in (0..contexts.len()).step_by(MOST_CONTEXTS) {
            let contexts = contexts.block(first_row, MOST_CONTEXTS);
            let to_second_level = is_streamed && contexts.len() <= MOST_STREAMED;
            let mut id = 0;
            while id < ids {
                let decoder = &decoder[id * d..];
                let to = &mut ProductColumns { matrix: to, first_row, first_id: id, is_added };
                // As many ids as leave all sums in registers, then one by one.
                id += if const { V::REGISTERS >= 32 } {
                    match ids - id {
                        4.. => multiply_ids::<4, T, V>(v, contexts, decoder, d, to_second_level, to),
                        _ => multiply_id(v, contexts, &decoder[..d], to),
                    }
                } else {
                    match ids - id {
                        2.. => multiply_ids::<2, T, V>(v, contexts, decoder, d, to_second_level, to),
                        _ => multiply_id(v, contexts, &decoder[..d], to),
                    }
                };
            }
        }
    }
}

/// The columns of a matrix in which the products of some ids are stored.
struct ProductColumns<'a, 'b, F> {
    matrix: &'a mut ViewMut<'b, F>,
    /// The row that belongs to the first context of a block.
    first_row: usize,
    /// The column that belongs to the first id.
    first_id: usize,
    is_added: bool,
}

impl<F: Copy + std::ops::AddAssign> ProductColumns<'_, '_, F> {
    /// Stores the products of a context of the block, one for each id.
    fn store(&mut self, row: usize, sums: &[F]) {
        let to = &mut self.matrix.row_mut(self.first_row + row)[self.first_id..][..sums.len()];
        if self.is_added {
            to.iter_mut().zip(sums).for_each(|(to, &sum)| *to += sum)
        } else {
            to.copy_from_slice(sums)
        }
    }
}

/// Values that are prefetched while others are multiplied.
#[derive(Clone, Copy)]
pub(crate) struct Next<'a, T> {
    values: &'a [T],
    /// Whether they are prefetched into the second-level cache, or into the first.
    to_second_level: bool,
}

impl<T> Next<'_, T> {
    /// Nothing is prefetched.
    pub(crate) const NONE: Self = Next { values: &[], to_second_level: false };
}

/// Prefetches cache lines of values.
#[inline(always)]
fn prefetch_lines<'a, T: 'a>(lines: impl Iterator<Item = &'a [T]>, to_second_level: bool) {
    if to_second_level {
        lines.for_each(|line| prefetch_to_second_level(line.as_ptr()));
    } else {
        lines.for_each(|line| prefetch(line.as_ptr()));
    }
}

/// Multiplies `IDS` ids by all contexts; returns `IDS`.
#[inline(always)]
fn multiply_ids<const IDS: usize, T: Element, V: Vector<T::Acc>>(
    v: V,
    contexts: ContextRows<'_, T::Acc>,
    decoder: &[T],
    d: usize,
    to_second_level: bool,
    to: &mut ProductColumns<'_, '_, T::Acc>,
) -> usize {
    let mut ids: [&[T]; IDS] = [&[]; IDS];
    for (id, row) in ids.iter_mut().zip(decoder.chunks_exact(d)) {
        *id = row;
    }
    // The next ids are prefetched during these products, because the hardware does not prefetch that far ahead.
    let mut next = decoder.get(IDS * d..).unwrap_or(&[]);
    next = &next[..next.len().min(IDS * d)];
    let per_group = (next.len() * ROWS).div_ceil(contexts.len());
    let mut take_next = || {
        let (share, later) = next.split_at(per_group.min(next.len()));
        next = later;
        Next { values: share, to_second_level }
    };
    let mut row = 0;
    let mut store = |sums: &[[T::Acc; IDS]]| {
        sums.iter().enumerate().for_each(|(i, sums)| to.store(row + i, sums));
        row += sums.len();
    };
    let whole = contexts.len() / ROWS * ROWS;
    for first in (0..whole).step_by(ROWS) {
        store(&dots::<ROWS, IDS, T, V>(v, contexts.block(first, ROWS), ids, take_next()));
    }
    let remaining = contexts.block(whole, ROWS);
    match remaining.len() {
        5 => store(&dots::<5, IDS, T, V>(v, remaining, ids, take_next())),
        4 => store(&dots::<4, IDS, T, V>(v, remaining, ids, take_next())),
        3 => store(&dots::<3, IDS, T, V>(v, remaining, ids, take_next())),
        2 => store(&dots::<2, IDS, T, V>(v, remaining, ids, take_next())),
        1 => store(&dots::<1, IDS, T, V>(v, remaining, ids, take_next())),
        _ => {}
    }
    IDS
}

/// Multiplies one of the last ids by all contexts; returns one.
#[inline(always)]
fn multiply_id<T: Element, V: Vector<T::Acc>>(
    v: V,
    contexts: ContextRows<'_, T::Acc>,
    id: &[T],
    to: &mut ProductColumns<'_, '_, T::Acc>,
) -> usize {
    for row in 0..contexts.len() {
        to.store(row, &dots::<1, 1, T, V>(v, contexts.block(row, 1), [id], Next::NONE)[0]);
    }
    1
}

/// Cuts values into chunks of the size of a cache line, which need not begin at one.
#[inline(always)]
fn lines<T>(values: &[T]) -> std::slice::Chunks<'_, T> {
    values.chunks((CACHE_LINE / size_of::<T>()).max(1))
}

/// Computes the inner products of `ROWS` contexts with `IDS` ids. Meanwhile `next` is prefetched, a few lines at a
/// time: the processor has room for few requests.
///
/// All loops over rows and ids are written out: the closure of a `map` would be compiled for each number of rows and
/// ids, and without the target features of the kernel.
#[inline(always)]
pub(crate) fn dots<const ROWS: usize, const IDS: usize, T: Element, V: Vector<T::Acc>>(
    v: V,
    contexts: ContextRows<'_, T::Acc>,
    ids: [&[T]; IDS],
    next: Next<'_, T>,
) -> [[T::Acc; IDS]; ROWS] {
    let d = ids[0].len();
    let zero = v.splat(T::Acc::zero());
    let n = V::split_lanes(ids[0]).0.len();
    let mut id_registers: [&[V::Lanes<T>]; IDS] = [&[]; IDS];
    let mut id_rests: [&[T]; IDS] = [&[]; IDS];
    for id in 0..IDS {
        let (registers, rest) = V::split_lanes(&ids[id][..d]);
        (id_registers[id], id_rests[id]) = (&registers[..n], rest);
    }
    let mut context_registers: [&[V::Reg]; ROWS] = [&[]; ROWS];
    let mut context_rests: [&[T::Acc]; ROWS] = [&[]; ROWS];
    for row in 0..ROWS {
        let (registers, rest) = V::split(contexts.part(row, 0..d));
        (context_registers[row], context_rests[row]) = (&registers[..n], rest);
    }
    let mut sums = [[zero; IDS]; ROWS];
    let mut lines = lines(next.values);
    let lines_at_a_time = lines.len().div_ceil(n.max(1));
    // Without lines there is a loop of its own: the addresses of all rows stay in registers then.
    if next.values.is_empty() {
        for i in 0..n {
            add_products::<ROWS, IDS, T, V>(v, &context_registers, &id_registers, i, &mut sums);
        }
    } else {
        for i in 0..n {
            prefetch_lines(lines.by_ref().take(lines_at_a_time), next.to_second_level);
            add_products::<ROWS, IDS, T, V>(v, &context_registers, &id_registers, i, &mut sums);
        }
    }
    if !id_rests[0].is_empty() {
        let mut decoder = [zero; IDS];
        for id in 0..IDS {
            decoder[id] = T::load_partial(v, id_rests[id]);
        }
        for row in 0..ROWS {
            let context = v.load_partial(context_rests[row]);
            for id in 0..IDS {
                sums[row][id] = v.mul_add(context, decoder[id], sums[row][id]);
            }
        }
    }
    let mut results = [[T::Acc::zero(); IDS]; ROWS];
    for row in 0..ROWS {
        for id in 0..IDS {
            results[row][id] = v.sum(sums[row][id]);
        }
    }
    results
}

/// Adds the products of the `i`-th registers to the sums of all contexts and ids.
#[inline(always)]
fn add_products<const ROWS: usize, const IDS: usize, T: Element, V: Vector<T::Acc>>(
    v: V,
    contexts: &[&[V::Reg]; ROWS],
    ids: &[&[V::Lanes<T>]; IDS],
    i: usize,
    sums: &mut [[V::Reg; IDS]; ROWS],
) {
    let mut decoder = [v.splat(T::Acc::zero()); IDS];
    for id in 0..IDS {
        decoder[id] = T::load(v, ids[id][i]);
    }
    for row in 0..ROWS {
        for id in 0..IDS {
            sums[row][id] = v.mul_add(contexts[row][i], decoder[id], sums[row][id]);
        }
    }
}
