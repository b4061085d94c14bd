//! Products with half-precision operands, computed by products in f32.
//!
//! candle's products of half-precision matrices round their result to half precision, which is not enough for logits.
//! Operands are therefore widened to f32, a tile at a time. For few rows, as in decoding, that would cost more than the
//! product, so a kernel of this crate reads the half-precision operands directly.

use std::cell::RefCell;

use candle_core::{DType, Tensor};

use crate::backend::gpu::arguments::Argument;
use crate::backend::gpu::device::{Buffer, DeviceMatrix, DeviceProduct, Gpu, BLOCK};
use crate::backend::operands::Sizes;
use crate::error::Result;

/// The most elements of the right operand that are widened at a time, unless one row has more.
const TILE: usize = 4 << 20;
/// The most terms that are added one after another. Each addition rounds to the precision of the partial sum, so a
/// longer sum, over a large vocabulary, would lose too many small terms.
const TERMS: usize = 8192;
/// The most rows of a product that the kernel of this crate computes.
const FEW_ROWS: usize = 16;
/// The most rows of a tile of candle's products.
const MOST_TILE_ROWS: usize = 64;
/// Threads per warp.
const WARP: usize = 32;

/// A device that has products in f32.
pub(in crate::backend) trait F32Products: Gpu {
    /// Computes a product of f32 matrices, without a factor.
    fn multiply_f32(&self, product: &DeviceProduct) -> Result<()>;
    /// The buffers that products share.
    fn scratch(&self) -> &ProductBuffers;
    /// An f32 tensor of `elements` arbitrary values.
    fn fresh(&self, elements: usize) -> Result<Tensor>;
    /// The most elements of the right operand that are widened at a time.
    fn tile(&self) -> usize {
        TILE
    }
    /// The most terms that are added one after another, before their sum is added to the rest.
    fn terms(&self) -> usize {
        TERMS
    }
}

/// The widened left (0) and right (1) operands of a product, and the last rows of what it adds to (2), valid until the
/// next product.
#[derive(Default)]
pub(in crate::backend) struct ProductBuffers(RefCell<[Option<Buffer>; 3]>);

impl ProductBuffers {
    /// The address of at least `elements` f32 values for the last rows of what a product adds to.
    #[cfg(feature = "metal")]
    pub(super) fn last_rows<G: F32Products>(&self, gpu: &G, elements: usize) -> Result<u64> {
        self.address(gpu, 2, elements)
    }

    /// The address of at least `elements` f32 values for a matrix, in the previous buffer if it is large enough.
    fn address<G: F32Products>(&self, gpu: &G, matrix: usize, elements: usize) -> Result<u64> {
        let cached = &mut self.0.borrow_mut()[matrix];
        if let Some(buffer) = cached.as_ref().filter(|buffer| buffer.tensor.elem_count() >= elements) {
            return Ok(buffer.at(0));
        }
        Ok(cached.insert(Buffer::new(gpu, gpu.fresh(elements)?)?).at(0))
    }
}

/// The workspace bytes of products: for each row of a chunk, and a fixed number.
pub(super) fn bytes(sizes: Sizes, dtype: DType) -> (usize, usize) {
    let f32_size = DType::F32.size_in_bytes();
    let last_rows = f32_size * MOST_TILE_ROWS * sizes.context_dim;
    let tile = TILE.max(sizes.context_dim).min(sizes.vocab.max(WARP) * sizes.context_dim);
    match dtype {
        DType::F32 => (0, last_rows),
        _ => (f32_size * sizes.context_dim, f32_size * tile + last_rows),
    }
}

/// Computes any product of the chunks.
pub(in crate::backend) fn multiply<G: F32Products>(gpu: &G, product: &DeviceProduct) -> Result<()> {
    let DeviceProduct { m, n, k, lhs, rhs, .. } = *product;
    debug_assert!(product.alpha.is_none(), "the kernel has already scaled the gradient");
    if m == 0 || n == 0 {
        return Ok(());
    }
    // Both operands are in half precision only in the product that computes the logits.
    if rhs.dtype != DType::F32 && lhs.dtype == rhs.dtype && m <= FEW_ROWS && !product.accumulate {
        debug_assert!(!lhs.transposed && rhs.transposed);
        return inner_products(gpu, product);
    }
    let lhs = widened(gpu, 0, lhs, if lhs.transposed { k } else { m })?;
    // The stored rows of the right operand are columns of the result, or terms of its sums.
    let rows = if rhs.transposed { n } else { k };
    let at_once = match (rhs.dtype, rhs.transposed) {
        (DType::F32, true) => rows,
        (DType::F32, false) => gpu.terms(),
        (_, true) => gpu.tile() / rhs.stride,
        (_, false) => (gpu.tile() / rhs.stride).min(gpu.terms()),
    };
    let offset = |elements: usize| (elements * DType::F32.size_in_bytes()) as u64;
    let mut first = 0;
    while first < rows {
        let tile_rows = at_once.max(1).min(rows - first);
        let address = rhs.address + (first * rhs.stride * rhs.dtype.size_in_bytes()) as u64;
        let tile = widened(gpu, 1, DeviceMatrix { address, ..rhs }, tile_rows)?;
        let part = DeviceProduct { lhs, rhs: tile, ..*product };
        gpu.multiply_f32(&if rhs.transposed {
            DeviceProduct { n: tile_rows, out: product.out + offset(first), ..part }
        } else {
            let first_of_lhs = if lhs.transposed { first * lhs.stride } else { first };
            let lhs = DeviceMatrix { address: lhs.address + offset(first_of_lhs), ..lhs };
            DeviceProduct { k: tile_rows, lhs, accumulate: product.accumulate || first > 0, ..part }
        })?;
        first += tile_rows;
    }
    Ok(())
}

/// The first stored rows of a matrix, in f32.
fn widened<G: F32Products>(gpu: &G, operand: usize, matrix: DeviceMatrix, rows: usize) -> Result<DeviceMatrix> {
    if matrix.dtype == DType::F32 {
        return Ok(matrix);
    }
    let count = rows * matrix.stride;
    let address = gpu.scratch().address(gpu, operand, count.max(1))?;
    let arguments = [Argument::Read(matrix.address), Argument::Write(address), Argument::Int(count as i32)];
    gpu.launch(&format!("widen_{}", matrix.dtype.as_str()), count.div_ceil(BLOCK), &arguments)?;
    Ok(DeviceMatrix { address, dtype: DType::F32, ..matrix })
}

fn inner_products<G: F32Products>(gpu: &G, product: &DeviceProduct) -> Result<()> {
    let DeviceProduct { m, n, k, lhs, rhs, out, out_stride, .. } = *product;
    let int = |n: usize| Argument::Int(n as i32);
    let arguments = [
        Argument::Read(lhs.address),
        Argument::Read(rhs.address),
        Argument::Write(out),
        Argument::Long(out_stride as i64),
        int(m),
        int(n),
        int(k),
    ];
    gpu.launch(&format!("inner_products_{}", lhs.dtype.as_str()), n.div_ceil(BLOCK / WARP), &arguments)
}
