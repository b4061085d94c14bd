//! The node of a mixture's loss or log-probabilities in candle's graph.
//!
//! candle's custom operations take three operands. The mixture's are the contexts, the decoder's weight, and, packed
//! into one vector because they are small, the log-priors, the adapter and the bias.

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};

use crate::backend;
use crate::backend::contract::Gradients;
use crate::backend::objective::{Objective, Scored};
use crate::backend::operands::{accumulation_dtype, NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::error::{Error, Result};
use crate::loss::Reduction;
use crate::tensors::autograd::{attach, is_root};
use crate::tensors::checks::check_number;

/// The gradients of a value that are known before the backward pass.
pub(super) struct Known {
    pub(super) gradients: Gradients,
    /// Whether the weight's gradient contains the gradients of earlier losses.
    pub(super) is_sum: bool,
}

/// The `value` of a loss as a function of the operands. `known` are the gradients of the value, if they are known
/// already: the first backward pass takes them, a second one computes them again. `compute` has the upstream gradient
/// of each position, if there is no reduction.
pub(super) fn attach_loss(
    value: Tensor,
    operands: Operands,
    needs_grad: NeedsGrad,
    reduction: Reduction,
    known: Option<Known>,
    compute: impl Fn(&Operands, Option<Tensor>) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    let known = Mutex::new(known);
    attach_mixture(value, operands, needs_grad, move |operands, value, upstream| {
        let known = known.lock().ok().and_then(|mut known| known.take());
        // A gradient for each position becomes part of the objective; one for all remains a factor.
        let (of_positions, factor) = match reduction {
            Reduction::None => {
                let upstream = upstream.flatten_all()?;
                (Some(upstream.to_dtype(accumulation_dtype("upstream", upstream.dtype())?)?), None)
            }
            _ => (None, Some(upstream.clone()).filter(|_| !is_root(value))),
        };
        let Some(Known { gradients, is_sum }) = known else {
            return compute(operands, of_positions)?.scaled_by(factor);
        };
        if let Some(factor) = factor.as_ref().filter(|_| is_sum) {
            // On the host: Metal has no f64.
            let factor = factor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            check_number(
                factor == 1.0,
                "gradient_sum",
                "the loss itself in the backward pass, not a multiple",
                factor,
            )?;
            return Ok(gradients);
        }
        gradients.scaled_by(factor)
    })
}

/// `log_probs` as a function of the operands.
pub(super) fn attach_log_probs(
    log_probs: Tensor,
    operands: Operands,
    needs_grad: NeedsGrad,
    plan: Plan,
) -> Result<Tensor> {
    attach_mixture(log_probs, operands, needs_grad, move |operands, _, upstream| {
        let accumulation = accumulation_dtype("contexts", operands.contexts.dtype())?;
        let upstream = upstream.to_dtype(accumulation)?.contiguous()?;
        Ok(backend::loss(operands, &Objective::LogProbs { upstream }, needs_grad, &plan)?.gradients)
    })
}

/// `scores`, `[positions, n + 1]`, as a function of the operands.
pub(super) fn attach_scores(
    scores: Tensor,
    operands: Operands,
    scored: Scored,
    needs_grad: NeedsGrad,
    plan: Plan,
) -> Result<Tensor> {
    attach_mixture(scores, operands, needs_grad, move |operands, _, upstream| {
        backend::score_gradients(operands, &scored, &upstream.contiguous()?, needs_grad, &plan)
    })
}

fn attach_mixture(
    value: Tensor,
    operands: Operands,
    needs_grad: NeedsGrad,
    gradients: impl Fn(&Operands, &Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    // Only operands that need a gradient are packed; the others must not appear in the GradStore.
    let accumulation = accumulation_dtype("contexts", operands.contexts.dtype())?;
    let needed = |is_needed: bool, operand: &Option<Tensor>| operand.clone().filter(|_| is_needed);
    let packed = pack(
        [
            needed(needs_grad.log_priors, &operands.log_priors),
            needed(needs_grad.adapter, &operands.adapter),
            needed(needs_grad.bias, &operands.bias),
        ]
        .map(|operand| operand.map(|operand| operand.to_dtype(accumulation)).transpose()),
    )?;
    let packed = match packed {
        Some(packed) => packed,
        None => Tensor::zeros(1, operands.contexts.dtype(), operands.contexts.device())?,
    };
    let (contexts, weight) = (operands.contexts.clone(), operands.weight.clone());
    // Detached: the node must not keep the graph of the operands alive.
    let operands = Operands {
        contexts: operands.contexts.detach(),
        log_priors: operands.log_priors.map(|t| t.detach()),
        weight: operands.weight.detach(),
        adapter: operands.adapter.map(|t| t.detach()),
        bias: operands.bias.map(|t| t.detach()),
        ..operands
    };
    attach("mixture", value, [&contexts, &packed, &weight], move |_, value, upstream| {
        let gradients = gradients(&operands, value, upstream)?;
        let packed = pack([gradients.log_priors, gradients.adapter, gradients.bias].map(Ok))?;
        // Rounded only here, after the upstream gradient is multiplied in: a loss scale then saves small gradients in
        // f16.
        let dtype = operands.contexts.dtype();
        let round = |gradient: Option<Tensor>| {
            // candle's GPU backends do not convert empty tensors.
            let round = |g: Tensor| match g.elem_count() {
                0 => Ok(Tensor::zeros(g.dims(), dtype, g.device())?),
                _ => backend::rounded(&g, dtype),
            };
            gradient.map(round).transpose()
        };
        Ok([round(gradients.contexts)?, packed, round(gradients.weight)?])
    })
}

/// Those of these tensors that are there, as one vector.
fn pack(tensors: [candle_core::Result<Option<Tensor>>; 3]) -> Result<Option<Tensor>> {
    let flat = |tensor: Tensor| tensor.flatten_all();
    let flat: Vec<Tensor> = tensors
        .into_iter()
        .filter_map(|tensor| Some(tensor.transpose()?.and_then(flat)))
        .collect::<candle_core::Result<_>>()?;
    Ok(if flat.is_empty() { None } else { Some(Tensor::cat(&flat, 0)?) })
}

impl Gradients {
    fn scaled_by(self, factor: Option<Tensor>) -> Result<Self> {
        let Some(factor) = factor else { return Ok(self) };
        // Free on the CPU; on a GPU reading the factor would wait.
        if factor.device().is_cpu() && factor.to_dtype(DType::F64)?.to_scalar::<f64>()? == 1.0 {
            return Ok(self);
        }
        // A gradient that is already rounded is multiplied before it is rounded again.
        let scaled = |g: Tensor| {
            let dtype = accumulation_dtype("gradient", g.dtype())?;
            Ok::<_, Error>(g.to_dtype(dtype)?.broadcast_mul(&factor.to_dtype(dtype)?)?)
        };
        let scale = |gradient: Option<Tensor>| gradient.map(scaled).transpose();
        Ok(Gradients {
            contexts: scale(self.contexts)?,
            log_priors: scale(self.log_priors)?,
            weight: scale(self.weight)?,
            adapter: scale(self.adapter)?,
            bias: scale(self.bias)?,
        })
    }
}

/// Which operands depend on a variable.
pub(super) fn needs_grad(operands: &Operands) -> NeedsGrad {
    let tracked = |tensor: &Option<Tensor>| tensor.as_ref().is_some_and(Tensor::track_op);
    NeedsGrad {
        contexts: operands.contexts.track_op(),
        log_priors: tracked(&operands.log_priors),
        weight: operands.weight.track_op(),
        adapter: tracked(&operands.adapter),
        bias: tracked(&operands.bias),
    }
}
