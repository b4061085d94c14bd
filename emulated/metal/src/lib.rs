//! Helpers of the tests on the emulated Metal device. See README.md.

pub mod gemm;

use candle_core::{DType, Device, Result, Tensor};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// The floating-point dtypes of candle's Metal backend.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The emulated device.
pub fn metal() -> Device {
    Device::new_metal(0).expect("the emulated device always exists")
}

/// Random numbers from -2 to 2 with this seed, on the CPU.
pub fn numbers(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-2.0..2.0)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("as many values as the shape has")
}

/// The relative tolerance for results of `dtype`.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 1e-2,
        DType::BF16 => 6e-2,
        _ => 0.0,
    }
}

/// The elements of a tensor in f64.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    // Metal has no f64, so the conversion is on the CPU.
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Panics unless both tensors have the same shape, the same dtype, and the same values up to the rounding of `dtype`.
pub fn assert_close(what: &str, got: &Tensor, expected: &Tensor, dtype: DType) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
    for (i, (got, expected)) in values(got)?.into_iter().zip(values(expected)?).enumerate() {
        let close = (got - expected).abs() <= tolerance(dtype) * expected.abs().max(1.0);
        // The difference of equal infinities, or of NaN, is NaN.
        assert!(
            close || got == expected || got.is_nan() && expected.is_nan(),
            "{what}, {dtype:?}: element {i} is {got}, not {expected}"
        );
    }
    Ok(())
}

/// Panics unless `f` of these tensors is the same on the emulated device as on the CPU. Floating-point tensors are
/// converted to `dtype`.
pub fn same_on_both(
    what: &str,
    dtype: DType,
    tensors: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let metal = metal();
    let on = |device: &Device| -> Result<Vec<Tensor>> {
        let convert = |tensor: &Tensor| {
            if tensor.dtype().is_float() {
                tensor.to_dtype(dtype)?.to_device(device)
            } else {
                tensor.to_device(device)
            }
        };
        tensors.iter().map(convert).collect()
    };
    let got = f(&on(&metal)?).unwrap_or_else(|error| panic!("{what}, {dtype:?}: {error}"));
    assert_close(what, &got, &f(&on(&Device::Cpu)?)?, dtype)
}
