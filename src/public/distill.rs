//! Distillation: the divergence of a student from a teacher, and its gradients.
//!
//! [`Teacher`] is a mixture over the same vocabulary, log-probabilities, or a list of the most probable ids;
//! [`MissingIds`] is the probability of the ids that a list lacks. [`Divergence`] is the forward or the reverse
//! Kullback-Leibler divergence, or that of Jensen and Shannon, and [`DistillOptions`] have it with temperature and
//! weights. Begin with [`OutputLayer::distill`](crate::OutputLayer::distill), which takes them: for a head that is one
//! mixture it costs three products from a teacher's list, and four from a teacher that is a mixture.

pub use crate::backend::divergence::Divergence;
pub use crate::mixture::{DistillOptions, MissingIds, Teacher};
