//! The gradients of a loss on a GPU: what accumulates over the chunks, and the gradient of a chunk's logits, an operand
//! of the second and third product.

use std::ops::Range;

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
    /// `[rows of a chunk, stride]`, of the rows that the filter keeps
    Filtered(Buffer, Live),
}

/// The rows of a chunk that the filter keeps. Products with the gradient of the logits use only these.
pub(super) struct Live {
    /// `[rows of a chunk]`: their indices
    pub(super) rows: Buffer,
    /// `[1]`: their number, on the device
    pub(super) count: Buffer,
    /// Their number, read back
    pub(super) known_count: usize,
    /// As the parts of the inputs
    pub(super) parts: Vec<LivePart>,
}

/// Some columns of the live rows.
pub(super) struct LivePart {
    /// `[rows of a chunk, columns]`: their contexts
    pub(super) contexts: Buffer,
    /// `[rows of a chunk, columns]`
    pub(super) context_gradients: Buffer,
}

pub(super) struct BiasGradient {
    pub(super) sum: Buffer,
    /// `[rows of a chunk]`, in the dtype of the products: the product with it sums rows
    pub(super) ones: Buffer,
}

impl DeviceGradients {
    pub(super) fn new<G: Gpu>(
        chunks: &Chunks<'_, G>,
        filters: bool,
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
            logits: match (filters, dtype) {
                (false, DType::F32) => LogitGradient::InPlace,
                (false, _) => LogitGradient::Separate(zeros(rows * stride, dtype)?),
                (true, _) => {
                    let part = |part: &InputPart| {
                        Ok(LivePart {
                            contexts: zeros(rows * part.width, inputs.dtype)?,
                            context_gradients: zeros(rows * part.width, DType::F32)?,
                        })
                    };
                    let live = Live {
                        rows: zeros(*rows, DType::U32)?,
                        count: zeros(1, DType::U32)?,
                        known_count: 0,
                        parts: inputs.parts.iter().map(part).collect::<Result<_>>()?,
                    };
                    LogitGradient::Filtered(zeros(rows * stride, dtype)?, live)
                }
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

    pub(super) fn live(&self) -> Option<&Live> {
        match &self.logits {
            LogitGradient::Filtered(_, live) => Some(live),
            LogitGradient::InPlace | LogitGradient::Separate(_) => None,
        }
    }

    /// The gradient of the chunk's logits, `[rows, vocab]`, as an operand of a product.
    pub(super) fn logit_matrix<G>(&self, chunks: &Chunks<'_, G>) -> DeviceMatrix {
        let buffer = match &self.logits {
            LogitGradient::InPlace => &chunks.logits,
            LogitGradient::Separate(gradient) | LogitGradient::Filtered(gradient, _) => gradient,
        };
        matrix(buffer, 0, chunks.stride)
    }

    /// The number of rows of this matrix.
    pub(super) fn row_count<G: Gpu>(&self, chunks: &Chunks<'_, G>, positions: &Range<usize>) -> usize {
        self.live().map_or(chunks.inputs.rows(positions).len(), |live| live.known_count)
    }

    /// Some columns of the contexts of these rows.
    pub(super) fn contexts<G: Gpu>(
        &self,
        chunks: &Chunks<'_, G>,
        positions: &Range<usize>,
        part: usize,
    ) -> DeviceMatrix {
        let of_inputs = &chunks.inputs.parts[part];
        match self.live() {
            Some(live) => matrix(&live.parts[part].contexts, 0, of_inputs.width),
            None => matrix(&of_inputs.contexts, chunks.inputs.rows(positions).start, of_inputs.width),
        }
    }
}
