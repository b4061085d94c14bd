//! The matrix products of a panel on vectors. A few rows of the result, as wide as a panel, stay in registers.
//!
//! All three products have the form `to[rows, width] (+)= left[rows, depth] right[depth, width]`. The kernel reads and
//! writes `right` and `to` as vectors, and reads `left` element by element from where it lies. So the decoder and the
//! exponentials are never repacked.

use crate::backend::cpu::memory::{prefetch, prefetch_to_second_level, CACHE_LINE};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};

/// The sizes of the part of a result that is computed in registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers {
    /// The number of rows of the result.
    pub(crate) rows: usize,
    /// The number of elements of a row: the width of a full panel.
    pub(crate) width: usize,
    /// The number of elements of a vector.
    pub(crate) lanes: usize,
}

impl Registers {
    /// Returns the sizes for an instruction set and an element type.
    pub(crate) fn for_isa<F: Float>(isa: Isa) -> Self {
        F::dispatch(isa, CountRegisters)
    }
}

/// Returns the sizes for the instruction set that it is compiled for.
struct CountRegisters;

impl<F: Float> Kernel<F> for CountRegisters {
    type Output = Registers;

    #[inline(always)]
    fn run<V: Vector<F>>(self, _: V) -> Registers {
        let (rows, vectors) = in_registers::<F, V>();
        let lanes = lanes::<F, V>();
        Registers { rows, width: vectors * lanes, lanes }
    }
}

/// Returns how many rows of the result, and how many vectors of each, fit the registers beside a row of `right` and an
/// element of `left`.
#[inline(always)]
fn in_registers<F: Float, V: Vector<F>>() -> (usize, usize) {
    if V::REGISTERS >= 32 {
        (8, 3)
    } else {
        (6, 2)
    }
}

/// Rows of a chunk that are computed together: their contexts, or their logits, are the columns of a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel {
    /// The index of its first row in the chunk, and of its first column when all panels lie side by side.
    pub(crate) first: usize,
    /// The number of its rows.
    pub(crate) rows: usize,
    /// The number of its columns: `rows`, rounded up to whole registers, or to whole squares of a tile unit.
    pub(crate) width: usize,
}

/// Returns the number of lanes of a register.
#[inline(always)]
pub(crate) fn lanes<F: Float, V: Vector<F>>() -> usize {
    size_of::<V::Reg>() / size_of::<F>()
}

/// A block of `depth` columns of the left operand, with element `(i, k)` at `values[i * row + k * step]`. One of the
/// strides is 1, the same one in all blocks.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a, F> {
    pub(crate) values: &'a [F],
    pub(crate) row: usize,
    pub(crate) step: usize,
    pub(crate) depth: usize,
}

/// The value that the products are added to.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a, F> {
    Zero,
    /// The present values of the result. They are added last, so that only one rounding has their size.
    Stored,
    /// One value per row of the result.
    Rows(&'a [F]),
}

/// Computes `to[rows, columns] = start + left[rows, depth] right[depth, width]`.
pub(crate) struct PanelProduct<'a, F> {
    pub(crate) start: Start<'a, F>,
    pub(crate) rows: usize,
    /// The left operand, in blocks side by side.
    pub(crate) left: &'a [Left<'a, F>],
    /// `[depth, width]`; the depths of the left operand's blocks add up to its depth
    pub(crate) right: &'a [F],
    /// The number of elements of a row of `right`: whole vectors, no more than a full panel has.
    pub(crate) width: usize,
    pub(crate) to: &'a mut [F],
    /// The distance between rows of `to`.
    pub(crate) to_row: usize,
    /// The number of columns of the result that are stored: all, or all but some of the last vector.
    pub(crate) columns: usize,
}

impl<F: Float> Kernel<F> for PanelProduct<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let (lanes, width) = (lanes::<F, V>(), self.width);
        let depth: usize = self.left.iter().map(|left| left.depth).sum();
        assert!(width > 0 && width.is_multiple_of(lanes) && width <= in_registers::<F, V>().1 * lanes);
        assert!(self.columns <= width && self.columns + lanes > width);
        assert!(depth * width <= self.right.len());
        if self.rows == 0 {
            return;
        }
        assert!((self.rows - 1) * self.to_row + self.columns <= self.to.len());
        assert!(self.left.iter().all(|left| left.row == 1) || self.left.iter().all(|left| left.step == 1));
        for left in self.left.iter().filter(|left| left.depth > 0) {
            assert!((self.rows - 1) * left.row + (left.depth - 1) * left.step < left.values.len());
        }
        if let Start::Rows(values) = self.start {
            assert!(self.rows <= values.len());
        }
        // The condition is a constant, so that nothing is compiled for registers that the instruction set lacks.
        if const { V::REGISTERS >= 32 } {
            match width / lanes {
                3 => product::<8, 3, F, V>(v, self),
                2 => product::<8, 2, F, V>(v, self),
                _ => product::<8, 1, F, V>(v, self),
            }
        } else {
            match width / lanes {
                2 => product::<6, 2, F, V>(v, self),
                _ => product::<6, 1, F, V>(v, self),
            }
        }
    }
}

/// Computes `ROWS` rows at a time, then four, then one.
#[inline(always)]
fn product<const ROWS: usize, const N: usize, F: Float, V: Vector<F>>(v: V, mut product: PanelProduct<'_, F>) {
    let across = product.left.iter().all(|left| left.row == 1);
    let mut row = 0;
    while row < product.rows {
        let left = product.rows - row;
        row += match (left >= ROWS, left >= 4, across) {
            (true, _, true) => tile::<ROWS, N, true, F, V>(v, &mut product, row),
            (true, _, false) => tile::<ROWS, N, false, F, V>(v, &mut product, row),
            (_, true, true) => tile::<4, N, true, F, V>(v, &mut product, row),
            (_, true, false) => tile::<4, N, false, F, V>(v, &mut product, row),
            (_, _, true) => tile::<1, N, true, F, V>(v, &mut product, row),
            (_, _, false) => tile::<1, N, false, F, V>(v, &mut product, row),
        };
    }
}

/// Computes `ROWS` rows of the result from `row` on; returns `ROWS`. With `ACROSS`, the rows of the left operand are
/// one element apart; otherwise its columns are.
#[inline(always)]
fn tile<const ROWS: usize, const N: usize, const ACROSS: bool, F: Float, V: Vector<F>>(
    v: V,
    product: &mut PanelProduct<'_, F>,
    row: usize,
) -> usize {
    let (lanes, width) = (lanes::<F, V>(), product.width);
    let last = product.columns - (N - 1) * lanes;
    let mut sums = [[v.splat(F::zero()); N]; ROWS];
    match product.start {
        Start::Zero => {}
        Start::Stored => {
            for i in 0..ROWS {
                let stored = product.to[(row + i) * product.to_row..].as_ptr();
                for j in 0..N {
                    prefetch(stored.wrapping_add(j * lanes));
                }
            }
        }
        Start::Rows(values) => {
            for (i, sums) in sums.iter_mut().enumerate() {
                *sums = [v.splat(values[row + i]); N];
            }
        }
    }

    let mut right = product.right.as_ptr();
    for left in product.left.iter().filter(|left| left.depth > 0) {
        // SAFETY: `run` has checked that row `row + ROWS - 1` and column `depth - 1` of the left operand lie in its
        // slice, and that `right` has as many rows of `width` elements as all blocks have columns. A register has the
        // size of its elements and no greater alignment. The prefetched address need not be valid.
        unsafe {
            let rows: [*const F; ROWS] = {
                let first = left.values.as_ptr().add(row * left.row);
                let mut rows = [first; ROWS];
                for (i, pointer) in rows.iter_mut().enumerate() {
                    *pointer = first.add(i * left.row);
                }
                rows
            };
            for k in 0..left.depth {
                if !ACROSS && k.is_multiple_of(LINE) {
                    // Rows of 4 KiB lie in the same sets of the first-level cache, which has no room for the next
                    // ones there.
                    for row in rows {
                        prefetch_to_second_level(row.wrapping_add(k + ROWS * left.row));
                        prefetch(row.wrapping_add(k + LINE));
                    }
                }
                let mut vectors = [v.splat(F::zero()); N];
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = right.add(j * lanes).cast::<V::Reg>().read_unaligned();
                    if (j * lanes * size_of::<F>()).is_multiple_of(CACHE_LINE) {
                        prefetch(right.wrapping_add(AHEAD * width + j * lanes));
                    }
                }
                let across = rows[0].wrapping_add(k * left.step);
                if ACROSS {
                    prefetch(across.wrapping_add(2 * ROWS));
                }
                for i in 0..ROWS {
                    let x = v.splat(if ACROSS { *across.add(i) } else { *rows[i].add(k) });
                    for j in 0..N {
                        sums[i][j] = v.mul_add(x, vectors[j], sums[i][j]);
                    }
                }
                right = right.add(width);
            }
        }
    }

    let is_stored = matches!(product.start, Start::Stored);
    if last == lanes {
        for (i, sums) in sums.iter().enumerate() {
            let to = V::split_mut(&mut product.to[(row + i) * product.to_row..][..product.columns]).0;
            for (to, &sum) in to.iter_mut().zip(sums) {
                *to = if is_stored { v.add(*to, sum) } else { sum };
            }
        }
        return ROWS;
    }
    // The loop reads a copy, so that the sums stay in registers although it is not unrolled.
    let copy = sums;
    for (i, sums) in copy.iter().enumerate() {
        let to = &mut product.to[(row + i) * product.to_row..][..product.columns];
        for (to, &sum) in to.chunks_mut(lanes).zip(sums) {
            let sum = if is_stored { v.add(v.load_partial(to), sum) } else { sum };
            v.store_partial(sum, to);
        }
    }
    ROWS
}

/// The number of elements of a row of the left operand, a cache line in f32, after which the next ones are prefetched.
const LINE: usize = 16;
/// The number of rows by which the right operand is prefetched ahead.
const AHEAD: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn values<F: Float>(n: usize, seed: usize) -> Vec<F> {
        (0..n).map(|i| F::from_f64(((i * 7 + seed * 13) % 19) as f64 - 9.0)).collect()
    }

    /// Checks both orders of the left operand, in one block and in two, at sizes that do not fill the registers.
    fn check<F: Float>() {
        for isa in Isa::available() {
            let Registers { width, lanes, .. } = Registers::for_isa::<F>(isa);
            let most = width / lanes;
            for (rows, depth, vectors, missing) in [(1, 1, 1, 0), (8, 5, 3, 0), (19, 33, 2, lanes - 1), (12, 7, 3, 1)] {
                let (width, missing) = (vectors.min(most) * lanes, missing.min(lanes - 1));
                let columns = width - missing;
                let (left, right) = (values::<F>(rows * depth, 1), values::<F>(depth * width, 2));
                let transposed: Vec<F> = (0..rows * depth).map(|i| left[i % rows * depth + i / rows]).collect();
                let block = |values, row, step, depth| Left { values, row, step, depth };
                let half = depth / 2;
                let forms: [Vec<Left<F>>; 4] = [
                    vec![block(&left, depth, 1, depth)],
                    vec![block(&transposed, 1, rows, depth)],
                    vec![block(&left, depth, 1, half), block(&left[half..], depth, 1, depth - half)],
                    vec![block(&transposed, 1, rows, half), block(&transposed[half * rows..], 1, rows, depth - half)],
                ];
                let bias = values::<F>(rows, 3);
                for blocks in &forms {
                    for start in [Start::Zero, Start::Stored, Start::Rows(&bias)] {
                        let to_row = columns + 2;
                        let before = values::<F>(rows * to_row, 4);
                        let mut to = before.clone();
                        let left = blocks.as_slice();
                        let right = &right[..];
                        F::dispatch(
                            isa,
                            PanelProduct { start, rows, left, right, width, to: &mut to, to_row, columns },
                        );
                        for (i, (found, &before)) in to.iter().zip(&before).enumerate() {
                            let (row, column) = (i / to_row, i % to_row);
                            let sum: F =
                                (0..depth).map(|k| at(&forms[0][0], row, k) * right[k * width + column % width]).sum();
                            let expected = match start {
                                _ if column >= columns => before,
                                Start::Zero => sum,
                                Start::Stored => before + sum,
                                Start::Rows(bias) => bias[row] + sum,
                            };
                            assert_eq!(
                                found.f64(),
                                expected.f64(),
                                "{} {rows} {depth} {width} {column}",
                                isa.kernels()
                            );
                        }
                    }
                }
            }
        }
    }

    fn at<F: Float>(left: &Left<F>, row: usize, k: usize) -> F {
        left.values[row * left.row + k * left.step]
    }

    #[test]
    fn products_equal_plain_loops() {
        check::<f32>();
        check::<f64>();
    }
}
