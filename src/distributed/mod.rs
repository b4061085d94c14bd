//! Distributed programs: ranks, and heads whose vocabulary, or models whose texts, are cut among them.

mod checkpoint;
mod data_parallel;
mod head;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;

pub use checkpoint::{save_sharded, ShardedCheckpoint};
pub use data_parallel::DataParallel;
pub use head::VocabParallel;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
