//! The fused mixture, in which a head joins its projection and its decoder: from contexts and log-priors to a loss,
//! log-probabilities or scores.
//!
//! ```text
//! log P(v) = logsumexp_k ( log pi_k + z_kv - logsumexp_u z_ku ),    z_k = W c_k + b    (Yang et al., 2018, equation 3)
//! ```

mod distill;
mod logits;
mod loss;
mod mean_logit;
pub(crate) mod node;
mod sample;
mod sampled_softmax;
mod shard_loss;

use candle_core::Tensor;

use crate::backend::logit_function::{check_logits, LogitFunction};
use crate::backend::operands::{Operands, Sizes};
use crate::backend::weight::Weight;
use crate::error::{Error, Result};
use crate::loss::{LossOptions, Precision};
use crate::tensors::autograd::converted;
use crate::tensors::checks::{
    accumulation_dtype, check_alike, check_bias, check_device, check_elements, check_sizes, check_vocab, check_weights,
};
use crate::tensors::linear::as_matrix;
use crate::tensors::transfer;
pub(crate) use distill::{DistillLoss, Distillation};
pub use distill::{DistillOptions, MissingIds, Teacher};
pub(crate) use sample::Sample;

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
/// use mos_head::{Distributions, LossOptions, Mixture};
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
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, arXiv
/// 1711.03953, equation 3.
#[derive(Clone, Debug)]
pub struct Mixture {
    operands: Operands,
    /// The leading dimensions of the contexts, whose product is the number of positions.
    leading: Vec<usize>,
}

impl Mixture {
    /// Makes the mixture of the softmaxes of these contexts.
    ///
    /// # Shapes
    ///
    /// - contexts: `[.., K, d]`, f16, bf16, f32 or f64
    /// - log_priors: `[.., K]`, log-probabilities, whose exponentials sum to one over K (this is not checked); any of
    ///   these dtypes; `None` is accepted if K = 1
    /// - weight: `[vocab, d]`, of the contexts' dtype; the transpose of a contiguous `[d, vocab]` is read in place (on
    ///   Metal it is copied)
    /// - bias: `[vocab]`, any of these dtypes
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not match, a dimension other than the number of positions is zero, a tensor has
    /// more than 2^40 elements, or there are more than 2^32 - 1 token ids.
    pub fn new(contexts: &Tensor, log_priors: Option<&Tensor>, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        // The sizes are checked before the weight is copied.
        check_shapes(contexts, weight.dims())?;
        let is_read_in_place = weight.is_contiguous() || weight.rank() == 2 && weight.t()?.is_contiguous();
        let weight = if is_read_in_place { weight.clone() } else { weight.contiguous()? };
        accumulation_dtype("contexts", contexts.dtype())?;
        check_alike("weight", &weight, "contexts", contexts)?;
        Self::from_weight(contexts, log_priors, Weight::Dense(weight), bias)
    }

    /// Makes the mixture of a weight that has the dtype of the contexts, or is quantised: then the contexts are in f32.
    pub(crate) fn from_weight(
        contexts: &Tensor,
        log_priors: Option<&Tensor>,
        weight: Weight,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let sizes = check_shapes(contexts, weight.dims())?;
        let Sizes { positions, components, context_dim, vocab } = sizes;
        let leading = &contexts.dims()[..contexts.rank() - 2];
        let accumulation = accumulation_dtype("contexts", contexts.dtype())?;
        let log_priors = match log_priors {
            None if components == 1 => None,
            None => return Err(Error::config("log_priors", "log-priors for more than one component", "none")),
            Some(log_priors) => {
                check_weights("log_priors", log_priors, &contexts.dims()[..leading.len() + 1], contexts)?;
                Some(as_matrix(log_priors)?.to_dtype(accumulation)?.contiguous()?)
            }
        };
        let bias = match bias {
            None => None,
            Some(bias) => {
                check_bias("bias", bias, vocab)?;
                check_device("bias", bias, contexts)?;
                Some(converted(bias, accumulation)?.contiguous()?)
            }
        };
        Ok(Mixture {
            leading: leading.to_vec(),
            operands: Operands {
                sizes,
                contexts: match contexts.rank() {
                    // There is not even a reshape, because candle would copy its gradient.
                    3 => contexts.contiguous()?,
                    _ => contexts.reshape((positions, components, context_dim))?.contiguous()?,
                },
                source: None,
                log_priors,
                weight,
                adapter: None,
                bias,
                logit_scale: 1.0,
                precision: Precision::Full,
                logit_function: LogitFunction::Identity,
            },
        })
    }

    /// Bounds the logits of every result of this mixture softly: `z = cap tanh((c W^T + b) / cap)` (Gemma Team: Gemma
    /// 2: Improving Open Language Models at a Practical Size. 2024, arXiv 2408.00118).
    ///
    /// # Errors
    ///
    /// If `cap` is not from 1e-30 to 1e30.
    pub fn with_softcap(self, cap: f64) -> Result<Self> {
        self.with_logit_function(LogitFunction::Softcap(cap))
    }

    /// Sets the function of the logits of every result of this mixture.
    ///
    /// # Errors
    ///
    /// If the cap of a softcap is not from 1e-30 to 1e30.
    pub fn with_logit_function(self, function: LogitFunction) -> Result<Self> {
        let logit_scale = self.operands.logit_scale;
        self.with_logits(logit_scale, function)
    }

    /// Multiplies the logits, before their function: `z = scale (c W^T + b)`, in f32 (f64 for f64) for every dtype.
    ///
    /// # Errors
    ///
    /// If `scale` is not from 1e-30 to 1e30.
    pub fn with_logit_scale(self, scale: f64) -> Result<Self> {
        let function = self.operands.logit_function;
        self.with_logits(scale, function)
    }

    /// Sets the precision of the matrix products of every result of this mixture: log-probabilities, token ids, samples
    /// and losses. The default is [`Precision::Full`]; the options of a loss may reduce it for that loss
    /// ([`LossOptions::with_precision`]).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use mos_head::{Distributions, DropoutMasks, MixtureLayer, Precision, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight, None)?;
    /// let hidden = Tensor::randn(0f32, 1., (40, 8), &Device::Cpu)?; // 40 positions
    /// let mixture = head.mixture(&hidden, DropoutMasks::Off)?;
    /// let top = mixture.with_precision(Precision::Bf16Products).top_k(5)?;
    /// assert_eq!(top.token_ids.dims(), [40, 5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.operands.precision = precision;
        self
    }

    /// Returns the precision of a loss with these options: the lower of the mixture's and theirs.
    fn loss_precision(&self, options: &LossOptions) -> Precision {
        match options.precision {
            Precision::Full => self.operands.precision,
            reduced => reduced,
        }
    }

    /// Sets the scale and the function of the logits.
    pub(crate) fn with_logits(mut self, logit_scale: f64, function: LogitFunction) -> Result<Self> {
        check_logits(logit_scale, function)?;
        (self.operands.logit_scale, self.operands.logit_function) = (logit_scale, function);
        Ok(self)
    }

    /// Lets another tensor, which has the elements of the contexts in another shape, get their gradient.
    pub(crate) fn with_source(mut self, source: &Tensor) -> Self {
        self.operands.source = Some((self.operands.contexts.id(), source.clone()));
        self
    }

    /// Adds an adapter `[vocab, r]` to the decoder, as columns to the right of its weight. `adapter_contexts` makes the
    /// contexts `[rows, r]` that the adapter multiplies from the mixture's `[rows, d]`.
    pub(crate) fn with_adapter(
        self,
        adapter: &Tensor,
        adapter_contexts: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let Operands { sizes, contexts, .. } = self.operands.clone();
        check_alike("adapter", adapter, "contexts", &contexts)?;
        let rank = adapter.dim(1)?;
        let adapter_contexts = adapter_contexts(&contexts.flatten(0, 1)?)?;
        let adapter_contexts = adapter_contexts.reshape((sizes.positions, sizes.components, rank))?;
        let contexts = Tensor::cat(&[&contexts, &adapter_contexts], 2)?.contiguous()?;
        let sizes = Sizes { context_dim: sizes.context_dim + rank, ..sizes };
        let adapter = Some(adapter.contiguous()?);
        Ok(self.with_operands(Operands { sizes, contexts, adapter, ..self.operands.clone() }))
    }

    /// Returns the contexts, `[.., K, d]`.
    ///
    /// # Shapes
    ///
    /// - returns `[.., K, d]`
    ///
    /// # Errors
    ///
    /// If the device has no memory left for a copy.
    pub fn contexts(&self) -> Result<Tensor> {
        let Sizes { components, .. } = self.operands.sizes;
        let d = self.operands.adapter_columns()?.start;
        let contexts = self.operands.contexts.narrow(2, 0, d)?;
        Ok(contexts.reshape([&self.leading[..], &[components, d]].concat())?)
    }

    /// Returns the log-priors, `[.., K]`, in f32 (f64 for f64): the log-probability of each component at each position.
    ///
    /// # Shapes
    ///
    /// - returns `[.., K]`
    ///
    /// # Errors
    ///
    /// If the device has no memory left for a copy.
    pub fn log_priors(&self) -> Result<Tensor> {
        let Operands { sizes, log_priors, contexts, .. } = &self.operands;
        let shape = [&self.leading[..], &[sizes.components]].concat();
        match log_priors {
            Some(log_priors) => Ok(log_priors.reshape(shape)?),
            None => Ok(Tensor::zeros(shape, accumulation_dtype("contexts", contexts.dtype())?, contexts.device())?),
        }
    }

    /// Returns the mixture as a constant.
    pub(crate) fn detach(&self) -> Self {
        self.with_operands(self.operands.detach())
    }

    /// The tensors and sizes that the kernels read.
    pub(crate) fn operands(&self) -> &Operands {
        &self.operands
    }

    /// The leading dimensions of the contexts.
    pub(crate) fn leading(&self) -> &[usize] {
        &self.leading
    }

    /// Selects `n` of the positions, which are given in ascending order. The leading dimensions of the result are
    /// `[n]`. If all positions are selected, the contexts are not copied.
    pub(crate) fn with_positions(&self, positions: &[u32]) -> Result<Self> {
        let operands = &self.operands;
        if positions.len() == operands.sizes.positions {
            return Ok(Mixture { leading: vec![positions.len()], operands: operands.clone() });
        }
        let index = transfer::to_device(positions.to_vec(), positions.len(), operands.contexts.device())?;
        let select = |tensor: &Tensor| transfer::select_rows(tensor, &index);
        let log_priors = operands.log_priors.as_ref().map(select).transpose()?;
        let sizes = Sizes { positions: positions.len(), ..operands.sizes };
        let operands = Operands { sizes, contexts: select(&operands.contexts)?, log_priors, ..operands.clone() };
        Ok(Mixture { leading: vec![sizes.positions], operands })
    }

    /// Returns the softmax of each component at each position, as a position of its own: `[positions * K]`.
    pub(crate) fn component_softmaxes(&self) -> Result<Self> {
        let Sizes { positions, components, context_dim, .. } = self.operands.sizes;
        let sizes = Sizes { positions: positions * components, components: 1, ..self.operands.sizes };
        let contexts = self.operands.contexts.reshape((sizes.positions, 1, context_dim))?;
        let operands = Operands { sizes, contexts, log_priors: None, ..self.operands.clone() };
        Ok(Mixture { leading: vec![sizes.positions], operands })
    }

    /// Makes another mixture with the same leading dimensions from these operands.
    pub(crate) fn with_operands(&self, operands: Operands) -> Self {
        Mixture { operands, leading: self.leading.clone() }
    }
}

/// Checks the shapes of contexts `[.., K, d]` and weight `[vocab, d]`, and returns the sizes of their mixture.
fn check_shapes(contexts: &Tensor, weight: &[usize]) -> Result<Sizes> {
    let &[ref leading @ .., components, context_dim] = contexts.dims() else {
        return Err(Error::shape("contexts", "[.., components, context_dim]", contexts.dims()));
    };
    let vocab = match *weight {
        [vocab, width] if width == context_dim => vocab,
        _ => return Err(Error::shape("weight", format!("[vocab_size, {context_dim}]"), weight)),
    };
    check_elements("contexts", contexts.dims())?;
    check_elements("weight", weight)?;
    check_sizes(&[("components", components), ("context_dim", context_dim)])?;
    check_vocab(vocab)?;
    Ok(Sizes { positions: check_elements("contexts", leading)?, components, context_dim, vocab })
}
