//! The CUDA backend: products by cuBLAS, and row kernels that are compiled with the crate (`mixture.cu`).

#[cfg(feature = "nccl")]
mod communicator;
#[cfg(feature = "cuda")]
mod device;
pub(super) mod kind;

#[cfg(feature = "cuda")]
pub(super) use device::Cuda;

#[cfg(feature = "nccl")]
pub(crate) use communicator::Communicator;
