//! The CPU's backend, parallel over the threads of rayon. Losses over hard targets take one pass, with products of its own
//! (`one_pass`). Results that need every logit twice take two passes, in which the `gemm` crate multiplies between row
//! kernels (`two_pass`). `plan` chooses between them; `loss`, `log_probs` and `decoding` run a task with one or the other.

mod activation;
mod decoding;
mod log_probs;
mod loss;
mod memory;
mod objective;
mod one_pass;
mod operands;
mod plan;
mod products;
#[cfg(test)]
mod testing;
mod tiles;
mod two_pass;
mod vector;

use candle_core::{DType, Tensor};

use crate::backend::contract::{Backend, LossResults};
use crate::backend::distribution::Visit;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::objective::{Objective, Scored, Task};
use crate::backend::operands::Operands;
use crate::backend::plan::{Plan, Planned};
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::tensors::id_lists::IdLists;
use log_probs::{log_probs, scores};
use loss::loss;
use objective::divergence::divergence;
use operands::dtype::{with_type, Element};
use operands::rounding;
use plan::{plan, ranking_task, with_products};
use products::{lists, matmul};

/// Computes with the type of the operands' numbers, and with the products that the plan is made for.
macro_rules! with_planned {
    ($planned:expr, $T:ident, $products:ident => $compute:expr) => {
        with_type!($planned.operands.contexts.dtype(), $T => with_products!($T, &$planned.plan, $products => $compute))
    };
}

/// The CPU's backend. It computes f64 in f64, and f32, f16 and bf16 in f32.
pub(super) struct Cpu;

impl Backend for Cpu {
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Planned> {
        let plan = with_type!(operands.contexts.dtype(), T => plan::<T>(operands, &task, budget))?;
        Ok(Planned { operands: operands.clone(), needs_grad: task.needs_grad(), plan })
    }

    fn loss(&self, planned: &Planned, objective: &Objective) -> Result<LossResults> {
        on_threads(&planned.plan, || with_planned!(planned, T, products => loss::<T, _>(products, planned, objective)))
    }

    fn log_probs(&self, planned: &Planned, dtype: DType) -> Result<Tensor> {
        with_planned!(planned, T, products => {
            if dtype == planned.operands.contexts.dtype() {
                log_probs::<T, T, _>(products, planned)
            } else {
                log_probs::<T, <T as Element>::Acc, _>(products, planned)
            }
        })
    }

    fn scores(&self, planned: &Planned, scored: &Scored) -> Result<(Tensor, Option<Tensor>)> {
        on_threads(&planned.plan, || with_planned!(planned, T, products => scores::<T, _>(products, planned, scored)))
    }

    fn divergence(&self, log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
        match log_probs.dtype() {
            DType::F64 => divergence::<f64>(&log_probs, log_teacher, terms),
            _ => divergence::<f32>(&log_probs, log_teacher, terms),
        }
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        let planned = self.plan(operands, ranking_task(operands.sizes, k), None)?;
        with_planned!(&planned, T, products => decoding::top_k::<T, _>(products, &planned, k))
    }

    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let planned = self.plan(operands, Task::Visit, None)?;
        with_planned!(&planned, T, products => decoding::visit::<T, _, V>(products, &planned, None, visit))
    }

    fn visit_shard<V: Visit>(&self, operands: &Operands, shard: &VocabShard, visit: &V) -> Result<Vec<V::Output>> {
        let planned = shard.agreed(self.plan(operands, Task::Visit, None))?;
        with_planned!(&planned, T, products => decoding::visit::<T, _, V>(products, &planned, Some(shard), visit))
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        match left.dtype() {
            DType::BF16 => matmul::matmul(left, right),
            _ => Ok(left.matmul(right)?),
        }
    }

    fn list_products(&self, contexts: &Tensor, matrix: &Tensor, lists: &IdLists) -> Result<Tensor> {
        lists::products(contexts, matrix, lists)
    }

    fn list_product_gradients(
        &self,
        contexts: &Tensor,
        matrix: &Tensor,
        lists: &IdLists,
        upstream: &Tensor,
        needed: [bool; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        lists::gradients(contexts, matrix, lists, upstream, needed)
    }

    fn scattered_rows(&self, values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
        lists::scattered_rows(values, ids, rows)
    }

    fn rounded(&self, gradient: &Tensor, dtype: DType) -> Result<Tensor> {
        match (gradient.dtype(), dtype) {
            (DType::F32, DType::BF16) => rounding::rounded::<half::bf16>(gradient),
            (DType::F32, DType::F16) => rounding::rounded::<half::f16>(gradient),
            _ => Ok(gradient.to_dtype(dtype)?),
        }
    }

    fn bias_tanh(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor> {
        activation::bias_tanh(z, bias)
    }

    fn tanh_gradient(&self, result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
        activation::tanh_gradient(result, &upstream.contiguous()?)
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
