//! Transfers between the device and the host, where token ids are chosen.

use candle_core::{DType, Device, Shape, Tensor, WithDType};
use rayon::prelude::*;

use crate::backend::contract::{Computed, Real, Visit};
use crate::error::{Error, Result};
use crate::validate::{check_elements, check_float};

/// Values of the host as a tensor. candle's Metal backend does not allocate empty buffers.
pub(crate) fn to_device<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match values.is_empty() {
        true => Ok(Tensor::zeros(shape, T::DTYPE, device)?),
        false => Ok(Tensor::from_vec(values, shape, device)?),
    }
}

/// The same in another dtype, rounded on the host: not every device has f64.
pub(crate) fn rounded(values: Vec<f64>, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    match values.is_empty() {
        true => Ok(Tensor::zeros(shape, dtype, device)?),
        false => Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?),
    }
}

/// The numbers of a matrix in f64.
pub(crate) fn matrix(tensor: &Tensor) -> Result<Vec<Vec<f64>>> {
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2()?)
}

/// A query of each distribution of log-probabilities `[.., vocab]`.
pub(super) fn visit<V: Visit>(log_probs: &Tensor, visit: &V) -> Result<Vec<V::Output>> {
    fn rows<F: Real, V: Visit>(log_probs: &Tensor, visit: &V) -> Result<Vec<V::Output>> {
        let rows = log_probs.flatten_to(log_probs.rank() - 2)?.to_vec2::<F>()?;
        rows.par_iter().enumerate().map(|(position, row)| visit.visit(position, &Computed(row))).collect()
    }
    check_float("log_probs", log_probs)?;
    check_elements("log_probs", log_probs.dims())?;
    let log_probs = log_probs.to_device(&Device::Cpu)?;
    match (log_probs.dims(), log_probs.dtype()) {
        ([] | [.., 0], _) => Err(Error::shape("log_probs", "[.., vocab]", log_probs.dims())),
        // One position, without leading dimensions.
        ([_], _) => self::visit(&log_probs.unsqueeze(0)?, visit),
        (_, DType::F64) => rows::<f64, V>(&log_probs, visit),
        _ => rows::<f32, V>(&log_probs.to_dtype(DType::F32)?, visit),
    }
}
