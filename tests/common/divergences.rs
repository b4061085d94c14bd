//! The divergences that a student learns by, and what a teacher's list says of the ids that it lacks.

use mos_head::distill::{Divergence, MissingIds};

pub const DIVERGENCES: [Divergence; 7] = [
    Divergence::ForwardKl,
    Divergence::ReverseKl,
    Divergence::JensenShannon(0.5),
    Divergence::JensenShannon(0.1),
    Divergence::TotalVariation,
    Divergence::NegLogAcceptance,
    Divergence::LkHybrid(3.0),
];
pub const MISSING: [MissingIds; 3] = [MissingIds::Zero, MissingIds::Renormalized, MissingIds::Tail];
