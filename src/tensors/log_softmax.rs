//! The log-softmax, as candle's operations compute it, and on the host the log-sum-exp.

use candle_core::{DType, Tensor, D};

use crate::error::Result;
use crate::tensors::transfer::{accurate_dtype, sum_rows};

/// Computes the log-softmax of each row. The largest value is a constant, so that it has no gradient of its own, which
/// candle-nn's log-softmax gives it, and which only rounding keeps from zero.
pub(crate) fn log_softmax(rows: &Tensor) -> Result<Tensor> {
    let relative = rows.broadcast_sub(&rows.detach().max_keepdim(D::Minus1)?)?;
    Ok(relative.broadcast_sub(&sum_rows(&relative.exp()?)?.unsqueeze(D::Minus1)?.log()?)?)
}

/// Computes the log-softmax of each row of `z + bias`, in f64 for operands in f64 and otherwise in f32, for `z` `[rows,
/// n]` and `bias` `[n]`. The graph does not know it.
pub(crate) fn biased(z: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let z = match bias {
        Some(bias) => z.broadcast_add(bias)?,
        None => z.clone(),
    };
    let z = z.to_dtype(accurate_dtype(&z))?;
    // candle has no maximum of an empty tensor.
    let is_empty = z.elem_count() == 0;
    Ok(if is_empty { z } else { candle_nn::ops::log_softmax(&z, D::Minus1)? })
}

/// Computes the gradient of the argument of the log-softmax in `dtype`, from its result and the gradient of the result.
pub(crate) fn gradient(result: &Tensor, upstream: &Tensor, dtype: DType) -> Result<Tensor> {
    let total = upstream.sum_keepdim(D::Minus1)?;
    Ok((upstream - result.exp()?.broadcast_mul(&total)?)?.to_dtype(dtype)?)
}

/// Divides rows of log-probabilities by a temperature, and renormalises them.
pub(crate) fn tempered(log_probs: &Tensor, temperature: f64) -> Result<Tensor> {
    if temperature == 1.0 {
        Ok(log_probs.clone())
    } else {
        log_softmax(&(log_probs / temperature)?)
    }
}

/// Computes `log sum_v exp(x_v / T)`, which is minus infinity if all values are, or if there are none.
pub(crate) fn log_sum_exp(values: impl Iterator<Item = f64> + Clone, temperature: f64) -> f64 {
    let largest = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return largest;
    }
    largest / temperature + values.map(|x| ((x - largest) / temperature).exp()).sum::<f64>().ln()
}
