//! The gradients of a loss on a GPU: those that accumulate over the chunks, and the gradient of a chunk's logits, an
//! operand of the second and third product.

use candle_core::{DType, Tensor};

use super::chunks::{matrix, Chunks, DeviceColumns};
use super::device::{Buffer, DeviceMatrix, Gpu};
use crate::backend::operands::Sizes;
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
}

/// The gradients of some columns of the contexts and of the decoder.
pub(super) struct DeviceColumnGradient {
    pub(super) contexts: Option<Buffer>,
    pub(super) decoder: Option<Buffer>,
    /// Whether `decoder` holds the gradient of earlier losses.
    pub(super) has_so_far: bool,
}

/// Where the kernels write the gradient of a chunk's logits, which is an operand of the second and third product.
pub(super) enum LogitGradient {
    /// It replaces the logits.
    InPlace,
    /// `[rows of a chunk, stride]`, in the dtype of the products.
    Separate(Buffer),
}

/// The gradient of the bias: the sum of the rows of the logits' gradient, computed as a product with ones.
pub(super) struct BiasGradient {
    pub(super) sum: Buffer,
    /// `[rows of a chunk]`, in the dtype of the products.
    pub(super) ones: Buffer,
}

impl DeviceGradients {
    /// Zeros for the gradients that are needed; the weight's starts from `so_far`.
    pub(super) fn new<G: Gpu>(chunks: &Chunks<'_, G>, has_own_targets: bool, so_far: Option<Tensor>) -> Result<Self> {
        let Chunks { gpu, planned, inputs, stride, rows_per_chunk: rows, .. } = chunks;
        let needs_grad = planned.needs_grad;
        let Sizes { positions, components, vocab, .. } = inputs.sizes;
        let device = chunks.logits.tensor.device();
        let dtype = gpu.kind().gradient_dtype(inputs.dtype);
        let zeros = |n, dtype| Buffer::zeros(*gpu, n, dtype, device);
        let optional = |is_needed: bool, n| is_needed.then(|| zeros(n, DType::F32)).transpose();
        let column_gradient = |(columns, (is_needed, so_far)): (&DeviceColumns, (bool, Option<Tensor>))| {
            Ok(DeviceColumnGradient {
                contexts: optional(needs_grad.contexts, positions * components * columns.width)?,
                has_so_far: so_far.is_some(),
                decoder: match so_far {
                    Some(so_far) => Some(Buffer::new(*gpu, so_far.to_dtype(DType::F32)?.flatten_all()?.contiguous()?)?),
                    None => optional(is_needed, vocab * columns.width)?,
                },
            })
        };
        let decoders = [(needs_grad.weight, so_far), (needs_grad.adapter, None)];
        Ok(DeviceGradients {
            logits: match dtype {
                DType::F32 => LogitGradient::InPlace,
                _ => LogitGradient::Separate(zeros(rows * stride, dtype)?),
            },
            columns: inputs.columns.iter().zip(decoders).map(column_gradient).collect::<Result<_>>()?,
            log_priors: zeros(positions * components, DType::F32)?,
            own: optional(has_own_targets, positions * components)?,
            bias: if needs_grad.bias {
                Some(BiasGradient {
                    sum: zeros(vocab, DType::F32)?,
                    ones: Buffer::new(*gpu, Tensor::ones(*rows, dtype, device)?)?,
                })
            } else {
                None
            },
        })
    }

    /// The gradient of the chunk's logits, `[rows, vocab]`, as an operand of a product.
    pub(super) fn logit_matrix<G>(&self, chunks: &Chunks<'_, G>) -> DeviceMatrix {
        let buffer = match &self.logits {
            LogitGradient::InPlace => &chunks.logits,
            LogitGradient::Separate(gradient) => gradient,
        };
        matrix(buffer, 0, chunks.stride)
    }
}
