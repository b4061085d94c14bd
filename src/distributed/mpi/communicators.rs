//! MPI's communicators, which only the one thread that calls MPI uses. Before each operation the ranks of a
//! communicator wait for each other, and compare what they are about to do.

use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, Destination, Source};
use mpi::Threading;

use super::operations::{Operation, ReadyRanks, SendBuffers};
use super::state::State;
use crate::error::{Error, Result};

/// The numbers that a rank sends to the others before an operation, one for each of [`ARGUMENTS`]. They must be the
/// same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Announcement([u64; ARGUMENTS.len()]);

/// The arguments of an operation, as errors name them.
const ARGUMENTS: [&str; 3] = ["the operation (0 is the end)", "numbers", "root"];
/// The announcement of a rank that makes no more operations.
const END: Announcement = Announcement([Operation::End as u64, 0, 0]);

impl Announcement {
    /// Makes the announcement of an operation on `count` numbers.
    pub(super) fn new(operation: Operation, count: usize) -> Self {
        Announcement([operation as u64, count as u64, 0])
    }

    /// Sets the rank from which a broadcast starts.
    pub(super) fn with_root(self, root: usize) -> Self {
        let Announcement([operation, count, _]) = self;
        Announcement([operation, count, root as u64])
    }
}

/// The ranks of a communicator.
#[derive(Clone, Debug)]
pub(super) struct Members {
    /// The number of the communicator in this process.
    pub(super) group: usize,
    /// This rank among them.
    pub(super) rank: usize,
    /// Their ranks in the whole program.
    pub(super) ranks: Vec<usize>,
}

impl Members {
    /// Returns the other ranks, by their numbers among the members and in the whole program.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranks.iter().copied().enumerate().filter(|(member, _)| *member != self.rank)
    }

    /// Returns the other ranks, by their numbers in the whole program.
    pub(super) fn other_ranks(&self) -> Vec<usize> {
        self.others().map(|(_, rank)| rank).collect()
    }
}

/// A communicator, and the state of its members.
struct RankGroup {
    communicator: SimpleCommunicator,
    members: Members,
    /// For each member, whether it has announced its end, and makes no more operations.
    has_ended: Vec<bool>,
}

/// All communicators of this process: the whole program first, then its splits.
pub(super) struct Communicators {
    groups: Vec<RankGroup>,
    /// How long ranks wait for each other.
    limit: Duration,
    /// The ranks that have not come in time; from then on no operation is possible.
    timeout: Option<Vec<usize>>,
    buffers: SendBuffers,
    state: Arc<State>,
    /// Ends MPI when it is dropped, after the communicators.
    _universe: Universe,
}

/// The time that a waiting rank sleeps before it looks again for announcements, while another thread or process can
/// compute.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

impl Communicators {
    /// Starts MPI in this thread.
    pub(super) fn start(limit: Duration, state: Arc<State>) -> Result<Self> {
        let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Funneled) else {
            return Err(Error::config("MPI", "one start in a process", "a second start"));
        };
        if threading < Threading::Funneled {
            return Err(Error::config("MPI", "other threads that do not call it", format!("{threading:?}")));
        }
        let world = universe.world();
        let ranks = (0..world.size() as usize).collect();
        let groups = vec![RankGroup::new(world, 0, ranks)];
        Ok(Communicators { groups, limit, timeout: None, buffers: SendBuffers::default(), state, _universe: universe })
    }

    /// Returns the ranks of the whole program.
    pub(super) fn world(&self) -> Members {
        self.groups[0].members.clone()
    }

    /// Runs an operation once all ranks of a communicator have come to the same one.
    pub(super) fn run_together<T>(
        &mut self,
        group: usize,
        announcement: Announcement,
        operation: impl FnOnce(&mut ReadyRanks) -> T,
    ) -> Result<T> {
        let announcements = self.wait_for_all(group, announcement)?;
        for (i, argument) in ARGUMENTS.into_iter().enumerate() {
            let values: Vec<f64> = announcements.iter().map(|Announcement(numbers)| numbers[i] as f64).collect();
            if values.iter().any(|value| *value != values[0]) {
                return Err(Error::Ranks { argument, element: None, values });
            }
        }
        let Communicators { groups, state, buffers, .. } = self;
        Ok(operation(&mut ReadyRanks { ranks: &groups[group].communicator, state, buffers }))
    }

    /// Makes a new communicator from those ranks of a communicator that come with the same color.
    pub(super) fn split(&mut self, group: usize, color: i32) -> Result<Members> {
        let own = self.groups[0].members.rank as f64;
        let (split, ranks) = self
            .run_together(group, Announcement::new(Operation::Split, 0), |ReadyRanks { ranks, state, .. }| {
                let key = ranks.rank();
                let split = state.watch(|| ranks.split_by_color_with_key(Color::with_value(color), key))?;
                let ready = &mut ReadyRanks { ranks: &split, state, buffers: &mut SendBuffers::default() };
                let ranks = ready.gather(&[own]);
                Some((split, ranks))
            })?
            .ok_or_else(|| Error::config("group", "one that MPI takes", color))?;
        let ranks = ranks.into_iter().map(|rank| rank as usize).collect();
        self.groups.push(RankGroup::new(split, self.groups.len(), ranks));
        Ok(self.groups[self.groups.len() - 1].members.clone())
    }

    /// Announces an operation to the other ranks of a communicator, waits until all have announced one, and returns the
    /// announcements of all ranks.
    fn wait_for_all(&mut self, group: usize, own: Announcement) -> Result<Vec<Announcement>> {
        if self.timeout.is_none() && self.state.has_been_stuck() {
            self.timeout = Some(self.groups[0].members.other_ranks());
        }
        if let Some(ranks) = &self.timeout {
            return Err(Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        let group = &mut self.groups[group];
        self.state.watch(|| group.announce(own));
        let (mut announcements, start) = (vec![None; group.members.ranks.len()], Instant::now());
        announcements[group.members.rank] = Some(own);
        loop {
            group.receive(&mut announcements);
            if let Some(announcements) = announcements.iter().copied().collect() {
                return Ok(announcements);
            }
            if start.elapsed() > self.limit {
                let is_absent = |(member, _): &(usize, usize)| announcements[*member].is_none();
                let ranks: Vec<usize> = group.members.others().filter(is_absent).map(|(_, rank)| rank).collect();
                self.timeout = Some(ranks.clone());
                return Err(Error::Timeout { ranks, limit: self.limit });
            }
            pause(&self.state, &group.communicator);
        }
    }

    /// Waits until all ranks of the program end. A rank that still comes with an operation gets an error instead of a
    /// result. If a rank has not come in time, or a thread of this process has panicked, it ends the whole program at
    /// once.
    pub(super) fn end(mut self) {
        if self.timeout.is_none() && !self.state.has_been_stuck() {
            self.state.watch(|| self.groups.iter().for_each(|group| group.announce(END)));
            let start = Instant::now();
            while self.groups.iter().any(|group| group.unfinished_ranks().next().is_some())
                && start.elapsed() <= self.limit
            {
                for group in &mut self.groups {
                    group.receive(&mut vec![None; group.members.ranks.len()]);
                }
                pause(&self.state, &self.groups[0].communicator);
            }
            let absent: Vec<usize> = self.groups[0].unfinished_ranks().collect();
            self.timeout = (!absent.is_empty()).then_some(absent);
        }
        let RankGroup { communicator, members, .. } = &self.groups[0];
        if let Some(ranks) = &self.timeout {
            print_error(members, &Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        if self.timeout.is_some() || self.state.has_been_stuck() || self.state.has_failed() {
            communicator.abort(1);
        }
        let Communicators { groups, state, _universe, .. } = self;
        state.watch(|| drop((groups, _universe)));
    }
}

impl RankGroup {
    /// Makes the group of a communicator; `ranks` are the members' ranks in the whole program.
    fn new(communicator: SimpleCommunicator, group: usize, ranks: Vec<usize>) -> Self {
        let has_ended = vec![false; ranks.len()];
        let members = Members { group, rank: communicator.rank() as usize, ranks };
        RankGroup { communicator, members, has_ended }
    }

    /// Returns the other members that have not ended, by their ranks in the whole program.
    fn unfinished_ranks(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.others().filter(|(member, _)| !self.has_ended[*member]).map(|(_, rank)| rank)
    }

    /// Tells the other members what this rank is about to do. Open MPI and MPICH send so short a message without
    /// waiting for its receiver.
    fn announce(&self, Announcement(numbers): Announcement) {
        for (member, _) in self.members.others() {
            self.communicator.process_at_rank(member as i32).send(&numbers[..]);
        }
    }

    /// Receives the announcements that have come from members whose announcement is missing. A member announces its end
    /// once, which then stands for all its later announcements.
    fn receive(&mut self, announcements: &mut [Option<Announcement>]) {
        let missing = announcements.iter_mut().enumerate().filter(|(_, announcement)| announcement.is_none());
        for (member, announcement) in missing {
            let process = self.communicator.process_at_rank(member as i32);
            if self.has_ended[member] {
                *announcement = Some(END);
            } else if process.immediate_probe().is_some() {
                let mut numbers = [0; ARGUMENTS.len()];
                process.receive_into(&mut numbers[..]);
                *announcement = Some(Announcement(numbers));
                self.has_ended[member] = *announcement == Some(END);
            }
        }
    }
}

/// Prints an error of a rank of the whole program, in one write, so that the output of other processes does not divide
/// it.
pub(super) fn print_error(members: &Members, error: &Error) {
    // If stderr is closed, nobody can read the error.
    let _ = std::io::stderr().write_all(format!("rank {}: {error}\n", members.rank).as_bytes());
}

/// Sleeps before a rank looks again for announcements; it ends the program if a thread of this process has panicked.
fn pause(state: &State, ranks: &SimpleCommunicator) {
    if state.has_failed() {
        ranks.abort(1);
    }
    thread::sleep(POLL_INTERVAL);
}
