//! The fused mixture: from contexts and log-priors to a loss or log-probabilities.
//!
//! ```text
//! log P(v) = logsumexp_k ( log pi_k + z_kv - logsumexp_u z_ku ),    z_k = W c_k + b    (Yang et al., 2018, eq. 3)
//! ```

mod node;
mod sample;
mod sampled_softmax;

use candle_core::{DType, Tensor, TensorId};

use crate::autograd::variables;
use crate::backend;
use crate::backend::contract::{
    accumulation_dtype, GradScale, NeedsGrad, Objective, Operands, Sizes, TargetLoss, Task,
};
use crate::backend::plan::Plan;
use crate::error::{Error, Result};
use crate::loss::{mask_ignored, mean, Loss, LossOptions, Reduction, Sampled, Unchecked};
use crate::validate::{
    check_alike, check_device, check_elements, check_logits, check_product, check_sizes, check_targets, check_vocab,
    check_weights,
};
use sample::{rows_of, Sample};
use sampled_softmax::small_loss;

/// A mixture of K softmaxes over one decoder at each position: the operation that every
/// [`MixtureLayer`](crate::MixtureLayer) reduces to.
///
/// ```text
/// P(v) = sum_k pi_k softmax(W c_k + b)_v
/// ```
///
/// Heads construct it from hidden states ([`MixtureLayer::mixture`](crate::MixtureLayer::mixture)); a model with its
/// own projection constructs it from contexts and priors. K = 1 is an ordinary softmax, whose loss is a fused linear
/// cross-entropy.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::{LossOptions, Mixture};
///
/// # fn main() -> mos_head::Result<()> {
/// let cpu = &Device::Cpu;
/// let contexts = Tensor::randn(0f32, 1., (5, 3, 8), cpu)?; // 5 positions, 3 components, d = 8
/// let log_priors = Tensor::full((1f32 / 3.).ln(), (5, 3), cpu)?;
/// let weight = Tensor::randn(0f32, 1., (100, 8), cpu)?; // 100 token ids
/// let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
///
/// let targets = Tensor::new(&[3u32, 14, 15, 92, 65], cpu)?;
/// let loss = mixture.loss(&targets, &LossOptions::default())?;
/// let log_probs = mixture.log_probs()?;
/// assert_eq!(log_probs.dims(), [5, 100]);
/// let nll = log_probs.gather(&targets.unsqueeze(1)?, 1)?.mean_all()?.neg()?;
/// assert!((nll.to_scalar::<f32>()? - loss.value.to_scalar::<f32>()?).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck. ICLR 2018, equation 3.
#[derive(Clone, Debug)]
pub struct Mixture {
    operands: Operands,
    /// The leading dimensions of the contexts, whose product is the number of positions.
    leading: Vec<usize>,
}

impl Mixture {
    /// The mixture of the softmaxes of these contexts.
    ///
    /// # Shapes
    ///
    /// - contexts: `[.., K, d]`, f16, bf16, f32 or f64
    /// - log_priors: `[.., K]`, log-probabilities, whose exponentials sum to one over K (this is not checked); `None` is
    ///   accepted if K = 1
    /// - weight: `[vocab, d]`, of the contexts' dtype; the transpose of a contiguous `[d, vocab]` is read in place (on
    ///   Metal it is copied)
    /// - bias: `[vocab]`
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not match, a dimension other than the number of positions is zero, a tensor has
    /// more than 2^40 elements, or there are more than 2^32 - 1 token ids.
    pub fn new(contexts: &Tensor, log_priors: Option<&Tensor>, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        // Before a copy is made.
        sizes(contexts, weight)?;
        let is_read_in_place = weight.is_contiguous() || weight.rank() == 2 && weight.t()?.is_contiguous();
        let weight = if is_read_in_place { weight.clone() } else { weight.contiguous()? };
        Self::of_rows(contexts, log_priors, weight, bias)
    }

    /// As [`Mixture::new`], with a weight of any layout, which only a loss over a sample may read.
    pub(crate) fn of_rows(
        contexts: &Tensor,
        log_priors: Option<&Tensor>,
        weight: Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let sizes = sizes(contexts, &weight)?;
        let Sizes { positions, components, context, vocab } = sizes;
        let leading = &contexts.dims()[..contexts.rank() - 2];
        let accumulation = accumulation_dtype("contexts", contexts.dtype())?;
        check_alike("weight", &weight, "contexts", contexts)?;
        let log_priors = match log_priors {
            None if components == 1 => None,
            None => return Err(Error::config("log_priors", "log-priors for more than one component", "none")),
            Some(log_priors) => {
                let expected = &contexts.dims()[..leading.len() + 1];
                if log_priors.dims() != expected {
                    return Err(Error::shape("log_priors", format!("{expected:?}"), log_priors.dims()));
                }
                check_device("log_priors", log_priors, contexts)?;
                accumulation_dtype("log_priors", log_priors.dtype())?;
                Some(log_priors.reshape((positions, components))?.to_dtype(accumulation)?.contiguous()?)
            }
        };
        let bias = match bias {
            None => None,
            Some(bias) => {
                if bias.dims() != [vocab] {
                    return Err(Error::shape("bias", format!("[{vocab}]"), bias.dims()));
                }
                check_device("bias", bias, contexts)?;
                accumulation_dtype("bias", bias.dtype())?;
                Some(bias.to_dtype(accumulation)?.contiguous()?)
            }
        };
        Ok(Mixture {
            leading: leading.to_vec(),
            operands: Operands {
                sizes,
                contexts: match contexts.rank() {
                    // Not even a reshape: candle would copy its gradient.
                    3 => contexts.contiguous()?,
                    _ => contexts.reshape((positions, components, context))?.contiguous()?,
                },
                log_priors,
                weight,
                bias,
                logit_scale: 1.0,
                softcap: None,
            },
        })
    }

    /// Bounds the logits softly: `z = cap tanh((c W^T + b) / cap)` (Gemma 2, 2024). It applies to every result of this
    /// mixture.
    ///
    /// # Errors
    ///
    /// If `cap` is not from 1e-30 to 1e30.
    pub fn with_softcap(self, cap: f64) -> Result<Self> {
        let logit_scale = self.operands.logit_scale;
        self.with_logits(logit_scale, Some(cap))
    }

    /// Multiplies the logits, before the softcap: `z = scale (c W^T + b)`, in f32 (f64 for f64) whatever the dtype.
    ///
    /// # Errors
    ///
    /// If `scale` is not from 1e-30 to 1e30.
    pub fn with_logit_scale(self, scale: f64) -> Result<Self> {
        let softcap = self.operands.softcap;
        self.with_logits(scale, softcap)
    }

    pub(crate) fn with_logits(mut self, logit_scale: f64, softcap: Option<f64>) -> Result<Self> {
        check_logits(logit_scale, softcap)?;
        (self.operands.logit_scale, self.operands.softcap) = (logit_scale, softcap);
        Ok(self)
    }

    /// The contexts, `[.., K, d]`.
    ///
    /// # Shapes
    ///
    /// - returns `[.., K, d]`
    ///
    /// # Errors
    ///
    /// If candle cannot reshape them.
    pub fn contexts(&self) -> Result<Tensor> {
        let Sizes { components, context, .. } = self.operands.sizes;
        Ok(self.operands.contexts.reshape([&self.leading[..], &[components, context]].concat())?)
    }

    /// The log-priors, `[.., K]`, in f32 (f64 for f64): the log-probability of each component at each position.
    ///
    /// # Shapes
    ///
    /// - returns `[.., K]`
    ///
    /// # Errors
    ///
    /// If candle cannot reshape them.
    pub fn log_priors(&self) -> Result<Tensor> {
        let Operands { sizes, log_priors, contexts, .. } = &self.operands;
        let shape = [&self.leading[..], &[sizes.components]].concat();
        match log_priors {
            Some(log_priors) => Ok(log_priors.reshape(shape)?),
            None => Ok(Tensor::zeros(shape, accumulation_dtype("contexts", contexts.dtype())?, contexts.device())?),
        }
    }

    /// The loss of the targets and, in the same three matrix products, the gradients of those of contexts, priors,
    /// weight and bias that depend on a variable. The logits of one chunk of positions are held at a time: see [`Plan`].
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If the shape or dtype of the targets is wrong, a target is not in the vocabulary, or an option is out of range.
    /// On a GPU a target that is not in the vocabulary makes its loss NaN instead, because reading it would wait for
    /// the device; [`Loss::sum_and_count`] waits and names it.
    ///
    /// # Numerics
    ///
    /// Computed in f32 (f64 for f64) for every dtype, in log space, without a floor under the probabilities. On CUDA
    /// the gradient of the logits is rounded to the dtype of the contexts, as an operand of the products. A target of
    /// probability zero has an infinite loss and, for K > 1, NaN gradients. With label smoothing, ids of probability
    /// zero make the loss infinite and are skipped in the gradient. NaN or plus infinity in the logits of a position, or
    /// minus infinity in all of them, makes the loss of that position NaN, and of no other, and with it the gradients.
    /// Log-priors that sum to more than one give a target more probability than one: its negative log-likelihood is
    /// then reported as zero, while the gradient remains the formula's. On the CPU, gradients of logits below 1e-30
    /// (f64: 1e-290) are flushed to zero: products with subnormal numbers are up to 20 times slower on some processors.
    pub fn loss(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let contexts = &self.operands.contexts;
        // The products of the CPU skip ignored rows, those of NCE do not.
        let skips = contexts.device().is_cpu() && !matches!(options.sampled_step(), Some(Sampled::Nce(_)));
        if skips || options.ignore_index.is_none() {
            return self.loss_of_masked(targets, options);
        }
        check_targets("targets", targets, &self.leading)?;
        check_device("targets", targets, contexts)?;
        let rows = contexts.flatten_from(1)?;
        let contexts = mask_ignored(&rows, &targets.flatten_all()?, options)?.reshape(contexts.shape())?;
        self.with_operands(Operands { contexts, ..self.operands.clone() }).loss_of_masked(targets, options)
    }

    /// The loss of a mixture whose contexts are masked at ignored positions, see [`mask_ignored`].
    pub(crate) fn loss_of_masked(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        options.validate()?;
        if let Some(sampled) = options.sampled_step() {
            return self.sampled_loss(|ids| rows_of(&self.operands.weight, ids), sampled, targets, options);
        }
        let objective = self.target_loss(targets, options)?;
        let loss = self.fused_loss(objective, options)?;
        let unchecked = (!targets.device().is_cpu()).then(|| Unchecked {
            targets: targets.clone(),
            ignore_index: options.ignore_index,
            vocab: self.operands.sizes.vocab,
        });
        Ok(Loss { unchecked, ..loss })
    }

    /// The loss of the fused operation, as a node of the graph.
    fn fused_loss(&self, objective: TargetLoss, options: &LossOptions) -> Result<Loss> {
        let operands = self.operands.clone();
        let needs_grad = if options.train { needs_grad(&operands) } else { NeedsGrad::default() };
        // Without a reduction, the upstream gradient is known only in the backward pass.
        let now = if options.reduction == Reduction::None { NeedsGrad::default() } else { needs_grad };
        // The backward pass must fit the budget too: a budget that is too small is an error before any work.
        backend::plan(&operands, Task::of(&objective, needs_grad), options.workspace_bytes)?;
        let plan = backend::plan(&operands, Task::of(&objective, now), options.workspace_bytes)?;
        let results = backend::loss(&operands, &Objective::Targets(objective.clone()), now, &plan)?;

        let value = match options.reduction {
            Reduction::Mean => mean(&results.sum, &results.count)?,
            Reduction::Sum => results.sum.clone(),
            Reduction::None => results.objective.reshape(self.leading.as_slice())?,
        };
        let value = match needs_grad.any() {
            true => {
                let known = now.any().then_some(results.gradients);
                let budget = options.workspace_bytes;
                node::attach_loss(value, operands, needs_grad, options.reduction, known, move |operands, upstream| {
                    let mut objective = objective.clone();
                    if let Some(upstream) = upstream {
                        objective.scale = GradScale::Upstream(upstream);
                    }
                    let plan = backend::plan(operands, Task::of(&objective, needs_grad), budget)?;
                    Ok(backend::loss(operands, &Objective::Targets(objective), needs_grad, &plan)?.gradients)
                })?
            }
            false => value,
        };
        let nll = results.nll.reshape(self.leading.as_slice())?;
        Ok(Loss {
            hits: results.hits,
            dropped_mass: results.dropped_mass,
            decoder: Some(self.operands.weight.clone()).filter(Tensor::is_variable),
            ..Loss::new(value, results.sum, results.count, nll)
        })
    }

    /// The loss of a training step over a sample of the vocabulary, with contexts masked at ignored positions; `rows` are
    /// those of the weight for some ids `[n]`.
    pub(crate) fn sampled_loss(
        &self,
        rows: impl Fn(&Tensor) -> Result<Tensor>,
        sampled: &Sampled,
        targets: &Tensor,
        options: &LossOptions,
    ) -> Result<Loss> {
        self.check_sampled(sampled, options)?;
        // All other arguments are checked here.
        self.target_loss(targets, options)?;
        let exact = options.exact();
        if self.operands.sizes.positions == 0 {
            return self.loss_of_masked(targets, &exact);
        }
        match sampled {
            Sampled::Softmax(negatives) => {
                let sample = Sample::new(&self.operands, rows, negatives, targets, options)?;
                let (operands, objective) = small_loss(&sample, options, grad_scale(options.reduction))?;
                let loss = self.with_operands(operands).fused_loss(objective, &exact)?;
                Ok(Loss { decoder_rows: sample.leaves, spared: self.spared(options), ..loss })
            }
            Sampled::Nce(negatives) => {
                let sample = Sample::new(&self.operands, rows, negatives, targets, options)?;
                let nll = sample.nce()?.reshape(self.leading.as_slice())?;
                let loss = Loss::from_nll("NCE", &nll, targets, &exact)?;
                Ok(Loss { decoder_rows: sample.leaves, spared: self.spared(options), ..loss })
            }
        }
    }

    /// The variables of the decoder, if a sampled loss has the gradients of its rows instead.
    fn spared(&self, options: &LossOptions) -> Vec<TensorId> {
        let decoder = [Some(&self.operands.weight), self.operands.bias.as_ref()];
        decoder.into_iter().flatten().filter(|_| options.decoder_rows).flat_map(variables).collect()
    }

    /// An error if the options or the mixture have what a loss over a sample does not support.
    fn check_sampled(&self, sampled: &Sampled, options: &LossOptions) -> Result<()> {
        let unsupported = ["label_smoothing", "z_loss", "hits", "responsibility_filter"];
        match sampled {
            Sampled::Softmax(_) => {
                options.reject("the sampled softmax", &unsupported)?;
                match self.operands.softcap {
                    Some(_) => Err(Error::Unsupported { option: "softcap", head: "the sampled softmax" }),
                    None => Ok(()),
                }
            }
            Sampled::Nce(_) => {
                options.reject("NCE", &unsupported)?;
                match self.operands.sizes.components {
                    1 => Ok(()),
                    _ => Err(Error::Unsupported { option: "nce", head: "a mixture of several softmaxes" }),
                }
            }
        }
    }

    /// Log-probabilities `[.., vocab]`, in the dtype of the contexts. Differentiable.
    ///
    /// # Shapes
    ///
    /// - returns `[.., vocab]`
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device.
    pub fn log_probs(&self) -> Result<Tensor> {
        self.log_probs_as(self.operands.contexts.dtype())
    }

    /// Log-probabilities `[.., vocab]` in another dtype: those of a half-precision mixture are not rounded if it is
    /// f32. Differentiable.
    ///
    /// # Shapes
    ///
    /// - returns `[.., vocab]`
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device, the dtype is none of f16, bf16, f32 and f64, or the result would have more
    /// than 2^40 elements.
    pub fn log_probs_as(&self, dtype: DType) -> Result<Tensor> {
        let operands = &self.operands;
        accumulation_dtype("dtype", dtype)?;
        check_product("positions * vocab", &[operands.sizes.positions, operands.sizes.vocab])?;
        let own = operands.contexts.dtype();
        let computed = if dtype == own { own } else { accumulation_dtype("contexts", own)? };
        let needs_grad = needs_grad(operands);
        let plan = backend::plan(operands, Task::log_probs(needs_grad), None)?;
        let mut log_probs = backend::log_probs(operands, computed, &plan)?;
        if needs_grad.any() {
            log_probs = node::attach_log_probs(log_probs, operands.clone(), needs_grad, plan)?;
        }
        Ok(log_probs.reshape([&self.leading[..], &[operands.sizes.vocab]].concat())?.to_dtype(dtype)?)
    }

    /// The log-probability `[..]` of a given token id at each position, f32 (f64 for heads in f64). Not differentiable;
    /// the differentiable form is [`Mixture::loss`] with [`Reduction::None`].
    ///
    /// # Shapes
    ///
    /// - tokens: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// As for the targets of [`Mixture::loss`].
    pub fn log_prob(&self, tokens: &Tensor) -> Result<Tensor> {
        check_targets("tokens", tokens, &self.leading)?;
        let options = LossOptions::evaluation().with_reduction(Reduction::None);
        // Not `neg`, which makes a minus zero.
        Ok(self.loss(tokens, &options)?.nll.affine(-1.0, 0.0)?)
    }

    pub(crate) fn operands(&self) -> &Operands {
        &self.operands
    }

    /// The leading dimensions.
    pub(crate) fn leading(&self) -> &[usize] {
        &self.leading
    }

    /// Another mixture for the same positions.
    pub(crate) fn with_operands(&self, operands: Operands) -> Self {
        Mixture { operands, leading: self.leading.clone() }
    }

    /// How [`Mixture::loss`] would split the work with these options.
    ///
    /// # Errors
    ///
    /// If an option is out of its range, or the budget cannot hold one position.
    pub fn plan(&self, options: &LossOptions) -> Result<Plan> {
        options.validate()?;
        let needs_grad = if options.train { needs_grad(&self.operands) } else { NeedsGrad::default() };
        let mut operands = self.operands.clone();
        let mut task = Task::loss(&options.terms, needs_grad);
        if let Some(Sampled::Softmax(negatives)) = options.sampled_step() {
            operands.sizes = sampled_softmax::sizes(operands.sizes, negatives);
            task.own_targets = true;
        }
        backend::plan(&operands, task, options.workspace_bytes)
    }

    /// The loss for the backend, shapes and dtypes checked.
    fn target_loss(&self, targets: &Tensor, options: &LossOptions) -> Result<TargetLoss> {
        let Operands { sizes, contexts, .. } = &self.operands;
        check_targets("targets", targets, &self.leading)?;
        check_device("targets", targets, contexts)?;
        let accumulation = accumulation_dtype("contexts", contexts.dtype())?;
        let weights = |argument, weights: &Option<Tensor>, dims: &[usize]| match weights {
            None => Ok(None),
            Some(weights) => {
                check_weights(argument, weights, dims, contexts)?;
                Ok::<_, Error>(Some(weights.flatten_all()?.to_dtype(accumulation)?.detach()))
            }
        };
        Ok(TargetLoss {
            targets: targets.flatten_all()?,
            ignore_index: options.ignore_index,
            position_weights: weights("position_weights", &options.position_weights, &self.leading)?,
            class_weights: weights("class_weights", &options.class_weights, &[sizes.vocab])?,
            terms: options.terms,
            scale: grad_scale(options.reduction),
            own_shifts: None,
        })
    }
}

/// The factor of the gradient of each position's weighted objective.
fn grad_scale(reduction: Reduction) -> GradScale {
    match reduction {
        Reduction::Mean => GradScale::OneOverCount,
        Reduction::Sum | Reduction::None => GradScale::One,
    }
}

/// The sizes of a mixture of these contexts `[.., K, d]` and this weight `[vocab, d]`, whose shapes are checked.
fn sizes(contexts: &Tensor, weight: &Tensor) -> Result<Sizes> {
    let &[ref leading @ .., components, context] = contexts.dims() else {
        return Err(Error::shape("contexts", "[.., components, context]", contexts.dims()));
    };
    let vocab = match *weight.dims() {
        [vocab, width] if width == context => vocab,
        _ => return Err(Error::shape("weight", format!("[vocab, {context}]"), weight.dims())),
    };
    check_elements("contexts", contexts.dims())?;
    check_elements("weight", weight.dims())?;
    check_sizes(&[("components", components), ("context", context)])?;
    check_vocab(vocab)?;
    Ok(Sizes { positions: check_elements("contexts", leading)?, components, context, vocab })
}

/// Which operands depend on a variable.
fn needs_grad(operands: &Operands) -> NeedsGrad {
    let tracked = |tensor: &Option<Tensor>| tensor.as_ref().is_some_and(Tensor::track_op);
    NeedsGrad {
        contexts: operands.contexts.track_op(),
        log_priors: tracked(&operands.log_priors),
        weight: operands.weight.track_op(),
        bias: tracked(&operands.bias),
    }
}
