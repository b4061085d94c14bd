//! The options of a loss, the same for every head.

use candle_core::{DType, Device, Tensor};

use super::negatives::Negatives;
use crate::backend::contract::Terms;
use crate::dropout::Dropout;
use crate::error::{Error, Result};
use crate::validate::{check_device, check_number, check_targets, leading};

/// The reduction of the losses of the positions to one value.
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
    /// The weighted mean: the sum divided by [`Loss::count`](crate::Loss::count). Zero if the weights sum to zero.
    ///
    /// Do not use it with weights of both signs, such as advantages: their sum may be close to zero, or negative, which
    /// makes value and gradients huge, or flips their sign. Use [`Reduction::Sum`] and divide by the number of
    /// positions.
    #[default]
    Mean,
    /// The weighted sum.
    Sum,
    /// One loss per position. The gradients are computed in the backward pass, when the upstream gradient is known, and
    /// the logits are computed twice. To weight positions, [`LossOptions::with_position_weights`] is cheaper.
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
    dropout: Dropout,
    pub(crate) reduction: Reduction,
    pub(crate) ignore_index: Option<i64>,
    pub(crate) position_weights: Option<Tensor>,
    pub(crate) class_weights: Option<Tensor>,
    pub(crate) workspace_bytes: Option<usize>,
    pub(crate) terms: Terms,
    pub(crate) sampled: Option<Sampled>,
    pub(crate) decoder_rows: bool,
}

/// A loss that looks at a sample of the vocabulary.
#[derive(Clone, Debug)]
pub(crate) enum Sampled {
    Softmax(Negatives),
    Nce(Negatives),
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
            dropout: Dropout::Random,
            reduction: Reduction::Mean,
            ignore_index: None,
            position_weights: None,
            class_weights: None,
            workspace_bytes: None,
            terms: Terms::default(),
            sampled: None,
            decoder_rows: false,
        }
    }

    /// The options of an evaluation: no gradients, which saves two of the three products, and no dropout. The value is
    /// detached.
    pub fn evaluation() -> Self {
        LossOptions { train: false, dropout: Dropout::Off, ..Self::new() }
    }

    /// Sets the dropout of the head. The default is [`Dropout::Random`] for a training step and [`Dropout::Off`] for an
    /// evaluation. [`Dropout::Seeded`] makes a step repeatable; use a different seed for each step.
    pub fn with_dropout(self, dropout: Dropout) -> Self {
        LossOptions { dropout, ..self }
    }

    /// Sets the reduction. The default is the mean.
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        LossOptions { reduction, ..self }
    }

    /// Ignores positions with this target: no loss and no gradient, whatever their hidden state holds, NaN included.
    /// The index need not be in the vocabulary. (A weight of zero removes a position from the loss, but not a NaN from
    /// the gradient of a projection.)
    pub fn with_ignore_index(self, index: i64) -> Self {
        LossOptions { ignore_index: Some(index), ..self }
    }

    /// Multiplies the loss of each position by a weight: a tensor of the targets' shape. The weights get no gradient.
    ///
    /// # Shapes
    ///
    /// - weights: `[..]`, that of the targets; a float type
    pub fn with_position_weights(self, weights: Tensor) -> Self {
        LossOptions { position_weights: Some(weights), ..self }
    }

    /// Multiplies the log-probability of each token id by a weight: a tensor `[vocab]`. The weights get no gradient.
    ///
    /// # Shapes
    ///
    /// - weights: `[vocab]`; a float type
    pub fn with_class_weights(self, weights: Tensor) -> Self {
        LossOptions { class_weights: Some(weights), ..self }
    }

    /// Spreads this fraction of each target's mass evenly over the vocabulary (Szegedy et al., 2016). At least 0 and
    /// below 1. It applies to the log-probabilities of the mixture, not of each component.
    pub fn with_label_smoothing(self, epsilon: f64) -> Self {
        LossOptions { terms: Terms { label_smoothing: epsilon, ..self.terms }, ..self }
    }

    /// Adds `coefficient * mean_k lse_k^2`, which keeps the normalisers of the logits near zero: the z-loss of PaLM
    /// (Chowdhery et al., 2022), for every component.
    pub fn with_z_loss(self, coefficient: f64) -> Self {
        LossOptions { terms: Terms { z_loss: coefficient, ..self.terms }, ..self }
    }

    /// Sets the budget of the workspace in bytes; see [`Plan`](crate::Plan). Gradients are not part of it. On the CPU a budget
    /// that is too small for all threads is for fewer.
    ///
    /// The default holds 32 MiB or 480 rows of logits (positions times components), whichever is larger: with fewer
    /// rows, the pass of each chunk over the decoder and its gradient takes noticeable time. On a GPU it holds 32 MiB
    /// of logits or 1024 rows (Metal: 512), whichever is larger, and is at most 1 GiB (Metal: 512 MiB, of which half
    /// may be unused, because candle rounds allocations up to a power of two).
    pub fn with_workspace_bytes(self, bytes: usize) -> Self {
        LossOptions { workspace_bytes: Some(bytes), ..self }
    }

    /// Skips the gradients of contexts and decoder for components whose responsibility for the target is below this
    /// threshold, which saves their share of two of the three products. The default, 0, is off.
    ///
    /// These gradients are then approximate; [`Loss::dropped_mass`](crate::Loss::dropped_mass) reports by how much. The
    /// gradient of the priors stays exact. Negative weights are compared by magnitude. It cannot be combined with a
    /// z-loss, which every component has a gradient of. On a GPU each chunk waits for the device once, to read the
    /// number of remaining rows.
    pub fn with_responsibility_filter(self, threshold: f64) -> Self {
        LossOptions { terms: Terms { responsibility_filter: threshold, ..self.terms }, ..self }
    }

    /// Also counts the positions whose target is the most probable token id, [`Loss::hits`](crate::Loss::hits).
    pub fn with_hits(self, hits: bool) -> Self {
        LossOptions { terms: Terms { hits, ..self.terms }, ..self }
    }

    /// Normalises over a sample of the vocabulary: the negatives, which all positions share, and the position's own
    /// target (Jean et al., 2015). With the counts that are expected of an id y in the draws, `E[count]`, the loss is
    ///
    /// ```text
    /// -log sum_k pi_k exp(z'_ky) / sum_{v in {y} + negatives other than y} exp(z'_kv),    z' = z - log E[count]
    /// ```
    ///
    /// as in TensorFlow's `sampled_softmax_loss`, for every component of a mixture. Only the decoder's rows of negatives
    /// and targets are read. Draw new negatives for each step.
    ///
    /// An evaluation is exact, whatever the negatives. [`Loss::nll`](crate::Loss::nll) of a training step is that of the
    /// sample. It cannot be combined with label smoothing, z-loss, hits, a responsibility filter or a softcap. The targets
    /// are read on the host: on a GPU this waits for the device.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::{LossOptions, OutputLayer, Proposal, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 1., (1000, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let proposal = Proposal::log_uniform(1000)?;
    /// for step in 0..2 {
    ///     let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    ///     let targets = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    ///     let options = LossOptions::new().with_sampled_softmax(proposal.draw(64, step)?);
    ///     let gradients = head.loss(&hidden, &targets, &options)?.backward()?;
    ///     # assert!(gradients.get(&weight).is_some());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_sampled_softmax(self, negatives: Negatives) -> Self {
        LossOptions { sampled: Some(Sampled::Softmax(negatives)), ..self }
    }

    /// Noise-contrastive estimation (Mnih & Teh, 2012), with normalisers of one: tells the target from the negatives by
    /// one logistic regression each, whatever the others are. With `z'` as above, the loss is
    ///
    /// ```text
    /// -log sigmoid(z'_y) - sum_{v in negatives} log(1 - sigmoid(z'_v))
    /// ```
    ///
    /// For one softmax; a mixture of several is [`Error::Unsupported`](crate::Error::Unsupported). An evaluation is
    /// exact: its probabilities are normalised. [`Loss::nll`](crate::Loss::nll) of a training step is this loss. It
    /// cannot be combined with label smoothing, z-loss, hits or a responsibility filter. The targets are read on the
    /// host: on a GPU this waits for the device. Memory: a few tensors of `[positions, negatives]`.
    pub fn with_nce(self, negatives: Negatives) -> Self {
        LossOptions { sampled: Some(Sampled::Nce(negatives)), ..self }
    }

    /// Returns the decoder's rows that a sampled loss reads as variables,
    /// [`Loss::decoder_rows`](crate::Loss::decoder_rows), in place of a gradient of the whole decoder, which is mostly
    /// zeros. No gradient reaches the decoder's own variables then; those of a tied embedding have that of their use as
    /// inputs alone. For a training step with a sample.
    pub fn with_decoder_rows(self, decoder_rows: bool) -> Self {
        LossOptions { decoder_rows, ..self }
    }

    /// Whether these are the options of a training step, with gradients.
    pub fn is_training(&self) -> bool {
        self.train
    }

    /// The dropout of the head: the argument of [`MixtureLayer::mixture`](crate::MixtureLayer::mixture).
    pub fn dropout(&self) -> Dropout {
        self.dropout
    }

    /// The reduction.
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// The ignored target.
    pub fn ignore_index(&self) -> Option<i64> {
        self.ignore_index
    }

    /// The weights of the positions.
    pub fn position_weights(&self) -> Option<&Tensor> {
        self.position_weights.as_ref()
    }

    /// The weights of the token ids.
    pub fn class_weights(&self) -> Option<&Tensor> {
        self.class_weights.as_ref()
    }

    /// The fraction of each target's mass that is spread over the vocabulary.
    pub fn label_smoothing(&self) -> f64 {
        self.terms.label_smoothing
    }

    /// The coefficient of the z-loss.
    pub fn z_loss(&self) -> f64 {
        self.terms.z_loss
    }

    /// The budget of the workspace in bytes, if it is not the default.
    pub fn workspace_bytes(&self) -> Option<usize> {
        self.workspace_bytes
    }

    /// The responsibility below which the gradient of a component is skipped.
    pub fn responsibility_filter(&self) -> f64 {
        self.terms.responsibility_filter
    }

    /// The negatives of a sampled loss.
    pub fn negatives(&self) -> Option<&Negatives> {
        self.sampled.as_ref().map(|(Sampled::Softmax(negatives) | Sampled::Nce(negatives))| negatives)
    }

    /// Whether a sampled loss returns the decoder's rows.
    pub fn decoder_rows(&self) -> bool {
        self.decoder_rows
    }

    /// Whether correct top-1 predictions are counted.
    pub fn hits(&self) -> bool {
        self.terms.hits
    }

    /// Hidden states `[.., hidden]` with zeros at ignored positions, and targets `[..]` (i64) with id 0 there: what a
    /// head of your own computes its loss from, so that nothing at an ignored position, NaN included, reaches a
    /// gradient. Pass the original targets to [`Loss::from_nll`](crate::Loss::from_nll).
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - targets: `[..]`; u8, u32 or i64
    /// - returns `[.., hidden]` and `[..]`, i64
    ///
    /// # Errors
    ///
    /// If `targets` do not have the leading dimensions of `hidden`, an integer dtype and its device.
    pub fn mask_ignored(&self, hidden: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((self.mask_hidden(hidden, targets)?, self.target_ids(targets)?))
    }

    /// The hidden states of [`LossOptions::mask_ignored`], with its checks.
    pub(crate) fn mask_hidden(&self, hidden: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_targets("targets", targets, leading(hidden)?)?;
        check_device("targets", targets, hidden)?;
        super::mask_ignored(hidden, targets, self)
    }

    /// Where targets are ignored (u8); `None` if none is, or, on a GPU, where reading them would wait, if no index is.
    pub(super) fn ignored(&self, targets: &Tensor) -> Result<Option<Tensor>> {
        let Some(index) = self.ignore_index.filter(|_| targets.elem_count() > 0) else { return Ok(None) };
        let ignored = targets.to_dtype(DType::I64)?.eq(index)?;
        match ignored.device().is_cpu() && ignored.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0 {
            true => Ok(None),
            false => Ok(Some(ignored)),
        }
    }

    /// Targets as i64, with id 0 in place of ignored ones.
    pub(super) fn target_ids(&self, targets: &Tensor) -> Result<Tensor> {
        let ids = if targets.elem_count() == 0 { targets.clone() } else { targets.to_dtype(DType::I64)? };
        match self.ignored(targets)? {
            Some(ignored) => Ok(ignored.where_cond(&ids.zeros_like()?, &ids)?),
            None => Ok(ids),
        }
    }

    /// The weight of each position, that of its target included; zero where there is none. Waits for the weights' device.
    pub(crate) fn weights_of(&self, targets: &[Option<usize>]) -> Result<Vec<f64>> {
        let read = |weights: &Option<Tensor>| match weights {
            None => Ok(None),
            Some(weights) => {
                let weights = weights.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
                Ok::<_, Error>(Some(weights.to_vec1::<f64>()?))
            }
        };
        let (of_positions, of_classes) = (read(&self.position_weights)?, read(&self.class_weights)?);
        let weight = |(position, target): (usize, &Option<usize>)| {
            let Some(id) = *target else { return 0.0 };
            of_positions.as_ref().map_or(1.0, |weights| weights[position])
                * of_classes.as_ref().map_or(1.0, |weights| weights[id])
        };
        Ok(targets.iter().enumerate().map(weight).collect())
    }

    /// The sampled loss of a training step; an evaluation is exact.
    pub(crate) fn sampled_step(&self) -> Option<&Sampled> {
        self.sampled.as_ref().filter(|_| self.train)
    }

    /// The options without a sample.
    pub(crate) fn exact(&self) -> Self {
        LossOptions { sampled: None, decoder_rows: false, ..self.clone() }
    }

    /// An error that names `head` if the options need more than the negative log-likelihoods of the targets.
    pub(crate) fn require_nll_only(&self, head: &'static str) -> Result<()> {
        self.reject(head, &["label_smoothing", "z_loss", "responsibility_filter", "hits", "sampled_softmax", "nce"])
    }

    /// An error if one of these options is set, which `head` does not support.
    pub(crate) fn reject(&self, head: &'static str, options: &[&'static str]) -> Result<()> {
        let Terms { label_smoothing, z_loss, responsibility_filter, hits } = self.terms;
        let is_set = |option: &str| match option {
            "label_smoothing" => label_smoothing > 0.0,
            "z_loss" => z_loss > 0.0,
            "responsibility_filter" => responsibility_filter > 0.0,
            "hits" => hits,
            "sampled_softmax" => matches!(self.sampled_step(), Some(Sampled::Softmax(_))),
            "nce" => matches!(self.sampled_step(), Some(Sampled::Nce(_))),
            _ => false,
        };
        match options.iter().find(|option| is_set(option)) {
            Some(option) => Err(Error::Unsupported { option, head }),
            None => Ok(()),
        }
    }

    /// Checks the ranges of the numbers.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.decoder_rows && self.train && self.sampled.is_none() {
            return Err(Error::config("decoder_rows", "a sampled loss", "none"));
        }
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
            // The z-loss has a gradient in every component, whatever its responsibility.
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
