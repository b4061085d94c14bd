//! The options of a loss, the same for every head.

use candle_core::Tensor;

use super::gradient_sum::GradientSum;
use super::negatives::Negatives;
use super::positions::{PositionOptions, Reduction};
use crate::backend::objective::LossTerms;
use crate::backend::operands::Precision;
use crate::error::{Error, OptionName, Result};
use crate::tensors::checks::check_number;
use crate::tensors::dropout::DropoutMasks;

/// Options of a loss. The default is a training step: the mean over the positions, with gradients and dropout.
///
/// The objective of position t with target y, in nats, is
///
/// ```text
/// l_t = tau_t ( sum_v q_v (-log p(v)) + zeta mean_k lse_k^2 ),    q_v = c_v ((1 - epsilon) [v = y] + epsilon / V)
/// mean = sum_t l_t / sum_t tau_t c_{y_t}
/// ```
///
/// with position weights tau, class weights c, label smoothing epsilon, z-loss coefficient zeta, and the log-sum-exp
/// `lse_k` of component k's logits. PyTorch's `cross_entropy` has the same convention for c and epsilon.
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
///
/// # References
///
/// - label smoothing: Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: Rethinking the Inception Architecture for Computer
///   Vision. CVPR 2016, arXiv 1512.00567.
/// - z-loss: Chowdhery et al.: PaLM: Scaling Language Modeling with Pathways. 2022, arXiv 2204.02311.
/// - sampled softmax: Jean, Cho, Memisevic, Bengio: On Using Very Large Target Vocabulary for Neural Machine
///   Translation. ACL 2015, arXiv 1412.2007.
/// - noise-contrastive estimation: Mnih, Teh: A Fast and Simple Algorithm for Training Neural Probabilistic Language
///   Models. ICML 2012, arXiv 1206.6426.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LossOptions {
    /// Whether this is a training step, with gradients. The default of [`LossOptions::new`] is true.
    pub train: bool,
    /// The dropout of the head. The default is [`DropoutMasks::Random`] for a training step and [`DropoutMasks::Off`]
    /// for an evaluation.
    pub dropout: DropoutMasks,
    /// Which positions count, with which weights and denominator. The default is the mean over all positions.
    pub positions: PositionOptions,
    /// The gradients of earlier losses, to which the decoder's are added. The default is none.
    pub gradient_sum: Option<GradientSum>,
    /// The weights of the token ids, `[vocab]`. The default is one for each.
    pub class_weights: Option<Tensor>,
    /// The fraction of each target's mass that is spread over the vocabulary. The default is 0.
    pub label_smoothing: f64,
    /// The coefficient of the z-loss. The default is 0.
    pub z_loss: f64,
    /// Whether correct positions are told and counted. The default is false.
    pub correct: bool,
    /// The sample of the vocabulary that a training step looks at. The default is none.
    pub sampled: Option<SampledLoss>,
    /// Whether a sampled loss returns the decoder's rows as variables. The default is false.
    pub decoder_rows: bool,
    /// The precision of the matrix products. The default is [`Precision::Full`].
    pub precision: Precision,
    /// The budget of the workspace in bytes. By default the device decides: see [`LossOptions::with_workspace_bytes`].
    pub workspace_bytes: Option<usize>,
}

/// A loss that looks at a sample of the vocabulary in a training step.
///
/// # Examples
///
/// ```
/// use mos_head::sampled::{NoiseDistribution, SampledLoss};
/// use mos_head::LossOptions;
///
/// # fn main() -> mos_head::Result<()> {
/// let negatives = NoiseDistribution::log_uniform(1000)?.draw(64, 42)?;
/// let options = LossOptions::new().with_sampled_softmax(negatives);
/// let Some(SampledLoss::Softmax(negatives)) = &options.sampled else { panic!("a sampled softmax") };
/// assert_eq!(negatives.token_ids().len(), 64);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SampledLoss {
    /// The sampled softmax, [`LossOptions::with_sampled_softmax`].
    Softmax(Negatives),
    /// Noise-contrastive estimation, [`LossOptions::with_nce`].
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
            dropout: DropoutMasks::Random,
            positions: PositionOptions::default(),
            gradient_sum: None,
            class_weights: None,
            label_smoothing: 0.0,
            z_loss: 0.0,
            correct: false,
            sampled: None,
            decoder_rows: false,
            precision: Precision::Full,
            workspace_bytes: None,
        }
    }

    /// The options of an evaluation, without dropout and without gradients, which saves two of the three products. The
    /// value is detached.
    pub fn evaluation() -> Self {
        LossOptions { train: false, dropout: DropoutMasks::Off, ..Self::new() }
    }

    /// Sets the dropout of the head. The default is [`DropoutMasks::Random`] for a training step and
    /// [`DropoutMasks::Off`] for an evaluation. [`DropoutMasks::Seeded`] makes a step repeatable; use a different seed
    /// for each step.
    pub fn with_dropout(self, dropout: DropoutMasks) -> Self {
        LossOptions { dropout, ..self }
    }

    /// Sets the reduction. The default is the mean.
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        LossOptions { positions: PositionOptions { reduction, ..self.positions }, ..self }
    }

    /// Divides the sum by this number in place of [`Loss::count`](crate::Loss::count), with [`Reduction::Mean`]. If
    /// several batches share one optimizer step, it is the number of targets of all of them (or the sum of their
    /// weights). It must be above 0.
    pub fn with_denominator(self, denominator: f64) -> Self {
        LossOptions { positions: PositionOptions { denominator: Some(denominator), ..self.positions }, ..self }
    }

    /// Adds the gradient of the decoder, the largest, to the one in `sum` while it is computed, so that several batches
    /// need memory for one. See [`GradientSum`].
    pub fn with_gradient_sum(self, sum: &GradientSum) -> Self {
        LossOptions { gradient_sum: Some(sum.clone()), ..self }
    }

    /// Ignores positions with this target: they add neither a loss nor a gradient, even if their hidden state is NaN.
    /// The index need not be in the vocabulary. (A weight of zero removes a position from the loss, but not a NaN from
    /// the gradient of a projection.)
    pub fn with_ignore_index(self, index: i64) -> Self {
        LossOptions { positions: PositionOptions { ignore_index: Some(index), ..self.positions }, ..self }
    }

    /// Multiplies the loss of each position by a weight: a tensor of the targets' shape. The weights get no gradient.
    ///
    /// # Shapes
    ///
    /// - weights: `[..]`, the shape of the targets; a float type
    pub fn with_position_weights(self, weights: Tensor) -> Self {
        LossOptions { positions: PositionOptions { position_weights: Some(weights), ..self.positions }, ..self }
    }

    /// Multiplies the log-probability of each token id by a weight: a tensor `[vocab]`. The weights get no gradient.
    ///
    /// # Shapes
    ///
    /// - weights: `[vocab]`; a float type
    pub fn with_class_weights(self, weights: Tensor) -> Self {
        LossOptions { class_weights: Some(weights), ..self }
    }

    /// Spreads this fraction of each target's mass evenly over the vocabulary (Szegedy et al., 2016). It is at least 0
    /// and below 1, and applies to the log-probabilities of the mixture, not to those of each component.
    pub fn with_label_smoothing(self, epsilon: f64) -> Self {
        LossOptions { label_smoothing: epsilon, ..self }
    }

    /// Adds `coefficient * mean_k lse_k^2`, which keeps the normalisers of the logits near zero: the z-loss of PaLM
    /// (Chowdhery et al., 2022), for every component.
    pub fn with_z_loss(self, coefficient: f64) -> Self {
        LossOptions { z_loss: coefficient, ..self }
    }

    /// Sets the precision of the matrix products. The default is [`Precision::Full`].
    pub fn with_precision(self, precision: Precision) -> Self {
        LossOptions { precision, ..self }
    }

    /// Sets the budget of the workspace in bytes; see [`Plan`](crate::Plan). Gradients are not part of it. On the CPU
    /// fewer threads work if the budget is too small for all of them. With a budget that is set, the chunks depend on
    /// the number of threads, so that losses and gradients differ by rounding.
    ///
    /// The default budget holds 32 MiB or 480 rows of logits (positions times components), whichever is larger: with
    /// fewer rows, the pass of each chunk over the decoder and its gradient takes noticeable time. Losses over targets
    /// in bf16, or rounded to it, by the tile products of Intel AMX, or of AVX512-BF16 on AMD, take 768 rows, and in
    /// bf16 all rows if they are at most twice as many as a context has elements: the gradient of a single chunk needs
    /// no sum in f32, which would take more memory. On Linux, exponentials of 8 MiB or more in a loss over hard
    /// targets go back to the system page by page, as the last chunk writes the decoder's gradient: a loss in one
    /// chunk never has all of both in memory.
    ///
    /// With CUDA the default budget holds 512 MiB of logits or 4096 rows, whichever is larger, and is at most an eighth
    /// of the memory of the GPU; a row takes 4 bytes for each id in f32, 6 in half precision, and 2 in bf16 where the
    /// first product writes exponentials (targets alone, contexts of at most 512 elements). Copies of operands in half
    /// precision whose rows are no multiple of 16 bytes, and the workspace of cuBLAS, are not part of it. With
    /// Metal it holds 32 MiB of logits or 512 rows, and is at most 512 MiB, of which half may be unused, because candle
    /// rounds allocations up to a power of two.
    pub fn with_workspace_bytes(self, bytes: usize) -> Self {
        LossOptions { workspace_bytes: Some(bytes), ..self }
    }

    /// Also tells at which positions the target is the most probable token id,
    /// [`Loss::is_correct`](crate::Loss::is_correct), and counts them, [`Loss::correct`](crate::Loss::correct).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Tensor::new(&[[0f32], [3.], [1.]], &Device::Cpu)?; // id 1 is the most probable
    /// let head = SoftmaxHead::from_tensors(weight, None)?;
    /// let hidden = Tensor::ones((4, 1), DType::F32, &Device::Cpu)?;
    /// let targets = Tensor::new(&[1u32, 2, 1, 0], &Device::Cpu)?;
    /// let loss = head.loss(&hidden, &targets, &LossOptions::evaluation().with_correct(true))?;
    /// assert_eq!(loss.is_correct.expect("asked for").to_vec1::<u8>()?, [1, 0, 1, 0]);
    /// let accuracy = (loss.correct.expect("asked for") / loss.count)?.to_scalar::<f32>()?;
    /// assert_eq!(accuracy, 0.5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_correct(self, correct: bool) -> Self {
        LossOptions { correct, ..self }
    }

    /// Normalises over a sample of the vocabulary: the negatives, which all positions share, and the position's own
    /// target (Jean et al., 2015). With the counts that are expected of an id y in the draws, `E[count]`, the loss is
    ///
    /// ```text
    /// -log sum_k pi_k exp(z'_ky) / sum_{v in {y} + negatives other than y} exp(z'_kv),    z' = z - log E[count]
    /// ```
    ///
    /// as in TensorFlow's `sampled_softmax_loss`, for every component of a mixture. Only the decoder's rows of
    /// negatives and targets are read. Draw new negatives for each step.
    ///
    /// An evaluation is exact, whatever the negatives are. In a training step [`Loss::nll`](crate::Loss::nll) is the
    /// negative log-likelihood over the sample. The option cannot be combined with label smoothing, z-loss, correct
    /// predictions or a function of the logits. The targets are read on the host: on a GPU this waits for the device.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::sampled::NoiseDistribution;
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 1., (1000, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let noise = NoiseDistribution::log_uniform(1000)?;
    /// for step in 0..2 {
    ///     let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    ///     let targets = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    ///     let options = LossOptions::new().with_sampled_softmax(noise.draw(64, step)?);
    ///     let gradients = head.loss(&hidden, &targets, &options)?.backward()?;
    ///     # assert!(gradients.get(&weight).is_some());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_sampled_softmax(self, negatives: Negatives) -> Self {
        LossOptions { sampled: Some(SampledLoss::Softmax(negatives)), ..self }
    }

    /// Trains by noise-contrastive estimation (Mnih & Teh, 2012) with normalisers of one: a logistic regression for
    /// each of target and negatives tells whether it is the target. With `z' = z - log E[count]` as in
    /// [`LossOptions::with_sampled_softmax`], the loss is
    ///
    /// ```text
    /// -log sigmoid(z'_y) - sum_{v in negatives} log(1 - sigmoid(z'_v))
    /// ```
    ///
    /// The head must be one softmax; a mixture of several is [`Error::Unsupported`](crate::Error::Unsupported). An
    /// evaluation is exact: its probabilities are normalised. In a training step [`Loss::nll`](crate::Loss::nll) is the
    /// loss above. The option cannot be combined with label smoothing, z-loss or correct predictions. The targets are
    /// read on the host: on a GPU this waits for the device. A few tensors `[positions, negatives]` are in memory.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::sampled::NoiseDistribution;
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 0.1, (5, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let noise = NoiseDistribution::unigram(&[50.0, 20.0, 15.0, 10.0, 5.0])?; // counts of the token ids
    /// let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    /// let targets = Tensor::new(&[1u32, 0, 3], &Device::Cpu)?;
    /// let options = LossOptions::new().with_nce(noise.draw_with_replacement(16, 42)?);
    /// let gradients = head.loss(&hidden, &targets, &options)?.backward()?;
    /// assert_eq!(gradients.get(&weight).expect("a gradient").dims(), [5, 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_nce(self, negatives: Negatives) -> Self {
        LossOptions { sampled: Some(SampledLoss::Nce(negatives)), ..self }
    }

    /// Makes variables of the decoder's rows that a sampled loss reads,
    /// [`Loss::decoder_rows`](crate::Loss::decoder_rows), whose gradients take the place of a gradient of the whole
    /// decoder, which is mostly zeros. No gradient reaches the decoder's own variables then: a tied embedding gets only
    /// the gradient of its use as input. A training step with this option needs a sampled loss.
    pub fn with_decoder_rows(self, decoder_rows: bool) -> Self {
        LossOptions { decoder_rows, ..self }
    }

    /// Returns the sampled loss if this is a training step; an evaluation has none, because it is exact.
    pub(crate) fn sampled_step(&self) -> Option<&SampledLoss> {
        self.sampled.as_ref().filter(|_| self.train)
    }

    /// Returns the terms of the objective that the kernels compute.
    pub(crate) fn terms(&self) -> LossTerms {
        let &LossOptions { label_smoothing, z_loss, correct: needs_correct, .. } = self;
        LossTerms { label_smoothing, z_loss, needs_correct }
    }

    /// Returns the options that are set and that need the support of a head or loss, because not all have it.
    pub(crate) fn needed_support(&self) -> impl Iterator<Item = OptionName> {
        let sampled = self.sampled_step();
        let options = [
            (OptionName::LabelSmoothing, self.label_smoothing > 0.0),
            (OptionName::ZLoss, self.z_loss > 0.0),
            (OptionName::Correct, self.correct),
            (OptionName::SampledSoftmax, matches!(sampled, Some(SampledLoss::Softmax(_)))),
            (OptionName::Nce, matches!(sampled, Some(SampledLoss::Nce(_)))),
            (OptionName::DecoderRows, sampled.is_some() && self.decoder_rows),
        ];
        options.into_iter().filter_map(|(option, is_set)| is_set.then_some(option))
    }

    /// Checks the ranges of the numbers, and that no two options exclude each other.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.decoder_rows && self.train && self.sampled.is_none() {
            return Err(Error::config("decoder_rows", "a sampled loss", "none"));
        }
        let &LossOptions { label_smoothing, z_loss, .. } = self;
        let is_share = (0.0..1.0).contains(&label_smoothing);
        check_number(is_share, "label_smoothing", "at least 0 and below 1", label_smoothing)?;
        check_number(z_loss >= 0.0 && z_loss.is_finite(), "z_loss", "a finite number, at least 0", z_loss)?;
        self.positions.validate()
    }
}
