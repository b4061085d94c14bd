//! Products of half-precision operands on Metal, computed by products in f32.
//!
//! candle's products of half-precision matrices round their result to half precision, which is not enough for logits.
//! Operands are therefore converted to f32, a tile at a time. For few rows, as in decoding, that would cost more than
//! the product, so that a kernel of this crate reads the half-precision operands directly.

use std::cell::RefCell;

use candle_core::{DType, Tensor};

use crate::backend::gpu::arguments::{Read, Write};
use crate::backend::gpu::device::{Buffer, DeviceMatrix, DeviceProduct, Gpu, ProductBytes, BLOCK};
use crate::backend::gpu::kernels::{kernels, KernelArguments};
use crate::backend::operands::Sizes;
use crate::error::Result;

/// The most elements of the right operand that are widened at a time, unless one row has more.
const MOST_TILE_ELEMENTS: usize = 4 << 20;
/// The most terms of a sum that are added one after another. Each addition rounds to the precision of the partial sum,
/// so that a longer sum, over a large vocabulary, would lose too many small terms.
const MOST_SUMMANDS: usize = 8192;
/// The most rows of a product that the kernel of this crate computes.
const FEW_ROWS: usize = 16;
/// The most rows of a tile of candle's products.
const MOST_TILE_ROWS: usize = 64;
/// The threads of a warp.
const WARP: usize = 32;

kernels! {
    widen(WidenArguments) {
        from: Read,
        to: Write,
        count: i32,
    }
    inner_products(InnerProductsArguments) {
        lhs: Read,
        rhs: Read,
        out: Write,
        out_stride: i64,
        m: i32,
        n: i32,
        k: i32,
    }
}

/// A device that has products in f32.
pub(in crate::backend) trait F32Products: Gpu {
    /// Computes a product of f32 matrices, without a factor.
    fn multiply_f32(&self, product: &DeviceProduct) -> Result<()>;
    /// The buffers that products share.
    fn scratch(&self) -> &ProductBuffers;
    /// An f32 tensor of `elements` arbitrary values.
    fn fresh(&self, elements: usize) -> Result<Tensor>;
    /// The most elements of the right operand that are widened at a time.
    fn most_tile_elements(&self) -> usize {
        MOST_TILE_ELEMENTS
    }
    /// The most terms of a sum that are added one after another, before they are added to the sum so far.
    fn most_summands(&self) -> usize {
        MOST_SUMMANDS
    }
}

/// The buffers of a product, by [`ProductMatrix`], valid until the next product.
#[derive(Default)]
pub(in crate::backend) struct ProductBuffers(RefCell<[Option<Buffer>; 3]>);

/// A matrix that needs a buffer.
#[derive(Clone, Copy)]
enum ProductMatrix {
    /// The left operand in f32.
    Left,
    /// The right operand in f32, or a tile of it.
    Right,
    /// The last rows of the matrix that the product adds to.
    #[cfg_attr(not(feature = "metal"), allow(dead_code))]
    LastRows,
}

impl ProductBuffers {
    /// The address of a buffer of at least `elements` f32 values for the last rows of the matrix that a product adds
    /// to.
    #[cfg(feature = "metal")]
    pub(super) fn last_rows<G: F32Products>(&self, gpu: &G, elements: usize) -> Result<u64> {
        self.address(gpu, ProductMatrix::LastRows, elements)
    }

    /// The address of a buffer of at least `elements` f32 values for a matrix: the previous buffer if it is large
    /// enough.
    fn address<G: F32Products>(&self, gpu: &G, matrix: ProductMatrix, elements: usize) -> Result<u64> {
        let cached = &mut self.0.borrow_mut()[matrix as usize];
        if let Some(buffer) = cached.as_ref().filter(|buffer| buffer.tensor.elem_count() >= elements) {
            return Ok(buffer.at(0));
        }
        Ok(cached.insert(Buffer::new(gpu, gpu.fresh(elements)?)?).at(0))
    }
}

/// The workspace of products with operands of `dtype`.
pub(super) fn product_bytes(sizes: Sizes, dtype: DType) -> ProductBytes {
    let f32_size = DType::F32.size_in_bytes();
    let last_rows = f32_size * MOST_TILE_ROWS * sizes.context_dim;
    let tile = MOST_TILE_ELEMENTS.max(sizes.context_dim).min(sizes.vocab.max(WARP) * sizes.context_dim);
    match dtype {
        DType::F32 => ProductBytes { per_row: 0, fixed: last_rows },
        _ => ProductBytes { per_row: f32_size * sizes.context_dim, fixed: f32_size * tile + last_rows },
    }
}

/// Computes any product of the chunks.
pub(in crate::backend) fn multiply<G: F32Products>(gpu: &G, product: &DeviceProduct) -> Result<()> {
    let DeviceProduct { m, n, k, lhs, rhs, .. } = *product;
    debug_assert!(product.alpha.is_none(), "the kernel has already scaled the gradient");
    debug_assert_eq!(product.out_dtype, DType::F32, "products are not rounded");
    if m == 0 || n == 0 {
        return Ok(());
    }
    // Both operands are in half precision only in the product that computes the logits.
    if rhs.dtype != DType::F32 && lhs.dtype == rhs.dtype && m <= FEW_ROWS && !product.accumulates {
        debug_assert!(!lhs.is_transposed && rhs.is_transposed);
        return inner_products(gpu, product);
    }
    let lhs = widened(gpu, ProductMatrix::Left, lhs, if lhs.is_transposed { k } else { m })?;
    // The stored rows of the right operand are columns of the result, or terms of its sums.
    let rows = if rhs.is_transposed { n } else { k };
    let at_once = match (rhs.dtype, rhs.is_transposed) {
        (DType::F32, true) => rows,
        (DType::F32, false) => gpu.most_summands(),
        (_, true) => gpu.most_tile_elements() / rhs.stride,
        (_, false) => (gpu.most_tile_elements() / rhs.stride).min(gpu.most_summands()),
    };
    let offset = |elements: usize| (elements * DType::F32.size_in_bytes()) as u64;
    let mut first = 0;
    while first < rows {
        let tile_rows = at_once.max(1).min(rows - first);
        let address = rhs.address + (first * rhs.stride * rhs.dtype.size_in_bytes()) as u64;
        let tile = widened(gpu, ProductMatrix::Right, DeviceMatrix { address, ..rhs }, tile_rows)?;
        let tile_product = DeviceProduct { lhs, rhs: tile, ..*product };
        gpu.multiply_f32(&if rhs.is_transposed {
            DeviceProduct { n: tile_rows, out: product.out + offset(first), ..tile_product }
        } else {
            let first_of_lhs = if lhs.is_transposed { first * lhs.stride } else { first };
            let lhs = DeviceMatrix { address: lhs.address + offset(first_of_lhs), ..lhs };
            DeviceProduct { k: tile_rows, lhs, accumulates: product.accumulates || first > 0, ..tile_product }
        })?;
        first += tile_rows;
    }
    Ok(())
}

/// Returns the first stored rows of a matrix in f32, converted if the matrix has another dtype.
fn widened<G: F32Products>(gpu: &G, operand: ProductMatrix, matrix: DeviceMatrix, rows: usize) -> Result<DeviceMatrix> {
    if matrix.dtype == DType::F32 {
        return Ok(matrix);
    }
    let count = rows * matrix.stride;
    let address = gpu.scratch().address(gpu, operand, count.max(1))?;
    let arguments = WidenArguments { from: Read(matrix.address), to: Write(address), count: count as i32 };
    arguments.launch_for(gpu, matrix.dtype, count.div_ceil(BLOCK))?;
    Ok(DeviceMatrix { address, dtype: DType::F32, ..matrix })
}

/// Computes a product of half-precision operands, the right one of which is transposed, by the kernel of this crate.
fn inner_products<G: F32Products>(gpu: &G, product: &DeviceProduct) -> Result<()> {
    let DeviceProduct { m, n, k, lhs, rhs, out, out_stride, .. } = *product;
    let arguments = InnerProductsArguments {
        lhs: Read(lhs.address),
        rhs: Read(rhs.address),
        out: Write(out),
        out_stride: out_stride as i64,
        m: m as i32,
        n: n as i32,
        k: k as i32,
    };
    arguments.launch_for(gpu, lhs.dtype, n.div_ceil(BLOCK / WARP))
}
