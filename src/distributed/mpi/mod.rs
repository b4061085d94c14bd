//! The ranks of an MPI program.

mod communicators;
mod engine;
mod state;

use std::sync::Arc;
use std::time::Duration;

use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Equivalence, Root};

use crate::backend::collectives::{check_rank, Collectives, Numbers};
use crate::error::{Error, Result};
use communicators::{Announcement, Members, Operation};
use engine::Engine;

/// The ranks of a program that `mpirun` has started, or some of them ([`Mpi::split`]).
///
/// A thread of its own calls MPI. Before each operation the ranks wait for each other, and compare which one it is and how
/// many numbers it has: if these differ, or a rank has ended, each gets [`Error::Ranks`]. If a rank does not come in time,
/// the others get [`Error::Timeout`], which names it.
///
/// When the last handle is dropped, the rank waits until the others end too. After a timeout it ends the whole program
/// instead, as it does if it panics; it prints the error first.
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
    members: Members,
    engine: Arc<Engine>,
}

/// How long ranks wait for each other.
const TIME_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Numbers that MPI is given at most at a time: it counts them in 32 bits, and does not let a sum replace them.
const MOST: usize = 1 << 20;

impl Mpi {
    /// Starts MPI, which a process can do once. Ranks wait half an hour for each other.
    ///
    /// # Errors
    ///
    /// If MPI has been started before, or allows no other thread than the first; if the system starts no thread.
    pub fn new() -> Result<Self> {
        Mpi::with_time_limit(TIME_LIMIT)
    }

    /// As [`Mpi::new`]; ranks wait this long for each other. It should be above what the slowest rank computes or saves
    /// between two operations, and from the last one to its end.
    ///
    /// # Errors
    ///
    /// As for [`Mpi::new`].
    pub fn with_time_limit(limit: Duration) -> Result<Self> {
        let (engine, members) = Engine::start(limit)?;
        Ok(Mpi { members, engine: Arc::new(engine) })
    }

    /// The ranks that call this with the same `group`, in their order; all ranks call it. In a grid of ranks that share a
    /// vocabulary and of ranks with texts of their own, one of each is a split of the same ranks:
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use mos_head::{Collectives, DataParallel, Mpi, VocabShard};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let (ranks, shards) = (Mpi::new()?, 2);
    /// let vocabulary = VocabShard::new(Arc::new(ranks.split(ranks.rank() / shards)?), 128_256)?;
    /// let texts = DataParallel::new(Arc::new(ranks.split(ranks.rank() % shards)?));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `group` is above 2^31 - 1; [`Error::Ranks`] if another rank makes another call,
    /// [`Error::Timeout`] if it makes none.
    pub fn split(&self, group: usize) -> Result<Self> {
        let Ok(color) = i32::try_from(group) else {
            return Err(Error::config("group", "at most 2147483647", group));
        };
        let members = self.engine.split(&self.members, color)?;
        Ok(Mpi { members, engine: self.engine.clone() })
    }

    /// The result of an operation of all ranks.
    fn call<T: Send + 'static>(
        &self,
        announcement: Announcement,
        operation: impl FnOnce(&SimpleCommunicator) -> T + Send + 'static,
    ) -> Result<T> {
        self.engine.call(&self.members, announcement, operation)
    }

    fn add_up<T: Equivalence + Copy + Send + 'static>(&self, operation: Operation, numbers: &mut [T]) -> Result<()> {
        let mut sum = numbers.to_vec();
        let sum = self.call(Announcement::new(operation, sum.len()), move |ranks| {
            let mut sent = Vec::new();
            for sum in sum.chunks_mut(MOST) {
                sent.clear();
                sent.extend_from_slice(sum);
                ranks.all_reduce_into(&sent[..], sum, SystemOperation::sum());
            }
            sum
        })?;
        numbers.copy_from_slice(&sum);
        Ok(())
    }

    fn send<T: Equivalence + Copy + Send + 'static>(
        &self,
        operation: Operation,
        numbers: &mut [T],
        root: usize,
    ) -> Result<()> {
        let mut sent = numbers.to_vec();
        let received = self.call(Announcement::new(operation, sent.len()).with_root(root), move |ranks| {
            sent.chunks_mut(MOST).for_each(|sent| ranks.process_at_rank(root as i32).broadcast_into(sent));
            sent
        })?;
        numbers.copy_from_slice(&received);
        Ok(())
    }
}

/// A rank that panics, perhaps inside a call of all, ends the program.
impl Drop for Mpi {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.engine.fail();
        }
    }
}

impl Collectives for Mpi {
    fn rank(&self) -> usize {
        self.members.rank
    }

    fn ranks(&self) -> usize {
        self.members.ranks.len()
    }

    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()> {
        match numbers {
            Numbers::F32(numbers) => self.add_up(Operation::SumF32, numbers),
            Numbers::F64(numbers) => self.add_up(Operation::SumF64, numbers),
        }
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        let (own, count) = (numbers.to_vec(), numbers.len());
        let mut all = vec![0.0; count * self.ranks()];
        self.call(Announcement::new(Operation::Gather, count), move |ranks| {
            let mut received = Vec::new();
            for (piece, sent) in own.chunks(MOST).enumerate() {
                received.resize(sent.len() * ranks.size() as usize, 0.0);
                ranks.all_gather_into(sent, &mut received[..]);
                for (to, from) in all.chunks_exact_mut(count).zip(received.chunks_exact(sent.len())) {
                    to[piece * MOST..][..from.len()].copy_from_slice(from);
                }
            }
            all
        })
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        check_rank("root", root, self.ranks())?;
        match numbers {
            Numbers::F32(numbers) => self.send(Operation::BroadcastF32, numbers, root),
            Numbers::F64(numbers) => self.send(Operation::BroadcastF64, numbers, root),
        }
    }
}
