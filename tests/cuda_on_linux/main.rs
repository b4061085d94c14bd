//! Tests of the emulated CUDA driver, and of the crate with the faults and errors that only an emulated driver shows.
//! `scripts/check-cuda-on-linux.sh` runs them; on a GPU, those that need the emulated driver say that they are skipped.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod capture;
mod counts;
mod driver;
mod faults;
mod injected;
#[cfg(feature = "nccl")]
mod nccl;
#[path = "../common/needs.rs"]
mod needs;
mod products;
mod streams;
#[cfg(feature = "nccl")]
#[path = "../common/values.rs"]
mod values;
#[cfg(feature = "nccl")]
// These tests do not use all of its comparisons.
#[allow(dead_code)]
#[path = "../common/vocabulary.rs"]
mod vocabulary;
