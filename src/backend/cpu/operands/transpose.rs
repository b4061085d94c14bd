//! Transposes blocks of matrices in registers.

use std::ops::Range;

/// Writes a block of a matrix with rows of `width` elements, transposed and converted, to rows of `stride` elements.
pub(crate) fn transpose<T: Copy, F: Copy>(
    matrix: &[T],
    width: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    to: &mut [F],
    stride: usize,
    convert: impl Fn(T) -> F + Copy,
) {
    for (i, row) in rows.clone().step_by(IN_REGISTERS).enumerate() {
        let block = &matrix[row * width..rows.end.min(row + IN_REGISTERS) * width];
        for (j, column) in columns.clone().step_by(IN_REGISTERS).enumerate() {
            let to = &mut to[j * IN_REGISTERS * stride + i * IN_REGISTERS..];
            let columns = column..columns.end.min(column + IN_REGISTERS);
            transpose_block(block, width, columns, to, stride, convert);
        }
    }
}

/// The number of rows, and of columns, of a block that is transposed in registers.
const IN_REGISTERS: usize = 8;

/// Writes `columns` of `block` as rows of `to`.
#[inline]
fn transpose_block<T: Copy, F: Copy>(
    block: &[T],
    width: usize,
    columns: Range<usize>,
    to: &mut [F],
    stride: usize,
    convert: impl Fn(T) -> F,
) {
    if block.len() < IN_REGISTERS * width || columns.len() < IN_REGISTERS {
        for (r, row) in block.chunks_exact(width).enumerate() {
            for (c, &x) in row[columns.clone()].iter().enumerate() {
                to[c * stride + r] = convert(x);
            }
        }
        return;
    }
    // The compiler turns this form into shuffles.
    let mut rows: [&[T]; IN_REGISTERS] = [&[]; IN_REGISTERS];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &block[r * width..][columns.clone()][..IN_REGISTERS];
    }
    for c in 0..IN_REGISTERS {
        let mut column = [convert(rows[0][c]); IN_REGISTERS];
        for r in 1..IN_REGISTERS {
            column[r] = convert(rows[r][c]);
        }
        to[c * stride..][..IN_REGISTERS].copy_from_slice(&column);
    }
}
