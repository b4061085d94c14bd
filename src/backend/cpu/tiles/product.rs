//! Products in squares: their operands, and where these lie.

use std::ops::Range;

use half::bf16;

use super::rounding::Pair;

/// The number of rows, columns and products of a square.
pub(crate) const SIDE: usize = 32;
/// The number of pairs of rows in a square of the right operand.
pub(crate) const PAIRS: usize = SIDE / 2;
/// The number of elements of a square.
pub(crate) const SQUARE: usize = SIDE * SIDE;
/// The maximum number of squares that are summed over at a time: the right operand of so many stays in the first-level
/// cache.
const MOST_STEPS: usize = 16;

/// Cuts a range into ranges of nearly the same size, of at most [`MOST_STEPS`].
pub(crate) fn steps(all: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let size = all.len().div_ceil(all.len().div_ceil(MOST_STEPS));
    all.clone().step_by(size).map(move |first| first..all.end.min(first + size))
}

/// An operand, and where its squares lie.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, E> {
    pub(crate) values: &'a [E],
    /// The distance from a row, or a pair of rows, to the next.
    pub(crate) row: usize,
    /// The distance from a square to the next in the direction of the sums.
    pub(crate) step: usize,
    /// The distance from a square to the next in the other direction.
    pub(crate) square: usize,
}

impl<E> Operand<'_, E> {
    /// Returns whether the operand contains so many squares, steps and rows.
    fn contains(&self, squares: usize, steps: usize, rows: usize) -> bool {
        (squares - 1) * self.square + (steps - 1) * self.step + (rows - 1) * self.row + SIDE <= self.values.len()
    }
}

/// `to = left right`, or `to += left right`.
pub(crate) struct TileProduct<'a> {
    pub(crate) left: Operand<'a, bf16>,
    pub(crate) right: Operand<'a, Pair>,
    /// The number of squares in the direction of the sums.
    pub(crate) steps: usize,
    pub(crate) to: &'a mut [f32],
    /// The distance from a row of `to` to the next.
    pub(crate) to_row: usize,
    /// The number of squares of the result, one below the other.
    pub(crate) rows: usize,
    /// The number of squares of the result, side by side.
    pub(crate) columns: usize,
    /// Whether the product is added to what `to` holds, or replaces it.
    pub(crate) is_added: bool,
}

/// `to = left right` for operands whose squares lie side by side.
pub(crate) struct SquareProduct<'a> {
    /// `[square of rows][square of the depth][SIDE, SIDE]`
    pub(crate) left: &'a [bf16],
    /// `[square of columns][pair of rows][SIDE]`
    pub(crate) right: &'a [Pair],
    /// The number of squares in the direction of the sums.
    pub(crate) depth: usize,
    /// `[SIDE rows, width]`
    pub(crate) to: &'a mut [f32],
    /// The number of squares of the result, one below the other.
    pub(crate) rows: usize,
    /// The number of columns of the result, a multiple of [`SIDE`].
    pub(crate) width: usize,
}

impl TileProduct<'_> {
    /// Returns whether the result has no square.
    pub(super) fn is_empty(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }

    /// Checks that all squares lie in the operands and in the result.
    ///
    /// # Panics
    ///
    /// If one does not.
    pub(super) fn check(&self) {
        let TileProduct { left, right, steps, to_row, rows, columns, .. } = *self;
        assert!(steps > 0 && left.contains(rows, steps, SIDE) && right.contains(columns, steps, PAIRS));
        assert!(SIDE * columns <= to_row && (SIDE * rows - 1) * to_row + SIDE * columns <= self.to.len());
    }
}
