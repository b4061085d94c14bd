//! Distributed programs: ranks, and heads whose vocabulary is cut among them.

mod checkpoint;
mod head;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;

pub use checkpoint::{save_sharded, ShardedCheckpoint};
pub use head::VocabParallel;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
