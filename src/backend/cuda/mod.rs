//! The CUDA backend: products by cuBLAS, and row kernels that are compiled with the crate (`mixture.cu`).

#[cfg(feature = "cuda")]
mod device;
pub(super) mod kind;

#[cfg(feature = "cuda")]
pub(super) use device::Cuda;
