//! The same formula from ordinary candle operations, differentiable by candle's autograd: what a user would write, with
//! every intermediate `[positions, K, vocab]` tensor. It sets the tolerances, and is the baseline of the benchmarks.
//!
//! Softmaxes are written out, because candle's fused ones drop gradients.

use candle_core::{DType, Device, Result, Tensor, D};
use mos_head::parts::LogitFunction;
use mos_head::{ContextActivation, Mixture, Reduction};

use super::case::{Head, Logits, Tensors};
use super::objective::Objective;

/// The operands that a head passes to the mixture.
#[derive(Debug)]
pub struct Operands {
    /// `[positions, K, d]`.
    pub contexts: Tensor,
    /// `[positions, K]`; `None` with one component.
    pub log_priors: Option<Tensor>,
    /// `[vocab, d]`.
    pub weight: Tensor,
    /// `[vocab]`.
    pub bias: Option<Tensor>,
}

impl Operands {
    /// Projects the hidden states of a case as `head` does.
    pub fn project(head: Head, tensors: &Tensors, activation: ContextActivation) -> Result<Self> {
        let weight = tensors["decoder.weight"].clone();
        let bias = tensors.get("decoder.bias").cloned();
        let d = weight.dim(1)?;
        if head == Head::Mixture {
            let contexts = &tensors["contexts"];
            let k = contexts.dim(D::Minus2)?;
            let log_priors = tensors.get("log_priors").map(|p| p.reshape(((), k)));
            return Ok(Self {
                contexts: contexts.reshape(((), k, d))?,
                log_priors: log_priors.transpose()?,
                weight,
                bias,
            });
        }
        let hidden = &tensors["hidden"];
        let hidden = hidden.reshape(((), hidden.dim(D::Minus1)?))?;
        if head == Head::Softmax {
            return Ok(Self { contexts: hidden.unsqueeze(1)?, log_priors: None, weight, bias });
        }
        let layer = |weight: &str, bias: &str| linear(&hidden, &tensors[weight], tensors.get(bias));
        let prior_logits = layer("prior.weight", "prior.bias")?;
        let log_priors = log_softmax(&prior_logits)?;
        let contexts = layer("latent.weight", "latent.bias")?;
        let contexts = contexts.reshape(((), log_priors.dim(1)?, d))?;
        let contexts = match activation {
            ContextActivation::Tanh => contexts.tanh()?,
            _ => contexts,
        };
        if head == Head::MixtureOfSoftmaxes {
            return Ok(Self { contexts, log_priors: Some(log_priors), weight, bias });
        }
        let priors = log_priors.exp()?.unsqueeze(2)?;
        Ok(Self { contexts: contexts.broadcast_mul(&priors)?.sum_keepdim(1)?, log_priors: None, weight, bias })
    }

    /// The logits `[positions, K, vocab]`.
    pub fn logits(&self, finish: Logits) -> Result<Tensor> {
        let (positions, k, d) = self.contexts.dims3()?;
        let flat = self.contexts.reshape((positions * k, d))?;
        let mut logits = linear(&flat, &self.weight, self.bias.as_ref())?;
        if finish.scale != 1.0 {
            logits = (logits * finish.scale)?;
        }
        logits = match finish.function {
            LogitFunction::Softcap(cap) => ((logits / cap)?.tanh()? * cap)?,
            // log sigma(z) is the log-softmax of z beside zero, at z.
            LogitFunction::Sigsoftmax => {
                let beside_zero = Tensor::stack(&[&logits, &logits.zeros_like()?], 2)?;
                (&logits + log_softmax(&beside_zero)?.narrow(2, 0, 1)?.squeeze(2)?)?
            }
            _ => logits,
        };
        logits.reshape((positions, k, ()))
    }

    /// The decoder's rows of these ids.
    pub fn only(self, ids: &Tensor) -> Result<Self> {
        let weight = self.weight.contiguous()?.index_select(ids, 0)?;
        let bias = self.bias.map(|bias| bias.index_select(ids, 0)).transpose()?;
        Ok(Self { weight, bias, ..self })
    }

    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let optional = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_dtype(dtype)).transpose();
        Ok(Self {
            contexts: self.contexts.to_dtype(dtype)?,
            log_priors: optional(&self.log_priors)?,
            weight: self.weight.to_dtype(dtype)?,
            bias: optional(&self.bias)?,
        })
    }

    /// The same mixture in the library.
    pub fn mixture(&self, finish: Logits) -> mos_head::Result<Mixture> {
        let mixture = Mixture::new(&self.contexts, self.log_priors.as_ref(), &self.weight, self.bias.as_ref())?;
        let mixture = mixture.with_logit_scale(finish.scale)?;
        mixture.with_logit_function(finish.function)
    }

    /// Log-probabilities `[positions, vocab]` and each component's log-sum-exp `[positions, K]`.
    pub fn log_probs(&self, finish: Logits) -> Result<(Tensor, Tensor)> {
        let logits = self.logits(finish)?;
        let lse = log_sum_exp(&logits)?;
        let components = logits.broadcast_sub(&lse.unsqueeze(2)?)?;
        let Some(log_priors) = &self.log_priors else {
            return Ok((components.squeeze(1)?, lse));
        };
        let joint = components.broadcast_add(&log_priors.unsqueeze(2)?)?;
        Ok((log_sum_exp(&joint.transpose(1, 2)?.contiguous()?)?, lse))
    }

    /// The value of `objective`, and the negative log-likelihood `[positions]` of each target.
    pub fn loss(&self, targets: &[i64], objective: &Objective, logits: Logits) -> Result<(Tensor, Tensor)> {
        let (log_probs, lse) = self.log_probs(logits)?;
        let (positions, vocab) = log_probs.dims2()?;
        let counted = |y: i64| objective.ignore_index != Some(y);
        let weight = |(t, &y): (usize, &i64)| objective.position_weight(t, y);
        let taus: Vec<f64> = targets.iter().enumerate().map(weight).collect();
        let class = |&y: &i64| if counted(y) { y as usize } else { 0 };
        let classes: Vec<usize> = targets.iter().map(class).collect();

        let constant = |values: Vec<f64>| {
            let length = values.len();
            Tensor::from_vec(values, length, &Device::Cpu)?.to_dtype(log_probs.dtype())?.to_device(log_probs.device())
        };
        let ids: Vec<u32> = classes.iter().map(|&y| y as u32).collect();
        let ids = Tensor::from_vec(ids, (positions, 1), log_probs.device())?;
        let nll = log_probs.gather(&ids, 1)?.squeeze(1)?.neg()?;
        let target_weight = |&y: &usize| (1.0 - objective.label_smoothing) * objective.class_weight(y);
        let mut each = (&nll * constant(classes.iter().map(target_weight).collect())?)?;
        if objective.label_smoothing != 0.0 {
            let class_weights = constant((0..vocab).map(|v| objective.class_weight(v)).collect())?;
            let all = log_probs.broadcast_mul(&class_weights)?.sum(1)?;
            each = (each - (all * (objective.label_smoothing / vocab as f64))?)?;
        }
        if objective.z_loss != 0.0 {
            each = (each + (lse.sqr()?.mean(1)? * objective.z_loss)?)?;
        }
        let count: f64 = taus.iter().zip(&classes).map(|(tau, &y)| tau * objective.class_weight(y)).sum();
        // Ignored positions are masked, not multiplied by zero, so that a NaN in one has no effect.
        let zero = each.zeros_like()?;
        let mask: Vec<u8> = targets.iter().map(|&y| u8::from(counted(y))).collect();
        let mask = Tensor::from_vec(mask, positions, log_probs.device())?;
        let each = mask.where_cond(&(each * constant(taus)?)?, &zero)?;
        let nll = mask.where_cond(&nll, &zero)?;
        let value = match objective.reduction {
            Reduction::None => each,
            Reduction::Mean if count == 0.0 => each.zeros_like()?.sum_all()?,
            Reduction::Mean => (each.sum_all()? / count)?,
            _ => each.sum_all()?,
        };
        Ok((value, nll))
    }
}

/// `x w^T + b`; candle's CPU has no product in `bf16`, so one is done in `f32` and rounded.
fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let product = if x.dtype() == DType::BF16 && x.device().is_cpu() {
        let (x, weight) = (x.to_dtype(DType::F32)?, weight.to_dtype(DType::F32)?);
        x.matmul(&weight.t()?)?.to_dtype(DType::BF16)?
    } else {
        x.matmul(&weight.t()?)?
    };
    bias.map_or(Ok(product.clone()), |b| product.broadcast_add(b))
}

/// The log-sum-exp over the last dimension, which is removed.
pub fn log_sum_exp(x: &Tensor) -> Result<Tensor> {
    let largest = x.max_keepdim(D::Minus1)?.detach();
    let sum = x.broadcast_sub(&largest)?.exp()?.sum(D::Minus1)?;
    sum.log()? + largest.squeeze(D::Minus1)?
}

/// The log-softmax over the last dimension.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    x.broadcast_sub(&log_sum_exp(x)?.unsqueeze(D::Minus1)?)
}
