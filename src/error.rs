//! The error type of the crate: each variant names the argument, the expected value and the actual one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::DType;

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The errors of this crate. Arguments are checked before any work, so that an error leaves no partial results.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{Error, LossOptions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[7u32, 100], &Device::Cpu)?;
/// let error = head.loss(&hidden, &targets, &LossOptions::default()).unwrap_err();
/// assert_eq!(error.to_string(), "targets: 100 at position 1 is not in 0..100, the vocabulary");
/// assert!(matches!(error, Error::Target { argument: "targets", position: 1, got: 100, vocab_size: 100 }));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong shape.
    #[error("{argument}: expected shape {expected}, got {got}")]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The expected shape.
        expected: String,
        /// The actual shape.
        got: String,
    },
    /// A tensor has the wrong dtype.
    #[error("{argument}: expected dtype {expected}, got {got:?}")]
    DType {
        /// The argument's name.
        argument: &'static str,
        /// The supported dtypes.
        expected: String,
        /// The actual dtype.
        got: DType,
    },
    /// A tensor is on another device than the other arguments, or on one that this build has no kernels for.
    #[error("{argument}: expected device {expected}, got {got}")]
    Device {
        /// The argument's name.
        argument: &'static str,
        /// The supported devices.
        expected: String,
        /// The actual device.
        got: String,
    },
    /// A number or option is out of range.
    #[error("{argument}: expected {expected}, got {got}")]
    Config {
        /// The argument's name.
        argument: &'static str,
        /// The supported values.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// A token id is not in the vocabulary, and is not the ignored index of targets.
    #[error(
        "{argument}: {got} at position {position} is not in 0..{vocab_size}, the vocabulary{}",
        ignored_target_hint(argument, *got)
    )]
    Target {
        /// The argument's name: the targets of a loss, token ids that are scored, or those of a teacher's list.
        argument: &'static str,
        /// The first such position in the flattened argument.
        position: usize,
        /// The token id.
        got: i64,
        /// The size of the vocabulary.
        vocab_size: usize,
    },
    /// A target, or an id that is scored, is not in the set of its position, see
    /// [`AllowedIds`](crate::sets::AllowedIds::with_targets_added).
    #[error("token id {got} at position {position} is not among its allowed ids")]
    NotAllowed {
        /// The first such position in the flattened leading dimensions.
        position: usize,
        /// The target, or the id.
        got: i64,
    },
    /// No id is allowed at a position, see [`AllowedIds`](crate::sets::AllowedIds::with_empty_as_full).
    #[error("no id is allowed at position {position}")]
    EmptySet {
        /// The first such position in the flattened leading dimensions.
        position: usize,
    },
    /// A distribution has log-probabilities that are NaN or plus infinity, as they are if logits have overflowed.
    #[error("the distribution at position {position} is NaN or infinite")]
    Distribution {
        /// The first such position in the flattened hidden states.
        position: usize,
    },
    /// The divergence of a student from a teacher is infinite: one of them gives no probability to an id that the other
    /// may draw, see [`Divergence`](crate::distill::Divergence).
    #[error("the divergence at position {position} is infinite: student and teacher have other possible ids")]
    InfiniteDivergence {
        /// The first such position in the flattened leading dimensions.
        position: usize,
    },
    /// No outcome of a distribution is possible: its log-probabilities are all minus infinity. A head on a GPU computes
    /// NaN instead, which is [`Error::Distribution`].
    #[error("no outcome of the distribution at position {position} is possible")]
    Impossible {
        /// The first such position in the flattened hidden states.
        position: usize,
    },
    /// A number of a position is out of range: a given log-probability is above zero, or constraints make a logit NaN
    /// or plus infinity.
    #[error("{argument}: expected {expected}, got {got} at index {index} of position {position}")]
    Value {
        /// The name of the numbers.
        argument: &'static str,
        /// The supported values.
        expected: &'static str,
        /// The first such position in the flattened leading dimensions.
        position: usize,
        /// The token id, or the component if the numbers are priors.
        index: usize,
        /// The number.
        got: f64,
    },
    /// A request cannot be answered, and therefore no request of its batch is, see
    /// [`TokenRequest::check`](crate::decode::TokenRequest::check).
    #[error("request {index}: {error}")]
    Request {
        /// The index of the first such request in the batch.
        index: usize,
        /// The error of this request, which the message includes.
        error: Box<Error>,
    },
    /// A head does not support an option. No head ignores an option that changes a result.
    #[error("{option}: not supported by {head}")]
    Unsupported {
        /// The option.
        option: OptionName,
        /// The head or the loss.
        head: &'static str,
    },
    /// The workspace budget cannot hold even one position.
    #[error(
        "workspace_bytes: expected at least {least} ({fixed} fixed, {} for one position), got {got}",
        least.saturating_sub(*fixed)
    )]
    Workspace {
        /// The smallest sufficient budget for these shapes. On the CPU one thread computes with this budget; if a
        /// budget does not suffice for all threads, fewer threads compute.
        least: usize,
        /// The part of `least` that does not depend on the number of positions: the needs of any call, and of one
        /// thread on the CPU. The remaining bytes are for a chunk of one position.
        fixed: usize,
        /// The requested budget.
        got: usize,
    },
    /// Variables have no gradient after a backward pass, see [`Loss::check_gradients`](crate::Loss::check_gradients).
    #[error("{} of {variables} variables have no gradient: {}. {DETACHING}", names.len(), join_names(names))]
    MissingGradients {
        /// The variables without a gradient, in alphabetical order.
        names: Vec<String>,
        /// The number of all variables.
        variables: usize,
    },
    /// The ranks of a distributed program make calls with different arguments, or another rank has an error of its own.
    #[error("{argument}{}: expected the same on every rank, got {values:?}", first_difference(element))]
    Ranks {
        /// What differs.
        argument: &'static str,
        /// The first element that differs, by this rank's name of it, where the argument is a list of named ones.
        element: Option<String>,
        /// The number of each rank that stands for it: a size, or a number that is computed from all values.
        values: Vec<f64>,
    },
    /// Ranks of a distributed program have not come in time to an operation that all ranks run together, or it has not
    /// ended in time. The other ranks can run no more operations together.
    #[error("ranks {ranks:?}: expected an answer within {limit:?}, got none")]
    Timeout {
        /// The ranks that have not come, or all other ranks if all have come; by their numbers in the whole program.
        ranks: Vec<usize>,
        /// The time that the others have waited.
        limit: Duration,
    },
    /// A file of a checkpoint cannot be read or written, or does not hold what the caller asks for.
    #[error("{}: expected {expected}, got {got}", file.display())]
    Checkpoint {
        /// The file.
        file: PathBuf,
        /// The content that was expected.
        expected: String,
        /// The content that was found.
        got: String,
    },
    /// candle reported an error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// An option that not every head or loss supports, as [`Error::Unsupported`] names it.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
/// use mos_head::{Error, LossOptions, OptionName, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let head = AdaptiveSoftmax::new(&AdaptiveConfig::new(8, 100, vec![20]), vb)?;
/// let hidden = Tensor::zeros((1, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[7u32], &Device::Cpu)?;
/// let options = LossOptions::new().with_label_smoothing(0.1);
/// let error = head.loss(&hidden, &targets, &options).unwrap_err();
/// assert!(matches!(error, Error::Unsupported { option: OptionName::LabelSmoothing, .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptionName {
    /// [`LossOptions::label_smoothing`](crate::LossOptions::label_smoothing)
    LabelSmoothing,
    /// [`LossOptions::z_loss`](crate::LossOptions::z_loss)
    ZLoss,
    /// [`OutputLayer::log_probs`](crate::OutputLayer::log_probs), and results that are computed from them
    LogProbs,
    /// [`Distributions::log_prob_loss`](crate::Distributions::log_prob_loss)
    LogProbLoss,
    /// [`Distributions::sample`](crate::Distributions::sample)
    Sample,
    /// [`Distributions::distill`](crate::Distributions::distill)
    Distill,
    /// [`ScoreOptions::entropy`](crate::score::ScoreOptions::entropy) or
    /// [`PolicyOptions::entropy`](crate::policy::PolicyOptions::entropy)
    Entropy,
    /// [`ScoreOptions::outside`](crate::score::ScoreOptions::outside)
    Outside,
    /// [`ScoreOptions::collision`](crate::score::ScoreOptions::collision)
    Collision,
    /// [`ScoreOptions::mean_logit`](crate::score::ScoreOptions::mean_logit)
    MeanLogit,
    /// [`ScoreOptions::temperature`](crate::score::ScoreOptions::temperature) or
    /// [`PolicyOptions::temperature`](crate::policy::PolicyOptions::temperature)
    Temperature,
    /// [`LossOptions::correct`](crate::LossOptions::correct)
    Correct,
    /// [`ScoreOptions::is_argmax`](crate::score::ScoreOptions::is_argmax)
    IsArgmax,
    /// [`LossOptions::with_sampled_softmax`](crate::LossOptions::with_sampled_softmax)
    SampledSoftmax,
    /// [`LossOptions::with_nce`](crate::LossOptions::with_nce)
    Nce,
    /// [`LossOptions::decoder_rows`](crate::LossOptions::decoder_rows)
    DecoderRows,
    /// [`LogitFunction::Softcap`](crate::parts::LogitFunction::Softcap)
    Softcap,
    /// [`LogitFunction::Sigsoftmax`](crate::parts::LogitFunction::Sigsoftmax)
    Sigsoftmax,
    /// [`PositionOptions::reduction`](crate::PositionOptions::reduction)
    Reduction,
    /// [`Sampling::ancestral`](crate::decode::Sampling::ancestral)
    Ancestral,
    /// [`Sampling::component_temperature`](crate::decode::Sampling::component_temperature)
    ComponentTemperature,
    /// [`LossOptions::precision`](crate::LossOptions::precision)
    Precision,
    /// [`Decoder::from_quantised`](crate::parts::Decoder::from_quantised)
    QuantisedRows,
}

impl fmt::Display for OptionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OptionName::LabelSmoothing => "label_smoothing",
            OptionName::ZLoss => "z_loss",
            OptionName::LogProbs => "log_probs",
            OptionName::LogProbLoss => "log_prob_loss",
            OptionName::Sample => "sample",
            OptionName::Distill => "distill",
            OptionName::Entropy => "entropy",
            OptionName::Outside => "outside",
            OptionName::Collision => "collision",
            OptionName::MeanLogit => "mean_logit",
            OptionName::Temperature => "temperature",
            OptionName::Correct => "correct",
            OptionName::IsArgmax => "is_argmax",
            OptionName::SampledSoftmax => "sampled_softmax",
            OptionName::Nce => "nce",
            OptionName::DecoderRows => "decoder_rows",
            OptionName::Softcap => "softcap",
            OptionName::Sigsoftmax => "sigsoftmax",
            OptionName::Reduction => "reduction",
            OptionName::Ancestral => "ancestral",
            OptionName::ComponentTemperature => "component_temperature",
            OptionName::Precision => "precision",
            OptionName::QuantisedRows => "quantised rows",
        })
    }
}

/// The reason why variables have no gradient, and what a caller can do about it.
const DETACHING: &str = "The loss does not depend on them, or only through an operation of candle without a backward \
    pass, which detaches its result: use RmsNorm::forward_diff in place of forward (ops::rms_norm), \
    ops::layer_norm_slow in place of LayerNorm::forward with a bias (ops::layer_norm), rotary_emb::rope_slow or \
    rope_i_slow in place of rope, rope_i and rope_thd, ops::softmax in place of ops::softmax_last_dim and ops::sdpa, and \
    parts::QuantisedLinear in place of quantized::QMatMul";

/// Returns a hint on ignored targets: a negative target, which u32 holds as a number from 2^31 on, usually marks a
/// position that is to be ignored. Other token ids cannot be ignored, and get no hint.
fn ignored_target_hint(argument: &str, target: i64) -> String {
    let wrapped = u32::try_from(target).map_or(0, |target| target as i32);
    match (argument, wrapped) {
        ("targets", ..0) => {
            format!(" (it is {wrapped} as u32: targets of dtype i64 hold {wrapped}, which with_ignore_index ignores)")
        }
        ("targets", _) if target < 0 => " (with_ignore_index ignores targets)".into(),
        _ => String::new(),
    }
}

/// Returns the part of a message that names the first element that differs, if it is known.
fn first_difference(element: &Option<String>) -> String {
    element.as_ref().map_or(String::new(), |element| format!(", first at {element}"))
}

/// Joins the first names, and says how many more there are.
fn join_names(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::wrap(error),
        }
    }
}

impl Error {
    /// Renames the argument `from` in the error of a function that was called with it for the argument `to`.
    pub(crate) fn renamed(mut self, from: &'static str, to: &'static str) -> Self {
        match &mut self {
            Error::Shape { argument, .. }
            | Error::DType { argument, .. }
            | Error::Device { argument, .. }
            | Error::Config { argument, .. }
            | Error::Target { argument, .. }
            | Error::Ranks { argument, .. }
                if *argument == from =>
            {
                *argument = to;
            }
            _ => {}
        }
        self
    }

    /// Returns the position that an error of a distribution names.
    pub(crate) fn position(&self) -> Option<usize> {
        match self {
            Error::EmptySet { position }
            | Error::Distribution { position }
            | Error::Impossible { position }
            | Error::Value { position, .. } => Some(*position),
            _ => None,
        }
    }

    /// Replaces the position in an error of a computation for these positions alone: i becomes `positions[i]`.
    pub(crate) fn with_position_from(mut self, positions: &[u32]) -> Self {
        match &mut self {
            Error::Target { position, .. }
            | Error::NotAllowed { position, .. }
            | Error::EmptySet { position }
            | Error::Distribution { position }
            | Error::Impossible { position }
            | Error::Value { position, .. } => {
                if let Some(&original) = positions.get(*position) {
                    *position = original as usize;
                }
            }
            _ => {}
        }
        self
    }

    /// Makes the error of a tensor with another shape than `expected`.
    pub(crate) fn shape(argument: &'static str, expected: impl Into<String>, got: &[usize]) -> Self {
        Error::Shape { argument, expected: expected.into(), got: format!("{got:?}") }
    }

    /// Makes the error of a number or an option that is out of range.
    pub(crate) fn config(argument: &'static str, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::Config { argument, expected: expected.into(), got: got.to_string() }
    }

    /// Makes the error of a file that is not, or does not hold, what is expected.
    pub(crate) fn checkpoint(file: &Path, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::Checkpoint { file: file.to_owned(), expected: expected.into(), got: got.to_string() }
    }
}
