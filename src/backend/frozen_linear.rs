//! A linear layer whose matrix is quantised, as a node of candle's graph.

use candle_core::{DType, Tensor};

use super::{quantised_gradient, quantised_product};
use crate::backend::quantised::QuantisedMatrix;
use crate::error::{Error, Result};
use crate::tensors::autograd::attach;
use crate::tensors::linear::as_matrix;

/// Computes `input W^T + b` for an input `[.., columns]`, differentiably, in the dtype of the input: the matrix is a
/// constant. All of it is one node, because candle would copy the gradient of another one that adds the bias or
/// changes the shape.
pub(crate) fn frozen_linear(input: &Tensor, bias: Option<&Tensor>, matrix: &QuantisedMatrix) -> Result<Tensor> {
    let &[outputs, _] = matrix.dims();
    let mut value = quantised_product(&rows_in_f32(&input.detach())?, matrix)?;
    if let Some(bias) = bias {
        value = value.broadcast_add(&bias.detach().to_dtype(DType::F32)?)?;
    }
    let shape = [&input.dims()[..input.rank() - 1], &[outputs]].concat();
    let value = value.reshape(shape)?.to_dtype(input.dtype())?;
    let matrix = matrix.clone();
    attach("quantised linear", value, [Some(input), bias, None], move |[input, bias, _], _, upstream| {
        let upstream = rows_in_f32(upstream)?;
        let input_gradient = || {
            let gradient = quantised_gradient(&upstream, &matrix)?.to_dtype(input.dtype())?;
            Ok::<_, Error>(gradient.reshape(input.shape())?)
        };
        let bias_gradient = || Ok::<_, Error>(upstream.sum(0)?.to_dtype(bias.dtype())?);
        Ok([input.track_op().then(input_gradient).transpose()?, bias.track_op().then(bias_gradient).transpose()?, None])
    })
}

/// Returns rows, `[.., n]`, as a contiguous matrix in f32.
fn rows_in_f32(rows: &Tensor) -> Result<Tensor> {
    Ok(as_matrix(rows)?.to_dtype(DType::F32)?)
}
