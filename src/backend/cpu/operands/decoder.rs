//! The decoder in each of its layouts: rows, their transpose, or blocks.

use std::ops::Range;

use super::blocks::BlockRows;
use super::dtype::{with_values, Accumulator, Element, Stored};
use super::transpose::transpose;
use crate::backend::cpu::vector::simd::ROW_ALIGN;

/// The decoder: its weight, and to the right of it the columns of an adapter.
#[derive(Clone, Copy)]
pub(crate) struct DecoderView<'a, F: Accumulator> {
    pub(crate) weight: DecoderMatrix<'a, F>,
    pub(crate) adapter: Option<DecoderMatrix<'a, F>>,
}

impl<'a, F: Accumulator> DecoderView<'a, F> {
    /// Returns the weight and the adapter, if there is one, each with its columns of the decoder.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = (Range<usize>, DecoderMatrix<'a, F>)> {
        let d = self.weight.width;
        let adapter = self.adapter.map(|adapter| (d..d + adapter.width, adapter));
        std::iter::once((0..d, self.weight)).chain(adapter)
    }

    /// Returns the number of columns.
    pub(crate) fn width(&self) -> usize {
        self.weight.width + self.adapter.map_or(0, |adapter| adapter.width)
    }

    /// Copies the row of an id.
    pub(crate) fn row(&self, id: usize, to: &mut Vec<F>) {
        to.clear();
        self.matrices().for_each(|(_, matrix)| matrix.push_row(id, to));
    }
}

/// The decoder's weight `[vocab, d]`, or the columns of an adapter `[vocab, r]`.
#[derive(Clone, Copy)]
pub(crate) struct DecoderMatrix<'a, F: Accumulator> {
    pub(crate) values: MatrixValues<'a, F>,
    /// The number of rows, which may exceed the vocabulary.
    pub(crate) vocab: usize,
    /// The number of columns.
    pub(crate) width: usize,
}

/// The values of a matrix in the layout that they are stored in.
#[derive(Clone, Copy)]
pub(crate) enum MatrixValues<'a, F: Accumulator> {
    /// `[vocab, d]`
    Rows(Stored<'a, F>),
    /// `[d, vocab]`: the transpose
    Columns(Stored<'a, F>),
    /// Rows in blocks, which are dequantised where they are read.
    Blocks(&'a dyn BlockRows<F>),
}

impl<'a, F: Accumulator> MatrixValues<'a, F> {
    /// Takes stored values as a matrix, or as its transpose.
    pub(crate) fn stored(values: Stored<'a, F>, is_transposed: bool) -> Self {
        if is_transposed {
            MatrixValues::Columns(values)
        } else {
            MatrixValues::Rows(values)
        }
    }
}

impl<'a, F: Accumulator> DecoderMatrix<'a, F> {
    /// Returns whether the transpose is stored.
    pub(crate) fn is_transposed(&self) -> bool {
        matches!(self.values, MatrixValues::Columns(_))
    }

    /// Returns whether blocks `[ids, columns]` are read in place, without a copy.
    pub(crate) fn is_read_in_place(&self) -> bool {
        matches!(self.values, MatrixValues::Rows(Stored::Wide(_)))
    }

    /// Returns whether a copy has all columns of its rows, because the matrix is not cut between columns.
    pub(crate) fn has_whole_rows(&self) -> bool {
        matches!(self.values, MatrixValues::Blocks(_))
    }

    /// Returns the block `[ids, columns]` and its row stride, from the decoder itself or from a copy in `buffer`.
    pub(crate) fn rows<'b>(
        &'b self,
        ids: Range<usize>,
        columns: Range<usize>,
        buffer: &'b mut Vec<F>,
    ) -> (&'b [F], usize) {
        match self.values {
            MatrixValues::Rows(values) => widened_block(values, self.width, ids, columns, buffer),
            MatrixValues::Columns(values) => transposed_block(values, self.vocab, columns, ids, buffer),
            MatrixValues::Blocks(blocks) => {
                (&dequantised_rows(blocks, self.width, ids, buffer)[columns.start..], self.width)
            }
        }
    }

    /// Returns all columns of some ids in the layout of the decoder, from the decoder itself or from a copy in
    /// `buffer`.
    pub(crate) fn block<'b>(self, ids: Range<usize>, buffer: &'b mut Vec<F>) -> Block<'b, F>
    where
        'a: 'b,
    {
        let (d, vocab) = (self.width, self.vocab);
        match self.values {
            MatrixValues::Rows(values) => {
                let (values, id) = widened_block(values, d, ids, 0..d, buffer);
                Block { values, id, column: 1 }
            }
            MatrixValues::Columns(values) => {
                let (values, column) = widened_block(values, vocab, 0..d, ids, buffer);
                Block { values, id: 1, column }
            }
            MatrixValues::Blocks(blocks) => {
                Block { values: dequantised_rows(blocks, d, ids, buffer), id: d, column: 1 }
            }
        }
    }

    /// Appends the row of an id.
    pub(crate) fn push_row(&self, id: usize, to: &mut Vec<F>) {
        match self.values {
            MatrixValues::Rows(values) => values.slice(id * self.width..(id + 1) * self.width).append_to(to),
            MatrixValues::Columns(values) => {
                with_values!(values, values => to.extend(values[id..].iter().step_by(self.vocab).map(|x| x.widen())))
            }
            MatrixValues::Blocks(blocks) => {
                let first = to.len();
                to.resize(first + self.width, F::zero());
                blocks.dequantise(id..id + 1, self.width, &mut to[first..]);
            }
        }
    }
}

/// Some rows of the decoder. Column j of id i is `values[i * id + j * column]`.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a, F> {
    pub(crate) values: &'a [F],
    pub(crate) id: usize,
    pub(crate) column: usize,
}

/// Dequantises rows of `width` elements into `buffer`.
fn dequantised_rows<'a, F: Accumulator>(
    blocks: &dyn BlockRows<F>,
    width: usize,
    ids: Range<usize>,
    buffer: &'a mut Vec<F>,
) -> &'a [F] {
    buffer.resize(ids.len() * width, F::zero());
    blocks.dequantise(ids, width, buffer);
    buffer
}

/// Returns a block of a matrix with rows of `width` elements, and the block's row stride, from the matrix itself or
/// from a copy in `buffer`.
fn widened_block<'a, F: Accumulator>(
    matrix: Stored<'a, F>,
    width: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    buffer: &'a mut Vec<F>,
) -> (&'a [F], usize) {
    if let Some(values) = matrix.wide() {
        return (&values[rows.start * width + columns.start..], width);
    }
    buffer.clear();
    for row in rows {
        matrix.slice(row * width + columns.start..row * width + columns.end).append_to(buffer);
    }
    (buffer, columns.len())
}

/// Transposes and widens a block of a matrix with rows of `width` elements into `buffer`; returns it with its row
/// stride. The `gemm` crate can read a transposed operand, but only element by element, which costs as much as the
/// product itself when there are few rows of contexts.
fn transposed_block<'a, F: Accumulator>(
    matrix: Stored<'_, F>,
    width: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    buffer: &'a mut Vec<F>,
) -> (&'a [F], usize) {
    let stride = rows.len().next_multiple_of(ROW_ALIGN);
    buffer.resize(columns.len() * stride, F::zero());
    with_values!(matrix, matrix => transpose(matrix, width, rows, columns, buffer, stride, |x| x.widen()));
    (buffer, stride)
}
