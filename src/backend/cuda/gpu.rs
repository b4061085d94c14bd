//! What the chunks need of a GPU.

use candle_core::{DType, Tensor};

use super::arguments::Argument;
use crate::Result;

/// A device that runs the kernels of `mixture.cu`, in the order in which they are launched.
pub(super) trait Gpu {
    /// The address of the first element of a contiguous tensor. It holds as long as the tensor.
    fn address(&self, tensor: &Tensor) -> Result<u64>;
    /// Runs a kernel in `blocks` blocks of [`BLOCK`] threads.
    fn launch(&self, kernel: &str, blocks: usize, arguments: &[Argument]) -> Result<()>;
    /// A matrix product.
    fn multiply(&self, product: &Product) -> Result<()>;
}

/// A tensor whose memory the kernels read or write, and its address, asked for once.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) tensor: Tensor,
    address: u64,
}

impl Buffer {
    pub(super) fn new<G: Gpu>(gpu: &G, tensor: Tensor) -> Result<Self> {
        let tensor = tensor.contiguous()?;
        Ok(Buffer { address: gpu.address(&tensor)?, tensor })
    }

    /// Of a tensor that may be absent.
    pub(super) fn of<G: Gpu>(gpu: &G, tensor: &Option<Tensor>) -> Result<Option<Self>> {
        tensor.clone().map(|tensor| Buffer::new(gpu, tensor)).transpose()
    }

    /// The address of an element.
    pub(super) fn at(&self, element: usize) -> u64 {
        self.address + (element * self.tensor.dtype().size_in_bytes()) as u64
    }

    /// That of the first element, or the null pointer.
    pub(super) fn or_null(buffer: &Option<Self>) -> u64 {
        buffer.as_ref().map_or(0, |buffer| buffer.address)
    }
}

/// Threads of a block; as in `mixture.cu`.
pub(super) const BLOCK: usize = 256;

/// A matrix in the device's memory, row-major.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) address: u64,
    /// Elements from row to row.
    pub(super) stride: usize,
    /// Whether what is stored is the transposed matrix.
    pub(super) transposed: bool,
}

/// `out[m, n] = alpha lhs[m, k] rhs[k, n] + beta out`, accumulated in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Of `lhs` and `rhs`.
    pub(super) dtype: DType,
    pub(super) lhs: Matrix,
    pub(super) rhs: Matrix,
    /// f32, `out_stride` elements from row to row.
    pub(super) out: u64,
    pub(super) out_stride: usize,
    /// Addresses of f32 numbers in the device's memory.
    pub(super) alpha: u64,
    pub(super) beta: u64,
}
