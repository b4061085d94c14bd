//! The interface of a GPU that the chunks use.

use candle_core::{DType, Device, Shape, Tensor};

use super::arguments::Argument;
use crate::backend::operands::Sizes;
use crate::backend::plan::Kernels;
use crate::error::Result;

/// A device that runs the kernels in the order of their launches.
pub(in crate::backend) trait Gpu {
    /// The properties of this kind of GPU.
    fn kind(&self) -> &'static GpuKind;
    /// The bytes of memory of the device, if they are known.
    fn memory_bytes(&self) -> Option<usize> {
        None
    }
    /// Returns the address of the first element of a contiguous tensor, in bytes, which is never zero. It is valid as
    /// long as the tensor lives.
    fn address(&self, tensor: &Tensor) -> Result<u64>;
    /// Launches a kernel with `blocks` blocks of [`BLOCK`] threads.
    fn launch(&self, kernel: &str, blocks: usize, arguments: &[Argument]) -> Result<()>;
    /// Computes a matrix product.
    fn multiply(&self, product: &DeviceProduct) -> Result<()>;
}

/// The properties of a kind of GPU that the chunks and their plan depend on.
#[derive(Debug)]
pub(in crate::backend) struct GpuKind {
    /// The kernels' name in plans and errors.
    pub(in crate::backend) kernels: Kernels,
    /// Whether products take the gradient of the logits in f32 even if the other operands are in half precision.
    pub(in crate::backend) needs_f32_gradient: bool,
    /// Whether products can round their results to the dtype of the operands.
    pub(in crate::backend) rounds_products: bool,
    /// Products are faster if the rows of their operands in half precision are a multiple of this many elements.
    pub(in crate::backend) half_row_align: usize,
    /// The most elements of a context with which the first product of a loss in bf16 writes exponentials, and no
    /// logits.
    pub(in crate::backend) most_one_pass_width: usize,
    /// Whether products can read a decoder that is stored as its transpose. If not, it is copied.
    pub(in crate::backend) reads_transposed: bool,
    /// The workspace of products whose operands have these sizes and this dtype.
    pub(in crate::backend) product_bytes: fn(Sizes, DType) -> ProductBytes,
    /// The factor by which an allocation may exceed the requested bytes.
    pub(in crate::backend) allocation_factor: usize,
    /// The bytes of logits for which a chunk has room by default.
    pub(in crate::backend) default_logit_bytes: usize,
    /// The least rows of a chunk by default. With fewer, the matrix products are inefficient.
    pub(in crate::backend) least_default_rows: usize,
    /// The most bytes of workspace by default, as requested, if the memory of the device is not known.
    pub(in crate::backend) most_default_bytes: usize,
}

/// The bytes of workspace that products need.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct ProductBytes {
    pub(in crate::backend) per_row: usize,
    pub(in crate::backend) fixed: usize,
}

impl GpuKind {
    /// The dtype in which products write the gradients of operands of this dtype, if nothing is added to them. Those of
    /// f16 stay in f32, because they may become large enough for f16 only when they are multiplied by a loss scale.
    pub(super) fn product_dtype(&self, dtype: DType) -> DType {
        if self.rounds_products && dtype == DType::BF16 {
            DType::BF16
        } else {
            DType::F32
        }
    }

    /// The dtype of the gradient of the logits as an operand of products.
    pub(super) fn gradient_dtype(&self, dtype: DType) -> DType {
        if self.needs_f32_gradient {
            DType::F32
        } else {
            dtype
        }
    }
}

/// A tensor whose memory the kernels read or write, with its address.
#[derive(Clone, Debug)]
pub(in crate::backend) struct Buffer {
    pub(in crate::backend) tensor: Tensor,
    address: u64,
}

impl Buffer {
    /// The buffer of a tensor, or of a contiguous copy of it.
    pub(in crate::backend) fn new<G: Gpu>(gpu: &G, tensor: Tensor) -> Result<Self> {
        let tensor = tensor.contiguous()?;
        Ok(Buffer { address: gpu.address(&tensor)?, tensor })
    }

    /// A buffer of `n` zeros, or of one if `n` is zero.
    pub(super) fn zeros<G: Gpu>(gpu: &G, n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::new(gpu, Tensor::zeros(n.max(1), dtype, device)?)
    }

    /// A buffer of `n` elements that kernels or products write before anything reads them, or of one zero if `n` is
    /// zero.
    pub(super) fn unwritten<G: Gpu>(gpu: &G, n: usize, dtype: DType, device: &Device) -> Result<Self> {
        if n == 0 {
            return Self::zeros(gpu, n, dtype, device);
        }
        // SAFETY: the element types are numbers, of which all bits are values, and the callers' kernels write them
        // before anything reads them, which the emulated devices check.
        Self::new(gpu, unsafe { Tensor::empty(n, dtype, device) }?)
    }

    /// The buffer of an optional tensor.
    pub(super) fn from_option<G: Gpu>(gpu: &G, tensor: &Option<Tensor>) -> Result<Option<Self>> {
        tensor.clone().map(|tensor| Buffer::new(gpu, tensor)).transpose()
    }

    /// The first elements as a tensor of this shape.
    pub(super) fn shaped(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        Ok(self.tensor.narrow(0, 0, shape.elem_count())?.reshape(shape)?)
    }

    /// The address of an element.
    pub(in crate::backend) fn at(&self, element: usize) -> u64 {
        self.address + (element * self.tensor.dtype().size_in_bytes()) as u64
    }

    /// One element as a buffer, a scalar.
    pub(super) fn element(&self, element: usize) -> Result<Self> {
        Ok(Buffer { tensor: self.tensor.narrow(0, element, 1)?.squeeze(0)?, address: self.at(element) })
    }

    /// The buffer as a row-major matrix, from `first_row` on.
    pub(super) fn matrix(&self, first_row: usize, stride: usize) -> DeviceMatrix {
        let (address, dtype) = (self.at(first_row * stride), self.tensor.dtype());
        DeviceMatrix { address, dtype, stride, is_transposed: false }
    }

    /// The address of the first element, or null if there is no buffer.
    pub(super) fn or_null(buffer: &Option<Self>) -> u64 {
        buffer.as_ref().map_or(0, |buffer| buffer.address)
    }
}

/// By default a workspace takes at most one of this many parts of a device's memory.
pub(in crate::backend) const MEMORY_SHARE: usize = 8;

/// Threads per block, as in `kernels/arguments.h`.
pub(in crate::backend) const BLOCK: usize = 256;
/// Warps per block.
pub(in crate::backend) const WARPS: usize = BLOCK / 32;

/// A row-major matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct DeviceMatrix {
    pub(in crate::backend) address: u64,
    pub(in crate::backend) dtype: DType,
    /// The number of elements from one row to the next.
    pub(in crate::backend) stride: usize,
    /// Whether the matrix is stored as its transpose.
    pub(in crate::backend) is_transposed: bool,
}

/// The product `out[m, n] = alpha lhs[m, k] rhs[k, n]`, or `out += alpha lhs rhs` if it accumulates. Sums are in f32.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct DeviceProduct {
    pub(in crate::backend) m: usize,
    pub(in crate::backend) n: usize,
    pub(in crate::backend) k: usize,
    pub(in crate::backend) lhs: DeviceMatrix,
    pub(in crate::backend) rhs: DeviceMatrix,
    /// The address of a matrix, `out_stride` elements from one row to the next.
    pub(in crate::backend) out: u64,
    /// f32, or the dtype of the operands if [`GpuKind::rounds_products`].
    pub(in crate::backend) out_dtype: DType,
    pub(in crate::backend) out_stride: usize,
    /// The address of an f32 scalar in device memory. `None` is 1, and the only value if
    /// [`GpuKind::needs_f32_gradient`].
    pub(in crate::backend) alpha: Option<u64>,
    pub(in crate::backend) accumulates: bool,
}
