//! These functions move numbers between the device and the host, where words are chosen.

use candle_core::{DType, Device, Shape, Tensor, WithDType};

use crate::error::Result;

/// Makes a tensor from values of the host. Empty tensors are made from zeros, because candle's Metal backend does not
/// allocate empty buffers.
pub(crate) fn to_device<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    if values.is_empty() {
        Ok(Tensor::zeros(shape, T::DTYPE, device)?)
    } else {
        Ok(Tensor::from_vec(values, shape, device)?)
    }
}

/// Makes a tensor from values of the host in another dtype. The host rounds them, because not every device has f64.
pub(crate) fn rounded(values: Vec<f64>, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    if values.is_empty() {
        Ok(Tensor::zeros(shape, dtype, device)?)
    } else {
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
    }
}

/// Reads the numbers of a matrix in f64.
pub(crate) fn matrix(tensor: &Tensor) -> Result<Vec<Vec<f64>>> {
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2()?)
}
