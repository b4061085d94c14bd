//! The CPU's backend, parallel over the threads of rayon. Losses over hard targets take one pass, with products of its own
//! (`one_pass`). Results that need every logit twice take two passes, in which the `gemm` crate multiplies between row
//! kernels (`two_pass`). `plan` chooses between them; `loss`, `log_probs`, `scores`, `log_prob_terms` and `decoding` run a
//! task with one or the other.

mod activation;
mod decoding;
mod log_prob_terms;
mod log_probs;
mod loss;
mod memory;
mod objective;
mod one_pass;
mod operands;
mod plan;
mod products;
mod scores;
mod served;
#[cfg(test)]
mod testing;
mod tiles;
mod two_pass;
mod vector;

use candle_core::{DType, Tensor};

use crate::backend::contract::{Backend, LossResults};
use crate::backend::distribution::Visit;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::objective::{LogProbTerms, Objective, ScoreTerms, Scored};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::backend::shard::VocabShard;
use crate::backend::task::Task;
use crate::error::Result;
use crate::tensors::id_lists::IdLists;
use log_prob_terms::log_prob_loss;
use log_probs::log_probs;
use loss::objective_loss;
use objective::divergence::divergence;
use operands::dtype::{with_type, Element};
use operands::rounding;
use plan::plan;
use products::{lists, matmul};
use scores::{score_loss, scores};
use served::with_products;

/// Computes with the type of the operands' numbers, and with the products that the plan is made for.
macro_rules! with_operands {
    ($operands:expr, $plan:expr, $T:ident, $products:ident => $compute:expr) => {
        with_type!($operands.contexts.dtype(), $T => with_products!($T, $plan, $products => $compute))
    };
}

/// The CPU's backend. It computes f64 in f64, and f32, f16 and bf16 in f32.
pub(super) struct Cpu;

impl Backend for Cpu {
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
        with_type!(operands.contexts.dtype(), T => plan::<T>(operands, task, budget))
    }

    fn loss(
        &self,
        operands: &Operands,
        objective: &Objective,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        let computation = plan::computation(&objective.task(needs_grad), operands.sizes);
        debug_assert_eq!(plan.computation, computation, "the plan of another task");
        let compute = || {
            with_operands!(operands, plan, T, products => {
                objective_loss::<T, _>(products, operands, objective, needs_grad, plan)
            })
        };
        on_threads(plan.threads, compute)
    }

    fn log_probs(&self, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
        with_operands!(operands, plan, T, products => {
            if dtype == operands.contexts.dtype() {
                log_probs::<T, T, _>(products, operands, plan)
            } else {
                log_probs::<T, <T as Element>::Acc, _>(products, operands, plan)
            }
        })
    }

    fn scores(&self, operands: &Operands, scored: &Scored, plan: &Plan) -> Result<(Tensor, Option<Tensor>)> {
        let compute =
            || with_operands!(operands, plan, T, products => scores::<T, _>(products, operands, scored, plan));
        on_threads(plan.threads, compute)
    }

    fn score_loss(
        &self,
        operands: &Operands,
        scored: &Scored,
        terms: &ScoreTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        let compute = || {
            with_operands!(operands, plan, T, products => {
                score_loss::<T, _>(products, operands, scored, terms, needs_grad, plan)
            })
        };
        on_threads(plan.threads, compute)
    }

    fn log_prob_loss(
        &self,
        operands: &Operands,
        terms: &LogProbTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        let compute = || {
            with_operands!(operands, plan, T, products => {
                log_prob_loss::<T, _>(products, operands, terms, needs_grad, plan)
            })
        };
        on_threads(plan.threads, compute)
    }

    fn divergence(&self, log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
        match log_probs.dtype() {
            DType::F64 => divergence::<f64>(&log_probs, log_teacher, terms),
            _ => divergence::<f32>(&log_probs, log_teacher, terms),
        }
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        let plan = self.plan(operands, Task::for_ranking(operands.sizes, k), None)?;
        with_operands!(operands, &plan, T, products => decoding::top_k::<T, _>(products, operands, k, &plan))
    }

    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let plan = self.plan(operands, Task::for_decoding(), None)?;
        with_operands!(operands, &plan, T, products => {
            decoding::visit::<T, _, V>(products, operands, None, &plan, visit)
        })
    }

    fn visit_shard<V: Visit>(&self, operands: &Operands, shard: &VocabShard, visit: &V) -> Result<Vec<V::Output>> {
        let plan = shard.agreed(self.plan(operands, Task::for_decoding(), None))?;
        let shard = Some(shard);
        with_operands!(operands, &plan, T, products => {
            decoding::visit::<T, _, V>(products, operands, shard, &plan, visit)
        })
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

/// Computes on at most `threads` threads of rayon.
fn on_threads<R: Send>(threads: usize, compute: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    if threads >= rayon::current_num_threads() {
        return compute();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(candle_core::Error::wrap)?;
    pool.install(compute)
}
