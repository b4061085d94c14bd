//! The CPU backend, parallel over the threads of rayon. Losses over hard targets have products of their own
//! (`one_pass`); what needs every logit twice calls the `gemm` crate's products between row kernels (`two_pass`).

mod activation;
mod decoding;
mod log_prob_terms;
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

use candle_core::{DType, Device, Tensor, WithDType};

use crate::backend::contract::{Backend, LossResults};
use crate::backend::distribution::Visit;
use crate::backend::divergence::DivergenceTerms;
use crate::backend::objective::{LogProbTerms, Objective, ScoreTerms, Scored, SoFar};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::{Computation, Plan};
use crate::backend::schedule::Steps;
use crate::backend::shard::VocabShard;
use crate::backend::task::Task;
use crate::error::Result;
use crate::tensors::autograd::take_values;
use crate::tensors::id_lists::IdLists;
use log_prob_terms::log_prob_loss;
use memory::filled;
use objective::divergence::divergence;
use objective::results::{results, BufferedGradients};
use objective::targets::Targets;
use one_pass::{OnePass, OnePassRequest};
use operands::dtype::{with_type, Element};
use operands::inputs::Inputs;
use operands::rounding;
use plan::plan;
use products::{lists, matmul};
use scores::{score_loss, scores};
use served::{with_products, Products};
use two_pass::TwoPasses;

/// The backend for f64, f32, and f16 and bf16, which it computes in f32.
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
        let loss = || {
            with_type!(operands.contexts.dtype(), T => {
                with_products!(T, plan, products => loss::<T, _>(products, operands, objective, needs_grad, plan))
            })
        };
        on_threads(plan.threads, loss)
    }

    fn log_probs(&self, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
        with_type!(operands.contexts.dtype(), T => {
            with_products!(T, plan, products => {
                if dtype == operands.contexts.dtype() {
                    log_probs::<T, T, _>(products, operands, plan)
                } else {
                    log_probs::<T, <T as Element>::Acc, _>(products, operands, plan)
                }
            })
        })
    }

    fn scores(&self, operands: &Operands, scored: &Scored, plan: &Plan) -> Result<(Tensor, Option<Tensor>)> {
        let scores = || {
            with_type!(operands.contexts.dtype(), T => {
                with_products!(T, plan, products => scores::<T, _>(products, operands, scored, plan))
            })
        };
        on_threads(plan.threads, scores)
    }

    fn score_loss(
        &self,
        operands: &Operands,
        scored: &Scored,
        terms: &ScoreTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        let loss = || {
            with_type!(operands.contexts.dtype(), T => {
                with_products!(T, plan, products => score_loss::<T, _>(products, operands, scored, terms, needs_grad, plan))
            })
        };
        on_threads(plan.threads, loss)
    }

    fn log_prob_loss(
        &self,
        operands: &Operands,
        terms: &LogProbTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        let loss = || {
            with_type!(operands.contexts.dtype(), T => {
                with_products!(T, plan, products => log_prob_loss::<T, _>(products, operands, terms, needs_grad, plan))
            })
        };
        on_threads(plan.threads, loss)
    }

    fn divergence(&self, log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
        match log_probs.dtype() {
            DType::F64 => divergence::<f64>(&log_probs, log_teacher, terms),
            _ => divergence::<f32>(&log_probs, log_teacher, terms),
        }
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        let plan = self.plan(operands, Task::ranking(operands.sizes, k), None)?;
        with_type!(operands.contexts.dtype(), T => {
            with_products!(T, &plan, products => decoding::top_k::<T, _>(products, operands, k, &plan))
        })
    }

    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let plan = self.plan(operands, Task::decoding(), None)?;
        with_type!(operands.contexts.dtype(), T => {
            with_products!(T, &plan, products => decoding::visit::<T, _, V>(products, operands, None, &plan, visit))
        })
    }

    fn visit_shard<V: Visit>(&self, operands: &Operands, shard: &VocabShard, visit: &V) -> Result<Vec<V::Output>> {
        let plan = shard.agreed(self.plan(operands, Task::decoding(), None))?;
        let shard = Some(shard);
        with_type!(operands.contexts.dtype(), T => {
            with_products!(T, &plan, products => decoding::visit::<T, _, V>(products, operands, shard, &plan, visit))
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

/// The loss whose products a multiplier computes.
fn loss<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let rows = operands.weight_rows()?;
        let targets = Targets::new(objective, operands.sizes, rows)?;
        let so_far = objective.so_far().filter(|_| needs_grad.weight).and_then(SoFar::take);
        let so_far = so_far.map(|so_far| take_values(&so_far.to_dtype(T::Acc::DTYPE)?)).transpose()?;
        let rounds = X::rounds_gradients()
            && plan.computation == Computation::OnePass
            && plan.chunks().nth(1).is_none()
            && rows == operands.sizes.vocab;
        let columns = operands.adapter_columns()?;
        let gradients = BufferedGradients::new(operands.sizes, rows, columns, needs_grad, so_far, rounds);
        let (losses, mut gradients, ranks) = match plan.computation {
            Computation::OnePass => {
                let request = OnePassRequest::Loss { targets: &targets, shard: objective.shard() };
                let mut pass = OnePass::new(products, inputs, request, gradients, needs_grad, plan);
                pass.run_loss(plan, needs_grad)?;
                (pass.losses, pass.gradients, pass.ranks)
            }
            Computation::TwoPasses => {
                let passes = TwoPasses::new(products, inputs, plan).with_targets(&targets, gradients);
                let mut passes = passes.with_shard(objective.shard());
                passes.run_loss(plan, needs_grad)?;
                (passes.losses, passes.gradients, passes.ranks)
            }
        };
        if let Some(mut ranks) = ranks {
            ranks.finish_sum(&mut gradients.contexts)?;
        }
        results(operands.sizes, needs_grad, &targets, &losses, gradients)
    })
}

/// Log-probabilities in `O`, which is `T` or its accumulation type.
fn log_probs<T: Element, O: Element<Acc = T::Acc>, X: Products<T>>(
    products: X,
    operands: &Operands,
    plan: &Plan,
) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let mut passes = TwoPasses::new(products, inputs, plan);
        let mut log_probs = filled(O::zero(), positions * vocab);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            let to = &mut log_probs[positions.start * vocab..positions.end * vocab];
            passes.log_prob_rows(positions, to);
        }
        Ok(Tensor::from_vec(log_probs, (positions, vocab), &Device::Cpu)?)
    })
}
