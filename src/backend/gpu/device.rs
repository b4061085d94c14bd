//! What the chunks need of a GPU.

use candle_core::{DType, Tensor};

use super::arguments::Argument;
use crate::backend::contract::Sizes;
use crate::error::Result;

/// A device that runs the kernels, in the order in which they are launched.
pub(in crate::backend) trait Gpu {
    fn kind(&self) -> &'static Kind;
    /// The address of the first element of a contiguous tensor, in bytes; never zero. It holds as long as the tensor.
    fn address(&self, tensor: &Tensor) -> Result<u64>;
    /// Runs a kernel in `blocks` blocks of [`BLOCK`] threads.
    fn launch(&self, kernel: &str, blocks: usize, arguments: &[Argument]) -> Result<()>;
    /// A matrix product.
    fn multiply(&self, product: &Product) -> Result<()>;
}

/// What GPUs differ in, as far as chunks and their plan are concerned.
#[derive(Debug)]
pub(in crate::backend) struct Kind {
    /// As in a [`Plan`](crate::Plan)
    pub(in crate::backend) name: &'static str,
    /// Whether the gradient of the logits of half-precision operands is an operand of products in f32, as the logits are
    pub(in crate::backend) f32_gradient: bool,
    /// Whether products read a decoder that is stored as its transpose; if not, it is copied
    pub(in crate::backend) reads_transposed: bool,
    /// The bytes that products with operands of this dtype need of their own: for each row of a chunk, and in any case
    pub(in crate::backend) product_bytes: fn(Sizes, DType) -> (usize, usize),
    /// How many times the bytes that are asked for may be allocated
    pub(in crate::backend) allocated: usize,
}

impl Kind {
    /// The dtype of the gradient of the logits as an operand of products.
    pub(super) fn gradient_dtype(&self, dtype: DType) -> DType {
        if self.f32_gradient {
            DType::F32
        } else {
            dtype
        }
    }
}

/// A tensor whose memory the kernels read or write, and its address, asked for once.
#[derive(Debug)]
pub(in crate::backend) struct Buffer {
    pub(in crate::backend) tensor: Tensor,
    address: u64,
}

impl Buffer {
    pub(in crate::backend) fn new<G: Gpu>(gpu: &G, tensor: Tensor) -> Result<Self> {
        let tensor = tensor.contiguous()?;
        Ok(Buffer { address: gpu.address(&tensor)?, tensor })
    }

    /// Of a tensor that may be absent.
    pub(super) fn of<G: Gpu>(gpu: &G, tensor: &Option<Tensor>) -> Result<Option<Self>> {
        tensor.clone().map(|tensor| Buffer::new(gpu, tensor)).transpose()
    }

    /// The address of an element.
    pub(in crate::backend) fn at(&self, element: usize) -> u64 {
        self.address + (element * self.tensor.dtype().size_in_bytes()) as u64
    }

    /// That of the first element, or the null pointer.
    pub(super) fn or_null(buffer: &Option<Self>) -> u64 {
        buffer.as_ref().map_or(0, |buffer| buffer.address)
    }
}

/// Threads of a block; as in `rows.h`.
pub(in crate::backend) const BLOCK: usize = 256;

/// A matrix in the device's memory, row-major.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Matrix {
    pub(in crate::backend) address: u64,
    pub(in crate::backend) dtype: DType,
    /// Elements from row to row.
    pub(in crate::backend) stride: usize,
    /// Whether what is stored is the transposed matrix.
    pub(in crate::backend) transposed: bool,
}

/// `out[m, n] = alpha lhs[m, k] rhs[k, n]`, or that much more if it accumulates; summed up in f32.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Product {
    pub(in crate::backend) m: usize,
    pub(in crate::backend) n: usize,
    pub(in crate::backend) k: usize,
    pub(in crate::backend) lhs: Matrix,
    pub(in crate::backend) rhs: Matrix,
    /// f32, `out_stride` elements from row to row.
    pub(in crate::backend) out: u64,
    pub(in crate::backend) out_stride: usize,
    /// The address of an f32 number in the device's memory. `None`: 1, as it is wherever [`Kind::f32_gradient`] holds.
    pub(in crate::backend) alpha: Option<u64>,
    pub(in crate::backend) accumulate: bool,
}
