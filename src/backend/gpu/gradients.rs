//! The gradients of a loss on a GPU: those that accumulate over the chunks, and the gradient of a chunk's logits, an
//! operand of the second and third product.

use candle_core::{DType, Tensor};

use super::chunks::Chunks;
use super::columns::DeviceColumns;
use super::device::{Buffer, DeviceMatrix, Gpu};
use super::exponentials::ProductExponentials;
use crate::backend::operands::Sizes;
use crate::backend::plan::Computation;
use crate::error::Result;

/// The gradients that are needed.
pub(super) struct DeviceGradients {
    pub(super) logits: LogitGradient,
    /// The gradients of the weight's columns and of the adapter's, as in the inputs.
    pub(super) columns: Vec<DeviceColumnGradient>,
    pub(super) log_priors: Buffer,
    /// `[positions, K]`: the gradient of the logits of own targets, if there are any.
    pub(super) own: Option<Buffer>,
    pub(super) bias: Option<BiasGradient>,
    pub(super) sums: Sums,
}

/// The gradients of some columns of the contexts and of the decoder.
pub(super) struct DeviceColumnGradient {
    /// `[rows, stride]`, or with relative exponentials, `[rows, width]`
    pub(super) contexts: Option<Buffer>,
    pub(super) decoder: Option<Buffer>,
    /// Whether `decoder` holds the gradient of earlier losses.
    pub(super) has_so_far: bool,
    /// With relative exponentials, `[rows of a chunk, stride]` in f32: the gradient of the contexts without the factors
    /// of the rows.
    pub(super) unscaled: Option<Buffer>,
    /// With relative exponentials, `[rows of a chunk, stride]`: the contexts times the factors of the rows.
    pub(super) scaled_contexts: Option<Buffer>,
}

/// Where the kernels write the gradient of a chunk's logits, which is an operand of the second and third product.
pub(super) enum LogitGradient {
    /// It replaces the logits.
    InPlace,
    /// `[rows of a chunk, stride]`, in the dtype of the products.
    Separate(Buffer),
    /// `[rows of a chunk, stride]`: exponentials of the logits, each row of which becomes its gradient by a factor
    /// (`kernels/relative.h`).
    Relative {
        exponentials: Buffer,
        /// The first product, if it writes them.
        product: Option<ProductExponentials>,
    },
}

/// The gradient of the bias: the sum of the rows of the logits' gradient, computed as a product.
pub(super) enum BiasGradient {
    /// The ones are a column of the contexts, so that the product is part of the decoder's gradient.
    Column,
    /// The product is one of its own.
    Product {
        sum: Buffer,
        /// `[rows of a chunk]`, in the dtype of the products: ones, or the factors of relative exponentials.
        vector: Buffer,
    },
}

/// Whether something is added to the gradients after the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// Nothing is: products may round them to the dtype of the operands.
    Final,
    /// Something is, so that they are in f32.
    Continued,
}

impl DeviceGradients {
    /// Memory for the gradients that are needed; the weight's starts from `so_far`.
    pub(super) fn new<G: Gpu>(
        chunks: &Chunks<'_, G>,
        has_own_targets: bool,
        is_relative: bool,
        sums: Sums,
        so_far: Option<Tensor>,
    ) -> Result<Self> {
        let Chunks { gpu, planned, inputs, stride, rows_per_chunk: rows, .. } = chunks;
        debug_assert!(is_relative || planned.plan.computation == Computation::TwoPasses, "the plan of another task");
        let needs_grad = planned.needs_grad;
        let Sizes { positions, components, vocab, .. } = inputs.sizes;
        let device = chunks.logits.tensor.device();
        let dtype = gpu.kind().gradient_dtype(inputs.dtype);
        let unwritten = |n, dtype| Buffer::unwritten(*gpu, n, dtype, device);
        let optional = |is_needed: bool, n, dtype| is_needed.then(|| unwritten(n, dtype)).transpose();
        // Without positions there is no chunk, which would write them.
        let written_by_chunks = |n, dtype| match positions {
            0 => Buffer::zeros(*gpu, n, dtype, device),
            _ => unwritten(n, dtype),
        };
        let result_dtype = match sums {
            Sums::Final => gpu.kind().product_dtype(inputs.dtype),
            Sums::Continued => DType::F32,
        };
        let has_one_chunk = planned.plan.positions_per_chunk >= positions;
        let column_gradient = |(columns, (needs_decoder, so_far)): (&DeviceColumns, (bool, Option<Tensor>))| {
            // The gradient of an adapter stays in f32, as does that of the bias, which may be a column of the weight's.
            let is_weight = std::ptr::eq(columns, &inputs.columns[0]);
            let is_rounded = is_weight && has_one_chunk && !columns.has_ones;
            let decoder_dtype = if is_rounded { result_dtype } else { DType::F32 };
            let result_stride = if is_relative { columns.width } else { columns.stride };
            let chunk = |is_needed, dtype| optional(is_relative && is_needed, rows * columns.stride, dtype);
            Ok(DeviceColumnGradient {
                contexts: optional(needs_grad.contexts, positions * components * result_stride, result_dtype)?,
                unscaled: chunk(needs_grad.contexts, DType::F32)?,
                scaled_contexts: chunk(needs_decoder, inputs.dtype)?,
                has_so_far: so_far.is_some(),
                decoder: match so_far {
                    Some(so_far) => Some(Buffer::new(*gpu, columns.padded_gradient(&so_far)?)?),
                    None => needs_decoder
                        .then(|| written_by_chunks(columns.decoder_rows * columns.stride, decoder_dtype))
                        .transpose()?,
                },
            })
        };
        let decoders = [(needs_grad.weight, so_far), (needs_grad.adapter, None)];
        Ok(DeviceGradients {
            sums,
            logits: match dtype {
                DType::F32 => LogitGradient::InPlace,
                _ if is_relative => LogitGradient::Relative {
                    exponentials: unwritten(rows * stride, dtype)?,
                    product: match planned.plan.computation {
                        Computation::OnePass => Some(ProductExponentials::new(chunks)?),
                        Computation::TwoPasses => None,
                    },
                },
                _ => LogitGradient::Separate(unwritten(rows * stride, dtype)?),
            },
            columns: inputs.columns.iter().zip(decoders).map(column_gradient).collect::<Result<_>>()?,
            log_priors: unwritten(positions * components, DType::F32)?,
            own: optional(has_own_targets, positions * components, DType::F32)?,
            bias: match needs_grad.bias {
                true if inputs.columns[0].has_ones => Some(BiasGradient::Column),
                true => Some(BiasGradient::Product {
                    sum: written_by_chunks(vocab, DType::F32)?,
                    vector: match is_relative {
                        true => unwritten(*rows, dtype)?,
                        false => Buffer::new(*gpu, Tensor::ones(*rows, dtype, device)?)?,
                    },
                }),
                false => None,
            },
        })
    }

    /// The gradient of the chunk's logits, `[rows, vocab]`, as an operand of a product.
    pub(super) fn logit_matrix<G>(&self, chunks: &Chunks<'_, G>) -> DeviceMatrix {
        let buffer = match &self.logits {
            LogitGradient::InPlace => &chunks.logits,
            LogitGradient::Separate(gradient) | LogitGradient::Relative { exponentials: gradient, .. } => gradient,
        };
        buffer.matrix(0, chunks.stride)
    }
}
