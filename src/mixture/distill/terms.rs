//! What the positions of a chunk add to a distillation.

use candle_core::Tensor;

use crate::backend::divergence::not_negative;
use crate::error::{Error, Result};
use crate::tensors::checks::check_device;

/// The objective of a chunk's positions, before their weights, and its derivatives, times these.
pub(super) struct DistillTerms {
    pub(super) objective: Tensor,
    pub(super) derivatives: Tensor,
}

/// Checks the shape and the device of a teacher's tensor.
pub(super) fn check_dims(argument: &'static str, tensor: &Tensor, dims: &[usize], like: &Tensor) -> Result<()> {
    if tensor.dims() == dims {
        check_device(argument, tensor, like)
    } else {
        Err(Error::shape(argument, format!("{dims:?}"), tensor.dims()))
    }
}

/// `(1 - weight) divergence + weight nll`
pub(super) fn mixed(divergence: Tensor, nll: Option<Tensor>, weight: f64) -> Result<Tensor> {
    Ok(match nll {
        Some(nll) => ((divergence * (1.0 - weight))? + (not_negative(&nll)? * weight)?)?,
        None => divergence,
    })
}
