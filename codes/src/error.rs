//! This is the error type of the crate. Each variant names the argument, the expected value and the actual one.

use candle_core::DType;

/// The functions of this crate return this result.
pub type Result<T> = std::result::Result<T, Error>;

/// The functions of this crate return these errors. Arguments are checked before any work, so that an error leaves no
/// partial results.
///
/// # Examples
///
/// ```
/// use mos_codes::Codebook;
///
/// let error = Codebook::new(2, &[&[0][..], &[0, 1]]).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "sequences: expected a sequence that no other word has or begins with for word 1, got [0, 1]"
/// );
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
    /// A number or a sequence is out of range.
    #[error("{argument}: expected {expected}, got {got}")]
    Config {
        /// The argument's name.
        argument: &'static str,
        /// The supported values.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// A log-probability is NaN or plus infinity, or minus infinity where it is a cost.
    #[error("the distribution at position {position} is NaN or infinite")]
    Distribution {
        /// A position with such a log-probability.
        position: usize,
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

    /// Adds the index of the element of a list to which the error belongs.
    pub(crate) fn at_index(self, index: usize) -> Self {
        match self {
            Error::Config { argument, expected, got } => {
                Error::Config { argument, expected, got: format!("{got} at index {index}") }
            }
            error => error,
        }
    }
}
