//! Distributed programs: ranks, and heads whose vocabulary is cut among them.

#[cfg(feature = "mpi")]
mod mpi;
#[cfg(test)]
mod threads;

#[cfg(feature = "mpi")]
pub use mpi::Mpi;
