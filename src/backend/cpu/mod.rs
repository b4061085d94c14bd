//! The CPU backend: products by the `gemm` crate, row kernels in SIMD, both spread over the threads of rayon.

mod activation;
mod chunks;
mod distribution;
mod dots;
mod element;
mod log_sum_exp;
mod math;
mod memory;
mod outcome;
mod products;
mod rows;
mod simd;
mod targets;

use candle_core::{Device, Storage, Tensor};

use super::plan::{Needs, Plan, Sizes};
use super::{Backend, Distribution, Objective, Operands, Outcome, Task, Visit, Wanted, TILE};
use crate::{Error, Result};
pub(super) use activation::{bias_tanh, tanh_gradient};
use chunks::{Cpu, BIAS_PARTS};
use element::Element;
use memory::zeros;
use outcome::{outcome, BufferedGradients};
pub(crate) use simd::Float;
use simd::{Isa, ROW_ALIGN};
use targets::Targets;

/// Rows of a chunk whose logits are not kept: a tile of logits stays in the second-level cache.
const STREAMED_ROWS: usize = 768;

/// The default budget is at least this,
const LEAST_DEFAULT_BUDGET: usize = 32 << 20;
/// and enough for chunks of this many rows: with fewer it matters that each chunk reads all of the decoder
/// and adds to all of its gradient.
const ENOUGH_ROWS: usize = 480;

/// The plan of a task with these operands.
pub(super) fn plan<T: Element>(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    let Sizes { components, context, vocab, .. } = operands.sizes;
    let size = size_of::<T::Acc>();
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let threads = rayon::current_num_threads();
    let tile = products::VOCAB_TILE.min(stride);
    // Each tile's log-sum-exp, in two parts.
    let summaries = 2 * vocab.div_ceil(tile);
    // Contexts and their gradient, where they are widened or only some rows are live.
    let contexts = 2 * context;
    let row = match task.keeps_logits {
        true => stride + summaries + contexts,
        // A tile of logits for every thread.
        false => tile * threads + summaries + contexts,
    };
    let bias_parts = if task.bias_gradient { BIAS_PARTS } else { 0 };
    let scratch_rows = usize::from(task.all_ids) + 2 * usize::from(task.soft_targets);
    let per_position = components * row * size;
    // The bias, the soft targets, and for every thread the rows of its `Scratch` and a tile of the decoder.
    let of_thread = scratch_rows * stride + products::buffered_tile(context, vocab);
    let fixed = (stride * (2 + bias_parts) + threads * of_thread) * size;
    // Where nothing is added to a gradient, as many as the kernel for few rows takes.
    let enough_rows = if task.few_rows { dots::MOST_ROWS } else { ENOUGH_ROWS };
    let needs = Needs {
        per_position,
        fixed,
        default_budget: LEAST_DEFAULT_BUDGET.max(fixed + enough_rows.div_ceil(components) * per_position),
        most_positions: if task.keeps_logits { usize::MAX } else { STREAMED_ROWS / components },
        keeps_logits: task.keeps_logits,
        kernels: Isa::best().name(),
        threads,
    };
    Plan::new(operands.sizes, needs, budget)
}

pub(super) fn loss<T: Element>(
    operands: &Operands,
    objective: &Objective,
    wanted: Wanted,
    plan: &Plan,
) -> Result<Outcome> {
    with_slices(operands, |contexts: &[T], weight: &[T]| {
        let targets = Targets::new(objective, operands.sizes)?;
        let gradients = BufferedGradients::new(operands.sizes, wanted);
        let mut cpu = Cpu::new(operands, contexts, weight, plan)?.with_targets(&targets, gradients);
        cpu.run_loss(plan, wanted)?;
        outcome(operands.sizes, wanted, &targets, &cpu.losses, cpu.gradients)
    })
}

pub(super) fn log_probs<T: Element>(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    with_slices(operands, |contexts: &[T], weight: &[T]| {
        let Sizes { positions, vocab, .. } = operands.sizes;
        let mut cpu = Cpu::new(operands, contexts, weight, plan)?;
        cpu.log_probs = vec![T::zero(); positions * vocab];
        cpu.run_log_probs(plan)?;
        Ok(Tensor::from_vec(cpu.log_probs, (positions, vocab), &Device::Cpu)?)
    })
}

pub(super) fn argmax<T: Element>(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    with_slices(operands, |contexts: &[T], weight: &[T]| {
        let positions = operands.sizes.positions;
        let mut cpu = Cpu::new(operands, contexts, weight, plan)?;
        cpu.argmax = vec![0; positions];
        cpu.run_argmax(plan)?;
        Ok(Tensor::from_vec(cpu.argmax, positions, &Device::Cpu)?)
    })
}

pub(super) fn visit<T: Element, V: Visit>(operands: &Operands, plan: &Plan, visit: &V) -> Result<Vec<V::Output>> {
    with_slices(operands, |contexts: &[T], weight: &[T]| {
        let mut cpu = Cpu::new(operands, contexts, weight, plan)?;
        let mut outputs = Vec::with_capacity(operands.sizes.positions);
        for positions in plan.chunks() {
            cpu.logits(positions.clone())?;
            outputs.extend(cpu.visit_rows(positions, visit)?);
        }
        Ok(outputs)
    })
}

/// Calls `f` with the elements of the contexts and of the decoder's weight.
fn with_slices<T: Element, O>(operands: &Operands, f: impl FnOnce(&[T], &[T]) -> Result<O>) -> Result<O> {
    with_slice("contexts", &operands.contexts, |contexts| {
        with_slice("weight", &operands.weight, |weight| f(contexts, weight))
    })
}

/// Calls `f` with the elements of a contiguous tensor.
fn with_slice<T: Element, O>(argument: &'static str, tensor: &Tensor, f: impl FnOnce(&[T]) -> Result<O>) -> Result<O> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        let got = format!("{:?}", tensor.device().location());
        return Err(Error::Device { argument, expected: "Cpu".into(), got });
    };
    match layout.contiguous_offsets() {
        Some((from, to)) => f(&T::cpu_storage_as_slice(storage)?[from..to]),
        None => Err(Error::shape(argument, "contiguous", layout.dims())),
    }
}
