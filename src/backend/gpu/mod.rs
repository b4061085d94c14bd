//! The common part of the GPU backends. Mixtures are computed chunk by chunk, with matrix products from the device's
//! library and row kernels from one source (the headers in `kernels/`); CUDA has a first product of its own too. A loss
//! over the whole vocabulary waits for the device only if ranks share the vocabulary, to read what they exchange.
//!
//! Only a [`Gpu`] knows a device's libraries, so the tests can run the same kernels and launches on a machine without a
//! GPU (module `testing`).

mod activation;
pub(super) mod arguments;
mod chunks;
mod columns;
mod decoding;
pub(super) mod device;
mod device_scores;
mod exponentials;
mod gradients;
pub(super) mod kernels;
mod log_probs;
mod loss;
mod loss_chunks;
mod objective;
mod own_targets;
mod plan;
mod shared_targets;
mod target_ids;

#[cfg(all(test, target_os = "linux"))]
mod testing;

pub(super) use activation::{bias_tanh, log_softmax, log_softmax_gradient, tanh_gradient};
pub(super) use decoding::{top_k, visit};
pub(super) use log_probs::{log_probs, scores};
pub(super) use loss::loss;
pub(super) use plan::plan;
