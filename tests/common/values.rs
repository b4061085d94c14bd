//! Values that every rank makes alike.

use candle_core::{DType, Device, Tensor};
use mos_head::Result;

/// Numbers from -2 to 2, which differ for each seed.
pub fn tensor(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let values = (0..shape.iter().product()).map(|i| ((i * 7919 + seed * 104_729 + i / 13) % 201) as f32 / 50.0 - 2.0);
    Ok(Tensor::from_iter(values, &Device::Cpu)?.reshape(shape)?.to_dtype(dtype)?)
}
