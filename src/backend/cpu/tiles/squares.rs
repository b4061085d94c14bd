//! Matrices in squares. Each square lies in one piece, one row of squares after the other.

use half::bf16;

use super::product::{Parts, SIDE, SQUARE};

/// The number of squares of a matrix, one below the other and side by side, and their parts.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) down: usize,
    pub(crate) across: usize,
    pub(crate) parts: Parts,
}

impl Grid {
    pub(crate) fn elements(self) -> usize {
        self.down * self.across * self.parts.square()
    }

    pub(crate) fn transposed(self) -> Self {
        Grid { down: self.across, across: self.down, ..self }
    }
}

/// Stores one part of a row of a matrix, padded with zeros.
fn store_line(line: &[bf16], row: usize, part: usize, grid: Grid, to: &mut [bf16]) {
    let square = grid.parts.square();
    let first = row / SIDE * grid.across * square + part * SQUARE + row % SIDE * SIDE;
    let (pieces, last) = line.as_chunks::<SIDE>();
    for (i, to) in to[first..].chunks_mut(square).take(grid.across).enumerate() {
        let Some(to) = to.first_chunk_mut() else { return };
        *to = pieces.get(i).copied().unwrap_or([bf16::ZERO; SIDE]);
        if i == pieces.len() {
            to[..last.len()].copy_from_slice(last);
        }
    }
}

/// Stores all parts of a row of a matrix, which lie one after the other, padded with zeros.
pub(crate) fn store_parts(parts: &[bf16], row: usize, grid: Grid, to: &mut [bf16]) {
    let count = grid.parts.count();
    let length = parts.len() / count;
    (0..count).for_each(|part| store_line(&parts[part * length..][..length], row, part, grid, to));
}

/// Stores the rows of a matrix of one part, padded with zeros.
pub(crate) fn store_lines<'l>(lines: impl Iterator<Item = &'l [bf16]>, grid: Grid, to: &mut [bf16]) {
    let mut lines = lines.fuse();
    (0..grid.down * SIDE).for_each(|row| store_line(lines.next().unwrap_or_default(), row, 0, grid, to));
}
