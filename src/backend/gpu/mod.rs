//! The common part of the GPU backends. Mixtures are computed chunk by chunk, with matrix products from the device's
//! library and row kernels from one source (the headers in `kernels/`). A loss over the whole vocabulary waits for the
//! device only if ranks share the vocabulary, to read what they exchange.
//!
//! Only a [`Gpu`] knows a device's libraries, so the tests can run the same kernels and launches on a machine without a
//! GPU (module `testing`).

pub(super) mod arguments;
mod chunks;
pub(super) mod device;
mod device_scores;
mod gradients;
pub(super) mod kernels;
mod log_prob_terms;
mod log_probs;
mod logit_offsets;
mod loss;
mod objective;
mod own_targets;
mod scores;
mod shared_targets;
mod target_ids;

#[cfg(all(test, target_os = "linux"))]
mod testing;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backend::contract::{Backend, LossResults};
use crate::backend::distribution::{Computed, Visit};
use crate::backend::objective::{LogProbTerms, Objective, ScoreTerms, Scored};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::{default, Computation, Needs, Plan};
use crate::backend::ranking::{tensors, TopKQuery};
use crate::backend::task::{ScoreTask, Task};
use crate::error::{Error, Result};
use chunks::{Chunks, ROW_ALIGN};
use device::{Buffer, Gpu, GpuKind};
use device_scores::values_per_position;
use log_prob_terms::log_prob_loss;
use log_probs::log_probs;
use logit_offsets::logit_offsets;
use loss::loss;
use scores::{score_loss, scores};

/// The backend of a GPU, for operands in f16, bf16 and f32.
pub(super) struct GpuBackend<G>(pub(super) G);

impl<G: Gpu> Backend for GpuBackend<G> {
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
        let kind = self.0.kind();
        match operands.contexts.dtype() {
            dtype @ (DType::F32 | DType::F16 | DType::BF16) => plan(kind, operands.sizes, dtype, task, budget),
            got => {
                let expected = format!("f16, bf16 or f32 on {}", kind.kernels);
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

    fn scores(&self, operands: &Operands, scored: &Scored, plan: &Plan) -> Result<(Tensor, Option<Tensor>)> {
        scores(&self.0, operands, scored, plan)
    }

    fn score_loss(
        &self,
        operands: &Operands,
        scored: &Scored,
        terms: &ScoreTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        score_loss(&self.0, operands, scored, terms, needs_grad, plan)
    }

    fn log_prob_loss(
        &self,
        operands: &Operands,
        terms: &LogProbTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults> {
        log_prob_loss(self, operands, terms, needs_grad, plan)
    }

    /// Ranks on the device if `k` is small, otherwise on the host.
    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        if k > MAX_K_ON_DEVICE {
            return tensors(&self.visit(operands, &TopKQuery { k })?, k, DType::F32, operands.contexts.device());
        }
        let task = Task { top_k: Some(k), ..Task::for_log_probs(NeedsGrad::default()) };
        let plan = self.plan(operands, task, None)?;
        let (ids, log_probs) = top_k(&self.0, operands, k, &plan)?;
        // Reading back synchronizes. A NaN is ranked first.
        let first =
            log_probs.narrow(1, 0, 1)?.contiguous()?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        match first.iter().position(|x| x.is_nan() || *x == f32::NEG_INFINITY) {
            Some(position) if first[position].is_nan() => Err(Error::Distribution { position }),
            Some(position) => Err(Error::Impossible { position }),
            None => Ok((ids, log_probs)),
        }
    }

    /// Reads the log-probabilities of all ids, and answers the query on the host.
    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        let plan = self.plan(operands, Task::for_log_probs(NeedsGrad::default()), None)?;
        let log_probs = self.log_probs(operands, DType::F32, &plan)?;
        let log_probs = log_probs.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
        let offsets = if visit.needs_logits() { logit_offsets(operands, &log_probs)? } else { Vec::new() };
        let answer = |(position, row): (usize, &Vec<f32>)| {
            visit.visit(position, &Computed::new(row).with_logit_offset(offsets.get(position).copied()))
        };
        V::answers(log_probs.par_iter().enumerate().map(answer))
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

/// Plans a task with these sizes and operands of `dtype`.
fn plan(kind: &GpuKind, sizes: Sizes, dtype: DType, task: Task, budget: Option<usize>) -> Result<Plan> {
    let Sizes { components, vocab, .. } = sizes;
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let f32_size = DType::F32.size_in_bytes();
    let gradient_dtype = kind.gradient_dtype(dtype);
    let gradient = if gradient_dtype == DType::F32 { 0 } else { stride * gradient_dtype.size_in_bytes() };
    let products = (kind.product_bytes)(sizes, dtype);
    // The logits, their gradient in the dtype of the products, and at most eight f32 values.
    let row = stride * f32_size + gradient + products.per_row + 8 * f32_size;
    let (needs_log_probs, scores) = match task.scores {
        Some(ScoreTask { candidates, needs_all_ids, .. }) => {
            (needs_all_ids, values_per_position(candidates, components) * f32_size)
        }
        None => (task.has_soft_targets || task.top_k.is_some(), 0),
    };
    let log_probs = if needs_log_probs { stride * f32_size } else { 0 };
    let per_position = kind.allocation_factor * (components * row + log_probs + scores);
    let fixed = kind.allocation_factor * (vocab * f32_size + products.fixed);
    let cached_rows = default::GPU_LOGITS / (stride * f32_size);
    let positions = cached_rows.max(kind.least_default_rows).div_ceil(components);
    let needs = Needs {
        per_position,
        fixed,
        per_thread: 0,
        default_budget: (fixed + positions * per_position).min(kind.allocation_factor * kind.most_default_bytes),
        most_positions: usize::MAX,
        keeps_logits: true,
        computation: Computation::TwoPasses,
        kernels: kind.kernels,
        threads: 1,
    };
    Plan::new(sizes.positions, components, needs, budget)
}

/// Finds the `k` most probable ids and their log-probabilities, `[positions, k]`, u32 and f32.
fn top_k<G: Gpu>(gpu: &G, operands: &Operands, k: usize, plan: &Plan) -> Result<(Tensor, Tensor)> {
    let positions = operands.sizes.positions;
    let zeros = |dtype| Buffer::new(gpu, Tensor::zeros((positions.max(1), k), dtype, operands.contexts.device())?);
    let (ids, log_probs) = (zeros(DType::U32)?, zeros(DType::F32)?);
    let chunks = Chunks::new(gpu, operands, plan)?;
    let all_log_probs = chunks.log_prob_rows()?;
    plan.chunks().try_for_each(|positions| chunks.top_k(positions, k, &all_log_probs, &ids, &log_probs))?;
    Ok((ids.tensor.narrow(0, 0, positions)?, log_probs.tensor.narrow(0, 0, positions)?))
}
