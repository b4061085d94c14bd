//! The CPU backend, parallel over the threads of rayon: losses over hard targets by kernels of its own in SIMD
//! (`one_pass`); what needs every logit twice by the `gemm` crate's products between row kernels (`chunks`).

mod activation;
mod chunks;
mod distribution;
mod dtype;
mod gemm;
mod gemv;
mod inputs;
mod log_sum_exp;
mod math;
mod matrix;
mod memory;
mod one_pass;
mod path;
mod results;
mod rows;
mod simd;
mod targets;
#[cfg(test)]
mod testing;

use candle_core::{DType, Device, Tensor};

use crate::backend::contract::{Backend, LossResults, NeedsGrad, Objective, Operands, Sizes, Task, Visit};
use crate::backend::plan::{default, Needs, Plan};
use crate::backend::ranking::Best;
use crate::backend::schedule::Steps;
use crate::error::Result;
use chunks::Chunks;
use dtype::{with_type, Element};
use inputs::Inputs;
use memory::Workspace;
use one_pass::OnePass;
use path::Path;
use results::{results, BufferedGradients};
use rows::PositionLoss;
use simd::Isa;
use targets::Targets;

/// The backend for f32, f64, and f16 and bf16 (computed in f32).
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
        let loss = || with_type!(operands.contexts.dtype(), T => loss::<T>(operands, objective, needs_grad, plan));
        on_threads(plan.threads, loss)
    }

    fn log_probs(&self, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
        with_type!(operands.contexts.dtype(), T => match dtype == operands.contexts.dtype() {
            true => log_probs::<T, T>(operands, plan),
            false => log_probs::<T, <T as Element>::Acc>(operands, plan),
        })
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        let found = self.visit(operands, &Best { k })?;
        let shape = (operands.sizes.positions, k);
        let ids = found.iter().flatten().map(|ranked| ranked.1).collect();
        let log_probs = found.iter().flatten().map(|ranked| ranked.0).collect();
        let log_probs = Tensor::from_vec::<_, f64>(log_probs, shape, &Device::Cpu)?;
        let accumulation = if operands.contexts.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        Ok((Tensor::from_vec::<_, u32>(ids, shape, &Device::Cpu)?, log_probs.to_dtype(accumulation)?))
    }

    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let plan = self.plan(operands, Task::decoding(), None)?;
        with_type!(operands.contexts.dtype(), T => visit_all::<T, V>(operands, &plan, visit))
    }

    fn bias_tanh(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor> {
        activation::bias_tanh(z, bias)
    }

    fn tanh_gradient(&self, result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
        activation::tanh_gradient(result, &upstream.contiguous()?)
    }
}

/// Computes on at most so many threads.
fn on_threads<R: Send>(threads: usize, compute: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    if threads >= rayon::current_num_threads() {
        return compute();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(candle_core::Error::wrap)?;
    pool.install(compute)
}

fn plan<T: Element>(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    let Sizes { positions, components, .. } = operands.sizes;
    let (size, threads, isa) = (size_of::<T::Acc>(), rayon::current_num_threads(), Isa::best()?);
    let path = Path::of(&task, operands.sizes);
    let keeps_logits = task.keeps_logits || path == Path::TwoPasses;
    let Workspace { per_row, fixed, per_thread } = match path {
        Path::OnePass => one_pass::workspace::<T>(operands.sizes, isa, task.keeps_logits),
        Path::TwoPasses => chunks::workspace(operands.sizes, task),
    };
    let (per_position, fixed, per_thread) = (components * per_row * size, fixed * size, per_thread * size);
    // Where no gradient is accumulated, as many rows as `gemv` takes.
    let enough_rows = if task.few_rows { gemv::MOST_ROWS } else { default::CPU_ROWS };
    let needs = Needs {
        per_position,
        fixed,
        per_thread,
        // By this default the chunks do not depend on the number of threads.
        default_budget: fixed
            + threads * per_thread
            + default::CPU_BYTES.max(enough_rows.div_ceil(components) * per_position),
        most_positions: if keeps_logits { usize::MAX } else { default::CPU_ROWS_WITHOUT_LOGITS / components },
        keeps_logits,
        kernels: isa.name(),
        threads,
    };
    Plan::new(positions, components, needs, budget)
}

fn loss<T: Element>(
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let rows = operands.weight_rows()?;
        let targets = Targets::new(objective, operands.sizes, rows)?;
        let gradients = BufferedGradients::new(operands.sizes, rows, needs_grad);
        let task = match objective {
            Objective::Targets(loss) => Task::of(loss, needs_grad),
            Objective::LogProbs { .. } => Task::log_probs(needs_grad),
        };
        let (losses, gradients) = run(Path::of(&task, operands.sizes), inputs, &targets, gradients, needs_grad, plan)?;
        results(operands.sizes, needs_grad, &targets, &losses, gradients)
    })
}

/// The loss of each position, and the gradients.
fn run<T: Element>(
    path: Path,
    inputs: Inputs<'_, T>,
    targets: &Targets<T::Acc>,
    gradients: BufferedGradients<T>,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<(Vec<PositionLoss>, BufferedGradients<T>)> {
    match path {
        Path::OnePass => {
            let mut pass = OnePass::new(inputs, targets, gradients, needs_grad, plan);
            pass.run_loss(plan, needs_grad)?;
            Ok((pass.losses, pass.gradients))
        }
        Path::TwoPasses => {
            let mut chunks = Chunks::new(inputs, plan).with_targets(targets, gradients);
            chunks.run_loss(plan, needs_grad)?;
            Ok((chunks.losses, chunks.gradients))
        }
    }
}

/// Log-probabilities in `O`, which is `T` or its accumulation type.
fn log_probs<T: Element, O: Element<Acc = T::Acc>>(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let mut chunks = Chunks::new(inputs, plan);
        let mut log_probs = vec![O::zero(); positions * vocab];
        for positions in plan.chunks() {
            chunks.logits(positions.clone())?;
            let to = &mut log_probs[positions.start * vocab..positions.end * vocab];
            chunks.log_prob_rows(positions, to);
        }
        Ok(Tensor::from_vec(log_probs, (positions, vocab), &Device::Cpu)?)
    })
}

fn visit_all<T: Element, V: Visit>(operands: &Operands, plan: &Plan, visit: &V) -> Result<Vec<V::Output>> {
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let mut chunks = Chunks::new(inputs, plan);
        let mut outputs = Vec::with_capacity(operands.sizes.positions);
        for positions in plan.chunks() {
            chunks.logits(positions.clone())?;
            outputs.extend(chunks.visit_rows(positions, visit)?);
        }
        Ok(outputs)
    })
}
