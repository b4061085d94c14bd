//! The common part of the GPU backends: mixtures are computed chunk by chunk, with matrix products from the device's
//! library and row kernels from one source (`rows.h`). A loss over the whole vocabulary synchronizes with the device only
//! to read back the number of live rows if the responsibility filter is on.
//!
//! A device is a [`Gpu`]. Everything else is independent of its libraries, so the tests can run the same kernels and
//! launches on a machine without a GPU (module `testing`).

pub(super) mod arguments;
mod chunks;
pub(super) mod device;
mod objective;
mod own_targets;

#[cfg(all(test, target_os = "linux"))]
mod testing;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backend::contract::{Backend, Computed, LossResults, NeedsGrad, Objective, Operands, Sizes, Task, Visit};
use crate::backend::plan::{default, Needs, Plan};
use crate::backend::ranking::Best;
use crate::backend::schedule::Steps;
use crate::error::{Error, Result};
use chunks::{Chunks, ROW_ALIGN};
use device::{Buffer, Gpu, Kind};
use objective::Prepared;
use own_targets::OwnTargets;

/// The backend of a GPU, in f16, bf16 and f32.
pub(super) struct On<G>(pub(super) G);

impl<G: Gpu> Backend for On<G> {
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
        let kind = self.0.kind();
        match operands.contexts.dtype() {
            dtype @ (DType::F32 | DType::F16 | DType::BF16) => plan(kind, operands.sizes, dtype, task, budget),
            got => {
                let expected = format!("f16, bf16 or f32 on {}", kind.name);
                Err(Error::DType { argument: "hidden", expected, got })
            }
        }
    }

    fn loss(
        &self,
        operands: &Operands,
        objective: &Objective,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        loss(&self.0, operands, objective, needs_grad, plan)
    }

    fn log_probs(&self, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
        log_probs(&self.0, operands, dtype, plan)
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        let (positions, device) = (operands.sizes.positions, operands.contexts.device());
        if k > MAX_K_ON_DEVICE {
            let found = self.visit(operands, &Best { k })?;
            let ids: Vec<u32> = found.iter().flatten().map(|best| best.1).collect();
            let log_probs: Vec<f32> = found.iter().flatten().map(|best| best.0 as f32).collect();
            return match positions {
                // candle's Metal backend cannot make a tensor from an empty vector.
                0 => Ok((Tensor::zeros((0, k), DType::U32, device)?, Tensor::zeros((0, k), DType::F32, device)?)),
                _ => Ok((
                    Tensor::from_vec(ids, (positions, k), device)?,
                    Tensor::from_vec(log_probs, (positions, k), device)?,
                )),
            };
        }
        let task = Task { soft_targets: true, ..Task::log_probs(NeedsGrad::default()) };
        let plan = self.plan(operands, task, None)?;
        let (ids, log_probs) = top_k(&self.0, operands, k, &plan)?;
        // Reading back synchronizes. A NaN is ranked first.
        let first =
            log_probs.narrow(1, 0, 1)?.contiguous()?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        match first.iter().position(|x| x.is_nan() || *x == f32::NEG_INFINITY) {
            Some(position) => Err(Error::Distribution { position }),
            None => Ok((ids, log_probs)),
        }
    }

    /// Runs on the host, on the log-probabilities of all ids.
    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let plan = self.plan(operands, Task { all_ids: true, ..Task::decoding() }, None)?;
        let log_probs = self.log_probs(operands, DType::F32, &plan)?;
        let log_probs = log_probs.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
        log_probs.par_iter().enumerate().map(|(position, row)| visit.visit(position, &Computed(row))).collect()
    }

    fn bias_tanh(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor> {
        Ok(z.broadcast_add(bias)?.tanh()?)
    }

    fn tanh_gradient(&self, result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
        Ok((upstream - (result.sqr()? * upstream)?)?)
    }
}

/// The largest `k` that is ranked on the device, where the kernel scans the vocabulary once for each rank.
const MAX_K_ON_DEVICE: usize = 64;

/// The plan of a task with these sizes and operands of `dtype`.
fn plan(kind: &Kind, sizes: Sizes, dtype: DType, task: Task, budget: Option<usize>) -> Result<Plan> {
    let Sizes { components, context, vocab, .. } = sizes;
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let f32_size = DType::F32.size_in_bytes();
    let gradient_dtype = kind.gradient_dtype(dtype);
    let in_place = gradient_dtype == DType::F32 && !task.filters;
    let gradient = if in_place { 0 } else { stride * gradient_dtype.size_in_bytes() };
    // The contexts of the live rows, the gradient of these, and the indices of the rows.
    let live = if task.filters { context * (dtype.size_in_bytes() + f32_size) + f32_size } else { 0 };
    let (of_row, of_all) = (kind.product_bytes)(sizes, dtype);
    // Logits, their gradient in the dtype of the products, and seven f32 values.
    let row = stride * f32_size + gradient + live + of_row + 8 * f32_size;
    let soft = if task.soft_targets { stride * f32_size } else { 0 };
    let per_position = kind.allocated * (components * row + soft);
    let fixed = kind.allocated * (vocab * f32_size + of_all);
    let cached = default::GPU_LOGITS / (stride * f32_size);
    let positions = cached.max(kind.default_rows).div_ceil(components);
    let needs = Needs {
        per_position,
        fixed,
        per_thread: 0,
        default_budget: (fixed + positions * per_position).min(kind.allocated * kind.default_bytes),
        most_positions: usize::MAX,
        keeps_logits: true,
        kernels: kind.name,
        threads: 1,
    };
    Plan::new(sizes.positions, components, needs, budget)
}

fn loss<G: Gpu>(
    gpu: &G,
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let prepared = Prepared::new(gpu, objective, operands)?;
    let own = match objective {
        Objective::Targets(loss) => OwnTargets::new(operands, loss)?,
        Objective::LogProbs { .. } => None,
    };
    let mut chunks = Chunks::new(gpu, operands, Some(prepared), needs_grad, false, plan)?;
    if let Some(own) = &own {
        chunks.set_own_logits(&own.logits, needs_grad)?;
    }
    chunks.run_loss(plan, needs_grad)?;

    let positions = operands.sizes.positions;
    let of_positions = |padded: &Tensor| padded.narrow(0, 0, positions);
    let (nll, losses) = (&chunks.nll.tensor, &chunks.losses.tensor);
    let Some((prepared, ids)) = chunks.prepared().and_then(|p| Some((p, p.ids.as_ref()?))) else {
        // For log-probabilities only the gradients are needed.
        let (objective, nll) = (of_positions(losses)?, of_positions(nll)?);
        let (sum, count) = (losses.sum_all()?, losses.zeros_like()?.sum_all()?);
        let gradients = chunks.into_gradients(needs_grad)?;
        return Ok(LossResults { objective, nll, sum, count, hits: None, dropped_mass: None, gradients });
    };
    let weighted = weigh(&ids.weights.tensor, losses)?;
    let hits = match prepared.hits {
        true => {
            let is_hit = chunks.argmax.tensor.eq(&ids.ids.tensor)?;
            // A NaN distribution has no most probable id.
            let is_number = nll.eq(nll)?;
            Some((is_hit.to_dtype(DType::F32)? * is_number.to_dtype(DType::F32)?)?.sum_all()?)
        }
        false => None,
    };
    let dropped_mass = match prepared.filter > 0.0 {
        true => {
            let masses = chunks.masses.tensor.reshape(((), 2))?;
            let weights = ids.weights.tensor.abs()?;
            let total = |column| {
                let masses = masses.narrow(1, column, 1)?.squeeze(1)?.contiguous()?;
                Ok::<_, Error>(weigh(&weights, &masses)?.sum_all()?)
            };
            let (dropped, all) = (total(0)?, total(1)?);
            let is_zero = all.eq(0f32)?;
            Some(is_zero.where_cond(&dropped.zeros_like()?, &(dropped / &all)?)?)
        }
        false => None,
    };
    let (objective, nll) = (of_positions(&weighted)?, of_positions(nll)?);
    let (sum, count) = (weighted.sum_all()?, ids.count.clone());
    let of_own_logits = chunks.own_gradient()?;
    let gradients = chunks.into_gradients(needs_grad)?;
    let gradients = match own.zip(of_own_logits) {
        Some((own, of_own_logits)) => own.add_to(gradients, &of_own_logits, operands)?,
        None => gradients,
    };
    Ok(LossResults { objective, nll, sum, count, hits, dropped_mass, gradients })
}

/// `weights * values`, and zero where the weight is zero, even for an infinite value or NaN.
fn weigh(weights: &Tensor, values: &Tensor) -> Result<Tensor> {
    Ok(weights.eq(0f32)?.where_cond(&values.zeros_like()?, &(values * weights)?)?)
}

fn log_probs<G: Gpu>(gpu: &G, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    let log_probs = Tensor::zeros((positions, vocab), dtype, operands.contexts.device())?;
    let mut chunks = Chunks::new(gpu, operands, None, NeedsGrad::default(), false, plan)?;
    if positions > 0 {
        chunks.all_log_probs = Some(Buffer::new(gpu, log_probs.clone())?);
    }
    for positions in plan.chunks() {
        chunks.logits(positions.clone())?;
        chunks.log_prob_rows(positions)?;
    }
    Ok(log_probs)
}

/// The `k` most probable ids and their log-probabilities, `[positions, k]`, u32 and f32; the plan is that of a task
/// with soft targets.
fn top_k<G: Gpu>(gpu: &G, operands: &Operands, k: usize, plan: &Plan) -> Result<(Tensor, Tensor)> {
    let positions = operands.sizes.positions;
    let zeros = |dtype| Buffer::new(gpu, Tensor::zeros((positions.max(1), k), dtype, operands.contexts.device())?);
    let (ids, log_probs) = (zeros(DType::U32)?, zeros(DType::F32)?);
    let mut chunks = Chunks::new(gpu, operands, None, NeedsGrad::default(), true, plan)?;
    for chunk in plan.chunks() {
        chunks.logits(chunk.clone())?;
        chunks.top_k_rows(&chunk, k, &ids, &log_probs)?;
    }
    Ok((ids.tensor.narrow(0, 0, positions)?, log_probs.tensor.narrow(0, 0, positions)?))
}
