//! Distillation: the divergence of a student from a teacher, and its gradients.
//!
//! [`Teacher`] is a mixture over the same vocabulary, its log-probabilities, or a list of its most probable ids;
//! [`MissingIds`] says what the ids have that a list lacks. [`Divergence`] is the forward or the reverse
//! Kullback-Leibler divergence, or that of Jensen and Shannon, and [`DistillOptions`] hold it with temperature and
//! weights. Begin with [`OutputLayer::distill`](crate::OutputLayer::distill), which takes them: for a head that is one
//! mixture it costs three products from a teacher's list, and four from a teacher that is a mixture.

pub use crate::backend::divergence::Divergence;
pub use crate::mixture::{DistillOptions, MissingIds, Teacher};
