//! Reads distributions that are given as a tensor of log-probabilities, and checks that the numbers are
//! log-probabilities.

use candle_core::{DType, Device, Tensor};

use crate::backend::distribution::{answers, read_positions, Computed, Reader, Visit};
use crate::backend::operands::Real;
use crate::backend::parallel;
use crate::error::{Error, Result};
use crate::tensors::checks::{check_elements, check_float, max_log_prob, LOG_PROBS};

/// Checks that no number of these rows is NaN or above zero, except by rounding in the dtype that they were computed
/// in. The error of a NaN or an infinity in any row comes before that of a number above zero, which may follow from it.
pub(crate) fn check_host_log_probs<F: Real>(argument: &'static str, rows: &[Vec<F>], dtype: DType) -> Result<()> {
    /// Finds the first number for which `is_wrong`, by its row and its place in the row.
    fn find_first<F: Real>(rows: &[Vec<F>], is_wrong: impl Fn(f64) -> bool + Sync) -> Option<(usize, usize)> {
        let wrong_in = |(position, row): (usize, &Vec<F>)| {
            row.iter().position(|x| is_wrong(x.f64())).map(|index| (position, index))
        };
        parallel::map(rows.iter().enumerate(), wrong_in).into_iter().flatten().next()
    }
    let most = max_log_prob(dtype);
    let Some((position, index)) = find_first(rows, |x| x.is_nan() || x > most) else { return Ok(()) };
    if let Some((position, _)) = find_first(rows, |x| x.is_nan() || x == f64::INFINITY) {
        return Err(Error::Distribution { position });
    }
    let got = rows[position][index].f64();
    Err(Error::Value { argument, expected: LOG_PROBS, position, index, got })
}

/// Checks the dtype and the shape of log-probabilities `[.., vocab]`, and returns the number of distributions.
pub(super) fn check_distributions(log_probs: &Tensor) -> Result<usize> {
    check_float("log_probs", log_probs)?;
    check_elements("log_probs", log_probs.dims())?;
    match log_probs.dims() {
        [] | [.., 0] => Err(Error::shape("log_probs", "[.., vocab]", log_probs.dims())),
        [leading @ .., _] => Ok(leading.iter().product()),
    }
}

/// Answers a query of each distribution of log-probabilities `[.., vocab]`, which were rounded to the dtype `rounded`.
pub(super) fn visit<V: Visit>(log_probs: &Tensor, rounded: DType, visit: &V) -> Result<Vec<V::Output>> {
    let positions = check_distributions(log_probs)?;
    let log_probs = log_probs.to_device(&Device::Cpu)?;
    if log_probs.rank() == 1 {
        // A single position has no leading dimensions.
        return self::visit(&log_probs.unsqueeze(0)?, rounded, visit);
    }
    answers(visit, positions, |reader| match log_probs.dtype() {
        DType::F64 => read_rows::<f64>(&log_probs, rounded, reader),
        _ => read_rows::<f32>(&log_probs.to_dtype(DType::F32)?, rounded, reader),
    })
}

/// Lets a query read the distributions of rows that are given in one of the number types.
fn read_rows<F: Real>(log_probs: &Tensor, rounded: DType, reader: &dyn Reader) -> Result<()> {
    let rows = log_probs.flatten_to(log_probs.rank() - 2)?.to_vec2::<F>()?;
    check_host_log_probs("log_probs", &rows, rounded)?;
    read_positions(0..rows.len(), &|position| {
        let row: Vec<f64> = rows[position].iter().map(|x| x.f64()).collect();
        reader.read(position, &Computed::new(&row))
    })
}
