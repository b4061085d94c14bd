//! Processes of an MPI program as ranks: losses, gradients and what is decoded of a vocabulary that they share are
//! those of the whole one, and a checkpoint that they save loads with another cut. Without the feature `mpi` this is
//! skipped.
//!
//!     cargo build --features mpi --test mpi
//!     mpirun -n 3 target/debug/deps/mpi-..    # scripts/mpi.sh finds the name, and runs 1 to 4 processes
//!     mpirun -n 3 target/debug/deps/mpi-.. absent    # scripts/mpi-faults.sh

#[cfg(feature = "mpi")]
#[path = "common/checkpoint.rs"]
mod checkpoint;
#[cfg(feature = "mpi")]
#[path = "common/decoding.rs"]
mod decoding;
#[cfg(not(feature = "mpi"))]
#[path = "common/needs.rs"]
mod needs;
#[cfg(feature = "mpi")]
#[path = "mpi/processes.rs"]
mod processes;
#[cfg(feature = "mpi")]
#[path = "common/texts.rs"]
mod texts;
#[cfg(feature = "mpi")]
#[path = "common/values.rs"]
mod values;
#[cfg(feature = "mpi")]
#[path = "common/vocabulary.rs"]
mod vocabulary;

#[cfg(feature = "mpi")]
fn main() -> mos_head::Result<()> {
    processes::run()
}

#[cfg(not(feature = "mpi"))]
fn main() {
    needs::MPI.is_missing_for("tests/mpi.rs", "this build lacks the feature `mpi`; scripts/mpi.sh has it");
}
