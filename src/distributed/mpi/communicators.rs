//! MPI's communicators, in the one thread that calls MPI, and how their ranks wait for each other.

use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, Destination, Source};
use mpi::Threading;

use super::operations::{Operation, SendBuffers, Together};
use super::state::State;
use crate::error::{Error, Result};

/// What a rank tells the others before an operation, which must be the same on every rank: a number for each of
/// [`ARGUMENTS`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Announcement([u64; ARGUMENTS.len()]);

const ARGUMENTS: [&str; 3] = ["the operation (0 is the end)", "numbers", "root"];
const END: Announcement = Announcement([Operation::End as u64, 0, 0]);

impl Announcement {
    pub(super) fn new(operation: Operation, count: usize) -> Self {
        Announcement([operation as u64, count as u64, 0])
    }

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
    /// The other ranks, by their numbers among the members and in the whole program.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranks.iter().copied().enumerate().filter(|(member, _)| *member != self.rank)
    }

    /// The other ranks, by their numbers in the whole program.
    pub(super) fn other_ranks(&self) -> Vec<usize> {
        self.others().map(|(_, rank)| rank).collect()
    }
}

/// A communicator.
struct RankGroup {
    communicator: SimpleCommunicator,
    members: Members,
    /// The members that make no more operations.
    have_ended: Vec<bool>,
}

/// All communicators of this process: the whole program first, then its splits.
pub(super) struct Communicators {
    groups: Vec<RankGroup>,
    limit: Duration,
    /// The ranks that have not come in time: the others can do nothing more.
    timeout: Option<Vec<usize>>,
    buffers: SendBuffers,
    state: Arc<State>,
    /// Ends MPI when it is dropped, after the communicators.
    _universe: Universe,
}

/// How long a rank that waits for others sleeps between two looks for them: another thread of the process, or another
/// process, can compute meanwhile.
const NAP: Duration = Duration::from_micros(50);

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

    /// The ranks of the whole program.
    pub(super) fn world(&self) -> Members {
        self.groups[0].members.clone()
    }

    /// Runs an operation once all ranks of a communicator have come to the same one.
    pub(super) fn together<T>(
        &mut self,
        group: usize,
        announcement: Announcement,
        operation: impl FnOnce(&mut Together) -> T,
    ) -> Result<T> {
        let of_ranks = self.meet(group, announcement)?;
        for (i, argument) in ARGUMENTS.into_iter().enumerate() {
            let of_ranks: Vec<f64> = of_ranks.iter().map(|Announcement(numbers)| numbers[i] as f64).collect();
            if of_ranks.iter().any(|of_rank| *of_rank != of_ranks[0]) {
                return Err(Error::Ranks { argument, element: None, of_ranks });
            }
        }
        let Communicators { groups, state, buffers, .. } = self;
        Ok(operation(&mut Together { ranks: &groups[group].communicator, state, buffers }))
    }

    /// The ranks of a communicator that come with the same color, which are a communicator from then on.
    pub(super) fn split(&mut self, group: usize, color: i32) -> Result<Members> {
        let own = self.groups[0].members.rank as f64;
        let (split, ranks) = self
            .together(group, Announcement::new(Operation::Split, 0), |Together { ranks, state, .. }| {
                let key = ranks.rank();
                let split = state.inside(|| ranks.split_by_color_with_key(Color::with_value(color), key))?;
                let of_ranks = Together { ranks: &split, state, buffers: &mut SendBuffers::default() }.gather(&[own]);
                Some((split, of_ranks))
            })?
            .ok_or_else(|| Error::config("group", "one that MPI takes", color))?;
        let ranks = ranks.into_iter().map(|rank| rank as usize).collect();
        self.groups.push(RankGroup::new(split, self.groups.len(), ranks));
        Ok(self.groups[self.groups.len() - 1].members.clone())
    }

    /// Waits until all ranks of a communicator have come; returns what each is about to do.
    fn meet(&mut self, group: usize, own: Announcement) -> Result<Vec<Announcement>> {
        if self.timeout.is_none() && self.state.was_stuck() {
            self.timeout = Some(self.groups[0].members.other_ranks());
        }
        if let Some(ranks) = &self.timeout {
            return Err(Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        let group = &mut self.groups[group];
        self.state.inside(|| group.announce(own));
        let (mut of_ranks, start) = (vec![None; group.members.ranks.len()], Instant::now());
        of_ranks[group.members.rank] = Some(own);
        loop {
            group.receive(&mut of_ranks);
            if let Some(of_ranks) = of_ranks.iter().copied().collect() {
                return Ok(of_ranks);
            }
            if start.elapsed() > self.limit {
                let is_absent = |(member, _): &(usize, usize)| of_ranks[*member].is_none();
                let ranks: Vec<usize> = group.members.others().filter(is_absent).map(|(_, rank)| rank).collect();
                self.timeout = Some(ranks.clone());
                return Err(Error::Timeout { ranks, limit: self.limit });
            }
            pause(&self.state, &group.communicator);
        }
    }

    /// Waits until all ranks of the program end. One that still comes with an operation gets an error instead of a result.
    /// The whole program ends at once if a rank has not come in time, or a thread of this process has panicked.
    pub(super) fn end(mut self) {
        if self.timeout.is_none() && !self.state.was_stuck() {
            self.state.inside(|| self.groups.iter().for_each(|group| group.announce(END)));
            let start = Instant::now();
            while self.groups.iter().any(|group| group.that_go_on().next().is_some()) && start.elapsed() <= self.limit {
                for group in &mut self.groups {
                    group.receive(&mut vec![None; group.members.ranks.len()]);
                }
                pause(&self.state, &self.groups[0].communicator);
            }
            let absent: Vec<usize> = self.groups[0].that_go_on().collect();
            self.timeout = (!absent.is_empty()).then_some(absent);
        }
        let RankGroup { communicator, members, .. } = &self.groups[0];
        if let Some(ranks) = &self.timeout {
            print(members, &Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        if self.timeout.is_some() || self.state.was_stuck() || self.state.has_failed() {
            communicator.abort(1);
        }
        let Communicators { groups, state, _universe, .. } = self;
        state.inside(|| drop((groups, _universe)));
    }
}

impl RankGroup {
    fn new(communicator: SimpleCommunicator, group: usize, ranks: Vec<usize>) -> Self {
        let have_ended = vec![false; ranks.len()];
        let members = Members { group, rank: communicator.rank() as usize, ranks };
        RankGroup { communicator, members, have_ended }
    }

    /// The other members that have not ended, by their ranks in the whole program.
    fn that_go_on(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.others().filter(|(member, _)| !self.have_ended[*member]).map(|(_, rank)| rank)
    }

    /// Tells the other members what this rank is about to do. Open MPI and MPICH send so short a message without waiting for
    /// its receiver.
    fn announce(&self, Announcement(numbers): Announcement) {
        for (member, _) in self.members.others() {
            self.communicator.process_at_rank(member as i32).send(&numbers[..]);
        }
    }

    /// Receives the announcements that have come, of the members whose announcement is missing. A member announces its end
    /// once, which then stands for all that it does not announce.
    fn receive(&mut self, of_ranks: &mut [Option<Announcement>]) {
        for (member, of_rank) in of_ranks.iter_mut().enumerate().filter(|(_, of_rank)| of_rank.is_none()) {
            let process = self.communicator.process_at_rank(member as i32);
            if self.have_ended[member] {
                *of_rank = Some(END);
            } else if process.immediate_probe().is_some() {
                let mut numbers = [0; ARGUMENTS.len()];
                process.receive_into(&mut numbers[..]);
                *of_rank = Some(Announcement(numbers));
                self.have_ended[member] = *of_rank == Some(END);
            }
        }
    }
}

/// Prints an error of a rank of the whole program, in one piece, whatever the other processes print.
pub(super) fn print(members: &Members, error: &Error) {
    // Without stderr there is nobody to tell.
    let _ = std::io::stderr().write_all(format!("rank {}: {error}\n", members.rank).as_bytes());
}

/// What a rank does between two looks for others.
fn pause(state: &State, ranks: &SimpleCommunicator) {
    if state.has_failed() {
        ranks.abort(1);
    }
    thread::sleep(NAP);
}
