//! The product of a linear layer, `input W^T`. Each row of the result has the same bits whatever the other rows are,
//! and on any number of threads, as decoding promises; candle's product rounds a single row otherwise than several.
//!
//! The elements are inner products (`gemv`), which read the weight from where it lies, or in bf16 products on a tile
//! unit. Both add up the terms of an element in the same order in every row.

use candle_core::{DType, Device, Tensor};

use super::gemv::DecoderDots;
use super::matmul;
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::dtype::{locked, rounded, with_accumulator, with_values, Accumulator};
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::tiles::unit::TileUnit;
use crate::backend::cpu::vector::simd::Isa;
use crate::backend::parallel;
use crate::error::Result;

/// The rows and the columns of the result that a thread computes at a time. Their rows of the input and of the weight
/// stay in the second-level cache.
const TILE: (usize, usize) = (96, 64);

/// Computes `input W^T`, `[n, outputs]`, for an input `[n, inputs]` and a weight `[outputs, inputs]`. Operands that do
/// not match each other, and empty ones, are candle's.
pub(crate) fn linear(input: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let ((n, inputs), (outputs, columns)) = (input.dims2()?, weight.dims2()?);
    let are_alike = inputs == columns && input.dtype() == weight.dtype();
    if !are_alike || n * inputs * outputs == 0 {
        return Ok(input.matmul(&weight.t()?)?);
    }
    if input.dtype() == DType::BF16 && TileUnit::detected()?.is_some() {
        return matmul::matmul(input, &weight.t()?);
    }
    let (input, weight) = (input.contiguous()?, weight.contiguous()?);
    let products = with_accumulator!(input.dtype(), F => inner_products::<F>(&input, &weight))?;
    rounded(products, input.dtype())
}

/// Computes the inner products of the rows of two matrices.
fn inner_products<F: Accumulator>(input: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let isa = Isa::detected()?;
    let ((n, d), outputs) = (input.dims2()?, weight.dim(0)?);
    let (input, weight) = (locked("input", input)?, locked("weight", weight)?);
    let (mut widened, weight) = (Vec::new(), weight.stored::<F>()?);
    let input = input.stored::<F>()?.widened(&mut widened);
    let mut products: Vec<F> = zeros(n * outputs);
    let tiles = ViewMut::new(&mut products, n, outputs, outputs).tiles(TILE.0, TILE.1);
    parallel::for_each(tiles, |(rows, columns, mut to)| {
        let contexts = ContextRows { values: &input[rows.start * d..rows.end * d], stride: d };
        with_values!(weight.slice(columns.start * d..columns.end * d), decoder => {
            F::dispatch(isa, DecoderDots { contexts, decoder, d, is_added: false, to: &mut to });
        });
    });
    Ok(Tensor::from_vec(products, (n, outputs), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::transfer::read_matrix;

    /// Makes numbers whose products are rounded.
    fn matrix(rows: usize, columns: usize, seed: usize, dtype: DType) -> Result<Tensor> {
        let values = (0..rows * columns).map(|i| ((i * 7919 + seed) as f64).sin());
        Ok(Tensor::from_vec(values.collect(), (rows, columns), &Device::Cpu)?.to_dtype(dtype)?)
    }

    #[test]
    fn products_equal_sums_in_f64_and_each_row_has_its_bits_alone() -> Result<()> {
        for (dtype, rounding) in [(DType::F32, 1e-6), (DType::F64, 1e-14), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            for (n, inputs, outputs) in
                [(1, 1, 1), (1, 37, 130), (5, 600, 7), (97, 33, 65), (200, 64, 1), (45, 1100, 7)]
            {
                let (input, weight) = (matrix(n, inputs, 1, dtype)?, matrix(outputs, inputs, 2, dtype)?);
                let strided = weight.t()?.contiguous()?.t()?;
                let product = linear(&input, &weight)?;
                let (found, name) = (read_matrix(&product)?, format!("{dtype:?} {n} {inputs} {outputs}"));
                assert_eq!((product.dtype(), product.dims()), (dtype, &[n, outputs][..]));
                assert_eq!(
                    found,
                    read_matrix(&linear(&input, &strided)?)?,
                    "{name}, a weight that is stored transposed"
                );
                let (rows, columns) = (read_matrix(&input)?, read_matrix(&weight)?);
                for (i, (row, found)) in rows.iter().zip(&found).enumerate() {
                    assert_eq!(found, &read_matrix(&linear(&input.narrow(0, i, 1)?, &weight)?)?[0], "{name}, row {i}");
                    for (found, column) in found.iter().zip(&columns) {
                        let expected: f64 = row.iter().zip(column).map(|(x, w)| x * w).sum();
                        assert!(
                            (found - expected).abs() <= rounding * (1.0 + expected.abs()),
                            "{name}: {found} {expected}"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn empty_operands_and_those_that_do_not_match_are_candles() -> Result<()> {
        for (n, inputs, outputs) in [(0, 3, 2), (2, 0, 3), (2, 3, 0)] {
            let product = linear(&matrix(n, inputs, 1, DType::F32)?, &matrix(outputs, inputs, 2, DType::F32)?)?;
            assert_eq!(read_matrix(&product)?, vec![vec![0.0; outputs]; n]);
        }
        assert!(linear(&matrix(2, 3, 1, DType::F32)?, &matrix(4, 5, 2, DType::F32)?).is_err());
        assert!(linear(&matrix(2, 3, 1, DType::F32)?, &matrix(4, 3, 2, DType::F64)?).is_err());
        Ok(())
    }
}
