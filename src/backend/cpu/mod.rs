//! The CPU's backend, parallel over the threads of rayon: f64 in f64, and f32, f16 and bf16 in f32. Losses over hard
//! targets take one pass, with products of its own (`one_pass`). Results that need every logit twice take two passes,
//! in which the `gemm` crate computes the second and the third product (`two_pass`). `plan` chooses between them; `loss`,
//! `log_probs` and `decoding` run a task with one or the other.

mod activation;
mod decoding;
mod inputs;
mod locked_weight;
mod log_probs;
mod loss;
mod memory;
mod objective;
mod one_pass;
mod operands;
mod pages;
mod plan;
#[cfg(target_arch = "x86_64")]
mod processor;
mod products;
mod quantised;
mod scratch;
#[cfg(test)]
mod testing;
mod tiles;
mod two_pass;
mod vector;

use candle_core::{DType, Tensor};

use crate::backend::distribution::Reader;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::objective::{LossResults, Objective, Scored, Task};
use crate::backend::operands::Operands;
use crate::backend::plan::{Plan, Planned};
use crate::backend::shard::VocabShard;
use crate::error::Result;
pub(super) use crate::tensors::log_softmax::{biased as log_softmax, gradient as log_softmax_gradient};
pub(super) use activation::{bias_tanh, tanh_gradient};
use objective::divergence;
pub(super) use operands::dtype::rounded;
use operands::dtype::{with_accumulator, Accumulator};
use plan::{multiplier, ranking_task};
pub(super) use products::linear::linear;
pub(super) use products::lists::{list_product_gradients, list_products, scattered_rows};
pub(super) use products::matmul::matmul;
pub(super) use two_pass::frozen_linear::{quantised_gradient, quantised_product};

/// Computes in the accumulation dtype of the operands, with the multiplier that the plan is made for.
macro_rules! with_planned {
    ($planned:expr, $F:ident, $multiplier:ident => $compute:expr) => {{
        let $multiplier = multiplier($planned)?;
        with_accumulator!($planned.operands.contexts.dtype(), $F => $compute)
    }};
}

/// Makes the plan of a task.
pub(super) fn plan(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Planned> {
    let plan = with_accumulator!(operands.contexts.dtype(), F => plan::plan::<F>(operands, &task, budget))?;
    Ok(Planned { operands: operands.clone(), needs_grad: task.needs_grad(), plan })
}

/// Computes an objective, and the gradients of the operands that need one.
pub(super) fn loss(planned: &Planned, objective: &Objective) -> Result<LossResults> {
    let Planned { operands, needs_grad, plan } = planned;
    let task = objective.task(operands, *needs_grad)?;
    debug_assert_eq!(plan.computation, plan::computation(&task, operands.sizes), "the plan of another task");
    on_threads(plan, || with_planned!(planned, F, multiplier => loss::loss::<F>(multiplier, planned, objective)))
}

/// Computes log-probabilities `[positions, vocab]`, in the operands' dtype or in the accumulation dtype.
pub(super) fn log_probs(planned: &Planned, dtype: DType) -> Result<Tensor> {
    with_planned!(planned, F, multiplier => match dtype {
        DType::F16 => log_probs::log_probs::<F, <F as Accumulator>::F16>(multiplier, planned),
        DType::BF16 => log_probs::log_probs::<F, <F as Accumulator>::Bf16>(multiplier, planned),
        _ => log_probs::log_probs::<F, F>(multiplier, planned),
    })
}

/// Computes the scores of each position, `[positions, n + 3]`, and whether each candidate is the most probable id.
pub(super) fn scores(planned: &Planned, scored: &Scored) -> Result<(Tensor, Option<Tensor>)> {
    on_threads(
        &planned.plan,
        || with_planned!(planned, F, multiplier => log_probs::scores::<F>(multiplier, planned, scored)),
    )
}

/// Finds the `k` most probable ids and their log-probabilities, each `[positions, k]`.
pub(super) fn top_k(operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
    let planned = plan(operands, ranking_task(operands.sizes, k), None)?;
    with_planned!(&planned, F, multiplier => decoding::top_k::<F>(multiplier, &planned, k))
}

/// Lets a query read each position's distribution.
pub(super) fn visit(operands: &Operands, reader: &dyn Reader) -> Result<()> {
    let planned = plan(operands, Task::Visit, None)?;
    with_planned!(&planned, F, multiplier => decoding::visit::<F>(multiplier, &planned, None, reader))
}

/// Lets a query read the part of each position's distribution that a shard has.
pub(super) fn visit_shard(operands: &Operands, shard: &VocabShard, reader: &dyn Reader) -> Result<()> {
    let planned = shard.agreed(plan(operands, Task::Visit, None))?;
    with_planned!(&planned, F, multiplier => decoding::visit::<F>(multiplier, &planned, Some(shard), reader))
}

/// Computes the divergence of each row of log-probabilities from the teacher's, and its derivatives.
pub(super) fn divergence(
    log_probs: &Tensor,
    log_teacher: &Tensor,
    terms: &DivergenceTerms,
) -> Result<(Tensor, Tensor)> {
    match log_probs.dtype() {
        DType::F64 => divergence::divergence::<f64>(log_probs, log_teacher, terms),
        _ => divergence::divergence::<f32>(log_probs, log_teacher, terms),
    }
}

/// Computes on at most as many threads of rayon as the plan has.
fn on_threads<R: Send>(plan: &Plan, compute: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    if plan.threads >= rayon::current_num_threads() {
        return compute();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(plan.threads).build().map_err(candle_core::Error::wrap)?;
    pool.install(compute)
}
