//! These functions check arguments before any work.

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// The largest number of elements of a tensor or a table of costs: 2^40, or fewer on a 32-bit machine, whose addresses
/// do not suffice.
pub(crate) const MOST_ELEMENTS: usize = match 1usize.checked_shl(40) {
    Some(most) => most,
    None => isize::MAX as usize / 8,
};

/// Checks that no size is zero.
pub(crate) fn check_sizes(sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((argument, size)) => Err(Error::config(argument, "at least 1", size)),
        None => Ok(()),
    }
}

/// Checks that a size is at most `most`.
pub(crate) fn check_at_most(argument: &'static str, size: usize, most: usize) -> Result<()> {
    if size <= most {
        Ok(())
    } else {
        Err(Error::config(argument, format!("at most {most}"), size))
    }
}

/// Checks that the product `a b`, a number of costs that `argument` names, is at most [`MOST_ELEMENTS`].
pub(crate) fn check_product(argument: &'static str, a: usize, b: usize) -> Result<()> {
    if a.checked_mul(b).is_some_and(|product| product <= MOST_ELEMENTS) {
        Ok(())
    } else {
        Err(Error::config(argument, format!("at most {MOST_ELEMENTS}"), format!("{a} * {b}")))
    }
}

/// Checks that the dtype of a tensor is one of floating-point numbers.
pub(crate) fn check_float(argument: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => Ok(()),
        got => Err(Error::DType { argument, expected: "f16, bf16, f32 or f64".into(), got }),
    }
}
