//! The options of a distillation, and the teacher that is learned from.

use candle_core::Tensor;

use crate::backend::divergence::Divergence;
use crate::error::{Error, OptionName, Result};
use crate::loss::{CountedPositions, OutputShape, PositionOptions, Positions, Reduction};
use crate::mixture::Mixture;
use crate::scores::ScoreOptions;
use crate::tensors::checks::check_number;

/// The teacher that a student learns from: a distribution at each position, which is a constant.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::distill::{MissingIds, Teacher};
/// use mos_head::{DropoutMasks, MixtureLayer, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
/// let hidden = Tensor::randn(0f32, 1., (4, 8), &Device::Cpu)?;
/// let mixture_teacher = Teacher::from_mixture(&head.mixture(&hidden, DropoutMasks::Off)?);
/// let top = head.top_k(&hidden, 16)?;
/// let list_teacher = Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail);
/// let tensor_teacher = Teacher::from_log_probs(&head.log_probs(&hidden)?);
/// # let _ = (mixture_teacher, list_teacher, tensor_teacher);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Teacher(pub(super) TeacherKind);

/// The kinds of teachers, with their tensors detached.
#[derive(Clone, Debug)]
pub(super) enum TeacherKind {
    Mixture(Mixture),
    LogProbs(Tensor),
    TopK(TeacherList),
}

/// A list of ids for each position with their log-probabilities, `[.., n]` each.
#[derive(Clone, Debug)]
pub(super) struct TeacherList {
    pub(super) token_ids: Tensor,
    pub(super) log_probs: Tensor,
    pub(super) missing: MissingIds,
}

impl Teacher {
    /// Takes the distributions of a mixture with the same token ids, whose log-probabilities are computed chunk by
    /// chunk. If the teacher is a head, this is the [`MixtureLayer::mixture`](crate::MixtureLayer::mixture) of its own
    /// hidden states.
    pub fn from_mixture(mixture: &Mixture) -> Self {
        Teacher(TeacherKind::Mixture(mixture.detach()))
    }

    /// Takes distributions that are given as log-probabilities.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[.., vocab]`, at most zero; a float type
    pub fn from_log_probs(log_probs: &Tensor) -> Self {
        Teacher(TeacherKind::LogProbs(log_probs.detach()))
    }

    /// Takes distributions of which only some ids are known, in any order. An id that occurs again in a list counts
    /// once, with its first log-probability: a server's list may have the sampled id first, and again among the most
    /// probable ones. An id with a log-probability of minus infinity is padding and counts as missing. With
    /// [`MissingIds::Renormalized`] the log-probabilities are at temperature 1; otherwise they must be at the
    /// temperature of the options already. The lists are read on the host, which waits for a GPU.
    ///
    /// # Shapes
    ///
    /// - token_ids: `[.., n]`; u8, u32 or i64
    /// - log_probs: `[.., n]`, at most zero; a float type
    pub fn from_top_k(token_ids: &Tensor, log_probs: &Tensor, missing: MissingIds) -> Self {
        let (token_ids, log_probs) = (token_ids.detach(), log_probs.detach());
        Teacher(TeacherKind::TopK(TeacherList { token_ids, log_probs, missing }))
    }
}

/// The probability that a teacher gives to the ids that its list lacks.
///
/// # Examples
///
/// A list of two of four ids, and a student that gives each of the four the same probability:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let student = SoftmaxHead::from_tensors(Tensor::zeros((4, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((1, 8), DType::F32, &Device::Cpu)?;
/// let token_ids = Tensor::new(&[[2u32, 0]], &Device::Cpu)?;
/// let log_probs = Tensor::new(&[[0.5f32, 0.25]], &Device::Cpu)?.log()?;
/// let term = |teacher: f32, student: f32| teacher * (teacher / student).ln();
/// for (missing, expected) in [
///     (MissingIds::Zero, term(0.5, 0.25) + term(0.25, 0.25)),
///     (MissingIds::Renormalized, term(2.0 / 3.0, 0.25) + term(1.0 / 3.0, 0.25)),
///     (MissingIds::Tail, term(0.5, 0.25) + term(0.25, 0.25) + term(0.25, 0.5)),
/// ] {
///     let teacher = Teacher::from_top_k(&token_ids, &log_probs, missing);
///     let loss = student.distill(&hidden, &teacher, &DistillOptions::new(Divergence::ForwardKl))?;
///     assert!((loss.value.to_scalar::<f32>()? - expected).abs() < 1e-5);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingIds {
    /// The missing ids have probability zero. Those of the list stay, and may sum to less than one.
    /// [`Divergence::ReverseKl`], which would be infinite, is an error.
    Zero,
    /// The missing ids have probability zero. Those of the list are divided by their sum, after the temperature.
    /// [`Divergence::ReverseKl`], which would be infinite, is an error. The divergence of a list of padding alone,
    /// whose sum is zero, is NaN.
    Renormalized,
    /// The missing ids together have the probability that the list leaves, at least 1e-7: the divergence is between
    /// distributions over the ids of the list and one more outcome, "another id". If the student gives no probability
    /// to that outcome, it counts only where the list leaves more than rounding explains (1e-5 for a list in f32, 1e-7
    /// in f64, 2^-6 in half precision). This is the default.
    #[default]
    Tail,
}

/// Options of [`OutputLayer::distill`](crate::OutputLayer::distill). The objective of a position, in nats, is
///
/// ```text
/// (1 - hard_weight) D(T, Q) - hard_weight log P(y)
/// ```
///
/// where teacher T and student Q are both at the temperature, and the student P is at temperature 1. The objective is
/// not multiplied by the square of the temperature (Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural
/// Network. 2015, arXiv 1503.02531, section 2).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::distill::{DistillOptions, Divergence};
///
/// # fn main() -> candle_core::Result<()> {
/// let targets = Tensor::new(&[3i64, 1, -100, 4], &Device::Cpu)?;
/// let options = DistillOptions::new(Divergence::ForwardKl).with_temperature(2.0);
/// let with_targets = options.with_targets(targets).with_hard_weight(0.1).with_ignore_index(-100);
/// # let _ = with_targets;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DistillOptions {
    /// The default is the forward Kullback-Leibler divergence.
    pub divergence: Divergence,
    /// The temperature of both distributions. The default is 1.
    pub temperature: f64,
    /// The weight of the targets' loss. The default is 0.
    pub hard_weight: f64,
    /// The targets, of the leading dimensions' shape. The default is none.
    pub targets: Option<Tensor>,
    /// Which positions count, with which weights and denominator. The default is the mean over all positions. The
    /// reduction is the mean or the sum.
    pub positions: PositionOptions,
    /// The budget of the workspace in bytes; by default the device decides.
    pub workspace_bytes: Option<usize>,
}

impl Default for DistillOptions {
    fn default() -> Self {
        Self::new(Divergence::ForwardKl)
    }
}

impl DistillOptions {
    /// The options for the mean of this divergence over all positions, at temperature 1.
    pub fn new(divergence: Divergence) -> Self {
        DistillOptions {
            divergence,
            temperature: 1.0,
            hard_weight: 0.0,
            targets: None,
            positions: PositionOptions::default(),
            workspace_bytes: None,
        }
    }

    /// Sets the temperature of both distributions: from 1e-6 to 1e6.
    pub fn with_temperature(self, temperature: f64) -> Self {
        DistillOptions { temperature, ..self }
    }

    /// Sets the weight of the targets' loss, from 0 to 1: one minus it is the weight of the divergence. It needs
    /// targets.
    pub fn with_hard_weight(self, hard_weight: f64) -> Self {
        DistillOptions { hard_weight, ..self }
    }

    /// Sets the targets.
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the hidden states; u8, u32 or i64
    pub fn with_targets(self, targets: Tensor) -> Self {
        DistillOptions { targets: Some(targets), ..self }
    }

    /// Leaves out the positions with this target before any product. It needs targets.
    pub fn with_ignore_index(self, index: i64) -> Self {
        DistillOptions { positions: PositionOptions { ignore_index: Some(index), ..self.positions }, ..self }
    }

    /// Multiplies the objective of each position by a weight; positions of weight zero are left out before any product.
    ///
    /// # Shapes
    ///
    /// - weights: `[..]`, the leading dimensions of the hidden states; a float type
    pub fn with_position_weights(self, weights: Tensor) -> Self {
        DistillOptions { positions: PositionOptions { position_weights: Some(weights), ..self.positions }, ..self }
    }

    /// Sets the reduction: the weighted mean, or the sum. [`Reduction::None`] is not supported: give each position its
    /// weight.
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        DistillOptions { positions: PositionOptions { reduction, ..self.positions }, ..self }
    }

    /// Divides the sum by this number in place of the sum of the weights, with [`Reduction::Mean`]. It must be above 0.
    pub fn with_denominator(self, denominator: f64) -> Self {
        DistillOptions { positions: PositionOptions { denominator: Some(denominator), ..self.positions }, ..self }
    }

    /// Sets the budget of the workspace in bytes.
    pub fn with_workspace_bytes(self, bytes: usize) -> Self {
        DistillOptions { workspace_bytes: Some(bytes), ..self }
    }

    /// Whether targets take part in the objective.
    pub(super) fn is_mixed(&self) -> bool {
        self.hard_weight != 0.0
    }

    /// Selects the positions that count for a student.
    pub(super) fn counted(&self, student: OutputShape) -> Result<CountedPositions> {
        Positions::new(student, &self.positions, self.targets.as_ref(), None)?.counted()
    }

    /// Checks the ranges of the numbers, and that the options fit each other and the teacher.
    pub(super) fn validate(&self, teacher: &Teacher) -> Result<()> {
        let temperature = self.temperature;
        ScoreOptions::new().with_temperature(temperature).validate()?;
        check_number((0.0..=1.0).contains(&self.hard_weight), "hard_weight", "from 0 to 1", self.hard_weight)?;
        if let Divergence::JensenShannon(beta) = self.divergence {
            let expected = "above 0 and below 1 (at the ends the divergence is zero: use ForwardKl or ReverseKl)";
            check_number(beta > 0.0 && beta < 1.0, "beta", expected, beta)?;
        }
        if let Divergence::LkHybrid(eta) = self.divergence {
            check_number(eta >= 0.0 && eta.is_finite(), "eta", "a finite number of at least 0", eta)?;
        }
        if self.positions.reduction == Reduction::None {
            return Err(Error::Unsupported { option: OptionName::Reduction, head: "distillation" });
        }
        if self.targets.is_none() && (self.is_mixed() || self.positions.ignore_index.is_some()) {
            return Err(Error::config("targets", "targets, because of hard_weight or ignore_index", "none"));
        }
        let TeacherKind::TopK(TeacherList { missing, .. }) = &teacher.0 else { return Ok(()) };
        if self.divergence == Divergence::ReverseKl && *missing != MissingIds::Tail {
            return Err(Error::config(
                "missing",
                "Tail, because ReverseKl is infinite without",
                format!("{missing:?}"),
            ));
        }
        if self.is_mixed() && temperature != 1.0 {
            let expected = "0 for a teacher's list at a temperature: add the loss of the targets";
            return Err(Error::config("hard_weight", expected, self.hard_weight));
        }
        Ok(())
    }
}
