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

/// How the numbers of operands are represented. A square of an operand lies as its parts, one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Parts {
    /// A number in bf16, to which wider ones are rounded.
    One,
    /// The sum of three numbers in bf16, which represent a finite one in f32; see [`parts`](super::rounding::parts).
    Three,
}

impl Parts {
    /// Returns the number of parts.
    pub(crate) fn count(self) -> usize {
        match self {
            Parts::One => 1,
            Parts::Three => 3,
        }
    }

    /// Returns the elements of a square of the left operand, with all parts.
    pub(crate) fn square(self) -> usize {
        self.count() * SQUARE
    }

    /// Returns the pairs of a square of the right operand, with all parts.
    pub(crate) fn square_pairs(self) -> usize {
        self.count() * PAIRS * SIDE
    }

    /// Returns which part of the left operand is multiplied by which of the right one, in the order in which the unit
    /// adds them up. Of three parts, the products that are left out have a sum of less than 2^-22 of the product (Henry,
    /// Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations",
    /// arXiv:1904.06376). Neighbours share an operand.
    pub(super) fn products(self) -> &'static [(usize, usize)] {
        match self {
            Parts::One => &[(0, 0)],
            Parts::Three => &[(0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)],
        }
    }

    /// Cuts the squares of a sum into those that are summed over at a time. Each part is multiplied several times while
    /// it is in registers and in the first-level cache, so that a sum of three parts is not cut.
    pub(crate) fn steps(self, all: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let most = if self == Parts::One { MOST_STEPS } else { usize::MAX };
        let size = all.len().div_ceil(all.len().div_ceil(most));
        all.clone().step_by(size).map(move |first| first..all.end.min(first + size))
    }
}

/// An operand, and where its squares lie. The rows of a square, or its pairs of rows, lie side by side.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, E> {
    pub(crate) values: &'a [E],
    /// The distance from a square to the next in the direction of the sums.
    pub(crate) step: usize,
    /// The distance from a square to the next in the other direction.
    pub(crate) square: usize,
}

impl<E> Operand<'_, E> {
    /// Returns whether the operand contains so many squares and steps, of which each part has so many rows.
    fn contains(&self, squares: usize, steps: usize, rows: usize, parts: Parts) -> bool {
        let square = parts.count() * rows * SIDE;
        (squares - 1) * self.square + (steps - 1) * self.step + square <= self.values.len()
    }
}

/// `to = left right`, or `to += left right`.
pub(crate) struct TileProduct<'a> {
    pub(crate) parts: Parts,
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

/// `to = left right` for operands of one part whose squares lie side by side.
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

    /// Calls `multiply` with the product of each part and another. No plan has several parts for AVX512-BF16, whose
    /// products take longer than those of vectors in f32.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn by_parts(self, mut multiply: impl FnMut(TileProduct<'_>)) {
        let TileProduct { parts, left, right, steps, to, to_row, rows, columns, is_added } = self;
        for (i, &(left_part, right_part)) in parts.products().iter().enumerate() {
            multiply(TileProduct {
                parts: Parts::One,
                left: Operand { values: &left.values[left_part * SQUARE..], ..left },
                right: Operand { values: &right.values[right_part * PAIRS * SIDE..], ..right },
                steps,
                to: &mut *to,
                to_row,
                rows,
                columns,
                is_added: is_added || i > 0,
            });
        }
    }

    /// Checks that all squares lie in the operands and in the result.
    ///
    /// # Panics
    ///
    /// If one does not.
    pub(super) fn check(&self) {
        let TileProduct { parts, left, right, steps, to_row, rows, columns, .. } = *self;
        assert!(steps > 0 && left.contains(rows, steps, SIDE, parts) && right.contains(columns, steps, PAIRS, parts));
        assert!(SIDE * columns <= to_row && (SIDE * rows - 1) * to_row + SIDE * columns <= self.to.len());
    }
}
