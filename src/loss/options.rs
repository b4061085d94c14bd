//! What is asked of a loss, the same of every head.

use candle_core::Tensor;

use crate::backend::contract::Terms;
use crate::error::Result;
use crate::validate::check_number;

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
    pub(crate) workspace_bytes: Option<usize>,
    pub(crate) terms: Terms,
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
            workspace_bytes: None,
            terms: Terms::default(),
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
        LossOptions { terms: Terms { label_smoothing: epsilon, ..self.terms }, ..self }
    }

    /// Adds this times `mean_k lse_k^2`, which keeps the logits' normalisers near zero (the z-loss of PaLM, Chowdhery et
    /// al., 2022, for every component).
    pub fn with_z_loss(self, coefficient: f64) -> Self {
        LossOptions { terms: Terms { z_loss: coefficient, ..self.terms }, ..self }
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
        LossOptions { terms: Terms { responsibility_filter: threshold, ..self.terms }, ..self }
    }

    /// Also counts the positions whose target is the most probable token id, [`Loss::hits`].
    pub fn with_hits(self, hits: bool) -> Self {
        LossOptions { terms: Terms { hits, ..self.terms }, ..self }
    }

    /// Whether these are the options of a training step: with gradients and dropout.
    pub fn is_training(&self) -> bool {
        self.train
    }

    /// How the losses of the positions become one value.
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// The target that counts for nothing.
    pub fn ignore_index(&self) -> Option<i64> {
        self.ignore_index
    }

    /// What the loss of each position is multiplied by.
    pub fn position_weights(&self) -> Option<&Tensor> {
        self.position_weights.as_ref()
    }

    /// What the log-probability of each token id is multiplied by.
    pub fn class_weights(&self) -> Option<&Tensor> {
        self.class_weights.as_ref()
    }

    /// The part of each target's mass that is spread over the vocabulary.
    pub fn label_smoothing(&self) -> f64 {
        self.terms.label_smoothing
    }

    /// The coefficient of the z-loss.
    pub fn z_loss(&self) -> f64 {
        self.terms.z_loss
    }

    /// The bytes that the workspace may use, unless the default is taken.
    pub fn workspace_bytes(&self) -> Option<usize> {
        self.workspace_bytes
    }

    /// The responsibility below which a component gets no gradient.
    pub fn responsibility_filter(&self) -> f64 {
        self.terms.responsibility_filter
    }

    /// Whether the right top-1 predictions are counted.
    pub fn hits(&self) -> bool {
        self.terms.hits
    }

    /// Checks the ranges of the numbers.
    pub(crate) fn validate(&self) -> Result<()> {
        let unit = 0.0..1.0;
        check_number(
            unit.contains(&self.terms.label_smoothing),
            "label_smoothing",
            "at least 0 and below 1",
            self.terms.label_smoothing,
        )?;
        check_number(
            unit.contains(&self.terms.responsibility_filter),
            "responsibility_filter",
            "at least 0 and below 1",
            self.terms.responsibility_filter,
        )?;
        check_number(
            self.terms.z_loss >= 0.0 && self.terms.z_loss.is_finite(),
            "z_loss",
            "a finite number, at least 0",
            self.terms.z_loss,
        )?;
        if self.terms.z_loss > 0.0 {
            // Every component's log-sum-exp has a gradient, whatever its responsibility.
            let expected = "0 with a z_loss";
            check_number(
                self.terms.responsibility_filter == 0.0,
                "responsibility_filter",
                expected,
                self.terms.responsibility_filter,
            )?;
        }
        Ok(())
    }
}
