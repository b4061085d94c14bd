//! The common part of the GPU backends. Mixtures are computed chunk by chunk, with matrix products from the device's
//! library and row kernels from one source (the headers in `kernels/`). A loss over the whole vocabulary waits for the
//! device only if ranks share the vocabulary, to read what they exchange.
//!
//! Only a [`Gpu`] knows a device's libraries, so the tests can run the same kernels and launches on a machine without a
//! GPU (module `testing`).

pub(super) mod arguments;
mod chunks;
mod decoding;
pub(super) mod device;
mod device_scores;
mod gradients;
pub(super) mod kernels;
mod log_probs;
mod loss;
mod loss_chunks;
mod objective;
mod own_targets;
mod plan;
mod shared_targets;
mod target_ids;

#[cfg(all(test, target_os = "linux"))]
mod testing;

use candle_core::{DType, Tensor};

use crate::backend::contract::{Backend, LossResults};
use crate::backend::distribution::Visit;
use crate::backend::objective::{Objective, Scored, Task};
use crate::backend::operands::Operands;
use crate::backend::plan::Planned;
use crate::error::Result;
use device::Gpu;
use log_probs::{log_probs, scores};
use loss::loss;
use plan::plan;

/// The backend of a GPU, for operands in f16, bf16 and f32.
impl<G: Gpu> Backend for G {
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Planned> {
        let plan = plan(self.kind(), operands, &task, budget)?;
        Ok(Planned { operands: operands.clone(), needs_grad: task.needs_grad(), plan })
    }

    fn loss(&self, planned: &Planned, objective: &Objective) -> Result<LossResults> {
        loss(self, planned, objective)
    }

    fn log_probs(&self, planned: &Planned, dtype: DType) -> Result<Tensor> {
        log_probs(self, planned, dtype)
    }

    fn scores(&self, planned: &Planned, scored: &Scored) -> Result<(Tensor, Option<Tensor>)> {
        scores(self, planned, scored)
    }

    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
        decoding::top_k(self, operands, k)
    }

    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
        decoding::visit(self, operands, visit)
    }

    fn bias_tanh(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor> {
        Ok(z.broadcast_add(bias)?.tanh()?)
    }

    fn tanh_gradient(&self, result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
        Ok((upstream - (result.sqr()? * upstream)?)?)
    }
}
