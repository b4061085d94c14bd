//! Products whose operands may be in half precision, of products in f32.
//!
//! candle's products of half-precision matrices round their result to that precision, which logits cannot bear. Operands are
//! therefore made wider, a tile at a time; but where the rows are few, as in decoding, that would cost more than the product,
//! and a kernel of our own reads them as they are.

use std::cell::RefCell;

use candle_core::{DType, Tensor};

use crate::backend::contract::Sizes;
use crate::backend::gpu::arguments::Argument;
use crate::backend::gpu::device::{Buffer, Gpu, Matrix, Product, BLOCK};
use crate::error::Result;

/// The most elements of the right operand that are made wider at a time, unless one row has more.
const TILE: usize = 4 << 20;
/// Of sums over a large vocabulary too many small terms would be lost: each is rounded against all before it.
const TERMS: usize = 8192;
/// Products of so many rows take the kernel of our own.
const FEW_ROWS: usize = 16;
/// Threads of a warp.
const WARP: usize = 32;

/// A device that has products in f32.
pub(in crate::backend) trait Products: Gpu {
    /// The product of f32 matrices, without a factor.
    fn multiply_f32(&self, product: &Product) -> Result<()>;
    /// Where wider operands are kept.
    fn scratch(&self) -> &Scratch;
    /// So many f32, whatever they are.
    fn fresh(&self, elements: usize) -> Result<Tensor>;
    /// The elements of the right operand that are made wider at a time.
    fn tile(&self) -> usize {
        TILE
    }
    /// The terms of a sum that are added up one after another, before what comes of them is added to the rest.
    fn terms(&self) -> usize {
        TERMS
    }
}

/// The left (0) and the right (1) operand of a product in f32, until the next product.
#[derive(Default)]
pub(in crate::backend) struct Scratch(RefCell<[Option<Buffer>; 2]>);

impl Scratch {
    /// The address of so many f32 for an operand; those of before, if they are as many.
    fn address<G: Products>(&self, gpu: &G, operand: usize, elements: usize) -> Result<u64> {
        let kept = &mut self.0.borrow_mut()[operand];
        if let Some(buffer) = kept.as_ref().filter(|buffer| buffer.tensor.elem_count() >= elements) {
            return Ok(buffer.at(0));
        }
        Ok(kept.insert(Buffer::new(gpu, gpu.fresh(elements)?)?).at(0))
    }
}

/// The bytes that products of half-precision operands need: for each row of a chunk, and in any case.
pub(super) fn bytes(sizes: Sizes) -> (usize, usize) {
    let f32_size = DType::F32.size_in_bytes();
    let tile = TILE.max(sizes.context).min(sizes.vocab.max(WARP) * sizes.context);
    (f32_size * sizes.context, f32_size * tile)
}

/// Any product that the chunks ask for.
pub(in crate::backend) fn multiply<G: Products>(gpu: &G, product: &Product) -> Result<()> {
    let Product { m, n, k, lhs, rhs, .. } = *product;
    debug_assert!(product.alpha.is_none(), "the kernel has multiplied the gradient already");
    if m == 0 || n == 0 {
        return Ok(());
    }
    // Both are half only in the first product.
    if rhs.dtype != DType::F32 && lhs.dtype == rhs.dtype && m <= FEW_ROWS {
        debug_assert!(!lhs.transposed && rhs.transposed && !product.accumulate);
        return inner_products(gpu, product);
    }
    let lhs = widened(gpu, 0, lhs, if lhs.transposed { k } else { m })?;
    // The rows of the right operand as it is stored are columns of the result, or terms of its sums.
    let rows = if rhs.transposed { n } else { k };
    let at_once = match (rhs.dtype, rhs.transposed) {
        (DType::F32, true) => rows,
        (DType::F32, false) => gpu.terms(),
        (_, true) => gpu.tile() / rhs.stride,
        (_, false) => (gpu.tile() / rhs.stride).min(gpu.terms()),
    };
    let offset = |elements: usize| (elements * DType::F32.size_in_bytes()) as u64;
    let mut first = 0;
    // Once even if there are no rows: sums without terms are zero.
    loop {
        let tile_rows = at_once.max(1).min(rows - first);
        let address = rhs.address + (first * rhs.stride * rhs.dtype.size_in_bytes()) as u64;
        let tile = widened(gpu, 1, Matrix { address, ..rhs }, tile_rows)?;
        let part = Product { lhs, rhs: tile, ..*product };
        gpu.multiply_f32(&match rhs.transposed {
            true => Product { n: tile_rows, out: product.out + offset(first), ..part },
            false => {
                let first_of_lhs = if lhs.transposed { first * lhs.stride } else { first };
                let lhs = Matrix { address: lhs.address + offset(first_of_lhs), ..lhs };
                Product { k: tile_rows, lhs, accumulate: product.accumulate || first > 0, ..part }
            }
        })?;
        first += tile_rows;
        if first >= rows {
            return Ok(());
        }
    }
}

/// The first rows of a matrix as it is stored, in f32.
fn widened<G: Products>(gpu: &G, operand: usize, matrix: Matrix, rows: usize) -> Result<Matrix> {
    if matrix.dtype == DType::F32 {
        return Ok(matrix);
    }
    let count = rows * matrix.stride;
    let address = gpu.scratch().address(gpu, operand, count.max(1))?;
    let arguments = [Argument::Read(matrix.address), Argument::Write(address), Argument::Int(count as i32)];
    gpu.launch(&format!("widen_{}", matrix.dtype.as_str()), count.div_ceil(BLOCK), &arguments)?;
    Ok(Matrix { address, dtype: DType::F32, ..matrix })
}

fn inner_products<G: Products>(gpu: &G, product: &Product) -> Result<()> {
    let Product { m, n, k, lhs, rhs, out, out_stride, .. } = *product;
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
