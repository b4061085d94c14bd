//! What is asked of a loss, and what it returns: the same for every head.
//!
//! [`LossOptions`] and targets become a [`Request`], checked once; a head's answer is a [`Loss`]. [`Negatives`] are the
//! sample of the vocabulary that a sampled loss looks at.

mod gradient_sum;
mod missing_gradients;
mod negatives;
mod options;
mod request;
mod results;

pub use crate::backend::operands::Precision;
pub use gradient_sum::GradientSum;
pub use negatives::{Negatives, NoiseDistribution};
pub use options::{LossOptions, Reduction, SampledLoss};
pub(crate) use request::Request;
pub(crate) use results::Unchecked;
pub use results::{DecoderRows, Loss};
