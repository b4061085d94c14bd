//! The gradients of a loss on a GPU: what accumulates over the chunks, and the gradient of a chunk's logits, an operand
//! of the second and third product.

use candle_core::{DType, Tensor};

use super::chunks::{matrix, Chunks, InputPart};
use super::device::{Buffer, DeviceMatrix, Gpu};
use crate::backend::operands::{NeedsGrad, Sizes};
use crate::error::Result;

/// The gradients that are needed.
pub(super) struct DeviceGradients {
    pub(super) logits: LogitGradient,
    /// As the parts of the inputs
    pub(super) parts: Vec<PartGradient>,
    pub(super) log_priors: Buffer,
    /// If targets are entries of their own: their logits' gradient, `[positions, K]`
    pub(super) own: Option<Buffer>,
    pub(super) bias: Option<BiasGradient>,
}

/// The gradients of some columns of the contexts and of the decoder.
pub(super) struct PartGradient {
    pub(super) contexts: Option<Buffer>,
    pub(super) decoder: Option<Buffer>,
    /// Whether `decoder` holds the gradient of earlier losses
    pub(super) has_so_far: bool,
}

/// Where the kernels write the gradient of a chunk's logits, which is an operand of the second and third product.
pub(super) enum LogitGradient {
    /// It replaces the logits.
    InPlace,
    /// `[rows of a chunk, stride]`, in the dtype of the products
    Separate(Buffer),
}

pub(super) struct BiasGradient {
    pub(super) sum: Buffer,
    /// `[rows of a chunk]`, in the dtype of the products: the product with it sums rows
    pub(super) ones: Buffer,
}

impl DeviceGradients {
    pub(super) fn new<G: Gpu>(
        chunks: &Chunks<'_, G>,
        has_own: bool,
        so_far: Option<Tensor>,
        needs_grad: NeedsGrad,
    ) -> Result<Self> {
        let Chunks { gpu, inputs, stride, rows_per_chunk: rows, .. } = chunks;
        let Sizes { positions, components, vocab, .. } = inputs.sizes;
        let device = chunks.logits.tensor.device();
        let dtype = gpu.kind().gradient_dtype(inputs.dtype);
        let zeros = |n, dtype| Buffer::zeros(*gpu, n, dtype, device);
        let optional = |is_needed: bool, n| is_needed.then(|| zeros(n, DType::F32)).transpose();
        let part = |(part, (is_needed, so_far)): (&InputPart, (bool, Option<Tensor>))| {
            Ok(PartGradient {
                contexts: optional(needs_grad.contexts, positions * components * part.width)?,
                has_so_far: so_far.is_some(),
                decoder: match so_far {
                    Some(so_far) => Some(Buffer::new(*gpu, so_far.to_dtype(DType::F32)?.flatten_all()?.contiguous()?)?),
                    None => optional(is_needed, vocab * part.width)?,
                },
            })
        };
        let of_parts = [(needs_grad.weight, so_far), (needs_grad.adapter, None)];
        Ok(DeviceGradients {
            logits: match dtype {
                DType::F32 => LogitGradient::InPlace,
                _ => LogitGradient::Separate(zeros(rows * stride, dtype)?),
            },
            parts: inputs.parts.iter().zip(of_parts).map(part).collect::<Result<_>>()?,
            log_priors: zeros(positions * components, DType::F32)?,
            own: optional(has_own, positions * components)?,
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
