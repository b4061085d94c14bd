//! candle's matrix products are the same on the emulated cuBLAS as on the CPU.

use candle_core::{DType, Device, Result, Tensor};

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let numbers = |[batch, rows, columns]: [usize; 3], step: f64, transposed: bool| {
        let values: Vec<f64> = (1..=batch * rows * columns).map(|i| (i as f64 * step).sin()).collect();
        let shape = if transposed { (batch, columns, rows) } else { (batch, rows, columns) };
        let numbers = Tensor::from_vec(values, shape, &Device::Cpu)?;
        if transposed {
            numbers.transpose(1, 2)
        } else {
            Ok(numbers)
        }
    };
    for (batch, m, k, n) in [(1, 1, 1, 1), (1, 5, 7, 3), (3, 4, 600, 2), (2, 33, 1, 65)] {
        for (lhs_transposed, rhs_transposed) in [(false, false), (false, true), (true, false), (true, true)] {
            let lhs = numbers([batch, m, k], 0.7, lhs_transposed)?;
            let rhs = numbers([batch, k, n], 1.1, rhs_transposed)?;
            let expected = lhs.matmul(&rhs)?;
            for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::F16, 3e-3), (DType::BF16, 2e-2)]
            {
                let on = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_device(&device);
                let got = on(&lhs)?.matmul(&on(&rhs)?)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
                let error = (got - &expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
                assert!(error <= tolerance * (k as f64).sqrt(), "{dtype:?} {m} {k} {n}: {error}");
            }
        }
    }
    Ok(())
}
