//! The properties of CUDA that the chunks and their plan depend on.

use crate::backend::gpu::device::{GpuKind, ProductBytes};
use crate::backend::plan::Kernels;

/// The properties of CUDA. Products take the gradient of the logits in the operands' dtype. The default chunk follows
/// from a model of an H100, not from a measurement: each chunk reads the whole decoder and adds to its whole gradient.
pub(in crate::backend) const KIND: GpuKind = GpuKind {
    kernels: Kernels::Cuda,
    needs_f32_gradient: false,
    reads_transposed: true,
    product_bytes: |_, _| ProductBytes { per_row: 0, fixed: 0 },
    allocation_factor: 1,
    least_default_rows: 1024,
    most_default_bytes: 1 << 30,
};
