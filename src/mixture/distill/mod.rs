//! Distillation: the divergence of a student from a teacher, with gradients from three products, as a function of the
//! log-probabilities of a chunk or of the scores of a teacher's list.

mod full;
mod list;
mod options;
mod positions;
mod student;
mod terms;

pub use options::{DistillOptions, MissingIds, Teacher};
pub(crate) use student::Distillation;
