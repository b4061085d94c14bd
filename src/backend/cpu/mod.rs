//! The CPU backend, parallel over the threads of rayon. Losses over hard targets have products of their own
//! (`one_pass`); what needs every logit twice calls the `gemm` crate's products between row kernels (`two_pass`).

mod activation;
mod components;
mod decoder_squares;
mod dtype;
mod gemv;
mod inputs;
mod log_sum_exp;
mod math;
mod matrix;
mod memory;
mod multiplier;
mod one_pass;
mod plan;
mod products;
mod results;
mod rounding;
mod served;
mod simd;
mod softcap;
mod targets;
#[cfg(test)]
mod testing;
mod tiles;
mod two_pass;

use std::ops::Range;

use candle_core::{DType, Device, Tensor, WithDType};

use crate::backend::contract::{
    accumulation_dtype, Backend, Gradients, LossResults, NeedsGrad, Objective, Operands, Real, ScoreTerms, Scored,
    Sizes, SoFar, Task, Visit,
};
use crate::backend::plan::{Computation, Plan};
use crate::backend::ranking::{tensors, Best};
use crate::backend::schedule::Steps;
use crate::error::Result;
use crate::tensors::autograd::take_values;
use components::PositionLoss;
use dtype::{with_type, Element};
use inputs::Inputs;
use multiplier::Vectors;
use one_pass::OnePass;
use plan::{plan, tiles_of};
use results::{results, BufferedGradients};
use served::{Products, Served};
use simd::Isa;
use targets::{scored_ids, Targets};
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
        let loss = || with_type!(operands.contexts.dtype(), T => loss::<T>(operands, objective, needs_grad, plan));
        on_threads(plan.threads, loss)
    }

    fn log_probs(&self, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
        with_type!(operands.contexts.dtype(), T => match dtype == operands.contexts.dtype() {
            true => log_probs::<T, T>(operands, plan),
            false => log_probs::<T, <T as Element>::Acc>(operands, plan),
        })
    }

    fn scores(&self, operands: &Operands, scored: &Scored, plan: &Plan) -> Result<Tensor> {
        let scores = || with_type!(operands.contexts.dtype(), T => scores::<T>(operands, scored, plan));
        on_threads(plan.threads, scores)
    }

    fn score_gradients(
        &self,
        operands: &Operands,
        scored: &Scored,
        upstream: &Tensor,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<Gradients> {
        // The upstream gradient of each position is known, whatever its scores are.
        let upstream = upstream.clone();
        let terms = move |positions: Range<usize>, scores: &Tensor| {
            Ok((scores.narrow(1, 0, 1)?.squeeze(1)?, upstream.narrow(0, positions.start, positions.len())?))
        };
        Ok(self.score_loss(operands, scored, &terms, needs_grad, plan)?.gradients)
    }

    fn score_loss(
        &self,
        operands: &Operands,
        scored: &Scored,
        terms: &ScoreTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        let loss =
            || with_type!(operands.contexts.dtype(), T => score_loss::<T>(operands, scored, terms, needs_grad, plan));
        on_threads(plan.threads, loss)
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        let found = self.visit(operands, &Best { k })?;
        tensors(&found, k, accumulation_dtype("contexts", operands.contexts.dtype())?, &Device::Cpu)
    }

    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let plan = self.plan(operands, Task::decoding(), None)?;
        with_type!(operands.contexts.dtype(), T => visit_all::<T, V>(operands, &plan, visit))
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        match left.dtype() {
            DType::BF16 => products::matmul(left, right),
            _ => Ok(left.matmul(right)?),
        }
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

fn loss<T: Served>(
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    match tiles_of::<T>(operands)? {
        Some(tiles) => loss_in::<T, _>(tiles, operands, objective, needs_grad, plan),
        None => loss_in::<T, _>(Vectors(Isa::best()?), operands, objective, needs_grad, plan),
    }
}

/// The loss whose products a multiplier computes.
fn loss_in<T: Element, X: Products<T>>(
    multiplier: X,
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
        let rounds = X::rounds()
            && plan.computation == Computation::OnePass
            && plan.chunks().nth(1).is_none()
            && rows == operands.sizes.vocab;
        let columns = operands.adapter_columns()?;
        let gradients = BufferedGradients::new(operands.sizes, rows, columns, needs_grad, so_far, rounds);
        let (losses, gradients) = match plan.computation {
            Computation::OnePass => {
                let mut pass = OnePass::new(multiplier, inputs, &targets, gradients, needs_grad, plan);
                pass.run_loss(plan, needs_grad)?;
                (pass.losses, pass.gradients)
            }
            Computation::TwoPasses if targets.are_soft() => {
                let vectors = Vectors(Isa::best()?);
                let mut passes = TwoPasses::new(vectors, inputs, plan).with_targets(&targets, gradients);
                passes.run_loss(plan, needs_grad)?;
                (passes.losses, passes.gradients)
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::new(multiplier, inputs, plan).with_targets(&targets, gradients);
                passes.run_loss(plan, needs_grad)?;
                (passes.losses, passes.gradients)
            }
        };
        results(operands.sizes, needs_grad, &targets, &losses, gradients)
    })
}

/// Log-probabilities in `O`, which is `T` or its accumulation type.
fn log_probs<T: Served, O: Element<Acc = T::Acc>>(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    match tiles_of::<T>(operands)? {
        Some(tiles) => log_probs_in::<T, O, _>(tiles, operands, plan),
        None => log_probs_in::<T, O, _>(Vectors(Isa::best()?), operands, plan),
    }
}

fn log_probs_in<T: Element, O: Element<Acc = T::Acc>, X: Products<T>>(
    multiplier: X,
    operands: &Operands,
    plan: &Plan,
) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let mut passes = TwoPasses::new(multiplier, inputs, plan);
        let mut log_probs = vec![O::zero(); positions * vocab];
        for positions in plan.chunks() {
            passes.logits(positions.clone())?;
            let to = &mut log_probs[positions.start * vocab..positions.end * vocab];
            passes.log_prob_rows(positions, to);
        }
        Ok(Tensor::from_vec(log_probs, (positions, vocab), &Device::Cpu)?)
    })
}

fn scores<T: Served>(operands: &Operands, scored: &Scored, plan: &Plan) -> Result<Tensor> {
    match tiles_of::<T>(operands)? {
        Some(tiles) => scores_in::<T, _>(tiles, operands, scored, plan),
        None => scores_in::<T, _>(Vectors(Isa::best()?), operands, scored, plan),
    }
}

fn scores_in<T: Element, X: Products<T>>(
    multiplier: X,
    operands: &Operands,
    scored: &Scored,
    plan: &Plan,
) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let ids = scored_ids(scored, vocab)?;
        let n = scored.token_ids.dim(1)?;
        let mut passes = TwoPasses::new(multiplier, inputs, plan);
        let mut scores = Vec::with_capacity(positions * (n + 1));
        for positions in plan.chunks() {
            passes.logits(positions.clone())?;
            scores.extend(passes.score_rows(positions.clone(), &ids[positions.start * n..positions.end * n], scored));
        }
        Ok(Tensor::from_vec(scores, (positions, n + 1), &Device::Cpu)?)
    })
}

fn score_loss<T: Served>(
    operands: &Operands,
    scored: &Scored,
    terms: &ScoreTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    match tiles_of::<T>(operands)? {
        Some(tiles) => score_loss_in::<T, _>(tiles, operands, scored, terms, needs_grad, plan),
        None => score_loss_in::<T, _>(Vectors(Isa::best()?), operands, scored, terms, needs_grad, plan),
    }
}

/// A loss whose targets are known once the scores of a chunk are.
fn score_loss_in<T: Element, X: Products<T>>(
    multiplier: X,
    operands: &Operands,
    scored: &Scored,
    terms: &ScoreTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let sizes @ Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let (ids, n) = (scored_ids(scored, vocab)?, scored.token_ids.dim(1)?);
        let columns = operands.adapter_columns()?;
        let gradients = BufferedGradients::new(sizes, vocab, columns, needs_grad, None, false);
        let none = Targets::of_scores(scored, &[], &[], 0, sizes);
        let mut passes = TwoPasses::new(multiplier, inputs, plan).with_targets(&none, gradients);
        let mut losses = Vec::with_capacity(positions);
        for positions in plan.chunks() {
            passes.logits(positions.clone())?;
            let of_chunk = &ids[positions.start * n..positions.end * n];
            let scores = passes.score_rows(positions.clone(), of_chunk, scored);
            let nll: Vec<f64> = scores.chunks_exact(n + 1).map(|scores| -Real::f64(scores[0])).collect();
            let scores = Tensor::from_vec(scores, (positions.len(), n + 1), &Device::Cpu)?;
            let (values, upstream) = terms(positions.clone(), &scores)?;
            let values = values.to_vec1::<T::Acc>()?;
            let of_values = values.iter().zip(nll);
            losses.extend(of_values.map(|(x, nll)| PositionLoss {
                objective: Real::f64(*x),
                nll,
                ..PositionLoss::default()
            }));
            if needs_grad.any() {
                let upstream = upstream.flatten_all()?.to_vec1::<T::Acc>()?;
                let targets = Targets::of_scores(scored, of_chunk, &upstream, positions.start, sizes);
                passes.objective_rows(&targets, positions.clone());
                passes.gradients_of_rows(positions, needs_grad)?;
            }
        }
        results(sizes, needs_grad, &none, &losses, passes.gradients)
    })
}

fn visit_all<T: Served, V: Visit>(operands: &Operands, plan: &Plan, visit: &V) -> Result<Vec<V::Output>> {
    match tiles_of::<T>(operands)? {
        Some(tiles) => visit_in::<T, _, V>(tiles, operands, plan, visit),
        None => visit_in::<T, _, V>(Vectors(Isa::best()?), operands, plan, visit),
    }
}

fn visit_in<T: Element, X: Products<T>, V: Visit>(
    multiplier: X,
    operands: &Operands,
    plan: &Plan,
    visit: &V,
) -> Result<Vec<V::Output>> {
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let mut passes = TwoPasses::new(multiplier, inputs, plan);
        let mut outputs = Vec::with_capacity(operands.sizes.positions);
        for positions in plan.chunks() {
            passes.logits(positions.clone())?;
            outputs.extend(passes.visit_rows(positions, visit)?);
        }
        Ok(outputs)
    })
}
