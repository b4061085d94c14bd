//! Distillation: the divergence of a student from a teacher, and its gradients.
//!
//! [`Teacher`] is a mixture over the same vocabulary, log-probabilities, or a list of the most probable ids;
//! [`MissingIds`] is the probability of the ids that a list lacks. [`Divergence`] is the forward or the reverse
//! Kullback-Leibler divergence, that of Jensen and Shannon, or one that trains a drafter for acceptance, and
//! [`DistillOptions`] have it with temperature and weights. Begin with
//! [`OutputLayer::distill`](crate::OutputLayer::distill), which takes them: for a head that is one mixture it costs
//! three products from a teacher's list, and four from a teacher that is a mixture (on a GPU five).
//!
//! # Examples
//!
//! The acceptance of a drafter, the mean probability with which the teacher accepts its draft in speculative decoding,
//! is one minus the total variation:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use mos_head::distill::{DistillOptions, Divergence, Teacher};
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! let drafter = SoftmaxHead::from_tensors(Tensor::new(&[[0f32], [0.], [0.], [0.]], &Device::Cpu)?, None)?;
//! let hidden = Tensor::ones((1, 1), candle_core::DType::F32, &Device::Cpu)?;
//! let teacher = Teacher::from_log_probs(&Tensor::new(&[[0.4f32, 0.4, 0.1, 0.1]], &Device::Cpu)?.log()?);
//! let variation = drafter.distill(&hidden, &teacher, &DistillOptions::new(Divergence::TotalVariation))?;
//! let (sum, count) = variation.sum_and_count()?;
//! assert!((1.0 - sum / count - (0.25 + 0.25 + 0.1 + 0.1)).abs() < 1e-6);
//! # Ok(())
//! # }
//! ```

pub use crate::backend::divergence::Divergence;
pub use crate::mixture::{DistillOptions, MissingIds, Teacher};
