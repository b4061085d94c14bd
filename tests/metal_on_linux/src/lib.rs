//! What the tests of the make-believe device share. See README.md.

pub mod gemm;

use candle_core::{DType, Device, Result, Tensor};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// The float types that candle's Metal backend has.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The make-believe device.
pub fn metal() -> Device {
    Device::new_metal(0).expect("the device is always there")
}

/// Numbers from -2 to 2 that follow from `seed`, on the CPU.
pub fn numbers(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-2.0..2.0)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("as many values as the shape has")
}

/// The relative difference between two results of `dtype` that is due to rounding.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 1e-2,
        DType::BF16 => 6e-2,
        _ => 0.0,
    }
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    // Metal has no f64; the tensor comes to the CPU as it is.
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Panics unless both have the same shape, the same type, and the same values but for the rounding of `dtype`.
pub fn assert_close(what: &str, got: &Tensor, wanted: &Tensor, dtype: DType) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (wanted.dims(), wanted.dtype()), "{what}");
    for (i, (got, wanted)) in values(got)?.into_iter().zip(values(wanted)?).enumerate() {
        let close = (got - wanted).abs() <= tolerance(dtype) * wanted.abs().max(1.0);
        // Infinities differ by NaN, and so does NaN.
        assert!(
            close || got == wanted || got.is_nan() && wanted.is_nan(),
            "{what}, {dtype:?}: element {i} is {got}, not {wanted}"
        );
    }
    Ok(())
}

/// Panics unless `f` gives the same on the make-believe device as on the CPU, where it is given the same tensors: of
/// floats as `dtype`, of integers as they are.
pub fn same_on_both(
    what: &str,
    dtype: DType,
    tensors: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let metal = metal();
    let on = |device: &Device| -> Result<Vec<Tensor>> {
        let convert = |tensor: &Tensor| match tensor.dtype().is_float() {
            true => tensor.to_dtype(dtype)?.to_device(device),
            false => tensor.to_device(device),
        };
        tensors.iter().map(convert).collect()
    };
    let got = f(&on(&metal)?).unwrap_or_else(|error| panic!("{what}, {dtype:?}: {error}"));
    assert_close(what, &got, &f(&on(&Device::Cpu)?)?, dtype)
}
