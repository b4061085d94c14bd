//! Linear layers with their activations as nodes of candle's graph that keep only their results: the projections of
//! hidden states to contexts and priors, the first factor of a low-rank adapter, the projections of clusters.

use candle_core::{Tensor, D};

use super::autograd;
use crate::error::{Error, Result};

/// The operands of a linear layer, `W h + b` for each row h of the input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearOperands<'a> {
    /// `[rows, inputs]`
    pub(crate) input: &'a Tensor,
    /// `[outputs, inputs]`
    pub(crate) weight: &'a Tensor,
    /// `[outputs]`
    pub(crate) bias: Option<&'a Tensor>,
}

/// Returns rows, such as hidden states `[.., inputs]`, as a matrix. One is returned as it is: candle would copy the
/// gradient of a node that changes the shape.
pub(crate) fn as_matrix(rows: &Tensor) -> Result<Tensor> {
    match rows.rank() {
        2 => Ok(rows.contiguous()?),
        _ => Ok(rows.reshape(((), rows.dim(D::Minus1)?))?),
    }
}

/// Returns a tensor in a shape, contiguous. One that is so already is returned as it is, as in [`as_matrix`].
pub(crate) fn with_shape(tensor: &Tensor, shape: &[usize]) -> Result<Tensor> {
    Ok(if tensor.dims() == shape { tensor.contiguous()? } else { tensor.reshape(shape)? })
}

/// Computes the result of a linear layer and its activation from operands that are constants.
pub(crate) type LinearForward<'a> = dyn Fn(LinearOperands<'_>) -> Result<Tensor> + 'a;
/// Computes the gradient of `W h + b` from the result of a layer and the gradient of the result.
pub(crate) type LinearGradient = dyn Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync;

/// Computes a linear layer and its activation as one node of the graph, which keeps only its result. The result has a
/// `shape` of its own, because candle would copy the gradient of another node that changes the shape; `matmul`
/// multiplies two matrices. The functions are behind pointers, so that all layers are compiled once.
pub(crate) fn linear_layer(
    name: &'static str,
    operands: LinearOperands<'_>,
    shape: &[usize],
    forward: &LinearForward<'_>,
    matmul: fn(&Tensor, &Tensor) -> Result<Tensor>,
    gradient: Box<LinearGradient>,
) -> Result<Tensor> {
    let LinearOperands { input, weight, bias } = operands;
    let constants = (input.detach(), weight.detach(), bias.map(Tensor::detach));
    let constants = LinearOperands { input: &constants.0, weight: &constants.1, bias: constants.2.as_ref() };
    let result = forward(constants)?.reshape(shape)?;
    let operands = [Some(input), Some(weight), bias];
    autograd::attach(name, result, operands, move |[input, weight, bias], result, upstream| {
        // candle's Metal backend does not multiply empty matrices.
        if input.elem_count() == 0 {
            let zeros = |operand: &Tensor| operand.track_op().then(|| operand.zeros_like()).transpose();
            return Ok([zeros(input)?, zeros(weight)?, zeros(bias)?]);
        }
        let rows = |tensor: &Tensor| tensor.detach().reshape((input.dim(0)?, ()));
        let dz = gradient(&rows(result)?, &rows(upstream)?)?.to_dtype(input.dtype())?;
        let bias_gradient = || {
            let ones = Tensor::ones((1, dz.dim(0)?), dz.dtype(), dz.device())?;
            Ok::<_, Error>(matmul(&ones, &dz)?.squeeze(0)?)
        };
        Ok([
            input.track_op().then(|| matmul(&dz, &weight.detach())).transpose()?,
            weight.track_op().then(|| matmul(&dz.t()?, &input.detach())).transpose()?,
            bias.track_op().then(bias_gradient).transpose()?,
        ])
    })
}
