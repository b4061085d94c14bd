//! The CUDA backend: products by cuBLAS, row kernels compiled when the crate is built (`mixture.cu`).

#[cfg(feature = "cuda")]
mod device;

use super::gpu::Kind;

#[cfg(feature = "cuda")]
pub(super) use device::Cuda;

/// Products take the gradient of the logits in the operands' dtype.
pub(super) const KIND: Kind = Kind { name: "cuda", f32_gradient: false, product_bytes: |_, _| (0, 0), allocated: 1 };
