//! The operands of products on a tile unit: logits, their exponentials rounded or split, contexts times the factors of
//! rows, and the weighted sums of rounded exponentials.

use std::ops::Range;

use half::bf16;

use crate::backend::cpu::tiles::product::{Parts, PAIRS, SIDE, SQUARE};
use crate::backend::cpu::tiles::rounding::{self, Pair};
use crate::backend::cpu::vector::simd::{Kernel, Vector};

/// Computes `z := scale z + bias[id]` for logits `[ids, SIDE]`.
pub(super) struct ScaleAndAddBias<'a> {
    pub(super) logits: &'a mut [f32],
    pub(super) bias: &'a [f32],
    pub(super) scale: f32,
}

impl Kernel<f32> for ScaleAndAddBias<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, v: V) {
        let scale = v.splat(self.scale);
        for (row, &bias) in self.logits.chunks_exact_mut(SIDE).zip(self.bias) {
            let bias = v.splat(bias);
            for z in V::registers_mut(row) {
                *z = v.mul_add(*z, scale, bias);
            }
        }
    }
}

/// Rounds or splits exponentials `[ids, SIDE]`: as they lie, and in pairs of ids. Lanes without a row become zero.
pub(super) struct RoundExponentials<'a> {
    pub(super) exponentials: &'a [f32],
    pub(super) rows: usize,
    pub(super) parts: Parts,
    /// `[square of ids][part][id][SIDE]`
    pub(super) rounded: &'a mut [bf16],
    /// `[square of ids][part][pair of ids][SIDE]`
    pub(super) pairs: &'a mut [Pair],
}

impl Kernel<f32> for RoundExponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        match self.parts {
            Parts::One => self.write::<1>(),
            Parts::Three => self.write::<3>(),
        }
    }
}

impl RoundExponentials<'_> {
    #[inline(always)]
    fn write<const N: usize>(self) {
        let mut mask = [0; SIDE];
        mask[..self.rows].fill(u32::MAX);
        let squares = self.exponentials.chunks_exact(SQUARE).zip(self.rounded.chunks_exact_mut(N * SQUARE));
        for ((exponentials, rounded), pairs) in squares.zip(self.pairs.chunks_exact_mut(N * PAIRS * SIDE)) {
            for (i, rows) in exponentials.as_chunks::<SIDE>().0.as_chunks::<2>().0.iter().enumerate() {
                let first: [[u32; SIDE]; N] = rounding::parts(rows[0]);
                let second: [[u32; SIDE]; N] = rounding::parts(rows[1]);
                for part in 0..N {
                    let to = &mut rounded[part * SQUARE + 2 * i * SIDE..][..2 * SIDE];
                    let (to_first, to_second) = to.split_at_mut(SIDE);
                    let pairs = &mut pairs[(part * PAIRS + i) * SIDE..][..SIDE];
                    for r in 0..SIDE {
                        let (first, second) = (first[part][r] & mask[r], second[part][r] & mask[r]);
                        to_first[r] = rounding::bf16_from_bits(first);
                        to_second[r] = rounding::bf16_from_bits(second);
                        pairs[r] = rounding::pair(first, second);
                    }
                }
            }
        }
    }
}

/// Multiplies contexts by factors and writes them in pairs of rows, `[square of columns][square of rows][part][pair]
/// [SIDE]`, with zeros for rows and columns that are missing.
pub(super) struct ScaleInPairs<'a> {
    /// `[rows, d]`
    pub(super) contexts: &'a [f32],
    pub(super) d: usize,
    pub(super) columns: Range<usize>,
    pub(super) factors: &'a [f32],
    pub(super) parts: Parts,
    /// The pairs that a square of columns takes, with all rows and parts.
    pub(super) column_pairs: usize,
    pub(super) to: &'a mut [Pair],
}

impl Kernel<f32> for ScaleInPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        match self.parts {
            Parts::One => self.write::<1>(),
            Parts::Three => self.write::<3>(),
        }
    }
}

impl ScaleInPairs<'_> {
    #[inline(always)]
    fn write<const N: usize>(self) {
        let ScaleInPairs { contexts, d, columns: all, factors, column_pairs, to, .. } = self;
        for (first, to) in all.clone().step_by(SIDE).zip(to.chunks_exact_mut(column_pairs)) {
            let columns = first..all.end.min(first + SIDE);
            let row_squares = contexts.chunks(SIDE * d).zip(factors.chunks(SIDE));
            for (to, (rows, factors)) in to.chunks_exact_mut(N * PAIRS * SIDE).zip(row_squares) {
                if rows.len() < SIDE * d {
                    to.fill(0);
                }
                for (i, (rows, factors)) in rows.chunks(2 * d).zip(factors.chunks(2)).enumerate() {
                    let mut scaled = [[0.0; SIDE]; 2];
                    for ((scaled, row), factor) in scaled.iter_mut().zip(rows.chunks_exact(d)).zip(factors) {
                        scaled.iter_mut().zip(&row[columns.clone()]).for_each(|(to, x)| *to = factor * x);
                    }
                    let first: [[u32; SIDE]; N] = rounding::parts(scaled[0]);
                    let second: [[u32; SIDE]; N] = rounding::parts(scaled[1]);
                    for part in 0..N {
                        let to = &mut to[(part * PAIRS + i) * SIDE..][..SIDE];
                        for (to, (first, second)) in to.iter_mut().zip(first[part].into_iter().zip(second[part])) {
                            *to = rounding::pair(first, second);
                        }
                    }
                }
            }
        }
    }
}

/// Computes `to[id] += sum_r E[id, r] factors[r]` over the rows of some panels.
pub(super) struct AddTileWeightedSums<'a> {
    /// `[panel][square of ids][part][id][SIDE]`
    pub(super) exponentials: &'a [bf16],
    pub(super) ids: usize,
    pub(super) panels: usize,
    pub(super) parts: Parts,
    pub(super) factors: &'a [f32],
    pub(super) to: &'a mut [f32],
}

impl Kernel<f32> for AddTileWeightedSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        let square = self.parts.square();
        for (id, to) in self.to.iter_mut().enumerate() {
            let mut sums = [0.0; SIDE];
            for panel in 0..self.panels {
                let first = (panel * (self.ids / SIDE) + id / SIDE) * square + id % SIDE * SIDE;
                let factors = &self.factors[panel * SIDE..][..SIDE];
                for part in 0..self.parts.count() {
                    let exponentials = &self.exponentials[first + part * SQUARE..][..SIDE];
                    for r in 0..SIDE {
                        sums[r] += rounding::widened(exponentials[r]) * factors[r];
                    }
                }
            }
            *to += sums.iter().sum::<f32>();
        }
    }
}
