//! Some columns of the contexts and of the decoder on a GPU, as the operands of products.

use std::ops::Range;

use candle_core::{DType, Tensor, D};

use super::chunks::matrix;
use super::device::{Buffer, DeviceMatrix, Gpu};
use crate::backend::operands::Operands;
use crate::backend::plan::Planned;
use crate::error::Result;

/// Some columns of the contexts and of the decoder: those of the weight, or those of the adapter.
pub(super) struct DeviceColumns {
    /// The number of columns.
    pub(super) width: usize,
    /// The number of elements from one row to the next, of the contexts, the decoder and their gradients. Columns behind
    /// `width` are zero, but for one of the contexts.
    pub(super) stride: usize,
    /// Whether the contexts' column `width` is one, so that the one of the decoder's gradient is that of the bias.
    pub(super) has_ones: bool,
    /// `[positions, K, stride]`
    pub(super) contexts: Buffer,
    /// `[vocab, stride]`
    decoder: Buffer,
    /// Whether `decoder` is `[width, vocab]`. Its `stride` is then `width`.
    is_transposed: bool,
}

impl DeviceColumns {
    /// Those of the weight and, if there is one, of the adapter. Operands that are not contiguous are copied.
    pub(super) fn all<G: Gpu>(gpu: &G, planned: &Planned) -> Result<Vec<Self>> {
        let operands = &planned.operands;
        let adapter_columns = operands.adapter_columns()?;
        let weight = Self::weight(gpu, planned, 0..adapter_columns.start)?;
        let adapter = operands.adapter.clone().map(|adapter| {
            let contexts = narrowed(operands, &adapter_columns)?;
            Self::padded(gpu, &contexts, &adapter, padding(gpu, adapter_columns.len(), &contexts), false)
        });
        Ok(std::iter::once(weight).chain(adapter.transpose()?).collect())
    }

    fn weight<G: Gpu>(gpu: &G, planned: &Planned, columns: Range<usize>) -> Result<Self> {
        let Planned { operands, needs_grad, .. } = planned;
        let (contexts, width) = (narrowed(operands, &columns)?, columns.len());
        let mut added = padding(gpu, width, &contexts);
        // The product that gives the decoder's gradient gives the bias's too, for hardly any time, if the contexts have
        // a column of ones. Where rows need no padding, the copies must cost less than a product with a vector of ones.
        let rows = operands.sizes.positions * operands.sizes.components;
        let is_worth_copies = added > 0 || rows >= ROWS_PER_COLUMN * width;
        let has_ones = needs_grad.weight && needs_grad.bias && alignment(gpu, &contexts) > 1 && is_worth_copies;
        if has_ones && added == 0 {
            added = alignment(gpu, &contexts);
        }
        let (stored, is_transposed) = operands.stored_weight()?;
        if added > 0 || (is_transposed && !gpu.kind().reads_transposed) {
            return Self::padded(gpu, &contexts, &operands.weight, added, has_ones);
        }
        let (contexts, decoder) = (Buffer::new(gpu, contexts)?, Buffer::new(gpu, stored)?);
        Ok(DeviceColumns { width, stride: width, has_ones, contexts, decoder, is_transposed })
    }

    /// The columns, and `added` ones behind them.
    fn padded<G: Gpu>(gpu: &G, contexts: &Tensor, decoder: &Tensor, added: usize, has_ones: bool) -> Result<Self> {
        let width = decoder.dim(1)?;
        Ok(DeviceColumns {
            width,
            stride: width + added,
            has_ones,
            contexts: Buffer::new(gpu, with_columns(contexts, added, has_ones)?)?,
            decoder: Buffer::new(gpu, with_columns(decoder, added, false)?)?,
            is_transposed: false,
        })
    }

    /// A gradient of the decoder, `[vocab, width]`, with columns of zeros up to `stride`.
    pub(super) fn padded_gradient(&self, gradient: &Tensor) -> Result<Tensor> {
        with_columns(gradient, self.stride - self.width, false)
    }

    /// The columns of a gradient `[.., stride]` without those of the padding. A gradient in f32 of operands in half
    /// precision is a view, since rounding copies it.
    pub(super) fn without_padding(&self, padded: &Tensor) -> Result<Tensor> {
        if self.stride == self.width {
            return Ok(padded.clone());
        }
        let gradient = padded.narrow(D::Minus1, 0, self.width)?;
        Ok(match gradient.elem_count() {
            // candle cannot launch zero blocks.
            0 => Tensor::zeros(gradient.dims(), gradient.dtype(), gradient.device())?,
            _ if gradient.dtype() == self.decoder.tensor.dtype() => gradient.contiguous()?,
            _ => gradient,
        })
    }

    /// The bias's gradient `[vocab]`, f32, in that of the decoder, `[vocab, stride]`: the column that the contexts'
    /// column of ones gives.
    pub(super) fn bias_gradient(&self, decoder: &Tensor) -> Result<Tensor> {
        Ok(decoder.narrow(1, self.width, 1)?.flatten_all()?.to_dtype(DType::F32)?)
    }

    /// The decoder `[vocab, stride]`, or its transpose, as an operand of a product.
    pub(super) fn decoder(&self, is_transposed: bool) -> DeviceMatrix {
        let stride = match self.is_transposed {
            true => self.decoder.tensor.elem_count() / self.width,
            false => self.stride,
        };
        DeviceMatrix { is_transposed: is_transposed != self.is_transposed, ..matrix(&self.decoder, 0, stride) }
    }
}

/// The rows, relative to the columns, from which on the bias's gradient is worth copies of contexts and decoder.
const ROWS_PER_COLUMN: usize = 8;

/// The columns of the contexts as a matrix `[rows, columns]`.
fn narrowed(operands: &Operands, columns: &Range<usize>) -> Result<Tensor> {
    Ok(operands.contexts.narrow(2, columns.start, columns.len())?.flatten_to(1)?)
}

/// The number of elements that the rows of operands of products should be a multiple of.
fn alignment<G: Gpu>(gpu: &G, contexts: &Tensor) -> usize {
    match contexts.dtype() {
        DType::F16 | DType::BF16 => gpu.kind().half_row_align,
        _ => 1,
    }
}

/// The number of columns that rows of this width lack.
fn padding<G: Gpu>(gpu: &G, width: usize, contexts: &Tensor) -> usize {
    width.next_multiple_of(alignment(gpu, contexts)) - width
}

/// Appends `added` columns to a matrix: of zeros, or one of ones before them.
fn with_columns(matrix: &Tensor, added: usize, has_ones: bool) -> Result<Tensor> {
    let rows = matrix.dim(0)?;
    // candle cannot launch zero blocks.
    if added == 0 || rows == 0 {
        return Ok(matrix.clone());
    }
    let zeros = |columns| Tensor::zeros((rows, columns), matrix.dtype(), matrix.device());
    let matrix = if has_ones {
        let ones = Tensor::ones((rows, 1), matrix.dtype(), matrix.device())?;
        match added {
            1 => Tensor::cat(&[matrix, &ones], 1)?,
            _ => Tensor::cat(&[matrix, &ones, &zeros(added - 1)?], 1)?,
        }
    } else {
        Tensor::cat(&[matrix, &zeros(added)?], 1)?
    };
    Ok(matrix)
}
