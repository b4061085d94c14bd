//! The one error type of the crate: what was wrong, which argument it was, what was expected, and what came.

use candle_core::DType;

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. Arguments are checked before any work is done, so an error leaves nothing half written.
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
/// assert_eq!(error.to_string(), "target 100 at position 1 is not below vocab_size 100");
/// assert!(matches!(error, Error::Target { position: 1, got: 100, vocab: 100 }));
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
        /// The shape it should have.
        expected: String,
        /// The shape it has.
        got: String,
    },
    /// A tensor has the wrong dtype.
    #[error("{argument}: expected dtype {expected}, got {got:?}")]
    DType {
        /// The argument's name.
        argument: &'static str,
        /// The dtypes that would do.
        expected: String,
        /// The dtype it has.
        got: DType,
    },
    /// A tensor is on another device than the rest, or on one that this crate has no kernels for.
    #[error("{argument}: expected device {expected}, got {got}")]
    Device {
        /// The argument's name.
        argument: &'static str,
        /// The devices that would do.
        expected: String,
        /// The device it is on.
        got: String,
    },
    /// A number or option is out of its range.
    #[error("{argument}: expected {expected}, got {got}")]
    Config {
        /// The argument's name.
        argument: &'static str,
        /// The range of values that would do.
        expected: String,
        /// The value that came.
        got: String,
    },
    /// A target is not a token id of the vocabulary, and is not the ignored index either.
    #[error("target {got} at position {position} is not below vocab_size {vocab}")]
    Target {
        /// Where in the flattened targets the first bad one stands.
        position: usize,
        /// The bad target.
        got: i64,
        /// The size of the vocabulary.
        vocab: usize,
    },
    /// A distribution has log-probabilities that are not numbers.
    #[error("the distribution at position {position} is none: its log-probabilities are NaN")]
    Distribution {
        /// Where in the flattened hidden states the first such one stands.
        position: usize,
    },
    /// A head cannot honour an option. Heads never ignore one.
    #[error("{option}: not supported by {head}")]
    Unsupported {
        /// The option's name.
        option: &'static str,
        /// The head's name.
        head: &'static str,
    },
    /// The workspace budget cannot hold even one position.
    #[error("workspace_bytes: expected at least {least} for one position, got {got}")]
    Workspace {
        /// The least budget that works for these shapes.
        least: usize,
        /// The budget that came.
        got: usize,
    },
    /// candle reported an error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
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
    pub(crate) fn shape(argument: &'static str, expected: impl Into<String>, got: &[usize]) -> Self {
        Error::Shape { argument, expected: expected.into(), got: format!("{got:?}") }
    }

    pub(crate) fn config(argument: &'static str, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::Config { argument, expected: expected.into(), got: got.to_string() }
    }
}
