//! The formula composed of ordinary candle operations, differentiable by candle's autograd: what a user would write,
//! with every intermediate `[positions, K, vocab]` tensor. Softmaxes are written out, because candle's fused ones drop
//! gradients.

use candle_core::{DType, Result, Tensor, D};

/// Computes log-probabilities `[positions, vocab]` of contexts `[positions, K, d]` and log-priors `[positions, K]`,
/// which are `None` with one component.
pub(crate) fn log_probs(
    contexts: &Tensor,
    log_priors: Option<&Tensor>,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (positions, k, d) = contexts.dims3()?;
    let mut logits = product(&contexts.reshape((positions * k, d))?, weight)?;
    if let Some(bias) = bias {
        logits = logits.broadcast_add(bias)?;
    }
    let components = logits.broadcast_sub(&log_sum_exp(&logits)?.unsqueeze(1)?)?.reshape((positions, k, ()))?;
    match log_priors {
        None => components.squeeze(1),
        Some(log_priors) => {
            let joint = components.broadcast_add(&log_priors.unsqueeze(2)?)?;
            log_sum_exp(&joint.transpose(1, 2)?.contiguous()?)
        }
    }
}

/// Multiplies matrices. candle multiplies bf16 matrices on the CPU slowly or not at all, so that they are multiplied in
/// f32.
fn product(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if x.dtype() == DType::BF16 && x.device().is_cpu() {
        x.to_dtype(DType::F32)?.matmul(&weight.to_dtype(DType::F32)?.t()?)?.to_dtype(DType::BF16)
    } else {
        x.matmul(&weight.t()?)
    }
}

/// Returns the log-sum-exp over the last dimension, which is removed.
fn log_sum_exp(x: &Tensor) -> Result<Tensor> {
    let largest = x.max_keepdim(D::Minus1)?.detach();
    let sum = x.broadcast_sub(&largest)?.exp()?.sum(D::Minus1)?;
    sum.log()? + largest.squeeze(D::Minus1)?
}
