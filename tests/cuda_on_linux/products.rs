//! candle's matrix products are the same on the emulated cuBLAS as on the CPU.

use candle_core::{DType, Device, Result, Tensor};

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let numbers = |shape: (usize, usize, usize), transposed: bool| {
        let stored = if transposed { (shape.0, shape.2, shape.1) } else { shape };
        let numbers = Tensor::randn(0f64, 1.0, stored, &Device::Cpu)?;
        if transposed {
            numbers.transpose(1, 2)
        } else {
            Ok(numbers)
        }
    };
    for (batch, m, k, n) in [(1, 1, 1, 1), (1, 5, 7, 3), (3, 4, 600, 2), (2, 33, 1, 65)] {
        for (lhs_transposed, rhs_transposed) in [(false, false), (false, true), (true, false), (true, true)] {
            let lhs = numbers((batch, m, k), lhs_transposed)?;
            let rhs = numbers((batch, k, n), rhs_transposed)?;
            let expected = lhs.matmul(&rhs)?;
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-4), (DType::F16, 0.15), (DType::BF16, 1.0)]
            {
                let on = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_device(&device);
                let got = on(&lhs)?.matmul(&on(&rhs)?)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
                let error = (got - &expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
                assert!(error <= tolerance, "{dtype:?} {m} {k} {n}: {error}");
            }
        }
    }
    Ok(())
}
