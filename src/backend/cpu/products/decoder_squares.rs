//! Rows of the decoder as an operand of a tile unit.

use std::ops::Range;

use half::bf16;

use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::matrix::DecoderView;
use crate::backend::cpu::tiles::product::SIDE;
use crate::backend::cpu::tiles::rounding::RoundedRow;
use crate::backend::cpu::tiles::squares::store_line;
use crate::backend::cpu::tiles::transpose::transpose;
use crate::backend::cpu::vector::simd::{Float, Isa};

/// Some rows of the decoder in bf16, `[ids, d]`, and their transpose, both padded with zeros. Each square lies in one
/// piece, one row of squares after the other.
#[derive(Default)]
pub(crate) struct DecoderSquares {
    pub(crate) rows: Aligned<bf16>,
    pub(crate) columns: Aligned<bf16>,
    line: Vec<bf16>,
}

impl DecoderSquares {
    /// Copies the rows of some ids, and transposes them.
    pub(crate) fn read<T: Element<Acc = f32>>(&mut self, isa: Isa, decoder: &DecoderView<'_, T>, ids: Range<usize>) {
        let (down, across) = (ids.len().div_ceil(SIDE), decoder.width().div_ceil(SIDE));
        self.read_rows(isa, decoder, ids);
        if !decoder.weight.transposed {
            let columns = self.columns.at_least(self.rows.len());
            transpose(isa, &self.rows, (down, across), columns);
        }
    }

    /// Copies the rows of some ids. A weight is copied as it is stored: if that is its transpose, these are the
    /// transpose's columns.
    pub(crate) fn read_rows<T: Element<Acc = f32>>(
        &mut self,
        isa: Isa,
        decoder: &DecoderView<'_, T>,
        ids: Range<usize>,
    ) {
        let (d, n) = (decoder.width().next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        let rows = self.rows.at_least(n * d);
        self.line.clear();
        if decoder.weight.transposed {
            self.line.resize(n, bf16::ZERO);
            let columns = self.columns.at_least(n * d);
            let of_decoder = decoder.parts().flat_map(|(_, part)| (0..part.width).map(move |column| (part, column)));
            let mut of_decoder = of_decoder.map(Some).chain(std::iter::repeat(None));
            for column in 0..d {
                let line = &mut self.line[..ids.len()];
                match of_decoder.next().flatten() {
                    Some((matrix, column)) if matrix.transposed => {
                        let values = &matrix.values[column * matrix.vocab..][ids.clone()];
                        f32::dispatch(isa, RoundedRow { values, to: line });
                    }
                    Some((matrix, column)) => {
                        let values = matrix.values[ids.start * matrix.width + column..].iter().step_by(matrix.width);
                        line.iter_mut().zip(values).for_each(|(to, x)| *to = x.to_bf16());
                    }
                    None => line.fill(bf16::ZERO),
                }
                store_line(&self.line, column, n / SIDE, columns);
            }
            transpose(isa, columns, (d / SIDE, n / SIDE), rows);
            return;
        }
        self.line.resize(d, bf16::ZERO);
        for (row, id) in ids.clone().enumerate() {
            for (of_part, matrix) in decoder.parts() {
                let values = &matrix.values[id * matrix.width..(id + 1) * matrix.width];
                f32::dispatch(isa, RoundedRow { values, to: &mut self.line[of_part] });
            }
            store_line(&self.line, row, d / SIDE, rows);
        }
        (ids.len()..n).for_each(|row| store_line(&[], row, d / SIDE, rows));
    }
}
