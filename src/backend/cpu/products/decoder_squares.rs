//! Rows of the decoder as an operand of a tile unit.

use std::ops::Range;

use half::bf16;

use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::decoder::{DecoderView, MatrixValues};
use crate::backend::cpu::operands::dtype::with_values;
use crate::backend::cpu::tiles::product::SIDE;
use crate::backend::cpu::tiles::rounding::{RoundedRow, ToBf16};
use crate::backend::cpu::tiles::squares::{store_line, Grid};
use crate::backend::cpu::tiles::transpose::transpose;
use crate::backend::cpu::vector::simd::{Float, Isa};

/// Some rows of the decoder in bf16, `[ids, d]`, and their transpose, both in squares padded with zeros. Each square
/// lies in one piece, one row of squares after the other.
#[derive(Default)]
pub(crate) struct DecoderSquares {
    pub(crate) rows: Aligned<bf16>,
    pub(crate) columns: Aligned<bf16>,
    /// One row, or one column, before it is cut into squares.
    line: Vec<bf16>,
    /// One row of a matrix that is not read where it lies, before it is rounded.
    row: Vec<f32>,
}

impl DecoderSquares {
    /// Copies the rows of some ids, and transposes them.
    pub(crate) fn read(&mut self, isa: Isa, decoder: &DecoderView<'_, f32>, ids: Range<usize>) {
        let grid = Grid { down: ids.len().div_ceil(SIDE), across: decoder.width().div_ceil(SIDE) };
        self.read_rows(isa, decoder, ids);
        if !decoder.weight.is_transposed() {
            let columns = self.columns.at_least(self.rows.len());
            transpose(isa, &self.rows, grid, columns);
        }
    }

    /// Copies the rows of some ids. A weight is read as it is stored: if that is its transpose, its columns are copied
    /// first, and `columns` holds them afterwards.
    pub(crate) fn read_rows(&mut self, isa: Isa, decoder: &DecoderView<'_, f32>, ids: Range<usize>) {
        let (d, n) = (decoder.width().next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        if decoder.weight.is_transposed() {
            self.read_columns(isa, decoder, ids);
            let grid = Grid { down: d / SIDE, across: n / SIDE };
            transpose(isa, &self.columns, grid, self.rows.at_least(n * d));
            return;
        }
        let rows = self.rows.at_least(n * d);
        self.line.clear();
        self.line.resize(d, bf16::ZERO);
        for (row, id) in ids.clone().enumerate() {
            for (columns, matrix) in decoder.matrices() {
                let to = &mut self.line[columns];
                if let MatrixValues::Rows(values) = matrix.values {
                    let values = values.slice(id * matrix.width..(id + 1) * matrix.width);
                    with_values!(values, values => f32::dispatch(isa, RoundedRow { values, to }));
                } else {
                    self.row.clear();
                    matrix.push_row(id, &mut self.row);
                    f32::dispatch(isa, RoundedRow { values: &self.row, to });
                }
            }
            store_line(&self.line, row, d / SIDE, rows);
        }
        (ids.len()..n).for_each(|row| store_line(&[], row, d / SIDE, rows));
    }

    /// Copies the columns of some ids, from a weight that is stored as its transpose.
    fn read_columns(&mut self, isa: Isa, decoder: &DecoderView<'_, f32>, ids: Range<usize>) {
        let (d, n) = (decoder.width().next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        self.line.clear();
        self.line.resize(n, bf16::ZERO);
        let columns = self.columns.at_least(n * d);
        let stored = decoder.matrices().flat_map(|(_, matrix)| (0..matrix.width).map(move |column| (matrix, column)));
        let mut stored = stored.map(Some).chain(std::iter::repeat(None));
        for column in 0..d {
            let line = &mut self.line[..ids.len()];
            match stored.next().flatten() {
                Some((matrix, column)) => match matrix.values {
                    MatrixValues::Columns(values) => {
                        let first = column * matrix.vocab;
                        let values = values.slice(first + ids.start..first + ids.end);
                        with_values!(values, values => f32::dispatch(isa, RoundedRow { values, to: line }));
                    }
                    MatrixValues::Rows(_) | MatrixValues::Blocks(_) => {
                        let (values, stride) = matrix.rows(ids.clone(), column..column + 1, &mut self.row);
                        line.iter_mut().zip(values.iter().step_by(stride)).for_each(|(to, x)| *to = x.to_bf16());
                    }
                },
                None => line.fill(bf16::ZERO),
            }
            store_line(&self.line, column, n / SIDE, columns);
        }
    }
}
