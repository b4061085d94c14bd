//! Checks of arguments, before any work.

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// The largest number of elements of a tensor or a table of costs: 2^40. On a 32-bit machine the addresses allow fewer.
pub(crate) const MOST_ELEMENTS: usize = match 1usize.checked_shl(40) {
    Some(most) => most,
    None => isize::MAX as usize / 8,
};

pub(crate) fn check_sizes(sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((argument, size)) => Err(Error::config(argument, "at least 1", size)),
        None => Ok(()),
    }
}

/// Checks that a size is at most `most`.
pub(crate) fn check_most(argument: &'static str, size: usize, most: usize) -> Result<()> {
    if size <= most {
        Ok(())
    } else {
        Err(Error::config(argument, format!("at most {most}"), size))
    }
}

/// Checks the number of costs, a product that `argument` names.
pub(crate) fn check_product(argument: &'static str, a: usize, b: usize) -> Result<()> {
    if a.checked_mul(b).is_some_and(|product| product <= MOST_ELEMENTS) {
        Ok(())
    } else {
        Err(Error::config(argument, format!("at most {MOST_ELEMENTS}"), format!("{a} * {b}")))
    }
}

pub(crate) fn check_float(argument: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => Ok(()),
        got => Err(Error::DType { argument, expected: "f16, bf16, f32 or f64".into(), got }),
    }
}
