//! Distributed programs: ranks, and heads whose vocabulary, or models whose texts, are cut among them.

mod checkpoint;
mod data_parallel;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod vocab_parallel;

pub use checkpoint::{save_sharded, ShardedCheckpoint};
pub use data_parallel::DataParallel;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use vocab_parallel::VocabParallel;
