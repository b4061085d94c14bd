//! What is asked of a loss, [`LossOptions`], and what it gives, [`Loss`]: the same for every head.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};

use crate::check::{check_number, read_ids};
use crate::{autograd, Result};

/// How the losses of the positions become one value.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{LossOptions, OutputLayer, Reduction, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?; // [batch, seq]
/// let loss = head.loss(&hidden, &targets, &LossOptions::new().with_reduction(Reduction::None))?;
/// assert_eq!(loss.value.dims(), [2, 3]); // each is the logarithm of 100
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reduction {
    /// Their weighted mean: the sum divided by [`Loss::count`]. Zero if no position counts, or the weights add up to exactly zero.
    ///
    /// Weights of both signs, such as advantages, have no mean: their sum may be close to zero or negative, which makes the
    /// value and its gradients huge or turns their sign. Use [`Reduction::Sum`] with them, divided by the number of positions.
    #[default]
    Mean,
    /// Their weighted sum.
    Sum,
    /// None: one loss per position. The gradients are then computed in the backward pass, when the upstream gradient is
    /// known, at the price of computing the logits twice. To weight positions, [`LossOptions::with_position_weights`] is cheaper.
    None,
}

/// Options of a loss. The default is a training step: mean over the positions, with gradients and dropout.
///
/// The objective of position t with target y, in nats, is
///
/// ```text
/// l_t = tau_t ( sum_v q_v (-log p(v)) + zeta mean_k lse_k^2 ),    q_v = c_v ((1 - epsilon) [v = y] + epsilon / V)
/// mean = sum_t l_t / sum_t tau_t c_{y_t}
/// ```
///
/// with position weights tau, class weights c, label smoothing epsilon, z-loss coefficient zeta, and `lse_k` the
/// log-sum-exp of component k's logits. The convention for c and epsilon is that of PyTorch's `cross_entropy`.
///
/// # Examples
///
/// ```
/// use mos_head::{LossOptions, Reduction};
///
/// let training = LossOptions::default().with_label_smoothing(0.1).with_ignore_index(-100);
/// let perplexity = LossOptions::evaluation().with_reduction(Reduction::Sum);
/// # let _ = (training, perplexity);
/// ```
#[derive(Clone, Debug)]
pub struct LossOptions {
    pub(crate) train: bool,
    pub(crate) reduction: Reduction,
    pub(crate) ignore_index: Option<i64>,
    pub(crate) position_weights: Option<Tensor>,
    pub(crate) class_weights: Option<Tensor>,
    pub(crate) label_smoothing: f64,
    pub(crate) z_loss: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) workspace_bytes: Option<usize>,
    pub(crate) responsibility_filter: f64,
    pub(crate) hits: bool,
}

impl Default for LossOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LossOptions {
    /// The options of a training step, the default.
    pub fn new() -> Self {
        LossOptions {
            train: true,
            reduction: Reduction::Mean,
            ignore_index: None,
            position_weights: None,
            class_weights: None,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: None,
            workspace_bytes: None,
            responsibility_filter: 0.0,
            hits: false,
        }
    }

    /// The options of an evaluation: no gradients, which saves two of the three products, and no dropout. The value is
    /// detached.
    pub fn evaluation() -> Self {
        LossOptions { train: false, ..Self::new() }
    }

    /// Sets how the losses of the positions become one value. The default is their mean.
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        LossOptions { reduction, ..self }
    }

    /// Positions with this target count for nothing, and get no gradient. It need not be a token id of the vocabulary.
    pub fn with_ignore_index(self, index: i64) -> Self {
        LossOptions { ignore_index: Some(index), ..self }
    }

    /// Multiplies the loss of each position: a tensor of the targets' shape. The weights get no gradient.
    pub fn with_position_weights(self, weights: Tensor) -> Self {
        LossOptions { position_weights: Some(weights), ..self }
    }

    /// Multiplies the log-probability of each token id: a tensor `[vocab]`. The weights get no gradient.
    pub fn with_class_weights(self, weights: Tensor) -> Self {
        LossOptions { class_weights: Some(weights), ..self }
    }

    /// Spreads this part of each target's mass evenly over the vocabulary (Szegedy et al., 2016), of the mixture's
    /// log-probabilities. At least 0 and below 1.
    pub fn with_label_smoothing(self, epsilon: f64) -> Self {
        LossOptions { label_smoothing: epsilon, ..self }
    }

    /// Adds this times `mean_k lse_k^2`, which keeps the logits' normalisers near zero (the z-loss of PaLM, Chowdhery et
    /// al., 2022, for every component).
    pub fn with_z_loss(self, coefficient: f64) -> Self {
        LossOptions { z_loss: coefficient, ..self }
    }

    /// Bounds the logits softly: `z <- cap tanh(z / cap)`, after the bias (Gemma 2, 2024).
    pub fn with_softcap(self, cap: f64) -> Self {
        LossOptions { softcap: Some(cap), ..self }
    }

    /// The bytes that the workspace may use; see [`Plan`](crate::Plan). The default is 32 MiB, or what the logits of 480
    /// rows (positions times components) need, whichever is larger: with fewer, each chunk's pass over the decoder and its
    /// gradient takes noticeable time (on a GPU: what 512 rows need, or 32 MiB of logits, but at most 256 MiB; on Metal
    /// twice that, since candle rounds what it allocates up to a power of two). Gradients are
    /// not part of it.
    pub fn with_workspace_bytes(self, bytes: usize) -> Self {
        LossOptions { workspace_bytes: Some(bytes), ..self }
    }

    /// Leaves out the gradients of contexts and decoder from components whose responsibility for the target is below this
    /// threshold, which saves their share of two of the three products. Off (0) by default: with it, these gradients are
    /// approximate, and [`Loss::dropped_mass`] says by how much. The gradient of the priors stays exact. Where weights are
    /// negative, their sizes are compared. It does not go together with a z-loss, of which every component has a gradient. On
    /// a GPU each chunk waits for the device once, to know how many rows are left.
    pub fn with_responsibility_filter(self, threshold: f64) -> Self {
        LossOptions { responsibility_filter: threshold, ..self }
    }

    /// Also counts the positions whose target is the most probable token id, [`Loss::hits`].
    pub fn with_hits(self, hits: bool) -> Self {
        LossOptions { hits, ..self }
    }

    /// Checks the ranges of the numbers.
    pub(crate) fn validate(&self) -> Result<()> {
        let unit = 0.0..1.0;
        check_number(
            unit.contains(&self.label_smoothing),
            "label_smoothing",
            "at least 0 and below 1",
            self.label_smoothing,
        )?;
        check_number(
            unit.contains(&self.responsibility_filter),
            "responsibility_filter",
            "at least 0 and below 1",
            self.responsibility_filter,
        )?;
        check_number(
            self.z_loss >= 0.0 && self.z_loss.is_finite(),
            "z_loss",
            "a finite number, at least 0",
            self.z_loss,
        )?;
        if self.z_loss > 0.0 {
            // Every component's log-sum-exp has a gradient, whatever its responsibility.
            let expected = "0 with a z_loss";
            check_number(
                self.responsibility_filter == 0.0,
                "responsibility_filter",
                expected,
                self.responsibility_filter,
            )?;
        }
        if let Some(cap) = self.softcap {
            check_number(cap > 0.0 && cap.is_finite(), "softcap", "a finite number above 0", cap)?;
        }
        Ok(())
    }
}

/// The results of a loss, all of one pass. Tensors, so that reading them is the caller's choice: `f32`, or `f64` for heads
/// in `f64`.
///
/// # Examples
///
/// Two batches whose gradients add up to those of one batch of both:
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use mos_head::{LossOptions, OutputLayer, Reduction, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
/// let options = LossOptions::new().with_reduction(Reduction::Sum).with_ignore_index(0);
/// let (mut gradient, mut sum, mut count) = (weight.zeros_like()?, 0.0, 0.0);
/// for targets in [[1u32, 2, 0], [3, 0, 0]] {
///     let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
///     let loss = head.loss(&hidden, &Tensor::new(&targets, &Device::Cpu)?, &options)?;
///     if let Some(part) = loss.backward()?.get(&weight) {
///         gradient = (gradient + part)?;
///     }
///     let (sum_of_batch, count_of_batch) = loss.sum_and_count()?;
///     sum += sum_of_batch;
///     count += count_of_batch;
/// }
/// let mean_gradient = (gradient / count)?;
/// println!("{} nats per position, of {count} positions", sum / count);
/// # assert_eq!((mean_gradient.dims(), count), (&[100, 8][..], 3.0));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loss {
    /// The differentiable value: a scalar, or of the targets' shape for [`Reduction::None`].
    pub value: Tensor,
    /// Scalar: the weighted sum of the objective over the positions. With `count`, what gradient accumulation over several
    /// batches needs to normalise right. Detached, as all that follows.
    pub sum: Tensor,
    /// Scalar: the denominator of the mean; the number of positions that count, if there are no weights.
    pub count: Tensor,
    /// Of the targets' shape: the negative log-likelihood `-log p(y)` of each position in nats, without weights, smoothing or
    /// z-loss; zero where the target is ignored.
    pub nll: Tensor,
    /// Scalar: how many positions had their target as the most probable token id, if asked for ([`LossOptions::with_hits`]).
    pub hits: Option<Tensor>,
    /// Scalar: the share of the gradient's mass (the size of responsibility times weight) that the filter dropped, if there is
    /// one; from 0 to 1.
    pub dropped_mass: Option<Tensor>,
    /// The decoder's weight, if that is a variable.
    pub(crate) decoder: Option<Tensor>,
    /// What the targets are to be checked against, where that has not been done.
    pub(crate) unchecked: Option<Unchecked>,
}

/// Targets that were not looked at, because that would have meant to wait for a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Unchecked {
    pub(crate) targets: Tensor,
    pub(crate) ignore_index: Option<i64>,
    pub(crate) vocab: usize,
}

impl Loss {
    /// The gradients of the value with respect to every variable that it depends on: those of `loss.value.backward()`, with
    /// one copy less of the decoder's, which is the largest.
    ///
    /// # Errors
    ///
    /// If candle cannot compute them.
    pub fn backward(&self) -> Result<GradStore> {
        autograd::backward(&self.value, self.decoder.as_ref())
    }

    /// `sum` and `count` as numbers, in one transfer; waits for the device.
    ///
    /// # Errors
    ///
    /// On a GPU, where the loss itself does not look at the targets: if the sum is NaN because of a target that is not in the
    /// vocabulary. The error names the first of them.
    pub fn sum_and_count(&self) -> Result<(f64, f64)> {
        let numbers = Tensor::stack(&[&self.sum, &self.count], 0)?.to_device(&Device::Cpu)?;
        let numbers = numbers.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        let (sum, count) = (numbers[0], numbers[1]);
        if let Some(Unchecked { targets, ignore_index, vocab }) = self.unchecked.as_ref().filter(|_| sum.is_nan()) {
            read_ids(targets, *ignore_index, *vocab)?;
        }
        Ok((sum, count))
    }
}

/// `values` `[.., n]` with zeros where the target is ignored, if any is: whatever stands there, a NaN too, is to reach no
/// gradient. On a GPU, where to look would be to wait, wherever there is an index to ignore.
pub(crate) fn mask_ignored(values: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> Result<Tensor> {
    let Some(index) = ignore_index.filter(|_| values.elem_count() > 0) else { return Ok(values.clone()) };
    let ignored = targets.to_dtype(DType::I64)?.eq(index)?;
    if ignored.device().is_cpu() && ignored.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0 {
        return Ok(values.clone());
    }
    let ignored = ignored.unsqueeze(values.rank() - 1)?.broadcast_as(values.shape())?;
    Ok(ignored.where_cond(&values.zeros_like()?, values)?)
}
