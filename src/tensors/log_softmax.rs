//! The log-softmax, as candle's operations compute it, and on the host the log-sum-exp.

use candle_core::{Tensor, D};

use crate::error::Result;

/// Computes the log-softmax of each row. The largest value is a constant, so that it has no gradient of its own, which
/// candle-nn's log-softmax gives it, and which only rounding keeps from zero.
pub(crate) fn log_softmax(rows: &Tensor) -> Result<Tensor> {
    let relative = rows.broadcast_sub(&rows.detach().max_keepdim(D::Minus1)?)?;
    Ok(relative.broadcast_sub(&relative.exp()?.sum_keepdim(D::Minus1)?.log()?)?)
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
