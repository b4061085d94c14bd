//! MPI's communicators, in the one thread that calls MPI, and how their ranks wait for each other.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Source};
use mpi::Threading;

use super::state::State;
use crate::error::{Error, Result};

/// What a rank does next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// Nothing more.
    End,
    SumF32,
    SumF64,
    Gather,
    BroadcastF32,
    BroadcastF64,
    Split,
}

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
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranks.iter().copied().enumerate().filter(|(member, _)| *member != self.rank)
    }
}

/// A communicator.
struct Group {
    communicator: SimpleCommunicator,
    members: Members,
    /// The members that make no more operations.
    have_ended: Vec<bool>,
}

/// All communicators of this process: the whole program first, then its splits.
pub(super) struct Communicators {
    groups: Vec<Group>,
    limit: Duration,
    /// The ranks that have not come in time: the others can do nothing more.
    timeout: Option<Vec<usize>>,
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
        let groups = vec![Group::new(world, 0, ranks)];
        Ok(Communicators { groups, limit, timeout: None, state, _universe: universe })
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
        operation: impl FnOnce(&SimpleCommunicator) -> T,
    ) -> Result<T> {
        let of_ranks = self.meet(group, announcement)?;
        for (i, argument) in ARGUMENTS.into_iter().enumerate() {
            let of_ranks: Vec<f64> = of_ranks.iter().map(|Announcement(numbers)| numbers[i] as f64).collect();
            if of_ranks.iter().any(|of_rank| *of_rank != of_ranks[0]) {
                return Err(Error::Ranks { argument, of_ranks });
            }
        }
        Ok(self.state.inside(|| operation(&self.groups[group].communicator)))
    }

    /// The ranks of a communicator that come with the same color, which are a communicator from then on.
    pub(super) fn split(&mut self, group: usize, color: i32) -> Result<Members> {
        let own = self.groups[0].members.rank as u64;
        let split = |ranks: &SimpleCommunicator| {
            let split = ranks.split_by_color_with_key(Color::with_value(color), ranks.rank())?;
            let mut of_ranks = vec![0u64; split.size() as usize];
            split.all_gather_into(&own, &mut of_ranks[..]);
            Some((split, of_ranks))
        };
        let split = self.together(group, Announcement::new(Operation::Split, 0), split)?;
        let (split, of_ranks) = split.ok_or_else(|| Error::config("group", "one that MPI takes", color))?;
        let ranks = of_ranks.into_iter().map(|rank| rank as usize).collect();
        self.groups.push(Group::new(split, self.groups.len(), ranks));
        Ok(self.groups[self.groups.len() - 1].members.clone())
    }

    /// Waits until all ranks of a communicator have come; returns what each is about to do.
    fn meet(&mut self, group: usize, own: Announcement) -> Result<Vec<Announcement>> {
        if let Some(ranks) = &self.timeout {
            return Err(Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        let group = &mut self.groups[group];
        group.announce(own);
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
        if self.timeout.is_none() {
            self.groups.iter().for_each(|group| group.announce(END));
            let (group, start) = (&mut self.groups[0], Instant::now());
            let goes_on =
                |group: &Group| group.members.others().filter(|(member, _)| !group.have_ended[*member]).count();
            while goes_on(group) > 0 && start.elapsed() <= self.limit {
                group.receive(&mut vec![None; group.members.ranks.len()]);
                pause(&self.state, &group.communicator);
            }
            if goes_on(group) > 0 {
                let ranks = group.members.others().filter(|(member, _)| !group.have_ended[*member]);
                self.timeout = Some(ranks.map(|(_, rank)| rank).collect());
            }
        }
        let Group { communicator, members, .. } = &self.groups[0];
        if let Some(ranks) = &self.timeout {
            eprintln!("rank {}: {}", members.rank, Error::Timeout { ranks: ranks.clone(), limit: self.limit });
            communicator.abort(1);
        }
        if self.state.has_failed() {
            communicator.abort(1);
        }
    }
}

impl Group {
    fn new(communicator: SimpleCommunicator, group: usize, ranks: Vec<usize>) -> Self {
        let have_ended = vec![false; ranks.len()];
        let members = Members { group, rank: communicator.rank() as usize, ranks };
        Group { communicator, members, have_ended }
    }

    /// Tells the other members what this rank is about to do. MPI keeps so short a message until they receive it.
    fn announce(&self, Announcement(numbers): Announcement) {
        for (member, _) in self.members.others() {
            self.communicator.process_at_rank(member as i32).send(&numbers[..]);
        }
    }

    /// Receives what the members are about to do from which it is not there yet, as far as it has come. A member that has
    /// ended announces this once, and is about to end for ever.
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

/// What a rank does between two looks for others.
fn pause(state: &State, ranks: &SimpleCommunicator) {
    if state.has_failed() {
        ranks.abort(1);
    }
    thread::sleep(NAP);
}
