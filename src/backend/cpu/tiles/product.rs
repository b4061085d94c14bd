//! A product in squares: its operands, and where they lie.

use std::ops::Range;

use half::bf16;

use super::rounding::Pair;

/// Rows, columns and depth of a square.
pub(crate) const SIDE: usize = 32;
/// Pairs of rows in the depth of a square.
pub(crate) const PAIRS: usize = SIDE / 2;
/// Elements of a square.
pub(crate) const SQUARE: usize = SIDE * SIDE;
/// Squares that are summed over at a time: the right operand of so many stays in the first-level cache.
const MOST_STEPS: usize = 16;

/// Parts of nearly the same size, of at most [`MOST_STEPS`].
pub(crate) fn steps(all: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let size = all.len().div_ceil(all.len().div_ceil(MOST_STEPS));
    all.clone().step_by(size).map(move |first| first..all.end.min(first + size))
}

/// Where the squares of an operand lie.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, E> {
    pub(crate) values: &'a [E],
    /// From a row, or a pair of rows, to the next.
    pub(crate) row: usize,
    /// From a square to the next in the direction of the sums.
    pub(crate) step: usize,
    /// From a square to the next in the other direction.
    pub(crate) square: usize,
}

impl<E> Operand<'_, E> {
    fn contains(&self, squares: usize, steps: usize, rows: usize) -> bool {
        (squares - 1) * self.square + (steps - 1) * self.step + (rows - 1) * self.row + SIDE <= self.values.len()
    }
}

/// `to = left right`, or `to += left right`.
pub(crate) struct TileProduct<'a> {
    pub(crate) left: Operand<'a, bf16>,
    pub(crate) right: Operand<'a, Pair>,
    /// Squares in the direction of the sums.
    pub(crate) steps: usize,
    pub(crate) to: &'a mut [f32],
    /// From a row of `to` to the next.
    pub(crate) to_row: usize,
    /// Squares of the result, down and across.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) add: bool,
}

impl TileProduct<'_> {
    /// Whether the product has a square.
    pub(super) fn is_empty(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }

    /// Checks that all squares lie in the operands and in the result.
    pub(super) fn check(&self) {
        let TileProduct { left, right, steps, to_row, rows, columns, .. } = *self;
        assert!(steps > 0 && left.contains(rows, steps, SIDE) && right.contains(columns, steps, PAIRS));
        assert!(SIDE * columns <= to_row && (SIDE * rows - 1) * to_row + SIDE * columns <= self.to.len());
    }
}
