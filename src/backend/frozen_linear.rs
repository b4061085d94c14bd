//! A linear layer whose matrix is quantised, as a node of candle's graph.

use candle_core::Tensor;

use super::{quantised_gradient, quantised_product};
use crate::backend::quantised::QuantisedMatrix;
use crate::error::Result;
use crate::tensors::autograd::attach;

/// Computes `input W^T` for a contiguous input `[n, columns]` in f32, differentiably: the matrix is a constant.
pub(crate) fn frozen_product(input: &Tensor, matrix: &QuantisedMatrix) -> Result<Tensor> {
    let value = quantised_product(&input.detach(), matrix)?;
    let matrix = matrix.clone();
    attach("quantised linear", value, [Some(input), None, None], move |_, _, upstream| {
        Ok([Some(quantised_gradient(&upstream.contiguous()?, &matrix)?), None, None])
    })
}
