//! Some columns of the contexts and of the decoder on a GPU, as the operands of products: where many rows are
//! multiplied in half precision, copies with padded rows (`kernels/columns.h`).

use std::ops::Range;

use candle_core::{DType, Tensor, D};

use super::arguments::{Read, Write};
use super::device::{Buffer, DeviceMatrix, Gpu, WARPS};
use super::kernels::{KernelArguments, PadRowsArguments, RoundRowsArguments, ScaleRowsArguments};
use crate::backend::operands::{Operands, Precision, Sizes};
use crate::backend::plan::Planned;
use crate::error::Result;

/// The rows of logits from which on copies of contexts and decoder are worth their time: products of rows that are no
/// multiple of 16 bytes take two to three times as long.
pub(super) const LEAST_PADDED_ROWS: usize = 256;
/// The rows, relative to the columns, from which on copies are worth their time for the bias's gradient alone.
const ROWS_PER_COLUMN: usize = 8;

/// The dtype of the contexts and the decoder as operands of products, for operands with the precision of a plan.
pub(super) fn product_dtype(operands: &Operands) -> DType {
    match operands.precision {
        Precision::Full => operands.contexts.dtype(),
        Precision::Bf16Products => DType::BF16,
    }
}

/// Some columns of the contexts and of the decoder: those of the weight, or those of the adapter.
pub(super) struct DeviceColumns {
    /// The number of columns.
    pub(super) width: usize,
    /// The number of elements from one row to the next, of the contexts, the decoder and their gradients. Columns
    /// behind `width` are zero, but for one of the contexts and of the decoder's gradient (`has_ones`).
    pub(super) stride: usize,
    /// The number of rows of the decoder and its gradient: those of the vocabulary, and zeros behind them.
    pub(super) decoder_rows: usize,
    /// Whether the contexts' column `width` is one, so that this column of the decoder's gradient is that of the bias.
    pub(super) has_ones: bool,
    /// `[rows, stride]`
    pub(super) contexts: Buffer,
    /// `[decoder_rows, stride]`, and rows that no product reads.
    decoder: Buffer,
    /// Whether `decoder` is `[width, vocab]`. Nothing is padded then.
    is_transposed: bool,
}

impl DeviceColumns {
    /// The columns of the weight and, if there is one, those of the adapter.
    pub(super) fn all<G: Gpu>(gpu: &G, planned: &Planned) -> Result<Vec<Self>> {
        let operands = &planned.operands;
        let dtype = product_dtype(operands);
        let split = operands.adapter_columns()?.start;
        let parts =
            [(0..split, Some(operands.weight.tensor()?)), (operands.adapter_columns()?, operands.adapter.as_ref())];
        let padding = Padding::new(gpu, planned, split);
        let columns = |(columns, decoder): (Range<usize>, Option<&Tensor>)| {
            let decoder = decoder?;
            let has_ones = columns.start == 0 && padding.is_some_and(|padding| padding.has_ones);
            let contexts = operands.contexts.narrow(2, columns.start, columns.len());
            let rounded = contexts.and_then(|contexts| Ok((contexts.to_dtype(dtype)?, decoder.to_dtype(dtype)?)));
            Some(rounded.map_err(Into::into).and_then(|(contexts, decoder)| match padding {
                Some(Padding { align, .. }) => Self::padded(gpu, operands.sizes, &contexts, &decoder, align, has_ones),
                None => Self::as_stored(gpu, operands, &contexts, &decoder),
            }))
        };
        parts.into_iter().filter_map(columns).collect()
    }

    /// The columns without padding. Those that are not contiguous are copied.
    fn as_stored<G: Gpu>(gpu: &G, operands: &Operands, contexts: &Tensor, decoder: &Tensor) -> Result<Self> {
        let is_transposed = !decoder.is_contiguous() && gpu.kind().reads_transposed;
        let stored = if is_transposed { decoder.t()? } else { decoder.clone() };
        let width = decoder.dim(1)?;
        Ok(DeviceColumns {
            width,
            stride: width,
            decoder_rows: operands.sizes.vocab,
            has_ones: false,
            contexts: Buffer::new(gpu, contexts.clone())?,
            decoder: Buffer::new(gpu, stored)?,
            is_transposed,
        })
    }

    /// Copies of the columns whose rows are a multiple of `align` elements.
    fn padded<G: Gpu>(
        gpu: &G,
        sizes: Sizes,
        contexts: &Tensor,
        decoder: &Tensor,
        align: usize,
        has_ones: bool,
    ) -> Result<Self> {
        let width = decoder.dim(1)?;
        let stride = (width + usize::from(has_ones)).next_multiple_of(align);
        let decoder_rows = sizes.vocab.next_multiple_of(align);
        let rows = sizes.positions * sizes.components;
        let pad = |from: &Tensor, count: usize, rows: usize, has_ones: bool| {
            let from = Buffer::new(gpu, from.clone())?;
            let to = Buffer::unwritten(gpu, rows * stride, from.tensor.dtype(), from.tensor.device())?;
            let arguments = PadRowsArguments {
                from: Read(from.at(0)),
                to: Write(to.at(0)),
                count: count as i64,
                rows: rows as i64,
                width: width as i32,
                stride: stride as i32,
                has_ones: i32::from(has_ones),
            };
            arguments.launch_for(gpu, from.tensor.dtype(), rows.div_ceil(WARPS))?;
            Ok::<_, crate::error::Error>(to)
        };
        Ok(DeviceColumns {
            width,
            stride,
            decoder_rows,
            has_ones,
            contexts: pad(contexts, rows, rows, has_ones)?,
            decoder: pad(decoder, sizes.vocab, decoder_rows, false)?,
            is_transposed: false,
        })
    }

    /// A gradient of the decoder, `[vocab, width]`, as one to add to, in f32.
    pub(super) fn padded_gradient(&self, gradient: &Tensor) -> Result<Tensor> {
        let (vocab, width) = gradient.dims2()?;
        let gradient = gradient.to_dtype(DType::F32)?;
        let gradient = gradient.pad_with_zeros(1, 0, self.stride - width)?;
        Ok(gradient.pad_with_zeros(0, 0, self.decoder_rows - vocab)?.flatten_all()?)
    }

    /// The first `rows` rows of a gradient `[.., stride]` without the padding: if it is final and of operands in bf16,
    /// rounded, and otherwise a view.
    pub(super) fn without_padding<G: Gpu>(
        &self,
        gpu: &G,
        padded: &Buffer,
        rows: usize,
        is_final: bool,
    ) -> Result<Tensor> {
        let (stride, width) = (self.stride, self.width);
        let dtype = padded.tensor.dtype();
        if rows == 0 {
            return Ok(Tensor::zeros((0, width), dtype, padded.tensor.device())?);
        }
        let shaped = padded.shaped((rows, stride))?;
        if stride == width || !is_final || self.decoder.tensor.dtype() != DType::BF16 {
            return Ok(shaped.narrow(D::Minus1, 0, width)?);
        }
        let to = Buffer::unwritten(gpu, rows * width, DType::BF16, padded.tensor.device())?;
        self.round(gpu, padded, Read(0), Write(to.at(0)), rows)?;
        Ok(to.tensor.reshape((rows, width))?)
    }

    /// Rounds the first `rows` rows of a gradient `[.., stride]` to bf16, without the padding, times a factor of each
    /// row unless `factors` is null.
    pub(super) fn round<G: Gpu>(&self, gpu: &G, padded: &Buffer, factors: Read, to: Write, rows: usize) -> Result<()> {
        let arguments = RoundRowsArguments {
            from: Read(padded.at(0)),
            factors,
            to,
            count: rows as i64,
            width: self.width as i32,
            stride: self.stride as i32,
        };
        arguments.launch_for(gpu, padded.tensor.dtype(), rows.div_ceil(WARPS))
    }

    /// Multiplies some rows of the contexts by a factor of each.
    pub(super) fn scale_contexts<G: Gpu>(
        &self,
        gpu: &G,
        rows: &Range<usize>,
        factors: Read,
        to: &Buffer,
    ) -> Result<()> {
        let arguments = ScaleRowsArguments {
            from: Read(self.contexts.at(rows.start * self.stride)),
            factors,
            to: Write(to.at(0)),
            count: rows.len() as i64,
            stride: self.stride as i32,
        };
        arguments.launch_for(gpu, to.tensor.dtype(), rows.len().div_ceil(WARPS))
    }

    /// The bias's gradient `[vocab]`, f32, in that of the decoder: the column that the contexts' column of ones gives.
    pub(super) fn bias_gradient(&self, decoder: &Buffer, vocab: usize) -> Result<Tensor> {
        let decoder = decoder.shaped((vocab, self.stride))?;
        Ok(decoder.narrow(1, self.width, 1)?.flatten_all()?.to_dtype(DType::F32)?)
    }

    /// The decoder `[decoder_rows, stride]`, or its transpose, as an operand of a product.
    pub(super) fn decoder(&self, is_transposed: bool) -> DeviceMatrix {
        let stride = match self.is_transposed {
            true => self.decoder.tensor.elem_count() / self.width,
            false => self.stride,
        };
        DeviceMatrix { is_transposed: is_transposed != self.is_transposed, ..self.decoder.matrix(0, stride) }
    }
}

/// How contexts and decoder are padded.
#[derive(Clone, Copy)]
struct Padding {
    /// The number of elements that rows, and rows of the decoder, are a multiple of.
    align: usize,
    /// Whether the contexts have a column of ones.
    has_ones: bool,
}

impl Padding {
    /// The padding that makes the products of a mixture faster than the copies take, for a weight of this width.
    fn new<G: Gpu>(gpu: &G, planned: &Planned, width: usize) -> Option<Self> {
        let Planned { operands, needs_grad, .. } = planned;
        let Sizes { positions, components, context_dim, vocab } = operands.sizes;
        let (align, rows) = (gpu.kind().half_row_align, positions * components);
        let is_half = matches!(product_dtype(operands), DType::F16 | DType::BF16);
        if !is_half || align == 1 || rows < LEAST_PADDED_ROWS {
            return None;
        }
        let is_aligned = [width, context_dim - width, vocab].iter().all(|size| size % align == 0);
        let has_ones = needs_grad.weight && needs_grad.bias && (!is_aligned || rows >= ROWS_PER_COLUMN * width);
        (!is_aligned || has_ones).then_some(Padding { align, has_ones })
    }
}
