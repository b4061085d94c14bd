//! The operands of the products: views of matrices in memory, the decoder in either layout, and the inputs of a mixture.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use candle_core::{Storage, Tensor};

use super::dtype::{locked, with_values, Accumulator, Element, Locked, Stored};
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::vector::math::Softcap;
use crate::backend::cpu::vector::simd::{Isa, ROW_ALIGN};
use crate::backend::operands::{Operands, Sizes};
use crate::error::Result;

/// A matrix for reading: `rows x cols` elements at `data[row * row_stride + col * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, F> {
    pub(crate) data: *const F,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: isize,
    pub(crate) col_stride: isize,
    lifetime: PhantomData<&'a [F]>,
}

/// A matrix for writing, with contiguous rows.
pub(crate) struct ViewMut<'a, F> {
    pub(crate) data: *mut F,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: isize,
    lifetime: PhantomData<&'a mut [F]>,
}

// SAFETY: a `View` is a shared borrow of its elements, like `&[F]`, and `F` is `Sync`.
unsafe impl<F: Sync> Send for View<'_, F> {}
// SAFETY: as above.
unsafe impl<F: Sync> Sync for View<'_, F> {}
// SAFETY: a `ViewMut` is a unique borrow of its elements, like `&mut [F]`, and `F` is `Send`.
unsafe impl<F: Send> Send for ViewMut<'_, F> {}

impl<'a, F> View<'a, F> {
    /// Views a row-major slice, whose rows start `stride` elements apart, as a `rows x cols` matrix.
    pub(crate) fn new(data: &'a [F], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride && (rows - 1) * stride + cols <= data.len()));
        View { data: data.as_ptr(), rows, cols, row_stride: stride as isize, col_stride: 1, lifetime: PhantomData }
    }

    /// Returns some of the columns.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols);
        View { data: self.data.wrapping_offset(columns.start as isize * self.col_stride), cols: columns.len(), ..self }
    }

    /// Returns the transpose, which is the same elements with other strides.
    pub(crate) fn transposed(self) -> Self {
        View { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

impl<'a, F> ViewMut<'a, F> {
    /// As [`View::new`], for writing.
    pub(crate) fn new(data: &'a mut [F], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride && (rows - 1) * stride + cols <= data.len()));
        ViewMut { data: data.as_mut_ptr(), rows, cols, row_stride: stride as isize, lifetime: PhantomData }
    }

    /// Borrows a row.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [F] {
        assert!(row < self.rows);
        // SAFETY: the row lies in the matrix, which is a unique borrow, and its elements are contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.data.offset(row as isize * self.row_stride), self.cols) }
    }

    /// Splits the matrix into tiles of at most `rows x cols`, each with its ranges of rows and columns.
    pub(crate) fn tiles(self, rows: usize, cols: usize) -> Vec<(Range<usize>, Range<usize>, ViewMut<'a, F>)> {
        let mut tiles = Vec::new();
        for r in (0..self.rows).step_by(rows) {
            for c in (0..self.cols).step_by(cols) {
                let row_range = r..self.rows.min(r + rows);
                let col_range = c..self.cols.min(c + cols);
                let tile = ViewMut {
                    // SAFETY: r < self.rows and c < self.cols, so this is an element of the matrix.
                    data: unsafe { self.data.offset(r as isize * self.row_stride + c as isize) },
                    rows: row_range.len(),
                    cols: col_range.len(),
                    row_stride: self.row_stride,
                    // The borrow is unique: `self` is consumed, and the tiles are disjoint.
                    lifetime: PhantomData,
                };
                tiles.push((row_range, col_range, tile));
            }
        }
        tiles
    }
}

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

/// The decoder's weight `[vocab, d]`, stored as such or as its transpose, or the columns of an adapter `[vocab, r]`.
#[derive(Clone, Copy)]
pub(crate) struct DecoderMatrix<'a, F: Accumulator> {
    pub(crate) values: Stored<'a, F>,
    /// The number of rows, which may exceed the vocabulary.
    pub(crate) vocab: usize,
    /// The number of columns.
    pub(crate) width: usize,
    /// Whether `values` is stored as `[d, vocab]`.
    pub(crate) is_transposed: bool,
}

impl<'a, F: Accumulator> DecoderMatrix<'a, F> {
    /// Returns whether blocks `[ids, columns]` are read in place, without a copy.
    pub(crate) fn is_read_in_place(&self) -> bool {
        self.values.wide().is_some() && !self.is_transposed
    }

    /// Returns the block `[ids, columns]` and its row stride, from the decoder itself or from a copy in `buffer`.
    pub(crate) fn rows<'b>(
        &'b self,
        ids: Range<usize>,
        columns: Range<usize>,
        buffer: &'b mut Vec<F>,
    ) -> (&'b [F], usize) {
        if !self.is_transposed {
            widened_block(self.values, self.width, ids, columns, buffer)
        } else {
            transposed_block(self.values, self.vocab, columns, ids, buffer)
        }
    }

    /// Returns all columns of some ids in the layout of the decoder, from the decoder itself or from a copy in
    /// `buffer`.
    pub(crate) fn block<'b>(self, ids: Range<usize>, buffer: &'b mut Vec<F>) -> Block<'b, F>
    where
        'a: 'b,
    {
        let (d, vocab) = (self.width, self.vocab);
        if !self.is_transposed {
            let (values, id) = widened_block(self.values, d, ids, 0..d, buffer);
            Block { values, id, column: 1 }
        } else {
            let (values, column) = widened_block(self.values, vocab, 0..d, ids, buffer);
            Block { values, id: 1, column }
        }
    }

    /// Appends the row of an id.
    pub(crate) fn push_row(&self, id: usize, to: &mut Vec<F>) {
        if !self.is_transposed {
            self.values.slice(id * self.width..(id + 1) * self.width).append_to(to);
        } else {
            with_values!(self.values, values => to.extend(values[id..].iter().step_by(self.vocab).map(|x| x.widen())))
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
    let rows: [&[T]; IN_REGISTERS] = std::array::from_fn(|r| &block[r * width..][columns.clone()][..IN_REGISTERS]);
    for c in 0..IN_REGISTERS {
        let column: [F; IN_REGISTERS] = std::array::from_fn(|r| convert(rows[r][c]));
        to[c * stride..][..IN_REGISTERS].copy_from_slice(&column);
    }
}

/// The operands of one computation.
pub(crate) struct Inputs<'a, F: Accumulator> {
    pub(crate) sizes: Sizes,
    pub(crate) isa: Isa,
    pub(crate) logit_scale: F,
    pub(crate) softcap: Option<Softcap<F>>,
    /// `[positions, K, d]`
    pub(crate) contexts: Stored<'a, F>,
    pub(crate) decoder: DecoderView<'a, F>,
    /// `[positions, K]`
    pub(crate) log_priors: Vec<F>,
    /// `[rows of the decoder]`, times the logit scale, padded with minus infinity to a multiple of [`ROW_ALIGN`]
    pub(crate) bias: Vec<F>,
}

/// The elements of the operands, locked for reading.
struct LockedOperands<'a, G> {
    operands: &'a Operands,
    contexts: Locked<G>,
    weight: Locked<G>,
    /// Whether the weight is stored as its transpose.
    is_transposed: bool,
    adapter: Option<Locked<G>>,
}

/// Locks the operands; `weight` is theirs as it is stored.
fn lock_operands<'a>(
    operands: &'a Operands,
    weight: &'a Tensor,
    is_transposed: bool,
) -> Result<LockedOperands<'a, impl Deref<Target = Storage> + use<'a>>> {
    let adapter = operands.adapter.as_ref().map(|adapter| locked("adapter", adapter)).transpose()?;
    let (contexts, weight) = (locked("contexts", &operands.contexts)?, locked("weight", weight)?);
    Ok(LockedOperands { operands, contexts, weight, is_transposed, adapter })
}

impl<G: Deref<Target = Storage>> LockedOperands<'_, G> {
    /// Makes the inputs of a computation.
    fn inputs<F: Accumulator>(&self) -> Result<Inputs<'_, F>> {
        let LockedOperands { operands, contexts, weight, is_transposed, adapter } = self;
        let sizes @ Sizes { positions, components, .. } = operands.sizes;
        let (rows, columns) = (operands.weight_rows()?, operands.adapter_columns()?);
        let matrix = |values, width, is_transposed| DecoderMatrix { values, vocab: rows, width, is_transposed };
        let adapter = adapter.as_ref().map(|adapter| adapter.stored()).transpose()?;
        let decoder = DecoderView {
            weight: matrix(weight.stored()?, columns.start, *is_transposed),
            adapter: adapter.map(|values| matrix(values, columns.len(), false)),
        };
        let log_priors = match &operands.log_priors {
            Some(log_priors) => log_priors.flatten_all()?.to_vec1()?,
            None => zeros(positions * components),
        };
        let logit_scale = F::from_f64(operands.logit_scale);
        let mut bias = match &operands.bias {
            Some(bias) => bias.to_vec1()?,
            None => zeros(rows),
        };
        bias.iter_mut().for_each(|b| *b *= logit_scale);
        bias.resize(rows.next_multiple_of(ROW_ALIGN), num_traits::Float::neg_infinity());
        let softcap = operands.softcap.map(|cap| Softcap::new(F::from_f64(cap)));
        let (isa, contexts) = (Isa::detected()?, contexts.stored()?);
        Ok(Inputs { sizes, isa, logit_scale, softcap, contexts, decoder, log_priors, bias })
    }
}

impl<F: Accumulator> Inputs<'_, F> {
    /// Calls `f` with the inputs of these operands.
    pub(crate) fn with<R>(operands: &Operands, f: impl FnOnce(Inputs<'_, F>) -> Result<R>) -> Result<R> {
        let (weight, is_transposed) = operands.stored_weight()?;
        let operands = lock_operands(operands, &weight, is_transposed)?;
        f(operands.inputs()?)
    }

    /// Divides the logits by a temperature.
    pub(crate) fn tempered(mut self, temperature: f64) -> Self {
        if temperature != 1.0 {
            let power = F::from_f64(1.0 / temperature);
            self.logit_scale *= power;
            self.bias.iter_mut().for_each(|b| *b *= power);
        }
        self
    }
}
