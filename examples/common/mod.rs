//! Parts that the training examples share: device, head, LSTM, seeded start, optimiser, checkpoints, progress, curves.
#![allow(dead_code)] // each example includes this module and uses only some of it

pub(crate) mod checkpoint;
pub(crate) mod device;
pub(crate) mod flags;
pub(crate) mod head;
pub(crate) mod init;
pub(crate) mod inplace;
pub(crate) mod optimizer;
pub(crate) mod plot;
pub(crate) mod progress;
pub(crate) mod recurrence;
pub(crate) mod recurrent;

/// Errors end an example with one line on stderr and exit code 1.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
