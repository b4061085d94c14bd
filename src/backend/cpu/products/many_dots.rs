//! The inner products of many contexts. A group of contexts stays in the first-level cache while the decoder's rows
//! pass; for that, both are cut into blocks of columns, between which the sums wait in memory, lane by lane. So the
//! terms of a sum are added in the same order as in [`dots`](super::gemv::dots).

use std::ops::Range;

use num_traits::Zero;

use super::gemv::{ContextRows, ProductColumns};
use super::panel::lanes;
use crate::backend::cpu::memory::{prefetch_to_second_level, CACHE_LINE};
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::vector::simd::Vector;

/// The number of ids whose sums stay in registers.
const IDS: usize = 3;
/// The bytes of a block of columns of a context.
const COLUMN_BYTES: usize = 2 << 10;
/// The bytes of the decoder's rows that are multiplied at a time, widened: they stay in the second-level cache.
const TILE_BYTES: usize = 192 << 10;
/// The most ids that are multiplied at a time.
const MOST_IDS: usize = 48;

/// Returns how many ids are multiplied at a time.
pub(super) fn tile_ids<F>(d: usize) -> usize {
    (TILE_BYTES / (d * size_of::<F>())).clamp(IDS, MOST_IDS) / IDS * IDS
}

/// A tile of ids by contexts.
pub(super) struct ManyDots<'a, T: Element> {
    pub(super) contexts: ContextRows<'a, T::Acc>,
    /// `[ids, d]`
    pub(super) decoder: &'a [T],
    pub(super) d: usize,
    /// What is prefetched meanwhile.
    pub(super) next: &'a [T],
}

impl<T: Element> ManyDots<'_, T> {
    /// Computes the products. `sums` is a buffer.
    #[inline(always)]
    pub(super) fn multiply<V: Vector<T::Acc>>(
        self,
        v: V,
        sums: &mut Vec<[V::Reg; IDS]>,
        to: &mut ProductColumns<'_, '_, T::Acc>,
    ) {
        let (rows, ids) = (self.contexts.len(), self.decoder.len() / self.d);
        sums.resize(rows * ids.div_ceil(IDS), [v.splat(T::Acc::zero()); IDS]);
        let columns = (COLUMN_BYTES / size_of::<T::Acc>()).next_multiple_of(lanes::<T::Acc, V>());
        for first in (0..self.d).step_by(columns) {
            let columns = first..self.d.min(first + columns);
            let mut row = 0;
            while row < rows {
                row += match rows - row {
                    8.. if const { V::REGISTERS >= 32 } => self.add_group::<8, V>(v, row, &columns, sums),
                    4.. => self.add_group::<4, V>(v, row, &columns, sums),
                    2.. => self.add_group::<2, V>(v, row, &columns, sums),
                    _ => self.add_group::<1, V>(v, row, &columns, sums),
                };
            }
        }
        for (group, sums) in sums.chunks_exact(rows).enumerate() {
            let ids = IDS.min(ids - group * IDS);
            for (row, sums) in sums.iter().enumerate() {
                let mut products = [T::Acc::zero(); IDS];
                for id in 0..IDS {
                    products[id] = v.sum(sums[id]);
                }
                to.store(row, group * IDS, &products[..ids]);
            }
        }
    }

    /// Adds the products of some columns to the sums of `ROWS` contexts and all ids; returns `ROWS`.
    #[inline(always)]
    fn add_group<const ROWS: usize, V: Vector<T::Acc>>(
        &self,
        v: V,
        row: usize,
        columns: &Range<usize>,
        sums: &mut [[V::Reg; IDS]],
    ) -> usize {
        let &ManyDots { contexts, decoder, d, next } = self;
        let (rows, ids) = (contexts.len(), decoder.len() / d);
        // Each context of each block of columns prefetches its share of what comes next.
        let share = (next.len() * columns.len() / d * ROWS).div_ceil(rows * ids.div_ceil(IDS));
        let place = next.len() * columns.start / d + next.len() * columns.len() / d * row / rows;
        let mut next = next.get(place..).unwrap_or(&[]);
        let mut group_contexts: [&[T::Acc]; ROWS] = [&[]; ROWS];
        for i in 0..ROWS {
            group_contexts[i] = contexts.part(row + i, columns.clone());
        }
        for (group, sums) in sums.chunks_exact_mut(rows).enumerate() {
            let (now, later) = next.split_at(share.min(next.len()));
            next = later;
            for line in now.chunks(CACHE_LINE / size_of::<T>()) {
                prefetch_to_second_level(line.as_ptr());
            }
            // The last ids are fewer: the last one is multiplied again in place of those that lack.
            let mut group_ids: [&[T]; IDS] = [&[]; IDS];
            for i in 0..IDS {
                group_ids[i] = &decoder[(group * IDS + i).min(ids - 1) * d..][columns.clone()];
            }
            add::<ROWS, T, V>(v, group_contexts, group_ids, columns.start == 0, &mut sums[row..][..ROWS]);
        }
        ROWS
    }
}

/// Adds the inner products of `ROWS` contexts with `IDS` ids to their sums, or starts these.
#[inline(always)]
fn add<const ROWS: usize, T: Element, V: Vector<T::Acc>>(
    v: V,
    contexts: [&[T::Acc]; ROWS],
    ids: [&[T]; IDS],
    is_first: bool,
    to: &mut [[V::Reg; IDS]],
) {
    let zero = v.splat(T::Acc::zero());
    let n = V::split_lanes(ids[0]).0.len();
    let mut id_registers: [&[V::Lanes<T>]; IDS] = [&[]; IDS];
    let mut id_rests: [&[T]; IDS] = [&[]; IDS];
    for id in 0..IDS {
        let (registers, rest) = V::split_lanes(ids[id]);
        (id_registers[id], id_rests[id]) = (&registers[..n], rest);
    }
    let mut context_registers: [&[V::Reg]; ROWS] = [&[]; ROWS];
    let mut context_rests: [&[T::Acc]; ROWS] = [&[]; ROWS];
    for row in 0..ROWS {
        let (registers, rest) = V::split(contexts[row]);
        (context_registers[row], context_rests[row]) = (&registers[..n], rest);
    }
    let mut sums = [[zero; IDS]; ROWS];
    if !is_first {
        for row in 0..ROWS {
            sums[row] = to[row];
        }
    }
    for i in 0..n {
        let mut decoder = [zero; IDS];
        for id in 0..IDS {
            decoder[id] = T::load(v, id_registers[id][i]);
        }
        for row in 0..ROWS {
            for id in 0..IDS {
                sums[row][id] = v.mul_add(context_registers[row][i], decoder[id], sums[row][id]);
            }
        }
    }
    if !id_rests[0].is_empty() {
        for id in 0..IDS {
            let decoder = T::load_partial(v, id_rests[id]);
            for row in 0..ROWS {
                sums[row][id] = v.mul_add(v.load_partial(context_rests[row]), decoder, sums[row][id]);
            }
        }
    }
    for row in 0..ROWS {
        to[row] = sums[row];
    }
}
