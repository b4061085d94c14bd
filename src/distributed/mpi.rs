//! The ranks of an MPI program.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use mpi::collective::SystemOperation;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Equivalence, Root};
use mpi::Threading;

use crate::backend::agreement::end;
use crate::backend::collectives::{check_rank, Collectives, Numbers};
use crate::error::{Error, Result};

/// The ranks of a program that `mpirun` has started, over MPI's world communicator.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use mos_head::{Collectives, Mpi};
///
/// # fn main() -> mos_head::Result<()> {
/// let ranks = Arc::new(Mpi::new()?);
/// println!("rank {} of {}", ranks.rank(), ranks.ranks());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Mpi {
    rank: usize,
    ranks: usize,
    /// MPI serves one thread at a time.
    turn: Mutex<()>,
    /// Ends MPI when it is dropped.
    _universe: Ended,
}

/// MPI, which ends when this is dropped.
struct Ended(#[allow(dead_code)] Universe);

impl fmt::Debug for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MPI")
    }
}

/// Numbers that a call sends at most: their copies stay small, and MPI counts them in 32 bits.
const MOST: usize = 1 << 20;

impl Mpi {
    /// Starts MPI, which a process can do once.
    ///
    /// # Errors
    ///
    /// If MPI has been started before, or serves no other thread than the first.
    pub fn new() -> Result<Self> {
        let started = mpi::initialize_with_threading(Threading::Serialized);
        let Some((universe, threading)) = started else {
            return Err(Error::config("MPI", "one start in a process", "a second start"));
        };
        if threading < Threading::Serialized {
            return Err(Error::config("MPI", "calls from several threads, one at a time", format!("{threading:?}")));
        }
        let world = universe.world();
        let (rank, ranks) = (world.rank() as usize, world.size() as usize);
        Ok(Mpi { rank, ranks, turn: Mutex::new(()), _universe: Ended(universe) })
    }

    /// The communicator of all ranks, while no other thread has it.
    fn world<T>(&self, call: impl FnOnce(SimpleCommunicator) -> T) -> T {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        call(SimpleCommunicator::world())
    }

    fn add_up<T: Equivalence + Copy>(&self, numbers: &mut [T]) {
        self.world(|world| {
            for numbers in numbers.chunks_mut(MOST) {
                world.all_reduce_into(&numbers.to_vec()[..], numbers, SystemOperation::sum());
            }
        });
    }

    fn send<T: Equivalence>(&self, numbers: &mut [T], root: usize) {
        self.world(|world| {
            numbers.chunks_mut(MOST).for_each(|numbers| world.process_at_rank(root as i32).broadcast_into(numbers));
        });
    }
}

/// Ends when all ranks do; a rank that still makes a call gets [`Error::Ranks`]. A rank that panics, perhaps inside a call of
/// all, ends the program.
impl Drop for Mpi {
    fn drop(&mut self) {
        if std::thread::panicking() {
            SimpleCommunicator::world().abort(1);
        }
        end(self);
    }
}

impl Collectives for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()> {
        match numbers {
            Numbers::F32(numbers) => self.add_up(numbers),
            Numbers::F64(numbers) => self.add_up(numbers),
        }
        Ok(())
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        let mut all = vec![0.0; numbers.len() * self.ranks];
        let mut received = Vec::new();
        self.world(|world| {
            for (piece, sent) in numbers.chunks(MOST).enumerate() {
                received.resize(sent.len() * self.ranks, 0.0);
                world.all_gather_into(sent, &mut received[..]);
                for (to, from) in all.chunks_exact_mut(numbers.len()).zip(received.chunks_exact(sent.len())) {
                    to[piece * MOST..][..from.len()].copy_from_slice(from);
                }
            }
        });
        Ok(all)
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        check_rank("root", root, self.ranks)?;
        match numbers {
            Numbers::F32(numbers) => self.send(numbers, root),
            Numbers::F64(numbers) => self.send(numbers, root),
        }
        Ok(())
    }
}
