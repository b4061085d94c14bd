//! Reads distributions whose log-probabilities are given as a tensor.

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backend::contract::{Computed, Real, Visit};
use crate::error::{Error, Result};
use crate::tensors::checks::{check_elements, check_float};

/// Answers a query about each distribution of log-probabilities `[.., vocab]`.
pub(super) fn visit<V: Visit>(log_probs: &Tensor, visit: &V) -> Result<Vec<V::Output>> {
    fn rows<F: Real, V: Visit>(log_probs: &Tensor, visit: &V) -> Result<Vec<V::Output>> {
        let rows = log_probs.flatten_to(log_probs.rank() - 2)?.to_vec2::<F>()?;
        let of_position = |(position, row): (usize, &Vec<F>)| visit.visit(position, &Computed::of(row));
        V::answers(rows.par_iter().enumerate().map(of_position))
    }
    check_float("log_probs", log_probs)?;
    check_elements("log_probs", log_probs.dims())?;
    let log_probs = log_probs.to_device(&Device::Cpu)?;
    match (log_probs.dims(), log_probs.dtype()) {
        ([] | [.., 0], _) => Err(Error::shape("log_probs", "[.., vocab]", log_probs.dims())),
        // A single position has no leading dimensions.
        ([_], _) => self::visit(&log_probs.unsqueeze(0)?, visit),
        (_, DType::F64) => rows::<f64, V>(&log_probs, visit),
        _ => rows::<f32, V>(&log_probs.to_dtype(DType::F32)?, visit),
    }
}
