//! The engine over MPI: the ranks of a program that `mpirun` has started. [`engine`] has the thread that calls MPI,
//! [`communicators`] how ranks wait for each other, [`operations`] what they then do, and [`state`] finds out that MPI
//! hangs.

mod communicators;
mod engine;
mod operations;
mod state;

use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Tensor};

use crate::backend::collectives::{check_rank, Collectives, Numbers};
use crate::error::{Error, Result};
use communicators::{Announcement, Members};
use engine::Engine;
use operations::{MpiNumber, Operation};

/// A rank of a program that `mpirun` has started, among all of its ranks or some of them ([`Mpi::split`]).
///
/// A thread of its own calls MPI. Before each operation the ranks wait for each other, and compare which one it is and
/// how many numbers it has: if these differ, or a rank has ended, each gets [`Error::Ranks`]. If a rank does not come
/// in time, the others get [`Error::Timeout`], which names it.
///
/// When the last handle is dropped, the rank waits until the others end too. After a timeout, or if the thread that
/// drops a handle panics, the rank prints the error and ends the whole program instead. A program should print an error
/// of its own before it drops the last handle: another rank that ends with an error may end the program.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use mos_head::distributed::{Collectives, Mpi};
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

/// How long ranks wait for each other by default.
const TIME_LIMIT: Duration = Duration::from_secs(30 * 60);

impl Mpi {
    /// Starts MPI, which a process can do once. Ranks wait half an hour for each other.
    ///
    /// # Errors
    ///
    /// If MPI has been started before, or allows no thread but the first to call it; if the system starts no thread.
    pub fn new() -> Result<Self> {
        Mpi::with_time_limit(TIME_LIMIT)
    }

    /// Starts MPI as [`Mpi::new`] does; ranks wait this long for each other. The limit should be longer than the
    /// slowest rank computes or saves between two operations, or after its last one. It is also the limit for MPI to
    /// move a million numbers.
    ///
    /// # Errors
    ///
    /// The errors of [`Mpi::new`].
    pub fn with_time_limit(limit: Duration) -> Result<Self> {
        let (engine, members) = Engine::start(limit)?;
        Ok(Mpi { members, engine: Arc::new(engine) })
    }

    /// Joins the ranks that call this with the same `group`, in their order; all ranks call it. The groups last as long
    /// as the program. Ranks call the operations of all their groups in the same order, one after the other. In a grid,
    /// the ranks that share a vocabulary and the ranks that have texts of their own are two splits of the same ranks,
    /// whose number is a multiple of the shards:
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use mos_head::distributed::{Collectives, DataParallel, Mpi, VocabShard};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let (ranks, shards) = (Mpi::new()?, 2);
    /// assert_eq!(ranks.ranks() % shards, 0);
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

    /// Computes the sums of numbers over all ranks.
    fn sums<T: MpiNumber>(&self, mut numbers: Vec<T>) -> Result<Vec<T>> {
        self.engine.call(&self.members, Announcement::new(T::SUM, numbers.len()), move |ranks| {
            ranks.add_up(&mut numbers);
            numbers
        })
    }

    /// Returns the numbers of the rank `root`.
    fn received<T: MpiNumber>(&self, mut numbers: Vec<T>, root: usize) -> Result<Vec<T>> {
        let announcement = Announcement::new(T::BROADCAST, numbers.len()).with_root(root);
        self.engine.call(&self.members, announcement, move |ranks| {
            ranks.broadcast(&mut numbers, root);
            numbers
        })
    }
}

/// A rank that panics, perhaps in a call that all ranks make, ends the program.
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
            Numbers::F32(numbers) => numbers.copy_from_slice(&self.sums(numbers.to_vec())?),
            Numbers::F64(numbers) => numbers.copy_from_slice(&self.sums(numbers.to_vec())?),
        }
        Ok(())
    }

    fn all_reduce_sum_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let (shape, device) = (tensor.shape(), tensor.device());
        let flat = tensor.flatten_all()?;
        match tensor.dtype() {
            DType::F32 => Ok(Tensor::from_vec(self.sums(flat.to_vec1::<f32>()?)?, shape, device)?),
            DType::F64 => Ok(Tensor::from_vec(self.sums(flat.to_vec1::<f64>()?)?, shape, device)?),
            got => Err(Error::DType { argument: "tensor", expected: "f32 or f64".into(), got }),
        }
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        let own = numbers.to_vec();
        let announcement = Announcement::new(Operation::Gather, own.len());
        self.engine.call(&self.members, announcement, move |ranks| ranks.gather(&own))
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        check_rank("root", root, self.ranks())?;
        match numbers {
            Numbers::F32(numbers) => numbers.copy_from_slice(&self.received(numbers.to_vec(), root)?),
            Numbers::F64(numbers) => numbers.copy_from_slice(&self.received(numbers.to_vec(), root)?),
        }
        Ok(())
    }
}
