//! The node of a mixture's loss, log-probabilities, scores or mean logits in candle's graph.
//!
//! candle's custom operations take three operands. Those of a mixture are the contexts, the decoder's weight, and one
//! that stands for the log-priors, the adapter and the bias (`tensors/joined.rs`).

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};

use crate::backend;
use crate::backend::objective::{Gradients, Objective, Scored};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::Planned;
use crate::error::{Error, Result};
use crate::loss::Reduction;
use crate::tensors::autograd::{attach, is_root};
use crate::tensors::checks::{accumulation_dtype, check_number};
use crate::tensors::joined::join;

/// The gradients of a value, if they are known before the backward pass.
pub(super) struct KnownGradients {
    pub(super) gradients: Gradients,
    /// Whether the weight's gradient contains the gradients of earlier losses.
    pub(super) is_sum: bool,
}

/// Computes the gradients of a mixture's operands, from the upstream gradient of each position if there is no
/// reduction.
pub(super) type ComputeGradients = dyn Fn(&Planned, Option<Tensor>) -> Result<Gradients> + Send + Sync;

/// Makes the `value` of a loss a node whose operands are the mixture's. `known` are the gradients of the value, if they
/// are known already: the first backward pass takes them, and a second one calls `compute`, which computes them again.
/// If there is no reduction, `compute` gets the upstream gradient of each position.
pub(super) fn attach_loss(
    value: Tensor,
    planned: Planned,
    reduction: Reduction,
    known: Option<KnownGradients>,
    compute: Box<ComputeGradients>,
) -> Result<Tensor> {
    let known = Mutex::new(known);
    let gradients = move |planned: &Planned, value: &Tensor, upstream: &Tensor| {
        let known = known.lock().ok().and_then(|mut known| known.take());
        // An upstream gradient for each position becomes part of the objective; one for all of them remains a factor.
        let (position_upstream, factor) = match reduction {
            Reduction::None => {
                let upstream = upstream.flatten_all()?;
                (Some(upstream.to_dtype(accumulation_dtype("upstream", upstream.dtype())?)?), None)
            }
            _ => (None, Some(upstream.clone()).filter(|_| !is_root(value))),
        };
        let Some(KnownGradients { gradients, is_sum }) = known else {
            return compute(planned, position_upstream)?.scaled_by(factor);
        };
        if let Some(factor) = factor.as_ref().filter(|_| is_sum) {
            // The factor is converted on the host, because Metal has no f64.
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
    };
    attach_mixture(value, planned, Box::new(gradients))
}

/// Makes `log_probs` a node whose operands are the mixture's. They have the shape that a caller sees, because candle
/// would copy the gradient of another node that changes the shape.
pub(crate) fn attach_log_probs(log_probs: Tensor, planned: Planned) -> Result<Tensor> {
    let gradients = move |planned: &Planned, _: &Tensor, upstream: &Tensor| {
        let accumulation = accumulation_dtype("contexts", planned.operands.contexts.dtype())?;
        let Sizes { positions, vocab, .. } = planned.operands.sizes;
        let upstream = upstream.to_dtype(accumulation)?.contiguous()?.reshape((positions, vocab))?;
        Ok(backend::loss(planned, &Objective::LogProbs { upstream })?.gradients)
    };
    attach_mixture(log_probs, planned, Box::new(gradients))
}

/// Makes `scores`, `[positions, n + 3]`, a node whose operands are the mixture's.
pub(crate) fn attach_scores(scores: Tensor, planned: Planned, scored: Scored) -> Result<Tensor> {
    let gradients = move |planned: &Planned, _: &Tensor, upstream: &Tensor| {
        let objective = Objective::from_score_upstream(scored.clone(), upstream.contiguous()?);
        Ok(backend::loss(planned, &objective)?.gradients)
    };
    attach_mixture(scores, planned, Box::new(gradients))
}

/// Computes the gradients of detached operands from the value of a node and its gradient.
type MixtureGradients = dyn Fn(&Planned, &Tensor, &Tensor) -> Result<Gradients> + Send + Sync;

/// Makes `value` a node whose operands are the mixture's. `gradients` computes their gradients from the detached
/// operands, the value and the upstream gradient.
fn attach_mixture(value: Tensor, planned: Planned, gradients: Box<MixtureGradients>) -> Result<Tensor> {
    let (operands, needs_grad) = (planned.operands.clone(), planned.needs_grad);
    // The operands are detached, because the node must not keep their graph alive.
    let planned = planned.detach();
    attach_operands(value, &operands, needs_grad, move |value, upstream| gradients(&planned, value, upstream))
}

/// Makes `value` a node whose operands are a mixture's. `gradients` computes their gradients from the value and the
/// upstream gradient; it must not keep the operands' graph alive.
pub(super) fn attach_operands(
    value: Tensor,
    operands: &Operands,
    needs_grad: NeedsGrad,
    gradients: impl Fn(&Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    let Operands { contexts, weight, log_priors, adapter, bias, .. } = operands;
    // An operand that needs no gradient must not appear in the GradStore.
    let trained = [
        log_priors.as_ref().filter(|_| needs_grad.log_priors),
        adapter.as_ref().filter(|_| needs_grad.adapter),
        bias.as_ref().filter(|_| needs_grad.bias),
    ];
    let trained_dtypes = trained.map(|operand| operand.map(Tensor::dtype));
    let (joined, joined_gradients) = join("operands of the mixture", trained, contexts)?;
    let source = operands.contexts_source().clone();
    let weight = weight.dense();
    let (shape, dtype, weight_dtype) = (source.shape().clone(), source.dtype(), weight.map(Tensor::dtype));
    let graph_operands = [Some(&source), joined.as_ref(), weight];
    attach("mixture", value, graph_operands, move |_, value, upstream| {
        let gradients = gradients(value, upstream)?;
        // The gradients are rounded after they are multiplied by the upstream gradient (those in bf16 often before, too):
        // a loss scale then saves small gradients in f16.
        let round = |gradient: Option<Tensor>, dtype: Option<DType>| {
            // candle's GPU backends do not convert empty tensors.
            let round = |(g, dtype): (Tensor, DType)| match g.elem_count() {
                0 => Ok(Tensor::zeros(g.dims(), dtype, g.device())?),
                _ => backend::rounded(g, dtype),
            };
            gradient.zip(dtype).map(round).transpose()
        };
        let [log_priors, adapter, bias] = trained_dtypes;
        let joined_gradient = joined_gradients.leave([
            round(gradients.log_priors, log_priors)?,
            round(gradients.adapter, adapter)?,
            round(gradients.bias, bias)?,
        ]);
        let contexts_gradient =
            round(gradients.contexts, Some(dtype))?.map(|gradient| gradient.reshape(&shape)).transpose()?;
        Ok([contexts_gradient, joined_gradient, round(gradients.weight, weight_dtype)?])
    })
}

impl Gradients {
    /// Multiplies the gradients by a factor, a scalar, if there is one.
    fn scaled_by(self, factor: Option<Tensor>) -> Result<Self> {
        let Some(factor) = factor else { return Ok(self) };
        // Reading the factor is free on the CPU; on a GPU it would wait.
        if factor.device().is_cpu() && factor.to_dtype(DType::F64)?.to_scalar::<f64>()? == 1.0 {
            return Ok(self);
        }
        // A gradient in half precision is multiplied in f32, before it is rounded again.
        let multiply = |g: Tensor| {
            let dtype = accumulation_dtype("gradient", g.dtype())?;
            Ok::<_, Error>(g.to_dtype(dtype)?.broadcast_mul(&factor.to_dtype(dtype)?)?)
        };
        let scale = |gradient: Option<Tensor>| gradient.map(multiply).transpose();
        Ok(Gradients {
            contexts: scale(self.contexts)?,
            log_priors: scale(self.log_priors)?,
            weight: scale(self.weight)?,
            adapter: scale(self.adapter)?,
            bias: scale(self.bias)?,
        })
    }
}

/// Returns which operands need a gradient: those that depend on a variable.
pub(crate) fn needs_grad(operands: &Operands) -> NeedsGrad {
    let is_tracked = |tensor: &Option<Tensor>| tensor.as_ref().is_some_and(Tensor::track_op);
    NeedsGrad {
        contexts: operands.contexts.track_op(),
        log_priors: is_tracked(&operands.log_priors),
        weight: operands.weight.track_op(),
        adapter: is_tracked(&operands.adapter),
        bias: is_tracked(&operands.bias),
    }
}
