//! The CPU backend: matrix products by the `gemm` crate between row kernels in SIMD, both parallel over the threads of
//! rayon.

mod activation;
mod chunks;
mod distribution;
mod dtype;
mod gemm;
mod gemv;
mod log_sum_exp;
mod math;
mod matrix;
mod memory;
mod results;
mod rows;
mod simd;
mod targets;

use candle_core::{DType, Device, Tensor};

use crate::backend::contract::{Backend, LossResults, NeedsGrad, Objective, Operands, Sizes, Task, Visit};
use crate::backend::plan::{default, Needs, Plan};
use crate::backend::ranking::Best;
use crate::backend::schedule::Steps;
use crate::error::Result;
use chunks::{Chunks, BIAS_PARTS};
use dtype::{with_slice, with_type, Element};
use matrix::DecoderMatrix;
use results::{results, BufferedGradients};
use simd::{Isa, ROW_ALIGN};
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
        with_type!(operands.contexts.dtype(), T => loss::<T>(operands, objective, needs_grad, plan))
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

fn plan<T: Element>(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    let Sizes { components, context, vocab, .. } = operands.sizes;
    let size = size_of::<T::Acc>();
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let threads = rayon::current_num_threads();
    let tile = gemm::VOCAB_TILE.min(stride);
    // The log-sum-exp of each tile, in two parts.
    let summaries = 2 * vocab.div_ceil(tile);
    // Contexts and their gradient, where they are widened or only some rows are live.
    let contexts = 2 * context;
    let row = match task.keeps_logits {
        true => stride + summaries + contexts,
        // A tile of logits per thread.
        false => (tile + ROW_ALIGN) * threads + summaries + contexts,
    };
    let bias_parts = if task.bias_gradient { BIAS_PARTS } else { 0 };
    let scratch_rows = usize::from(task.all_ids) + 2 * usize::from(task.soft_targets);
    let per_position = components * row * size;
    // The bias, the soft targets and, per thread, the rows of its `Scratch` and a tile of the decoder.
    let per_thread = scratch_rows * stride + gemm::buffered_tile(context, vocab);
    let fixed = (stride * (2 + bias_parts) + threads * per_thread) * size;
    // Where no gradient is accumulated, as many rows as `gemv` takes.
    let enough_rows = if task.few_rows { gemv::MOST_ROWS } else { default::CPU_ROWS };
    let needs = Needs {
        per_position,
        fixed,
        default_budget: default::CPU_BYTES.max(fixed + enough_rows.div_ceil(components) * per_position),
        most_positions: if task.keeps_logits { usize::MAX } else { default::CPU_STREAMED_ROWS / components },
        keeps_logits: task.keeps_logits,
        kernels: Isa::best()?.name(),
        threads,
    };
    Plan::new(operands.sizes.positions, components, needs, budget)
}

fn loss<T: Element>(
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    with_chunks(operands, plan, |chunks: Chunks<'_, T>| {
        let targets = Targets::new(objective, operands.sizes)?;
        let gradients = BufferedGradients::new(operands.sizes, needs_grad);
        let mut chunks = chunks.with_targets(&targets, gradients);
        match plan.keeps_logits {
            true => chunks.run_loss(plan, needs_grad)?,
            false => plan.chunks().for_each(|positions| chunks.stream_loss(positions)),
        }
        results(operands.sizes, needs_grad, &targets, &chunks.losses, chunks.gradients)
    })
}

/// Log-probabilities in `O`, which is `T` or its accumulation type.
fn log_probs<T: Element, O: Element<Acc = T::Acc>>(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    with_chunks(operands, plan, |mut chunks: Chunks<'_, T>| {
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
    with_chunks(operands, plan, |mut chunks: Chunks<'_, T>| {
        let mut outputs = Vec::with_capacity(operands.sizes.positions);
        for positions in plan.chunks() {
            chunks.logits(positions.clone())?;
            outputs.extend(chunks.visit_rows(positions, visit)?);
        }
        Ok(outputs)
    })
}

/// Calls `f` with the state for these operands.
fn with_chunks<T: Element, R>(
    operands: &Operands,
    plan: &Plan,
    f: impl FnOnce(Chunks<'_, T>) -> Result<R>,
) -> Result<R> {
    let Sizes { context, vocab, .. } = operands.sizes;
    let (weight, transposed) = operands.stored_weight()?;
    with_slice("contexts", &operands.contexts, |contexts| {
        with_slice("weight", &weight, |values| {
            f(Chunks::new(operands, contexts, DecoderMatrix { values, vocab, context, transposed }, plan)?)
        })
    })
}
