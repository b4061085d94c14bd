//! The properties of CUDA that the chunks and their plan depend on.

use crate::backend::gpu::device::GpuKind;
use crate::backend::plan::Kernels;

/// Products take the gradient of the logits in the operands' dtype. The default chunk follows from a model of an H100,
/// not from a measurement: each chunk reads the whole decoder and adds to its whole gradient.
pub(in crate::backend) const KIND: GpuKind = GpuKind {
    kernels: Kernels::Cuda,
    f32_gradient: false,
    reads_transposed: true,
    product_bytes: |_, _| (0, 0),
    allocated: 1,
    default_rows: 1024,
    default_bytes: 1 << 30,
};
