//! The activations of the projection on a GPU: the kernels of `kernels/activation.h`.

use candle_core::{DType, Tensor};

use super::arguments::{Read, Write};
use super::device::{Buffer, Gpu, BLOCK, WARPS};
use super::kernels::{
    BiasTanhArguments, KernelArguments, LogSoftmaxArguments, LogSoftmaxGradientArguments, TanhGradientArguments,
};
use crate::error::Result;
use crate::tensors::log_softmax;

/// Computes `tanh(z + bias)` for `z` `[rows, n]` and `bias` `[n]`; in f64, which has no kernels, by candle's
/// operations.
pub(in crate::backend) fn bias_tanh<G: Gpu>(gpu: &G, z: &Tensor, bias: &Tensor) -> Result<Tensor> {
    if z.dtype() == DType::F64 {
        return Ok(z.broadcast_add(bias)?.tanh()?);
    }
    let (rows, columns) = z.dims2()?;
    let [z, bias] = [z, bias].map(|operand| Buffer::new(gpu, operand.clone()));
    let (z, bias) = (z?, bias?);
    let result = Buffer::unwritten(gpu, rows * columns, z.tensor.dtype(), z.tensor.device())?;
    let arguments = BiasTanhArguments {
        z: Read(z.at(0)),
        bias: Read(bias.at(0)),
        result: Write(result.at(0)),
        columns: columns as i32,
    };
    arguments.launch_for(gpu, z.tensor.dtype(), rows)?;
    result.shaped((rows, columns))
}

/// Computes the gradient of the argument of `tanh`, from its result and the gradient of the result, as [`bias_tanh`].
pub(in crate::backend) fn tanh_gradient<G: Gpu>(gpu: &G, result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    if result.dtype() == DType::F64 {
        return Ok((upstream - (result.sqr()? * upstream)?)?);
    }
    let (shape, count) = (result.shape(), result.elem_count());
    let [result, upstream] = [result, upstream].map(|operand| Buffer::new(gpu, operand.clone()));
    let (result, upstream) = (result?, upstream?);
    let gradient = Buffer::unwritten(gpu, count, result.tensor.dtype(), result.tensor.device())?;
    let arguments = TanhGradientArguments {
        result: Read(result.at(0)),
        upstream: Read(upstream.at(0)),
        gradient: Write(gradient.at(0)),
        count: count as i64,
    };
    arguments.launch_for(gpu, result.tensor.dtype(), count.div_ceil(BLOCK))?;
    gradient.shaped(shape)
}

/// Computes the log-softmax of each row of `z + bias`, in f32, for `z` `[rows, n]` and `bias` `[n]`; in f64, which has
/// no kernels, by candle's operations.
pub(in crate::backend) fn log_softmax<G: Gpu>(gpu: &G, z: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if z.dtype() == DType::F64 {
        return log_softmax::biased(z, bias);
    }
    let (rows, columns) = z.dims2()?;
    let (z, bias) = (Buffer::new(gpu, z.clone())?, Buffer::from_option(gpu, &bias.cloned())?);
    let result = Buffer::unwritten(gpu, rows * columns, DType::F32, z.tensor.device())?;
    let arguments = LogSoftmaxArguments {
        z: Read(z.at(0)),
        bias: Read(Buffer::or_null(&bias)),
        result: Write(result.at(0)),
        count: rows as i64,
        columns: columns as i32,
    };
    arguments.launch_for(gpu, z.tensor.dtype(), rows.div_ceil(WARPS))?;
    result.shaped((rows, columns))
}

/// Computes the gradient of the argument of the log-softmax in `dtype`, from its result and the gradient of the result,
/// `[rows, n]`, as [`log_softmax`].
pub(in crate::backend) fn log_softmax_gradient<G: Gpu>(
    gpu: &G,
    result: &Tensor,
    upstream: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    if result.dtype() == DType::F64 {
        return log_softmax::gradient(result, upstream, dtype);
    }
    let (rows, columns) = result.dims2()?;
    let [result, upstream] = [result, upstream].map(|operand| Buffer::new(gpu, operand.clone()));
    let (result, upstream) = (result?, upstream?);
    let gradient = Buffer::unwritten(gpu, rows * columns, dtype, result.tensor.device())?;
    let arguments = LogSoftmaxGradientArguments {
        result: Read(result.at(0)),
        upstream: Read(upstream.at(0)),
        gradient: Write(gradient.at(0)),
        count: rows as i64,
        columns: columns as i32,
    };
    arguments.launch_for(gpu, dtype, rows.div_ceil(WARPS))?;
    gradient.shaped((rows, columns))
}
