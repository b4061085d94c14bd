//! The steps that are timed, on the same leaves: by this crate, and by ordinary candle operations.

use crate::composed::log_probs;
use candle_core::{DType, Device, Result, Tensor, Var};
use clap::ValueEnum;
use mos_head::parts::{LogitFunction, LowRankAdapter, Projection};
use mos_head::{
    ContextActivation, Head, LossOptions, Mixture, MixtureOfSoftmaxes, MixtureTensors, OutputLayer, SoftmaxHead,
};

/// The sizes of a training step.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) positions: usize,
    pub(crate) components: usize,
    /// The size of a context.
    pub(crate) context: usize,
    pub(crate) vocab: usize,
    /// The size of a hidden state.
    pub(crate) hidden: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Train {
    /// Hidden states and all parameters
    All,
    /// Hidden states and the projection, under a frozen decoder
    Hidden,
    /// The decoder, over frozen hidden states
    Decoder,
    /// Hidden states, the projection and a low-rank adapter of a frozen decoder
    Adapter,
}

/// The leaves of the computation.
pub(crate) struct Leaves {
    pub(crate) hidden: Var,
    pub(crate) prior_weight: Var,
    pub(crate) latent_weight: Var,
    pub(crate) latent_bias: Var,
    pub(crate) weight: Var,
    pub(crate) bias: Var,
    /// The first matrix of a low-rank adapter of the weight.
    pub(crate) lora_a: Var,
    pub(crate) lora_b: Var,
    pub(crate) targets: Tensor,
    pub(crate) logit_function: LogitFunction,
}

impl Leaves {
    /// Makes leaves of these sizes, and an adapter of this rank.
    pub(crate) fn new(sizes: Sizes, rank: usize, dtype: DType, device: &Device) -> Result<Self> {
        let Sizes { positions, components, context, vocab, hidden } = sizes;
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
            lora_a: leaf(&[rank, context], 0.02)?,
            lora_b: leaf(&[vocab, rank], 0.02)?,
            targets: Tensor::from_vec(ids, positions, device)?,
            logit_function: LogitFunction::Identity,
        })
    }

    /// Returns the leaves with another function of the logits.
    pub(crate) fn with_logit_function(self, logit_function: LogitFunction) -> Self {
        Leaves { logit_function, ..self }
    }
}

pub(crate) fn fused_step(
    leaves: &Leaves,
    components: usize,
    train: Train,
    options: &LossOptions,
) -> Result<Option<Tensor>> {
    let trained = |var: &Var, parts: &[Train]| {
        if parts.contains(&train) {
            var.as_tensor().clone()
        } else {
            var.as_detached_tensor()
        }
    };
    let below = |var: &Var| trained(var, &[Train::All, Train::Hidden, Train::Adapter]);
    let decoder = |var: &Var| trained(var, &[Train::All, Train::Decoder]);
    let adapter =
        || LowRankAdapter::from_tensors(leaves.lora_a.as_tensor().clone(), leaves.lora_b.as_tensor().clone(), 1.0);
    let adapter = if train == Train::Adapter { Some(adapter()?) } else { None };
    let weight = decoder(&leaves.weight);
    let head: Box<dyn OutputLayer> = match components {
        1 => adapted(SoftmaxHead::from_tensors(weight, None)?.with_logit_function(leaves.logit_function)?, adapter)?,
        _ => {
            let tensors = MixtureTensors {
                prior_weight: below(&leaves.prior_weight),
                prior_bias: None,
                latent_weight: below(&leaves.latent_weight),
                latent_bias: below(&leaves.latent_bias),
                decoder_weight: weight,
                decoder_bias: Some(decoder(&leaves.bias)),
            };
            let head = MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Tanh)?;
            adapted(head.with_logit_function(leaves.logit_function)?, adapter)?
        }
    };
    let loss = head.loss(&below(&leaves.hidden), &leaves.targets, options)?;
    if loss.value.track_op() {
        loss.backward()?;
    }
    Ok(Some(loss.value.detach()))
}

/// Returns the head with an adapter, if there is one.
fn adapted<P: Projection + 'static>(head: Head<P>, adapter: Option<LowRankAdapter>) -> Result<Box<dyn OutputLayer>> {
    Ok(match adapter {
        Some(adapter) => Box::new(head.with_adapter(adapter)?),
        None => Box::new(head),
    })
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

/// Returns the mixture of the leaves, all of them constants.
pub(crate) fn constant_mixture(leaves: &Leaves, components: usize) -> Result<Mixture> {
    let mixture = detached_mixture(leaves, components)?;
    let log_priors = mixture.log_priors()?.detach();
    let constant = Mixture::new(
        &mixture.contexts()?.detach(),
        Some(&log_priors).filter(|_| components > 1),
        &leaves.weight.detach(),
        if components == 1 { None } else { Some(leaves.bias.detach()) }.as_ref(),
    )?;
    Ok(constant.with_logit_function(leaves.logit_function)?)
}

/// Returns the mixture of the leaves, with contexts and log-priors that are variables themselves.
pub(crate) fn detached_mixture(leaves: &Leaves, components: usize) -> Result<Mixture> {
    let positions = leaves.hidden.dim(0)?;
    if components == 1 {
        let contexts = Var::from_tensor(&leaves.hidden.unsqueeze(1)?)?;
        return Ok(Mixture::new(&contexts, None, &leaves.weight, None)?.with_logit_function(leaves.logit_function)?);
    }
    let contexts = leaves.hidden.matmul(&leaves.latent_weight.t()?)?.tanh()?.reshape((positions, components, ()))?;
    let log_priors = candle_nn::ops::log_softmax(&leaves.hidden.matmul(&leaves.prior_weight.t()?)?, 1)?;
    let (contexts, log_priors) = (Var::from_tensor(&contexts)?, Var::from_tensor(&log_priors)?);
    let mixture = Mixture::new(&contexts, Some(&log_priors), &leaves.weight, Some(&leaves.bias))?;
    Ok(mixture.with_logit_function(leaves.logit_function)?)
}
