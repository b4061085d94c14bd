//! candle's matrix product with explicit strides, offsets and addition equals a plain loop.

use candle_core::{DType, Device, Result, Storage, Tensor};
use metal_on_linux::gemm::{gemm, Into, Matrix, TILE};
use metal_on_linux::{assert_close, metal, numbers, FLOATS};

/// The storage of a tensor on the emulated device.
macro_rules! storage {
    ($name:ident, $tensor:expr) => {
        let (guard, _) = $tensor.storage_and_layout();
        let Storage::Metal($name) = &*guard else { panic!("not a Metal tensor") };
    };
}

struct Case {
    sizes: (usize, usize, usize),
    transposed: [bool; 2],
    dtype: DType,
}

/// The gap between the rows of each matrix, and the offset of the first.
const GAPS: [usize; 4] = [3, 5, 7, 2];
const OFFSETS: [usize; 4] = [4, 6, 9, 11];

/// Asserts that the product of a case, and the addition of a matrix to it, equal a plain loop.
fn check(case: &Case, weights: Option<(f32, f32)>, in_place: bool) -> Result<()> {
    let (m, n, k) = case.sizes;
    let [ta, tb] = case.transposed;
    let shape =
        |rows: usize, columns: usize, transposed: bool| if transposed { (columns, rows) } else { (rows, columns) };
    let shapes = [shape(m, k, ta), shape(k, n, tb), (m, n), (m, n)];
    let strides: Vec<usize> = shapes.iter().zip(GAPS).map(|(shape, gap)| shape.1 + gap).collect();
    // Whole tiles of C are read.
    let rows = |i: usize| if i == 2 { m.next_multiple_of(TILE[0]) } else { shapes[i].0 };
    let length = |i: usize| OFFSETS[i] + rows(i) * strides[i];
    let cpu: Vec<Tensor> =
        (0..4).map(|i| numbers(&[length(i)], i as u64).to_dtype(case.dtype)).collect::<Result<_>>()?;
    let device = metal();
    let gpu: Vec<Tensor> = cpu.iter().map(|tensor| tensor.to_device(&device)).collect::<Result<_>>()?;
    let result = if in_place { 2 } else { 3 };
    {
        storage!(a, gpu[0]);
        storage!(b, gpu[1]);
        storage!(c, gpu[2]);
        storage!(d, gpu[result]);
        let matrix = |storage, i: usize| Matrix::new(storage, OFFSETS[i], strides[i]);
        let (mut a, mut b) = (matrix(a, 0), matrix(b, 1));
        if ta {
            a = a.transposed();
        }
        if tb {
            b = b.transposed();
        }
        let (c, d) = (matrix(c, 2), matrix(d, result));
        let into = match weights {
            Some((alpha, beta)) => Into::Weighted(c, alpha, beta),
            None => Into::Sum(c),
        };
        gemm(device.as_metal_device()?, case.dtype, case.sizes, [a, b, d], into)?;
    }

    let values: Vec<Vec<f32>> =
        cpu.iter().map(|tensor| tensor.to_dtype(DType::F32)?.to_vec1()).collect::<Result<_>>()?;
    let at = |i: usize, row: usize, column: usize| OFFSETS[i] + row * strides[i] + column;
    let mut expected = values[result].clone();
    let (alpha, beta) = weights.unwrap_or((1.0, 1.0));
    for row in 0..m {
        for column in 0..n {
            let product: f32 = (0..k)
                .map(|i| {
                    let left = if ta { at(0, i, row) } else { at(0, row, i) };
                    let right = if tb { at(1, column, i) } else { at(1, i, column) };
                    values[0][left] * values[1][right]
                })
                .sum();
            expected[at(result, row, column)] = alpha * product + beta * values[2][at(2, row, column)];
        }
    }
    let expected = Tensor::new(expected, &Device::Cpu)?.to_dtype(case.dtype)?;
    assert_close(
        &format!("{:?} {:?} {weights:?} {in_place}", case.sizes, case.transposed),
        &gpu[result],
        &expected,
        case.dtype,
    )
}

#[test]
fn strides_offsets_and_sums() -> Result<()> {
    for dtype in FLOATS {
        for sizes in [(5, 7, 3), (32, 32, 16), (33, 65, 40), (64, 5, 32)] {
            for transposed in [[false, false], [false, true], [true, false], [true, true]] {
                let case = Case { sizes, transposed, dtype };
                for in_place in [false, true] {
                    check(&case, None, in_place)?;
                    check(&case, Some((0.5, -2.0)), in_place)?;
                }
            }
        }
    }
    Ok(())
}
