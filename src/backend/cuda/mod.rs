//! The CUDA backend: products by cuBLAS, row kernels compiled when the crate is built (`mixture.cu`).

#[cfg(feature = "cuda")]
mod device;
pub(super) mod kind;

#[cfg(feature = "cuda")]
pub(super) use device::Cuda;
