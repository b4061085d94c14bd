//! What the GPUs' backends have in common: chunk after chunk, products by the device's library, row kernels of one text
//! (`rows.h`). Nothing here waits for the device, but for the number of live rows where the responsibility filter is on.
//!
//! A device is a [`Gpu`]. All but that is independent of its libraries, so that the tests can run the kernels' very text, and
//! the order in which they are launched, on a machine without a GPU ([`host`]).

mod arguments;
mod chunks;
mod device;
mod objective;

#[cfg(all(test, target_os = "linux"))]
mod host;

use candle_core::{DType, Tensor};

use super::plan::{Needs, Plan, Sizes};
use super::{Backend, Gradients, Objective, Operands, Outcome, Task, Wanted};
use crate::{Error, Result};
pub(super) use arguments::Argument;
#[cfg(feature = "cuda")]
pub(super) use arguments::{Logits, Objective as OfPositions, Rows};
use chunks::{Chunks, ROW_ALIGN};
pub(super) use device::{Buffer, Gpu, Kind, Matrix, Product, BLOCK};
use objective::Prepared;

/// The default budget: chunks whose logits stay in a second-level cache of 50 MiB, or as many rows as make the products
/// efficient, but never more than the last.
const CACHED_LOGITS: usize = 32 << 20;
const EFFICIENT_ROWS: usize = 512;
const LARGEST_DEFAULT_BUDGET: usize = 256 << 20;

/// The plan of a task, unless the operands are of a dtype that no GPU has kernels for.
pub(super) fn plan<G: Gpu>(gpu: &G, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    match operands.contexts.dtype() {
        dtype @ (DType::F32 | DType::F16 | DType::BF16) => plan_of(gpu.kind(), operands.sizes, dtype, task, budget),
        got => {
            let expected = format!("f16, bf16 or f32 on {}", gpu.kind().name);
            Err(Error::DType { argument: "hidden", expected, got })
        }
    }
}

/// The plan of a task with these sizes and operands of `dtype`.
fn plan_of(kind: &Kind, sizes: Sizes, dtype: DType, task: Task, budget: Option<usize>) -> Result<Plan> {
    let Sizes { components, context, vocab, .. } = sizes;
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let f32_size = DType::F32.size_in_bytes();
    let gradient_dtype = kind.gradient_dtype(dtype);
    let in_place = gradient_dtype == DType::F32 && !task.filters;
    let gradient = if in_place { 0 } else { stride * gradient_dtype.size_in_bytes() };
    // The contexts of the live rows, their gradient, and which rows these are.
    let live = if task.filters { context * (dtype.size_in_bytes() + f32_size) + f32_size } else { 0 };
    let (of_row, of_all) = (kind.product_bytes)(sizes, dtype);
    // Logits, their gradient in the dtype of the products, and seven numbers.
    let row = stride * f32_size + gradient + live + of_row + 7 * f32_size;
    let soft = if task.soft_targets { stride * f32_size } else { 0 };
    let per_position = kind.allocated * (components * row + soft);
    let fixed = kind.allocated * (vocab * f32_size + of_all);
    let cached = CACHED_LOGITS / (stride * f32_size);
    let positions = cached.max(EFFICIENT_ROWS).div_ceil(components);
    let needs = Needs {
        per_position,
        fixed,
        default_budget: (fixed + positions * per_position).min(kind.allocated * LARGEST_DEFAULT_BUDGET),
        most_positions: usize::MAX,
        keeps_logits: true,
        kernels: kind.name,
        threads: 1,
    };
    Plan::new(sizes, needs, budget)
}

pub(super) fn loss<G: Gpu>(
    gpu: &G,
    operands: &Operands,
    objective: &Objective,
    wanted: Wanted,
    plan: &Plan,
) -> Result<Outcome> {
    let prepared = Prepared::new(gpu, objective, operands.sizes, operands.contexts.dtype())?;
    let mut chunks = Chunks::new(gpu, operands, Some(prepared), wanted, false, plan)?;
    chunks.run_loss(plan, wanted)?;

    let positions = operands.sizes.positions;
    let of_positions = |padded: &Tensor| padded.narrow(0, 0, positions);
    let (nll, losses) = (&chunks.nll.tensor, &chunks.losses.tensor);
    let Some((prepared, ids)) = chunks.prepared().and_then(|p| Some((p, p.ids.as_ref()?))) else {
        // Of log-probabilities only the gradients are asked for.
        let (objective, nll) = (of_positions(losses)?, of_positions(nll)?);
        let (sum, count) = (losses.sum_all()?, losses.zeros_like()?.sum_all()?);
        let gradients = chunks.into_gradients(wanted)?;
        return Ok(Outcome { objective, nll, sum, count, hits: None, dropped_mass: None, gradients });
    };
    let weighted = weigh(&ids.weights.tensor, losses)?;
    let hits = match prepared.hits {
        true => {
            let right = chunks.argmax.tensor.eq(&ids.ids.tensor)?;
            // A distribution that is not one has no most probable token id.
            let known = nll.eq(nll)?;
            Some((right.to_dtype(DType::F32)? * known.to_dtype(DType::F32)?)?.sum_all()?)
        }
        false => None,
    };
    let dropped_mass = match prepared.filter > 0.0 {
        true => {
            let masses = chunks.masses.tensor.reshape(((), 2))?;
            let weights = ids.weights.tensor.abs()?;
            let size = |column| {
                let masses = masses.narrow(1, column, 1)?.squeeze(1)?.contiguous()?;
                Ok::<_, Error>(weigh(&weights, &masses)?.sum_all()?)
            };
            let (dropped, all) = (size(0)?, size(1)?);
            let nothing = all.eq(0f32)?;
            Some(nothing.where_cond(&dropped.zeros_like()?, &(dropped / &all)?)?)
        }
        false => None,
    };
    let (objective, nll) = (of_positions(&weighted)?, of_positions(nll)?);
    let (sum, count) = (weighted.sum_all()?, ids.count.clone());
    let gradients = chunks.into_gradients(wanted)?;
    Ok(Outcome { objective, nll, sum, count, hits, dropped_mass, gradients })
}

/// The product, where a weight of zero takes away even an infinite value.
fn weigh(weights: &Tensor, values: &Tensor) -> Result<Tensor> {
    Ok(weights.eq(0f32)?.where_cond(&values.zeros_like()?, &(values * weights)?)?)
}

/// Log-probabilities `[positions, vocab]` in this dtype.
pub(super) fn log_probs<G: Gpu>(gpu: &G, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    let log_probs = Tensor::zeros((positions, vocab), dtype, operands.contexts.device())?;
    let mut chunks = Chunks::new(gpu, operands, None, Wanted::default(), false, plan)?;
    if positions > 0 {
        chunks.all_log_probs = Some(Buffer::new(gpu, log_probs.clone())?);
    }
    chunks.run_log_probs(plan)?;
    Ok(log_probs)
}

pub(super) fn argmax<G: Gpu>(gpu: &G, operands: &Operands, plan: &Plan) -> Result<Tensor> {
    let mut chunks = Chunks::new(gpu, operands, None, Wanted::default(), false, plan)?;
    chunks.run_argmax(plan)?;
    Ok(chunks.argmax.tensor.narrow(0, 0, operands.sizes.positions)?)
}

/// The most probable token ids and their log-probabilities, `[positions, k]`, u32 and f32, of a task with soft targets.
pub(super) fn top_k<G: Gpu>(gpu: &G, operands: &Operands, k: usize, plan: &Plan) -> Result<(Tensor, Tensor)> {
    let positions = operands.sizes.positions;
    let zeros = |dtype| Buffer::new(gpu, Tensor::zeros((positions.max(1), k), dtype, operands.contexts.device())?);
    let (ids, log_probs) = (zeros(DType::U32)?, zeros(DType::F32)?);
    let mut chunks = Chunks::new(gpu, operands, None, Wanted::default(), true, plan)?;
    for of_chunk in plan.chunks() {
        chunks.logits(of_chunk.clone())?;
        chunks.top_k_rows(&of_chunk, k, &ids, &log_probs)?;
    }
    Ok((ids.tensor.narrow(0, 0, positions)?, log_probs.tensor.narrow(0, 0, positions)?))
}
