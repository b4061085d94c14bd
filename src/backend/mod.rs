//! The operations of a backend: the functions of this file, each computed on the device of its operands, the CPU or a
//! GPU that this build has kernels for. The CPU supports f16, bf16, f32 and f64; GPUs support f16, bf16 and f32.
//!
//! [`objective`] defines what is asked of a backend, and [`mod@plan`] cuts the work into chunks and orders their steps.
//! `cpu` and `gpu` have functions of the operations' names; `gpu` launches its kernels through `cuda` or `metal`.
//! Operations for which only the CPU has kernels are composed of candle's on a GPU, but for quantised products and a
//! shard's queries, which are for the CPU alone.

pub(crate) mod agreement;
pub(crate) mod collectives;
mod cpu;
#[cfg(any(feature = "cuda", all(test, target_os = "linux")))]
mod cuda;
pub(crate) mod distribution;
pub(crate) mod divergence;
pub(crate) mod frozen_linear;
#[cfg(any(feature = "cuda", feature = "metal", all(test, target_os = "linux")))]
mod gpu;
pub(crate) mod logit_function;
#[cfg(any(feature = "metal", all(test, target_os = "linux")))]
mod metal;
#[cfg(test)]
#[path = "../../tests/common/needs.rs"]
mod needs;
pub(crate) mod objective;
pub(crate) mod operands;
pub(crate) mod parallel;
pub(crate) mod plan;
pub(crate) mod quantised;
pub(crate) mod ranking;
pub(crate) mod shard;
mod shared_rows;
pub(crate) mod weight;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::id_lists::{self, IdLists};
use distribution::{answers, Visit};
use divergence::DivergenceTerms;
use objective::{LossResults, Objective, Scored, Task};
use operands::Operands;
use plan::Planned;
use quantised::QuantisedMatrix;
use ranking::TopKQuery;
use shard::VocabShard;
use weight::Weight;

#[cfg(feature = "nccl")]
pub(crate) use cuda::Communicator;

/// Calls a function of `cpu`, or of `gpu` with the GPU before the other arguments.
macro_rules! on_device {
    ($device:expr, $operation:ident($($argument:ident),*)) => {
        match $device {
            Device::Cpu => cpu::$operation($($argument),*),
            #[cfg(feature = "cuda")]
            device @ Device::Cuda(_) => gpu::$operation(&cuda::Cuda::from_device(device)?, $($argument),*),
            #[cfg(feature = "metal")]
            device @ Device::Metal(_) => gpu::$operation(&metal::Metal::from_device(device)?, $($argument),*),
            #[allow(unreachable_patterns)] // unreachable with both features
            device => Err(unsupported(device)),
        }
    };
}

/// Returns whether a device is the CPU. It is an error if it is a GPU that this build has no kernels for.
fn is_cpu(device: &Device) -> Result<bool> {
    match device {
        Device::Cpu => Ok(true),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Ok(false),
        #[cfg(feature = "metal")]
        Device::Metal(_) => Ok(false),
        #[allow(unreachable_patterns)] // unreachable with both features
        device => Err(unsupported(device)),
    }
}

/// Returns the error for a device that this build has no kernels for.
fn unsupported(device: &Device) -> Error {
    let mut expected = vec!["Cpu"];
    expected.extend(cfg!(feature = "cuda").then_some("Cuda"));
    expected.extend(cfg!(feature = "metal").then_some("Metal"));
    Error::Device { argument: "hidden", expected: expected.join(" or "), got: format!("{:?}", device.location()) }
}

/// Chooses the computation of a task, and cuts the positions into chunks.
pub(crate) fn plan(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Planned> {
    on_device!(operands.device(), plan(operands, task, budget))
}

/// Computes an objective, and the gradients of the operands that need one.
pub(crate) fn loss(planned: &Planned, objective: &Objective) -> Result<LossResults> {
    on_device!(planned.device(), loss(planned, objective))
}

/// Computes log-probabilities `[positions, vocab]`, in the operands' dtype or in the accumulation dtype.
pub(crate) fn log_probs(planned: &Planned, dtype: DType) -> Result<Tensor> {
    on_device!(planned.device(), log_probs(planned, dtype))
}

/// Computes the scores of each position, `[positions, n + 3]` in the accumulation dtype: log-probabilities, the
/// entropy, and the logarithms of the mass outside the ids and of the collision probability. If
/// [`Scored::needs_argmax`], it also tells whether each id is the most probable of all, `[positions, n]` in u8: among
/// equal ids the lowest is, and none is if the distribution is not defined.
pub(crate) fn scores(planned: &Planned, scored: &Scored) -> Result<(Tensor, Option<Tensor>)> {
    on_device!(planned.device(), scores(planned, scored))
}

/// Finds the `k` most probable ids and their log-probabilities, each `[positions, k]`, in u32 and in the accumulation
/// dtype, in descending order of probability; ties go to the lower id. If a position has no distribution, it returns an
/// error that names the first such position.
pub(crate) fn top_k(operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
    on_device!(operands.device(), top_k(operands, k))
}

/// As [`top_k`]; on the CPU the results of a position have the same bits whatever the other positions are.
pub(crate) fn independent_top_k(operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
    if is_cpu(operands.device())? {
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        ranking::tensors(&visit(operands, &TopKQuery { k })?, &[operands.sizes.positions, k], dtype, operands.device())
    } else {
        top_k(operands, k)
    }
}

/// Runs a query on each position's distribution.
pub(crate) fn visit<V: Visit>(operands: &Operands, query: &V) -> Result<Vec<V::Output>> {
    answers(query, operands.sizes.positions, |reader| on_device!(operands.device(), visit(operands, reader)))
}

/// Runs a query on the part of each position's distribution that a shard has: its own ids, with their log-probabilities
/// under the whole vocabulary. Every rank calls it.
pub(crate) fn visit_shard<V: Visit>(operands: &Operands, shard: &VocabShard, query: &V) -> Result<Vec<V::Output>> {
    if is_cpu(operands.device())? {
        return answers(query, operands.sizes.positions, |reader| cpu::visit_shard(operands, shard, reader));
    }
    let got = format!("{:?}", operands.device().location());
    Err(Error::Device { argument: "contexts", expected: "Cpu".into(), got })
}

/// Computes the divergence of each row of log-probabilities `[n, vocab]` from the teacher's, `[n]`, and its derivatives
/// by the log-probabilities, times their scales. Nothing else refers to the log-probabilities, which may be
/// overwritten.
pub(crate) fn divergence(log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
    if is_cpu(log_probs.device())? {
        cpu::divergence(&log_probs, log_teacher, terms)
    } else {
        divergence::composed(&log_probs, log_teacher, terms)
    }
}

/// Computes the product of two matrices.
pub(crate) fn matmul(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    if is_cpu(left.device())? {
        cpu::matmul(left, right)
    } else {
        Ok(left.matmul(right)?)
    }
}

/// Computes the product of a linear layer, `input W^T`, for an input `[n, inputs]` and a weight `[outputs, inputs]`. On
/// the CPU each row of the result has the same bits whatever the other rows are.
pub(crate) fn linear(input: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if is_cpu(input.device())? {
        cpu::linear(input, weight)
    } else {
        Ok(input.matmul(&weight.t()?)?)
    }
}

/// Computes the products of an input `[n, columns]`, in f32 on the CPU, with a quantised matrix: `[n, rows]`.
pub(crate) fn quantised_product(input: &Tensor, matrix: &QuantisedMatrix) -> Result<Tensor> {
    cpu::quantised_product(input, matrix)
}

/// Computes the gradient of the input of [`quantised_product`] from that of its result.
pub(crate) fn quantised_gradient(upstream: &Tensor, matrix: &QuantisedMatrix) -> Result<Tensor> {
    cpu::quantised_gradient(upstream, matrix)
}

/// Computes the products of each context, `[positions, d]`, with the matrix's rows of its list of ids, `[positions,
/// longest]` in the accumulation dtype; entries past the end of a list are unspecified.
pub(crate) fn list_products(contexts: &Tensor, matrix: &Weight, lists: &IdLists) -> Result<Tensor> {
    if is_cpu(contexts.device())? {
        cpu::list_products(contexts, matrix, lists)
    } else {
        id_lists::list_products(contexts, matrix.tensor()?, lists)
    }
}

/// Computes the gradients of contexts and matrix from the `upstream` gradient of [`list_products`], each if it is
/// `needed`, in the operands' dtype.
pub(crate) fn list_product_gradients(
    contexts: &Tensor,
    matrix: &Weight,
    lists: &IdLists,
    upstream: &Tensor,
    needed: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    if is_cpu(contexts.device())? {
        cpu::list_product_gradients(contexts, matrix, lists, upstream, needed)
    } else {
        id_lists::list_product_gradients(contexts, matrix.tensor()?, lists, upstream, needed)
    }
}

/// Makes a matrix `[rows, d]` that has these values in the rows `ids`, which ascend without repeats, and zeros
/// elsewhere.
pub(crate) fn scattered_rows(values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    if is_cpu(values.device())? {
        cpu::scattered_rows(values, ids, rows)
    } else {
        id_lists::scattered_rows(values, ids, rows)
    }
}

/// Converts a gradient, which nothing else may refer to, to the dtype of its operand.
pub(crate) fn rounded(gradient: Tensor, dtype: DType) -> Result<Tensor> {
    if is_cpu(gradient.device())? {
        cpu::rounded(gradient, dtype)
    } else {
        Ok(gradient.to_dtype(dtype)?)
    }
}

/// Computes `tanh(z + bias)` for `z` `[rows, n]` and `bias` `[n]`.
pub(crate) fn bias_tanh(z: &Tensor, bias: &Tensor) -> Result<Tensor> {
    on_device!(z.device(), bias_tanh(z, bias))
}

/// Computes the gradient of the argument of `tanh`, from its result and the gradient of the result.
pub(crate) fn tanh_gradient(result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    on_device!(result.device(), tanh_gradient(result, upstream))
}

/// Computes the log-softmax of each row of `z + bias` in the accumulation dtype, for `z` `[rows, n]` and `bias` `[n]`.
pub(crate) fn log_softmax(z: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    on_device!(z.device(), log_softmax(z, bias))
}

/// Computes the gradient of the argument of the log-softmax in `dtype`, from its result and the gradient of the result.
pub(crate) fn log_softmax_gradient(result: &Tensor, upstream: &Tensor, dtype: DType) -> Result<Tensor> {
    on_device!(result.device(), log_softmax_gradient(result, upstream, dtype))
}
