//! The factors that turn a row's exponentials into its gradient, for the offsets that the exponentials have.

use rayon::prelude::*;

use super::chunk_ids::ListedId;
use super::row_sums::FirstProductResults;
use super::rows::{ChunkRows, GradientRow};
use crate::backend::cpu::vector::simd::Float;

/// The factors of a chunk's rows, for each segment and each tile.
#[derive(Clone, Copy)]
pub(super) struct Factors<'p, F> {
    pub(super) first_product: &'p FirstProductResults<'p, F>,
    pub(super) rows: &'p [GradientRow<F>],
    pub(super) entries: &'p [ListedId<F>],
    /// `[segment][column]`: for the offsets at the end of each segment, which its second product has
    pub(super) by_segment: &'p [Vec<F>],
}

/// Computes `[segment][column]`, the rows' factors for the offsets at the end of each segment.
pub(super) fn segment_factors<F: Float>(
    first_product: &FirstProductResults<'_, F>,
    ChunkRows { rows, .. }: &ChunkRows<F>,
) -> Vec<Vec<F>> {
    let FirstProductResults { layout, panels, segments, .. } = first_product;
    let factors = |segment: usize| {
        let mut factors = vec![F::zero(); layout.columns(rows.len())];
        for (panel, sums) in panels.iter().zip(&segments[segment * panels.len()..]) {
            let rows = &rows[panel.first..][..panel.rows];
            for ((factor, row), &offset) in factors[panel.first..].iter_mut().zip(rows).zip(&sums.running.offset) {
                *factor = row.factor(offset);
            }
        }
        factors
    };
    (0..layout.segments()).into_par_iter().map(factors).collect()
}

impl<F: Float> Factors<'_, F> {
    /// Computes `[column]`, the rows' factors for the exponentials of a tile, whose offsets may be those before its
    /// segment's last ones.
    pub(super) fn tile_factors(&self, tile: usize) -> Vec<F> {
        let FirstProductResults { layout, panels, segments, .. } = self.first_product;
        let segment = layout.segment_of(tile);
        let in_segment = tile - layout.tiles_of_segment(segment).start;
        let mut factors = self.by_segment[segment].clone();
        for (panel, sums) in panels.iter().zip(&segments[segment * panels.len()..]) {
            let offsets = &sums.offsets[in_segment * panel.width..][..panel.rows];
            for (r, (&offset, last)) in offsets.iter().zip(&sums.running.offset).enumerate() {
                if offset != *last {
                    factors[panel.first + r] = self.rows[panel.first + r].factor(offset);
                }
            }
        }
        factors
    }
}
