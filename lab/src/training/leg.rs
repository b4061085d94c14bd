//! A training in legs.

use std::path::PathBuf;
use std::time::Instant;

/// One leg of a training that takes longer than a machine is available.
pub struct Leg {
    /// The file to which the state of training is written.
    pub path: PathBuf,
    /// The time at which training stops.
    pub until: Instant,
}
