//! The steps that are timed, on the same leaves: by this crate, and by ordinary candle operations.

use crate::composed::log_probs;
use candle_core::{DType, Device, Result, Tensor, Var};
use mos_head::{ContextActivation, LossOptions, Mixture, MixtureOfSoftmaxes, MixtureTensors, OutputLayer, SoftmaxHead};

/// The leaves of the computation.
pub(crate) struct Leaves {
    pub(crate) hidden: Var,
    pub(crate) prior_weight: Var,
    pub(crate) latent_weight: Var,
    pub(crate) latent_bias: Var,
    pub(crate) weight: Var,
    pub(crate) bias: Var,
    pub(crate) targets: Tensor,
}

impl Leaves {
    /// The leaves of the sizes (positions, K, d, vocab, hidden).
    pub(crate) fn new(
        (positions, components, context, vocab, hidden): (usize, usize, usize, usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let leaf = |dims: &[usize], scale: f64| {
            Var::from_tensor(&(Tensor::randn(0f32, 1., dims, device)? * scale)?.to_dtype(dtype)?)
        };
        let ids: Vec<u32> = (0..positions).map(|i| (i * 7919 % vocab) as u32).collect();
        let rows = components * context;
        Ok(Self {
            hidden: leaf(&[positions, hidden], 1.0)?,
            prior_weight: leaf(&[components, hidden], 0.05)?,
            latent_weight: leaf(&[if components > 1 { rows } else { 1 }, hidden], 0.05)?,
            latent_bias: leaf(&[rows], 0.05)?,
            weight: leaf(&[vocab, context], 0.06)?,
            bias: leaf(&[vocab], 0.01)?,
            targets: Tensor::from_vec(ids, positions, device)?,
        })
    }
}

pub(crate) fn fused_step(leaves: &Leaves, components: usize, options: &LossOptions) -> Result<Option<Tensor>> {
    let weight = leaves.weight.as_tensor().clone();
    let head: Box<dyn OutputLayer> = match components {
        1 => Box::new(SoftmaxHead::from_tensors(weight, None)?),
        _ => {
            let tensors = MixtureTensors {
                prior_weight: leaves.prior_weight.as_tensor().clone(),
                prior_bias: None,
                latent_weight: leaves.latent_weight.as_tensor().clone(),
                latent_bias: leaves.latent_bias.as_tensor().clone(),
                decoder_weight: weight,
                decoder_bias: Some(leaves.bias.as_tensor().clone()),
            };
            Box::new(MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Tanh)?)
        }
    };
    let loss = head.loss(&leaves.hidden, &leaves.targets, options)?;
    if loss.value.track_op() {
        loss.backward()?;
    }
    Ok(Some(loss.value.detach()))
}

pub(crate) fn composed_step(leaves: &Leaves, components: usize, forward_only: bool) -> Result<Option<Tensor>> {
    let positions = leaves.hidden.dim(0)?;
    let var = |var: &Var| if forward_only { var.detach() } else { var.as_tensor().clone() };
    let hidden = var(&leaves.hidden);
    let log_probs = match components {
        1 => log_probs(&hidden.unsqueeze(1)?, None, &var(&leaves.weight), None)?,
        _ => {
            let contexts = hidden.matmul(&var(&leaves.latent_weight).t()?)?;
            let contexts = contexts.broadcast_add(&var(&leaves.latent_bias))?.tanh()?;
            let contexts = contexts.reshape((positions, components, ()))?;
            let prior_logits = hidden.matmul(&var(&leaves.prior_weight).t()?)?;
            let log_priors = candle_nn::ops::log_softmax(&prior_logits, 1)?;
            log_probs(&contexts, Some(&log_priors), &var(&leaves.weight), Some(&var(&leaves.bias)))?
        }
    };
    let nll = log_probs.gather(&leaves.targets.unsqueeze(1)?, 1)?.mean_all()?.neg()?;
    if !forward_only {
        nll.backward()?;
    }
    Ok(Some(nll.detach()))
}

/// The mixture of the leaves, with contexts and log-priors that are variables themselves.
pub(crate) fn detached_mixture(leaves: &Leaves, components: usize) -> Result<Mixture> {
    let positions = leaves.hidden.dim(0)?;
    if components == 1 {
        let contexts = Var::from_tensor(&leaves.hidden.unsqueeze(1)?)?;
        return Ok(Mixture::new(&contexts, None, &leaves.weight, None)?);
    }
    let contexts = leaves.hidden.matmul(&leaves.latent_weight.t()?)?.tanh()?.reshape((positions, components, ()))?;
    let log_priors = candle_nn::ops::log_softmax(&leaves.hidden.matmul(&leaves.prior_weight.t()?)?, 1)?;
    let (contexts, log_priors) = (Var::from_tensor(&contexts)?, Var::from_tensor(&log_priors)?);
    Ok(Mixture::new(&contexts, Some(&log_priors), &leaves.weight, Some(&leaves.bias))?)
}
