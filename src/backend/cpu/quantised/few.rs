//! The products of a few contexts, in the registers in which weights are unpacked, and copies of rows.

use super::unpack::{for_each_unit, BlockKernel, Unpack};
use crate::backend::cpu::memory::{prefetch_to_second_level, CACHE_LINE};
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::vector::simd::Vector;

/// The bytes of the columns of contexts that stay in the first-level cache. The unit tests' contexts are small, and are
/// cut too.
const COLUMN_BYTES: usize = if cfg!(test) { 4 << 10 } else { 32 << 10 };
/// The number of times that ids pass over the same columns of contexts.
const GROUP: usize = 8;

/// Copies rows of blocks, the i-th to `to[i * stride..]`.
pub(super) struct Dequantise<'a> {
    pub(super) rows: &'a [u8],
    pub(super) row_bytes: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
    pub(super) to: &'a mut [f32],
}

impl BlockKernel for Dequantise<'_> {
    #[inline(always)]
    fn run<B: Unpack>(self, unpack: B) {
        for (row, to) in self.rows.chunks_exact(self.row_bytes).zip(self.to.chunks_mut(self.stride)) {
            let weights = B::WEIGHTS * B::UNITS;
            let to = to[..self.width].chunks_exact_mut(weights);
            for (block, to) in B::blocks(row).iter().zip(to) {
                let scales = unpack.scales(block);
                for_each_unit!(B, UNIT => {
                    let (to, _) = B::Simd::split_mut(&mut to[UNIT * B::WEIGHTS..][..B::WEIGHTS]);
                    to.copy_from_slice(unpack.unit::<UNIT>(block, &scales).as_ref());
                });
            }
        }
    }
}

/// Computes `to[row, id] = contexts[row] . rows[id]` for at most [`Unpack::MOST_ROWS`] contexts.
pub(super) struct FewDots<'a, 'b> {
    pub(super) contexts: ContextRows<'a, f32>,
    /// The blocks of whole rows.
    pub(super) rows: &'a [u8],
    pub(super) row_bytes: usize,
    pub(super) width: usize,
    /// Whether the products are added to what `to` holds, or replace it.
    pub(super) is_added: bool,
    pub(super) to: &'a mut ViewMut<'b, f32>,
}

impl BlockKernel for FewDots<'_, '_> {
    #[inline(always)]
    fn run<B: Unpack>(mut self, unpack: B) {
        let rows = self.contexts.len();
        assert!(rows <= B::MOST_ROWS);
        // Each number of contexts would be a kernel of its own; those between read one context twice.
        match rows {
            0 => {}
            1 => self.multiply::<1, 4, B>(unpack),
            2 => self.multiply::<2, 4, B>(unpack),
            3..=4 => self.multiply::<4, 2, B>(unpack),
            // The condition is a constant, so that nothing is compiled for more contexts than there may be.
            _ if const { B::MOST_ROWS <= 4 } => {}
            5..=6 => self.multiply::<6, 2, B>(unpack),
            _ => self.multiply::<8, 2, B>(unpack),
        }
    }
}

impl FewDots<'_, '_> {
    /// Multiplies all ids, `IDS` at a time. One context has four ids, as their sums are so many chains of products. If
    /// the contexts are larger than the first-level cache, some of their columns stay there while the ids of a group
    /// pass, whose sums wait lane by lane.
    #[inline(always)]
    fn multiply<const ROWS: usize, const IDS: usize, B: Unpack>(&mut self, unpack: B) {
        let v = unpack.simd();
        let blocks = self.row_bytes / size_of::<B::Block>();
        let column_blocks = (COLUMN_BYTES / (ROWS * B::UNITS * B::WEIGHTS * size_of::<f32>())).max(1);
        let group_bytes = GROUP * IDS * self.row_bytes;
        for (group, rows) in self.rows.chunks(group_bytes).enumerate() {
            let ids = rows.len() / self.row_bytes;
            let mut sums = [[[v.splat(0.0); IDS]; ROWS]; GROUP];
            for first in (0..blocks).step_by(column_blocks) {
                let columns = first..blocks.min(first + column_blocks);
                for (i, sums) in sums.iter_mut().enumerate().take(ids.div_ceil(IDS)) {
                    // The last ids are fewer: the last one is multiplied again in place of those that lack.
                    let mut blocks: [&[B::Block]; IDS] = [&[]; IDS];
                    for (n, block) in blocks.iter_mut().enumerate() {
                        let id = (i * IDS + n).min(ids - 1);
                        *block = &B::blocks(&rows[id * self.row_bytes..][..self.row_bytes])[columns.clone()];
                    }
                    self.add::<ROWS, IDS, B>(unpack, blocks, columns.start, sums);
                }
            }
            for (i, sums) in sums.iter().enumerate().take(ids.div_ceil(IDS)) {
                let first = i * IDS;
                for (row, sums) in sums.iter().enumerate().take(self.contexts.len()) {
                    let to = &mut self.to.row_mut(row)[group * GROUP * IDS + first..][..IDS.min(ids - first)];
                    for (to, &sum) in to.iter_mut().zip(sums) {
                        let sum = v.sum(sum);
                        *to = if self.is_added { *to + sum } else { sum };
                    }
                }
            }
        }
    }

    /// Adds the products of all contexts with some blocks of some ids, of which `first` is the first, to their sums.
    #[inline(always)]
    fn add<const ROWS: usize, const IDS: usize, B: Unpack>(
        &self,
        unpack: B,
        ids: [&[B::Block]; IDS],
        first: usize,
        to: &mut [[<B::Simd as Vector<f32>>::Reg; IDS]; ROWS],
    ) {
        let v = unpack.simd();
        let last = self.contexts.len() - 1;
        let first = first * B::UNITS * B::WEIGHTS;
        let mut contexts: [&[<B::Simd as Vector<f32>>::Reg]; ROWS] = [&[]; ROWS];
        for (row, context) in contexts.iter_mut().enumerate() {
            *context = B::Simd::split(self.contexts.part(row.min(last), first..self.width)).0;
        }
        let mut sums = *to;
        for (b, block) in ids[0].iter().enumerate() {
            let mut scales = [unpack.scales(block); IDS];
            for id in 0..IDS {
                // The same block of the ids that come next.
                let next = (&raw const ids[id][b]).cast::<u8>().wrapping_add(IDS * self.row_bytes);
                for line in 0..size_of::<B::Block>().div_ceil(CACHE_LINE) {
                    prefetch_to_second_level(next.wrapping_add(line * CACHE_LINE));
                }
                if id > 0 {
                    scales[id] = unpack.scales(&ids[id][b]);
                }
            }
            for_each_unit!(B, UNIT => {
                let at = b * B::UNITS + UNIT;
                for id in 0..IDS {
                    let weights = unpack.unit::<UNIT>(&ids[id][b], &scales[id]);
                    let weights = weights.as_ref();
                    for row in 0..ROWS {
                        let context = &contexts[row][at * weights.len()..][..weights.len()];
                        for j in 0..weights.len() {
                            sums[row][id] = v.mul_add(context[j], weights[j], sums[row][id]);
                        }
                    }
                }
            });
        }
        *to = sums;
    }
}
