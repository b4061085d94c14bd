//! The product of two matrices in bf16, on the tile unit or in f32. candle's own converts its operands on one thread;
//! here all threads do so.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use crate::backend::cpu::operands::dtype::{rounded_to, widened, with_slice};
use crate::backend::cpu::tiles::matmul::{self, TileMatrix};
use crate::backend::cpu::tiles::unit::TileUnit;
use crate::backend::cpu::vector::simd::Isa;
use crate::error::Result;

/// Computes `left right` for matrices `[m, k]` and `[k, n]`. Sizes and dtypes that this file does not serve are
/// candle's.
pub(crate) fn matmul(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    if left.dtype() != DType::BF16 {
        return Ok(left.matmul(right)?);
    }
    let (m, k) = left.dims2()?;
    let n = right.dim(1)?;
    if m * k * n == 0 || right.dim(0)? != k || right.dtype() != DType::BF16 {
        return Ok(left.matmul(right)?);
    }
    let Some(unit) = TileUnit::detected()? else {
        return rounded_to::<bf16>(wide(left)?.matmul(&wide(right)?)?);
    };
    let isa = Isa::detected()?;
    let ((a, left_transposed), (b, right_transposed)) = (stored(left)?, stored(right)?);
    let product = with_slice("left", &a, |a: &[bf16]| {
        with_slice("right", &b, |b: &[bf16]| {
            let left = TileMatrix { values: a, rows: m, columns: k, is_transposed: left_transposed };
            let right = TileMatrix { values: b, rows: k, columns: n, is_transposed: right_transposed };
            Ok(matmul::matmul(unit, isa, left, right))
        })
    })?;
    Ok(Tensor::from_vec(product, (m, n), &Device::Cpu)?)
}

/// Returns a matrix as it is stored, and whether that is its transpose.
fn stored(matrix: &Tensor) -> Result<(Tensor, bool)> {
    let transposed = matrix.t()?;
    Ok(if matrix.is_contiguous() || !transposed.is_contiguous() {
        (matrix.contiguous()?, false)
    } else {
        (transposed, true)
    })
}

/// Returns a matrix in f32, stored as before.
fn wide(matrix: &Tensor) -> Result<Tensor> {
    let (values, is_transposed) = stored(matrix)?;
    let wide = widened::<bf16>(&values)?;
    Ok(if is_transposed { wide.t()? } else { wide })
}
