//! Rows of the decoder as an operand of a tile unit.

use std::ops::Range;

use half::bf16;

use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::decoder::{DecoderView, MatrixValues};
use crate::backend::cpu::operands::dtype::with_values;
use crate::backend::cpu::tiles::product::{Parts, SIDE};
use crate::backend::cpu::tiles::split::write_parts;
use crate::backend::cpu::tiles::squares::{store_parts, Grid};
use crate::backend::cpu::tiles::transpose::transpose;
use crate::backend::cpu::vector::simd::Isa;

/// Some rows of the decoder, `[ids, d]`, and their transpose, both in squares padded with zeros. Each square lies in
/// one piece, one row of squares after the other.
#[derive(Default)]
pub(crate) struct DecoderSquares {
    pub(crate) rows: Aligned<bf16>,
    pub(crate) columns: Aligned<bf16>,
    /// The parts of one row, or of one column, before they are cut into squares.
    line: Vec<bf16>,
    /// One row of a matrix that is not read where it lies, or some of a column, before it is rounded.
    row: Vec<f32>,
}

impl DecoderSquares {
    /// Copies the rows of some ids, and transposes them.
    pub(crate) fn read(&mut self, isa: Isa, decoder: &DecoderView<'_, f32>, ids: Range<usize>, parts: Parts) {
        let grid = Grid { down: ids.len().div_ceil(SIDE), across: decoder.width().div_ceil(SIDE), parts };
        self.read_rows(isa, decoder, ids, parts);
        if !decoder.weight.is_transposed() {
            let columns = self.columns.at_least(self.rows.len());
            transpose(isa, &self.rows, grid, columns);
        }
    }

    /// Copies the rows of some ids. A weight is read as it is stored: if that is its transpose, its columns are copied
    /// first, and `columns` holds them afterwards.
    pub(crate) fn read_rows(&mut self, isa: Isa, decoder: &DecoderView<'_, f32>, ids: Range<usize>, parts: Parts) {
        let (d, n) = (decoder.width().next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        let grid = Grid { down: n / SIDE, across: d / SIDE, parts };
        if decoder.weight.is_transposed() {
            self.read_columns(isa, decoder, ids, parts);
            transpose(isa, &self.columns, grid.transposed(), self.rows.at_least(grid.elements()));
            return;
        }
        let rows = self.rows.at_least(grid.elements());
        self.line.clear();
        self.line.resize(parts.count() * d, bf16::ZERO);
        for (row, id) in ids.clone().enumerate() {
            for (columns, matrix) in decoder.matrices() {
                let to = &mut self.line[columns.start..];
                if let MatrixValues::Rows(values) = matrix.values {
                    let values = values.slice(id * matrix.width..(id + 1) * matrix.width);
                    with_values!(values, values => write_parts(isa, values, parts, to, d));
                } else {
                    self.row.clear();
                    matrix.push_row(id, &mut self.row);
                    write_parts(isa, &self.row, parts, to, d);
                }
            }
            store_parts(&self.line, row, grid, rows);
        }
        (ids.len()..n).for_each(|row| store_parts(&[], row, grid, rows));
    }

    /// Copies the columns of some ids, from a weight that is stored as its transpose.
    fn read_columns(&mut self, isa: Isa, decoder: &DecoderView<'_, f32>, ids: Range<usize>, parts: Parts) {
        let (d, n) = (decoder.width().next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        let grid = Grid { down: d / SIDE, across: n / SIDE, parts };
        self.line.clear();
        self.line.resize(parts.count() * n, bf16::ZERO);
        let columns = self.columns.at_least(grid.elements());
        let stored = decoder.matrices().flat_map(|(_, matrix)| (0..matrix.width).map(move |column| (matrix, column)));
        let mut stored = stored.map(Some).chain(std::iter::repeat(None));
        for column in 0..d {
            let line = &mut self.line;
            match stored.next().flatten() {
                Some((matrix, column)) => match matrix.values {
                    MatrixValues::Columns(values) => {
                        let first = column * matrix.vocab;
                        let values = values.slice(first + ids.start..first + ids.end);
                        with_values!(values, values => write_parts(isa, values, parts, line, n));
                    }
                    MatrixValues::Rows(_) | MatrixValues::Blocks(_) => {
                        let (values, stride) = matrix.rows(ids.clone(), column..column + 1, &mut self.row);
                        let values: Vec<f32> = values.iter().step_by(stride).take(ids.len()).copied().collect();
                        write_parts(isa, &values, parts, line, n);
                    }
                },
                None => line.fill(bf16::ZERO),
            }
            store_parts(&self.line, column, grid, columns);
        }
    }
}
