//! MPI's communicators, in the one thread that calls MPI, and how their ranks wait for each other.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{mem, thread};

use mpi::environment::Universe;
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Source};
use mpi::Threading;

use super::state::State;
use crate::error::{Error, Result};

/// An operation of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    SumF32,
    SumF64,
    Gather,
    BroadcastF32,
    BroadcastF64,
    Split,
}

/// What a rank is about to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announcement([u64; ARGUMENTS.len()]);

/// What ranks announce.
const ARGUMENTS: [&str; 3] = ["the operation", "numbers", "root"];

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
    /// The other ranks.
    pub(super) fn others(&self) -> Vec<usize> {
        let own = self.ranks[self.rank];
        self.ranks.iter().copied().filter(|&rank| rank != own).collect()
    }

    /// A number that other members hardly have.
    fn hash(&self) -> u64 {
        let mut state = DefaultHasher::new();
        self.ranks.hash(&mut state);
        state.finish() | 1
    }
}

/// All communicators of this process: the whole program first, then its splits.
pub(super) struct Communicators {
    groups: Vec<(SimpleCommunicator, Members)>,
    /// Of each rank of the whole program, 1 until it ends.
    goes_on: Vec<f64>,
    limit: Duration,
    /// The ranks that have not come in time: MPI can do nothing more.
    timeout: Option<Vec<usize>>,
    state: Arc<State>,
    /// Ends MPI when it is dropped, after the communicators.
    _universe: Universe,
}

/// The tags of a question whether a rank waits too, of its answer, and of a rank's end.
const QUESTION: i32 = 1;
const ANSWER: i32 = 2;
const END: i32 = 3;

/// The answer of a rank that waits for others to end.
const ENDED: u64 = 0;

/// How long a rank that waits for others looks for them all the time, and how long it sleeps between two looks later.
const EAGER: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);

/// How long ranks have to answer a question.
const GRACE: Duration = Duration::from_secs(2);

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
        let members = Members { group: 0, rank: world.rank() as usize, ranks: (0..world.size() as usize).collect() };
        let (goes_on, groups) = (vec![1.0; members.ranks.len()], vec![(world, members)]);
        Ok(Communicators { groups, goes_on, limit, timeout: None, state, _universe: universe })
    }

    /// The ranks of the whole program.
    pub(super) fn world(&self) -> Members {
        self.groups[0].1.clone()
    }

    /// Runs an operation once all ranks of a communicator have come to the same one.
    pub(super) fn together<T>(
        &mut self,
        group: usize,
        announcement: Announcement,
        operation: impl FnOnce(&SimpleCommunicator) -> T,
    ) -> Result<T> {
        self.meet(group)?;
        let (communicator, _) = &self.groups[group];
        self.state.inside(|| {
            let of_ranks = announcements(communicator, announcement);
            for (argument, of_ranks) in ARGUMENTS.into_iter().zip(of_ranks) {
                if of_ranks.iter().any(|of_rank| *of_rank != of_ranks[0]) {
                    let of_ranks = of_ranks.into_iter().map(|of_rank| of_rank as f64).collect();
                    return Err(Error::Ranks { argument, of_ranks });
                }
            }
            Ok(operation(communicator))
        })
    }

    /// The ranks of a communicator that come with the same color, which are a communicator from then on.
    pub(super) fn split(&mut self, group: usize, color: i32) -> Result<Members> {
        let own = self.groups[0].1.rank as u64;
        let split = |ranks: &SimpleCommunicator| {
            let split = ranks.split_by_color_with_key(Color::with_value(color), ranks.rank())?;
            let mut of_ranks = vec![0u64; split.size() as usize];
            split.all_gather_into(&own, &mut of_ranks[..]);
            Some((split, of_ranks))
        };
        let split = self.together(group, Announcement::new(Operation::Split, 0), split)?;
        let (split, of_ranks) = split.ok_or_else(|| Error::config("group", "one that MPI takes", color))?;
        let ranks = of_ranks.into_iter().map(|rank| rank as usize).collect();
        let members = Members { group: self.groups.len(), rank: split.rank() as usize, ranks };
        self.groups.push((split, members.clone()));
        Ok(members)
    }

    /// Waits until all ranks of a communicator have come.
    fn meet(&mut self, group: usize) -> Result<()> {
        if let Some(ranks) = &self.timeout {
            return Err(Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        let (communicator, members) = &self.groups[group];
        let (mut request, members) = (communicator.immediate_barrier(), members.clone());
        let start = Instant::now();
        while let Err(unfinished) = request.test() {
            request = unfinished;
            let error = match start.elapsed() {
                waited if waited > self.limit => {
                    let ranks = self.absent(&members);
                    self.timeout = Some(ranks.clone());
                    Error::Timeout { ranks, limit: self.limit }
                }
                _ => {
                    self.pause(start, members.hash());
                    let of_ranks: Vec<f64> = members.ranks.iter().map(|&rank| self.goes_on[rank]).collect();
                    if of_ranks.iter().all(|goes_on| *goes_on == 1.0) {
                        continue;
                    }
                    Error::Ranks { argument: "whether a rank goes on", of_ranks }
                }
            };
            // A rank will never come: MPI can neither finish the request nor cancel it.
            mem::forget(request);
            return Err(error);
        }
        Ok(())
    }

    /// What a rank does between two looks for others, for which it waits since `start`: it listens to them.
    fn pause(&mut self, start: Instant, answer: u64) {
        if start.elapsed() < EAGER {
            return thread::yield_now();
        }
        if self.state.has_failed() {
            self.groups[0].0.abort(1);
        }
        self.listen(answer);
        thread::sleep(NAP);
    }

    /// Notes who has ended, and tells those who ask what this rank waits for.
    fn listen(&mut self, answer: u64) {
        let (world, _) = &self.groups[0];
        while let Some(status) = world.any_process().immediate_probe_with_tag(QUESTION) {
            let asks = world.process_at_rank(status.source_rank());
            let _: (u64, _) = asks.receive_with_tag(QUESTION);
            asks.send_with_tag(&answer, ANSWER);
        }
        while let Some(status) = world.any_process().immediate_probe_with_tag(END) {
            let rank = status.source_rank();
            let _: (u64, _) = world.process_at_rank(rank).receive_with_tag(END);
            self.goes_on[rank as usize] = 0.0;
        }
    }

    /// Those of some ranks that do not answer, or else those that wait for another communicator than this one.
    fn absent(&mut self, members: &Members) -> Vec<usize> {
        let (own, start) = (members.hash(), Instant::now());
        let mut silent = BTreeSet::from_iter(members.others());
        let mut elsewhere = Vec::new();
        for &rank in &silent {
            self.groups[0].0.process_at_rank(rank as i32).send_with_tag(&own, QUESTION);
        }
        while !silent.is_empty() && start.elapsed() < GRACE {
            self.listen(own);
            let (world, _) = &self.groups[0];
            while let Some(status) = world.any_process().immediate_probe_with_tag(ANSWER) {
                let rank = status.source_rank();
                let (answer, _): (u64, _) = world.process_at_rank(rank).receive_with_tag(ANSWER);
                silent.remove(&(rank as usize));
                if ![own, ENDED].contains(&answer) {
                    elsewhere.push(rank as usize);
                }
            }
            thread::sleep(NAP);
        }
        match (silent.is_empty(), elsewhere.is_empty()) {
            (false, _) => silent.into_iter().collect(),
            (true, false) => elsewhere,
            // One has come since.
            (true, true) => members.others(),
        }
    }

    /// Waits until all ranks of the program end. One that still comes with an operation gets an error instead of a result.
    /// The whole program ends at once if MPI can do nothing more, or a thread of this process has panicked.
    pub(super) fn end(mut self) {
        let world = self.world();
        if self.timeout.is_none() && !self.state.has_failed() {
            for rank in world.others() {
                self.groups[0].0.process_at_rank(rank as i32).send_with_tag(&ENDED, END);
            }
            self.goes_on[world.rank] = 0.0;
            let start = Instant::now();
            while self.goes_on.contains(&1.0) && self.timeout.is_none() {
                self.pause(start, ENDED);
                if start.elapsed() > self.limit {
                    let goes_on = |rank: &usize| self.goes_on[*rank] == 1.0;
                    self.timeout = Some(world.others().into_iter().filter(goes_on).collect());
                }
            }
        }
        if let Some(ranks) = &self.timeout {
            eprintln!("rank {}: {}", world.rank, Error::Timeout { ranks: ranks.clone(), limit: self.limit });
        }
        if self.timeout.is_some() || self.state.has_failed() {
            self.groups[0].0.abort(1);
        }
    }
}

/// What all ranks of a communicator announce, of each argument in the order of the ranks.
fn announcements(communicator: &SimpleCommunicator, Announcement(own): Announcement) -> Vec<Vec<u64>> {
    let mut all = vec![0; own.len() * communicator.size() as usize];
    communicator.all_gather_into(&own[..], &mut all[..]);
    (0..own.len()).map(|i| all.iter().copied().skip(i).step_by(own.len()).collect()).collect()
}
