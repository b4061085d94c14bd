//! The dispatch of each operation to the backend of its operands' device: the CPU, or a GPU that this build has kernels
//! for.
//!
//! [`contract`] defines the operations of a backend, [`plan`] cuts the work into chunks, and [`schedule`] orders the
//! steps of a chunk. `cpu` and `gpu` implement them; `gpu` launches its kernels through `cuda` or `metal`. Each function
//! of this file is an operation of [`Backend`], which documents it.

pub(crate) mod agreement;
pub(crate) mod collectives;
pub(crate) mod contract;
mod cpu;
#[cfg(any(feature = "cuda", all(test, target_os = "linux")))]
mod cuda;
pub(crate) mod distribution;
pub(crate) mod divergence;
#[cfg(any(feature = "cuda", feature = "metal", all(test, target_os = "linux")))]
mod gpu;
#[cfg(any(feature = "metal", all(test, target_os = "linux")))]
mod metal;
pub(crate) mod objective;
pub(crate) mod operands;
pub(crate) mod plan;
pub(crate) mod ranking;
mod schedule;
pub(crate) mod shard;
mod shared_rows;
pub(crate) mod task;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::tensors::id_lists::IdLists;
use contract::{Backend, Gradients, LossResults};
use distribution::Visit;
use divergence::DivergenceTerms;
use objective::{LogProbTerms, Objective, ScoreTerms, Scored};
use operands::{NeedsGrad, Operands};
use plan::Plan;
use shard::VocabShard;
use task::Task;

#[cfg(feature = "nccl")]
pub(crate) use cuda::Communicator;

/// Evaluates `$call` with `$backend` bound to the backend of `$device`.
macro_rules! on_device {
    ($device:expr, $backend:ident => $call:expr) => {
        match $device {
            Device::Cpu => {
                let $backend = cpu::Cpu;
                $call
            }
            #[cfg(feature = "cuda")]
            device @ Device::Cuda(_) => {
                let $backend = gpu::GpuBackend(cuda::Cuda::from_device(device)?);
                $call
            }
            #[cfg(feature = "metal")]
            device @ Device::Metal(_) => {
                let $backend = gpu::GpuBackend(metal::Metal::from_device(device)?);
                $call
            }
            #[allow(unreachable_patterns)] // unreachable with both features
            device => Err(unsupported(device)),
        }
    };
}

/// Returns the error for a device that this build has no kernels for.
fn unsupported(device: &Device) -> Error {
    let mut expected = vec!["Cpu"];
    expected.extend(cfg!(feature = "cuda").then_some("Cuda"));
    expected.extend(cfg!(feature = "metal").then_some("Metal"));
    Error::Device { argument: "hidden", expected: expected.join(" or "), got: format!("{:?}", device.location()) }
}

pub(crate) fn plan(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    on_device!(operands.contexts.device(), backend => backend.plan(operands, task, budget))
}

pub(crate) fn loss(
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    on_device!(operands.contexts.device(), backend => backend.loss(operands, objective, needs_grad, plan))
}

pub(crate) fn log_probs(operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
    on_device!(operands.contexts.device(), backend => backend.log_probs(operands, dtype, plan))
}

pub(crate) fn scores(operands: &Operands, scored: &Scored, plan: &Plan) -> Result<(Tensor, Option<Tensor>)> {
    on_device!(operands.contexts.device(), backend => backend.scores(operands, scored, plan))
}

pub(crate) fn score_gradients(
    operands: &Operands,
    scored: &Scored,
    upstream: &Tensor,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<Gradients> {
    on_device!(operands.contexts.device(), backend => {
        backend.score_gradients(operands, scored, upstream, needs_grad, plan)
    })
}

pub(crate) fn score_loss(
    operands: &Operands,
    scored: &Scored,
    terms: &ScoreTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    on_device!(operands.contexts.device(), backend => backend.score_loss(operands, scored, terms, needs_grad, plan))
}

pub(crate) fn log_prob_loss(
    operands: &Operands,
    terms: &LogProbTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    on_device!(operands.contexts.device(), backend => backend.log_prob_loss(operands, terms, needs_grad, plan))
}

pub(crate) fn divergence(log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
    let device = log_probs.device().clone();
    on_device!(&device, backend => backend.divergence(log_probs, log_teacher, terms))
}

pub(crate) fn top_k(operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
    on_device!(operands.contexts.device(), backend => backend.top_k(operands, k))
}

pub(crate) fn visit<V: Visit>(operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
    on_device!(operands.contexts.device(), backend => backend.visit(operands, visit))
}

pub(crate) fn visit_shard<V: Visit>(operands: &Operands, shard: &VocabShard, visit: &V) -> Result<Vec<V::Output>> {
    on_device!(operands.contexts.device(), backend => backend.visit_shard(operands, shard, visit))
}

pub(crate) fn matmul(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    on_device!(left.device(), backend => backend.matmul(left, right))
}

pub(crate) fn list_products(contexts: &Tensor, matrix: &Tensor, lists: &IdLists) -> Result<Tensor> {
    on_device!(contexts.device(), backend => backend.list_products(contexts, matrix, lists))
}

pub(crate) fn list_product_gradients(
    contexts: &Tensor,
    matrix: &Tensor,
    lists: &IdLists,
    upstream: &Tensor,
    needed: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    on_device!(contexts.device(), backend => {
        backend.list_product_gradients(contexts, matrix, lists, upstream, needed)
    })
}

pub(crate) fn scattered_rows(values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    on_device!(values.device(), backend => backend.scattered_rows(values, ids, rows))
}

pub(crate) fn rounded(gradient: &Tensor, dtype: DType) -> Result<Tensor> {
    on_device!(gradient.device(), backend => backend.rounded(gradient, dtype))
}

pub(crate) fn bias_tanh(z: &Tensor, bias: &Tensor) -> Result<Tensor> {
    on_device!(z.device(), backend => backend.bias_tanh(z, bias))
}

pub(crate) fn tanh_gradient(result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    on_device!(result.device(), backend => backend.tanh_gradient(result, upstream))
}
