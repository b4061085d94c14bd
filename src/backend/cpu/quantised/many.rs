//! The products of many contexts with wide rows, which are copied to a tile. A group of contexts stays in the
//! first-level cache while the tile passes; for that, both are cut into blocks of columns, between which the sums wait
//! in memory, lane by lane. So the terms of a sum are added in the same order as in
//! [`DecoderDots`](crate::backend::cpu::products::gemv::DecoderDots).

use std::ops::Range;

use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::vector::simd::{Kernel, Vector};

/// The least contexts, and the least columns, with which a tile is multiplied in blocks of columns. With fewer, what
/// is multiplied at a time stays in the cache anyway. The unit tests' rows are narrow, and are cut too.
const LEAST: (usize, usize) = if cfg!(test) { (19, 257) } else { (19, 1025) };
/// The most contexts that pass over a tile together.
const MOST_ROWS: usize = 96;
/// The number of ids whose sums stay in registers.
const IDS: usize = 3;
/// The columns of a block.
const COLUMNS: usize = if cfg!(test) { 256 } else { 512 };

/// Returns whether [`ManyDots`] serves so many contexts of this width.
pub(super) fn serves(contexts: usize, width: usize) -> bool {
    contexts >= LEAST.0 && width >= LEAST.1
}

/// Computes `to[row, id] = contexts[row] . tile[id]`, or adds these products.
pub(super) struct ManyDots<'a, 'b> {
    pub(super) contexts: ContextRows<'a, f32>,
    /// `[ids, width]`, where the width is a multiple of a register's lanes.
    pub(super) tile: &'a [f32],
    pub(super) width: usize,
    pub(super) is_added: bool,
    pub(super) to: &'a mut ViewMut<'b, f32>,
}

impl Kernel<f32> for ManyDots<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, v: V) {
        let ManyDots { contexts, tile, width, is_added, to } = self;
        let groups = (tile.len() / width).div_ceil(IDS);
        let mut sums = vec![[v.splat(0.0); IDS]; groups * MOST_ROWS.min(contexts.len())];
        for first_row in (0..contexts.len()).step_by(MOST_ROWS) {
            let contexts = contexts.block(first_row, MOST_ROWS);
            let rows = contexts.len();
            let mut tile = Sums { contexts, tile, width, sums: &mut sums[..groups * rows] };
            tile.compute(v);
            for row in 0..rows {
                let to = to.row_mut(first_row + row).chunks_mut(IDS);
                for (to, sums) in to.zip(tile.sums.chunks_exact(rows)) {
                    for (to, &sum) in to.iter_mut().zip(&sums[row]) {
                        let sum = v.sum(sum);
                        *to = if is_added { *to + sum } else { sum };
                    }
                }
            }
        }
    }
}

/// The sums of some contexts and the ids of a tile.
struct Sums<'a, R> {
    contexts: ContextRows<'a, f32>,
    tile: &'a [f32],
    width: usize,
    /// `[group of ids][context][id]`
    sums: &'a mut [[R; IDS]],
}

impl<R: Copy> Sums<'_, R> {
    /// Computes all sums.
    #[inline(always)]
    fn compute<V: Vector<f32, Reg = R>>(&mut self, v: V) {
        let rows = self.contexts.len();
        for first in (0..self.width).step_by(COLUMNS) {
            let columns = first..self.width.min(first + COLUMNS);
            let mut row = 0;
            while row < rows {
                row += match rows - row {
                    8.. if const { V::REGISTERS >= 32 } => self.add_group::<8, V>(v, row, &columns),
                    4.. => self.add_group::<4, V>(v, row, &columns),
                    2.. => self.add_group::<2, V>(v, row, &columns),
                    _ => self.add_group::<1, V>(v, row, &columns),
                };
            }
        }
    }

    /// Adds the products of some columns to the sums of `ROWS` contexts and all ids; returns `ROWS`.
    #[inline(always)]
    fn add_group<const ROWS: usize, V: Vector<f32, Reg = R>>(
        &mut self,
        v: V,
        row: usize,
        columns: &Range<usize>,
    ) -> usize {
        let &mut Sums { contexts, tile, width, ref mut sums } = self;
        let ids = tile.len() / width;
        let mut group_contexts: [&[V::Reg]; ROWS] = [&[]; ROWS];
        for (i, context) in group_contexts.iter_mut().enumerate() {
            *context = V::split(contexts.part(row + i, columns.clone())).0;
        }
        for (group, sums) in sums.chunks_exact_mut(contexts.len()).enumerate() {
            // The last ids are fewer: the last one is multiplied again in place of those that lack.
            let mut group_ids: [&[V::Reg]; IDS] = [&[]; IDS];
            for (i, id) in group_ids.iter_mut().enumerate() {
                *id = V::split(&tile[(group * IDS + i).min(ids - 1) * width..][columns.clone()]).0;
            }
            add(v, group_contexts, group_ids, columns.start == 0, &mut sums[row..]);
        }
        ROWS
    }
}

/// Adds the inner products of `ROWS` contexts with `IDS` ids to their sums, or starts these.
#[inline(always)]
fn add<const ROWS: usize, V: Vector<f32>>(
    v: V,
    mut contexts: [&[V::Reg]; ROWS],
    mut ids: [&[V::Reg]; IDS],
    is_first: bool,
    to: &mut [[V::Reg; IDS]],
) {
    let n = ids[0].len();
    for id in &mut ids {
        *id = &id[..n];
    }
    for context in &mut contexts {
        *context = &context[..n];
    }
    let mut sums = [[v.splat(0.0); IDS]; ROWS];
    if !is_first {
        sums.copy_from_slice(&to[..ROWS]);
    }
    for i in 0..n {
        for row in 0..ROWS {
            for id in 0..IDS {
                sums[row][id] = v.mul_add(contexts[row][i], ids[id][i], sums[row][id]);
            }
        }
    }
    to[..ROWS].copy_from_slice(&sums);
}
