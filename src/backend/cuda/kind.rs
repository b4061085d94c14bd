//! The properties of CUDA that the chunks and their plan depend on.

use crate::backend::gpu::device::{GpuKind, ProductBytes};
use crate::backend::plan::Kernels;

/// The properties of CUDA. Products take the gradient of the logits in the operands' dtype. Each chunk reads the whole
/// decoder and adds to its whole gradient: `docs/measurements.md` has what that costs.
pub(in crate::backend) const KIND: GpuKind = GpuKind {
    kernels: Kernels::Cuda,
    needs_f32_gradient: false,
    rounds_products: true,
    half_row_align: 8,
    most_one_pass_width: 512,
    reads_transposed: true,
    product_bytes: |_, _| ProductBytes { per_row: 0, fixed: 0 },
    allocation_factor: 1,
    default_logit_bytes: 512 << 20,
    least_default_rows: 4096,
    most_default_bytes: 1 << 30,
};
