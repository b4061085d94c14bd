//! Distillation: the divergence of a student from a teacher, with gradients from three products. It is a loss of all
//! log-probabilities ([`full`]), or of the scores of a teacher's list ([`list`]), at the positions that count.

mod full;
mod list;
mod options;
mod student;
mod terms;

pub use options::{DistillOptions, MissingIds, Teacher};
pub(crate) use student::{DistillLoss, Distillation};
