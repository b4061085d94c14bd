//! Contexts and log-priors become a loss, log-probabilities, or the most probable token id: the fused mixture.
//!
//! ```text
//! log P(v) = logsumexp_k ( log pi_k + z_kv - logsumexp_u z_ku ),    z_k = W c_k + b        (Yang et al., 2018, equation 3)
//! ```

mod autograd;

use candle_core::{DType, Tensor};

use crate::backend::plan::{Plan, Sizes};
use crate::backend::{self, accumulation_dtype, Objective, Operands, Task, Wanted};
use crate::check::{check_alike, check_device, check_sizes};
use crate::loss::{mask_ignored, Loss, LossOptions, Reduction, Unchecked};
use crate::{Error, Result};

/// A mixture of K softmaxes over one decoder, for each of some positions: what every head reduces to.
///
/// ```text
/// P(v) = sum_k pi_k softmax(W c_k + b)_v
/// ```
///
/// The heads make one of these from hidden states ([`OutputLayer::mixture`](crate::OutputLayer::mixture)); a model with a
/// projection of its own can make one from its contexts and priors. K = 1 is an ordinary softmax, and its loss is a fused
/// linear cross-entropy.
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
    /// A mixture of the softmaxes of some contexts.
    ///
    /// # Shapes
    ///
    /// - contexts: `[.., K, d]`, f16, bf16, f32 or f64
    /// - log_priors: `[.., K]`, log-probabilities; may be left out if K = 1
    /// - weight: `[vocab, d]`, of the contexts' dtype
    /// - bias: `[vocab]`
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not fit each other, or a dimension other than the number of positions is zero.
    pub fn new(contexts: &Tensor, log_priors: Option<&Tensor>, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let [leading @ .., components, context] = contexts.dims() else {
            return Err(Error::shape("contexts", "[.., components, context]", contexts.dims()));
        };
        let (components, context) = (*components, *context);
        let &[vocab, width] = weight.dims() else {
            return Err(Error::shape("weight", format!("[vocab, {context}]"), weight.dims()));
        };
        if width != context {
            return Err(Error::shape("weight", format!("[vocab, {context}]"), weight.dims()));
        }
        check_sizes(&[("components", components), ("context", context), ("vocab", vocab)])?;
        let accumulation = accumulation_dtype("contexts", contexts.dtype())?;
        check_alike("weight", weight, "contexts", contexts)?;
        let positions = leading.iter().product();
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
                sizes: Sizes { positions, components, context, vocab },
                contexts: contexts.reshape((positions, components, context))?.contiguous()?,
                log_priors,
                weight: weight.contiguous()?,
                bias,
                softcap: None,
            },
        })
    }

    /// Bounds the logits softly, `z <- cap tanh(z / cap)`, in all that is computed of this mixture.
    ///
    /// # Errors
    ///
    /// If `cap` is not a finite number above zero.
    pub fn with_softcap(mut self, cap: f64) -> Result<Self> {
        LossOptions::new().with_softcap(cap).validate()?;
        self.operands.softcap = Some(cap);
        Ok(self)
    }

    /// The loss of the targets, and, in the same three matrix products, the gradients of contexts, priors, weight and bias,
    /// as far as each depends on a variable. `[positions, K, vocab]` is never held: see [`Plan`].
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If the targets' shape or dtype is wrong, a target is not in the vocabulary, or an option is out of its range. On a GPU
    /// a target that is not in the vocabulary makes its loss NaN instead: to look at it would mean to wait.
    /// [`Loss::sum_and_count`] waits, and names it.
    ///
    /// # Numerics
    ///
    /// Computed in f32 (f64 for f64) whatever the dtype of the tensors (on CUDA the gradient of the logits is rounded to that
    /// dtype, as an operand of the products), in log space throughout: there is no floor under the
    /// probabilities. A target of probability zero has loss infinity, and for K > 1 gradients that are NaN. NaN or plus
    /// infinity in a position's logits makes that position's loss NaN, and no other's.
    pub fn loss(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let contexts = &self.operands.contexts;
        // The CPU's products leave these rows out.
        if contexts.device().is_cpu() || options.ignore_index.is_none() || targets.dims() != self.leading {
            return self.loss_of_masked(targets, options);
        }
        let rows = contexts.flatten_from(1)?;
        let contexts = mask_ignored(&rows, &targets.flatten_all()?, options.ignore_index)?.reshape(contexts.shape())?;
        self.with_operands(Operands { contexts, ..self.operands.clone() }).loss_of_masked(targets, options)
    }

    /// The loss, where nothing undefined stands in the contexts of ignored positions.
    pub(crate) fn loss_of_masked(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        options.validate()?;
        let objective = self.objective(targets, options)?;
        let mut operands = self.operands.clone();
        operands.softcap = options.softcap.or(operands.softcap);
        let wanted = if options.train { wanted(&operands) } else { Wanted::default() };
        // Without a reduction, the gradient from upstream is known only in the backward pass.
        let now = if options.reduction == Reduction::None { Wanted::default() } else { wanted };
        // The backward pass must fit the budget too, and a budget that is too small is reported before any work.
        backend::plan(&operands, Task::loss(options, wanted), options.workspace_bytes)?;
        let plan = backend::plan(&operands, Task::loss(options, now), options.workspace_bytes)?;
        let outcome = backend::loss(&operands, &objective, now, &plan)?;

        let value = match options.reduction {
            Reduction::Mean => mean(&outcome.sum, &outcome.count)?,
            Reduction::Sum => outcome.sum.clone(),
            Reduction::None => outcome.objective.reshape(self.leading.as_slice())?,
        };
        let value = match wanted.any() {
            true => {
                let gradients = now.any().then_some(outcome.gradients);
                autograd::attach_loss(value, operands, objective, wanted, gradients)?
            }
            false => value,
        };
        Ok(Loss {
            value,
            sum: outcome.sum,
            count: outcome.count,
            nll: outcome.nll.reshape(self.leading.as_slice())?,
            hits: outcome.hits,
            dropped_mass: outcome.dropped_mass,
            decoder: Some(self.operands.weight.clone()).filter(Tensor::is_variable),
            unchecked: (!targets.device().is_cpu()).then(|| Unchecked {
                targets: targets.clone(),
                ignore_index: options.ignore_index,
                vocab: self.operands.sizes.vocab,
            }),
        })
    }

    /// Log-probabilities `[.., vocab]` of all token ids, of the contexts' dtype. Differentiable.
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device.
    pub fn log_probs(&self) -> Result<Tensor> {
        let operands = &self.operands;
        let wanted = wanted(operands);
        let plan = backend::plan(operands, Task::log_probs(wanted), None)?;
        let mut log_probs = backend::log_probs(operands, &plan)?;
        if wanted.any() {
            log_probs = autograd::attach_log_probs(log_probs, operands.clone(), wanted, plan)?;
        }
        Ok(log_probs.reshape([&self.leading[..], &[operands.sizes.vocab]].concat())?)
    }

    /// The most probable token id of each position, `[..]`, u32: of equals the one with the lowest id; of a distribution that is
    /// not one (NaN), the first NaN.
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device.
    pub fn argmax(&self) -> Result<Tensor> {
        let plan = backend::plan(&self.operands, Task::log_probs(Wanted::default()), None)?;
        Ok(backend::argmax(&self.operands, &plan)?.reshape(self.leading.as_slice())?)
    }

    /// The log-probability `[..]` of a given token id for each position, f32 (f64 for heads in f64). Not differentiable: that is
    /// [`Mixture::loss`] with [`Reduction::None`].
    ///
    /// # Shapes
    ///
    /// - token ids: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// As for the targets of [`Mixture::loss`].
    pub fn log_prob(&self, ids: &Tensor) -> Result<Tensor> {
        let options = LossOptions::evaluation().with_reduction(Reduction::None);
        // Not `neg`, which makes a minus zero.
        Ok(self.loss(ids, &options)?.nll.affine(-1.0, 0.0)?)
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

    /// How [`Mixture::loss`] with these options would be computed.
    ///
    /// # Errors
    ///
    /// If an option is out of its range, or the budget cannot hold one position.
    pub fn plan(&self, options: &LossOptions) -> Result<Plan> {
        options.validate()?;
        let wanted = if options.train { wanted(&self.operands) } else { Wanted::default() };
        backend::plan(&self.operands, Task::loss(options, wanted), options.workspace_bytes)
    }

    /// Checks the shapes and dtypes of what is to be learned.
    fn objective(&self, targets: &Tensor, options: &LossOptions) -> Result<Objective> {
        let Operands { sizes, contexts, .. } = &self.operands;
        if targets.dims() != self.leading {
            return Err(Error::shape("targets", format!("{:?}", self.leading), targets.dims()));
        }
        if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
            let expected = "u8, u32 or i64".into();
            return Err(Error::DType { argument: "targets", expected, got: targets.dtype() });
        }
        check_device("targets", targets, contexts)?;
        let accumulation = accumulation_dtype("contexts", contexts.dtype())?;
        let weights = |argument, weights: &Option<Tensor>, dims: &[usize]| match weights {
            None => Ok(None),
            Some(weights) if weights.dims() != dims => Err(Error::shape(argument, format!("{dims:?}"), weights.dims())),
            Some(weights) => {
                check_device(argument, weights, contexts)?;
                accumulation_dtype(argument, weights.dtype())?;
                Ok(Some(weights.flatten_all()?.to_dtype(accumulation)?.detach()))
            }
        };
        Ok(Objective::Targets {
            targets: targets.flatten_all()?,
            position_weights: weights("position_weights", &options.position_weights, &self.leading)?,
            class_weights: weights("class_weights", &options.class_weights, &[sizes.vocab])?,
            options: LossOptions { position_weights: None, class_weights: None, ..options.clone() },
            upstream: None,
        })
    }
}

/// Which operands depend on a variable.
fn wanted(operands: &Operands) -> Wanted {
    let tracked = |tensor: &Option<Tensor>| tensor.as_ref().is_some_and(Tensor::track_op);
    Wanted {
        contexts: operands.contexts.track_op(),
        log_priors: tracked(&operands.log_priors),
        weight: operands.weight.track_op(),
        bias: tracked(&operands.bias),
    }
}

/// `sum / count`, or zero if nothing counts; without reading either.
fn mean(sum: &Tensor, count: &Tensor) -> Result<Tensor> {
    let nothing = count.eq(0f64)?;
    let divisor = nothing.where_cond(&count.ones_like()?, count)?;
    Ok(nothing.where_cond(&sum.zeros_like()?, &(sum / divisor)?)?)
}
