//! The arguments and the results of a loss, which are the same for every head.
//!
//! Targets and [`LossOptions`] become a [`Request`], which is checked once; a head computes from it a [`Loss`].
//! [`Negatives`] are the sample of the vocabulary that a sampled loss looks at.

mod counted;
mod gradient_sum;
mod missing_gradients;
mod negatives;
mod options;
mod positions;
mod request;
mod results;

pub use crate::backend::operands::Precision;
pub(crate) use counted::CountedPositions;
pub use gradient_sum::GradientSum;
pub use negatives::{Negatives, NoiseDistribution};
pub use options::{LossOptions, SampledLoss};
pub(crate) use positions::{OutputShape, Positions, IGNORED};
pub use positions::{PositionOptions, Reduction};
pub(crate) use request::Request;
pub(crate) use results::UncheckedTargets;
pub use results::{DecoderRows, Loss};
