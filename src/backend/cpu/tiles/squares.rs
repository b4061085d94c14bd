//! Matrices in squares. Each square lies in one piece, one row of squares after the other.

use half::bf16;

use super::product::{SIDE, SQUARE};

/// The number of squares of a matrix, one below the other and side by side.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) down: usize,
    pub(crate) across: usize,
}

impl Grid {
    pub(crate) fn elements(self) -> usize {
        self.down * self.across * SQUARE
    }

    pub(crate) fn transposed(self) -> Self {
        Grid { down: self.across, across: self.down }
    }
}

/// Stores a row of a matrix that has `across` squares side by side, padded with zeros.
pub(crate) fn store_line(line: &[bf16], row: usize, across: usize, to: &mut [bf16]) {
    let squares = to[(row / SIDE * across * SIDE + row % SIDE) * SIDE..].chunks_mut(SQUARE).take(across);
    let mut parts = line.chunks(SIDE);
    for to in squares {
        let part = parts.next().unwrap_or_default();
        to[..part.len()].copy_from_slice(part);
        to[part.len()..SIDE].fill(bf16::ZERO);
    }
}

/// Stores the rows of a matrix, padded with zeros.
pub(crate) fn store_lines<'l>(lines: impl Iterator<Item = &'l [bf16]>, grid: Grid, to: &mut [bf16]) {
    let mut lines = lines.fuse();
    (0..grid.down * SIDE).for_each(|row| store_line(lines.next().unwrap_or_default(), row, grid.across, to));
}
