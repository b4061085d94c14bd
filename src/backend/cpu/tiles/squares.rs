//! Matrices in squares: each square lies in one piece, one row of squares after the other.

use half::bf16;

use super::product::{SIDE, SQUARE};

/// Stores a row of a matrix of so many squares across, padded with zeros.
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
pub(crate) fn store_lines<'l>(lines: impl Iterator<Item = &'l [bf16]>, down: usize, across: usize, to: &mut [bf16]) {
    let mut lines = lines.fuse();
    (0..down * SIDE).for_each(|row| store_line(lines.next().unwrap_or_default(), row, across, to));
}
