//! Parts that the training examples share: device, seeded start, optimiser, checkpoints, progress, curves.
#![allow(dead_code)] // each example includes this module and uses only some of it

pub mod checkpoint;
pub mod device;
pub mod init;
pub mod optimizer;
pub mod plot;
pub mod progress;

/// Errors end an example with one line on stderr and exit code 1.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
