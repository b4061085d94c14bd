//! A linear layer of candle's graph that keeps only its result.

use candle_core::Tensor;

use super::autograd;
use crate::error::{Error, Result};

/// A linear layer and its activation as one node of the graph, which keeps only its result: `forward(W h, b)`, in
/// another shape, since candle would copy the gradient of a node for that. The gradient of `W h + b` is
/// `gradient(result, upstream)`; `matmul` multiplies two matrices.
pub(crate) fn layer(
    name: &'static str,
    (rows, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    shape: &[usize],
    matmul: fn(&Tensor, &Tensor) -> Result<Tensor>,
    forward: impl Fn(Tensor, Option<&Tensor>) -> Result<Tensor>,
    gradient: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let product = matmul(&rows.detach(), &weight.detach().t()?)?;
    let result = forward(product, bias.map(Tensor::detach).as_ref())?.reshape(shape)?;
    // A custom operation of candle has three operands.
    let no_bias = Tensor::zeros(1, rows.dtype(), rows.device())?;
    let operands = [rows, weight, bias.unwrap_or(&no_bias)];
    autograd::attach(name, result, operands, move |[rows, weight, bias], result, upstream| {
        // candle's Metal backend does not multiply empty matrices.
        if rows.elem_count() == 0 {
            let zeros = |operand: &Tensor| operand.track_op().then(|| operand.zeros_like()).transpose();
            return Ok([zeros(rows)?, zeros(weight)?, zeros(bias)?]);
        }
        let of_rows = |tensor: &Tensor| tensor.detach().reshape((rows.dim(0)?, ()));
        let dz = gradient(&of_rows(result)?, &of_rows(upstream)?)?.to_dtype(rows.dtype())?;
        let ones = Tensor::ones((1, dz.dim(0)?), dz.dtype(), dz.device())?;
        Ok([
            rows.track_op().then(|| matmul(&dz, &weight.detach())).transpose()?,
            weight.track_op().then(|| matmul(&dz.t()?, &rows.detach())).transpose()?,
            bias.track_op().then(|| Ok::<_, Error>(matmul(&ones, &dz)?.squeeze(0)?)).transpose()?,
        ])
    })
}
