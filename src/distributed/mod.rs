//! Distributed programs, whose ranks each have a part of a head's vocabulary, or a part of the texts.
//!
//! Ranks exchange [`Numbers`] by [`Collectives`], which are an engine of your own or one of the two below, and a
//! [`VocabShard`] is the part of the vocabulary that a rank has. With these alone,
//! [`Mixture::vocab_parallel`](crate::Mixture::vocab_parallel) has the distributions over the whole vocabulary. The
//! feature `distributed` adds the others:
//!
//! | | |
//! |---|---|
//! | `VocabParallel` | a head whose decoder's rows are cut among the ranks: begin here with a large vocabulary |
//! | `DataParallel` | ranks that have texts of their own and the whole model: begin here with many texts |
//! | `ShardedCheckpoint`, `save_sharded` | read and write such heads, each rank its own rows, for any number of ranks |
//! | `Mpi` | the engine over MPI (feature `mpi`) |
//! | `Nccl` | the engine over NCCL, for ranks with an NVIDIA GPU each (feature `nccl`) |

#[cfg(feature = "distributed")]
mod checkpoint;
#[cfg(feature = "distributed")]
mod data_parallel;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "distributed")]
mod vocab_parallel;
mod vocab_parallel_mixture;

pub use crate::backend::collectives::{Collectives, Numbers};
pub use crate::backend::shard::VocabShard;
#[cfg(feature = "distributed")]
pub use checkpoint::{save_sharded, ShardedCheckpoint};
#[cfg(feature = "distributed")]
pub use data_parallel::DataParallel;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
#[cfg(feature = "distributed")]
pub use vocab_parallel::VocabParallel;
pub use vocab_parallel_mixture::VocabParallelMixture;
