//! The product of two matrices in bf16 on a tile unit.

use std::ops::Range;

use half::bf16;

use super::product::{Parts, SquareProduct, PAIRS, SIDE, SQUARE};
use super::rounding::{self, Pair, RoundedRow};
use super::squares::{store_lines, Grid};
use super::transpose;
use super::unit::TileUnit;
use crate::backend::cpu::memory::{zeros, Aligned};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::backend::parallel;

/// The squares of the result in a block, one below the other. A block stays in the second-level cache while its
/// products are summed.
const DOWN: usize = 4;
/// The squares of the result in a block, side by side.
const ACROSS: usize = 8;

/// A matrix `[rows, columns]`, stored as such or as its transpose.
#[derive(Clone, Copy)]
pub(crate) struct TileMatrix<'a> {
    pub(crate) values: &'a [bf16],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Whether `values` is stored as `[columns, rows]`.
    pub(crate) is_transposed: bool,
}

/// Computes `left right`, `[left.rows, right.columns]`, with sums in f32. No size is zero.
pub(crate) fn matmul(unit: TileUnit, isa: Isa, left: TileMatrix<'_>, right: TileMatrix<'_>) -> Vec<bf16> {
    assert!(left.columns == right.rows);
    let depth = left.columns.div_ceil(SIDE);
    let pairs = right.pairs(isa);
    let mut product = zeros(left.rows * right.columns);
    let blocks = product.chunks_mut(DOWN * SIDE * right.columns).enumerate();
    parallel::for_each_with(blocks, <(Aligned<bf16>, Aligned<f32>)>::default, |(packed, sums), (block, to)| {
        let rows = block * DOWN * SIDE..left.rows.min((block + 1) * DOWN * SIDE);
        let down = rows.len().div_ceil(SIDE);
        left.write_squares(isa, rows, packed);
        for first in (0..right.columns).step_by(ACROSS * SIDE) {
            let columns = first..right.columns.min(first + ACROSS * SIDE);
            let width = columns.len().next_multiple_of(SIDE);
            let sums = sums.at_least(down * SIDE * width);
            unit.multiply_squares(SquareProduct {
                left: packed,
                right: &pairs[first * depth * PAIRS..],
                depth,
                to: sums,
                rows: down,
                width,
            });
            for (to, sums) in to.chunks_exact_mut(right.columns).zip(sums.chunks_exact(width)) {
                let (to, sums) = (&mut to[columns.clone()], &sums[..columns.len()]);
                f32::dispatch(isa, RoundedRow { values: sums, to });
            }
        }
    });
    product
}

impl TileMatrix<'_> {
    /// Writes some rows in squares, padded with zeros.
    fn write_squares(self, isa: Isa, rows: Range<usize>, to: &mut Aligned<bf16>) {
        let grid = Grid { down: rows.len().div_ceil(SIDE), across: self.columns.div_ceil(SIDE), parts: Parts::One };
        let to = to.at_least(grid.elements());
        if !self.is_transposed {
            let lines = self.values[rows.start * self.columns..rows.end * self.columns].chunks_exact(self.columns);
            return store_lines(lines, grid, to);
        }
        let mut stored = Aligned::zeros(grid.elements());
        let lines = self.values.chunks_exact(self.rows).map(|column| &column[rows.clone()]);
        store_lines(lines, grid.transposed(), &mut stored);
        transpose::transpose(isa, &stored, grid.transposed(), to);
    }

    /// Returns all columns in pairs of rows: `[square of columns][pair][SIDE]`.
    fn pairs(self, isa: Isa) -> Aligned<Pair> {
        let depth = self.rows.div_ceil(SIDE);
        let mut pairs = Aligned::zeros(self.columns.div_ceil(SIDE) * depth * PAIRS * SIDE);
        let column_squares = pairs.chunks_exact_mut(depth * PAIRS * SIDE).enumerate();
        parallel::for_each_with(column_squares, Aligned::default, |squares, (square, pairs)| {
            let columns = square * SIDE..self.columns.min((square + 1) * SIDE);
            if self.is_transposed {
                let rows = TileMatrix { rows: self.columns, columns: self.rows, is_transposed: false, ..self };
                rows.write_squares(isa, columns, squares);
                return transpose::pairs(isa, squares, pairs);
            }
            // The rows of these columns become squares one below the other.
            let lines = self.values.chunks_exact(self.columns).map(|row| &row[columns.clone()]);
            let squares = squares.at_least(depth * SQUARE);
            store_lines(lines, Grid { down: depth, across: 1, parts: Parts::One }, squares);
            f32::dispatch(isa, PairRows { rows: squares, pairs });
        });
        pairs
    }
}

/// Pairs the rows of `[2 n, SIDE]`.
struct PairRows<'a> {
    rows: &'a [bf16],
    /// `[n, SIDE]`
    pairs: &'a mut [Pair],
}

impl Kernel<f32> for PairRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        for (rows, pairs) in self.rows.chunks_exact(2 * SIDE).zip(self.pairs.chunks_exact_mut(SIDE)) {
            let (first, second) = rows.split_at(SIDE);
            for ((pair, x), y) in pairs.iter_mut().zip(first).zip(second) {
                *pair = rounding::pair(x.to_bits().into(), y.to_bits().into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_equal_sums_in_f64_in_every_layout() {
        let isa = Isa::available()[0];
        let values = |n: usize, seed: usize| -> Vec<bf16> {
            (0..n).map(|i| bf16::from_f64(((i * 7 + seed * 13) % 31) as f64 / 8.0 - 2.0)).collect()
        };
        for unit in TileUnit::available(isa).into_iter().chain([TileUnit::Emulated]) {
            for (m, k, n) in [(1, 1, 1), (3, 33, 40), (150, 20, 300), (33, 600, 5)] {
                for (left_transposed, right_transposed) in [(false, false), (false, true), (true, false), (true, true)]
                {
                    let (a, b) = (values(m * k, 1), values(k * n, 2));
                    let left = TileMatrix { values: &a, rows: m, columns: k, is_transposed: left_transposed };
                    let right = TileMatrix { values: &b, rows: k, columns: n, is_transposed: right_transposed };
                    let found = matmul(unit, isa, left, right);
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let left_value = |l: usize| if left_transposed { a[l * m + i] } else { a[i * k + l] }.to_f64();
                        let right_value =
                            |l: usize| if right_transposed { b[j * k + l] } else { b[l * n + j] }.to_f64();
                        let expected: f64 = (0..k).map(|l| left_value(l) * right_value(l)).sum();
                        let error = (found[i * n + j].to_f64() - expected).abs();
                        assert!(error <= 4e-3 * expected.abs() + 1e-4, "{m} {k} {n}: {} {expected}", found[i * n + j]);
                    }
                }
            }
        }
    }
}
