//! Between the host, where token ids are chosen, and the device.

use candle_core::{DType, Device, Shape, Tensor, WithDType};

use crate::Result;

/// What the host has found, as a tensor. Metal, as candle asks it, makes nothing of no values.
pub(super) fn to_device<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match values.is_empty() {
        true => Ok(Tensor::zeros(shape, T::DTYPE, device)?),
        false => Ok(Tensor::from_vec(values, shape, device)?),
    }
}

/// The same in another dtype, rounded on the host: not every device has f64.
pub(super) fn rounded(values: Vec<f64>, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    match values.is_empty() {
        true => Ok(Tensor::zeros(shape, dtype, device)?),
        false => Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?),
    }
}

/// The numbers of a matrix in f64.
pub(super) fn matrix(tensor: &Tensor) -> Result<Vec<Vec<f64>>> {
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2()?)
}
