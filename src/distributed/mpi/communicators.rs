//! MPI's communicators, in the one thread that calls MPI, and how their ranks wait for each other.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{mem, thread};

use mpi::environment::Universe;
use mpi::request::Request;
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Source};
use mpi::Threading;

use super::state::State;
use crate::error::{Error, Result};

/// An operation of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// A rank makes no other.
    End,
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
const ARGUMENTS: [&str; 3] = ["the operation (0 is the end)", "numbers", "root"];

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
    limit: Duration,
    /// The ranks that have not come in time: MPI can do nothing more.
    timeout: Option<Vec<usize>>,
    state: Arc<State>,
    /// Ends MPI when it is dropped, after the communicators.
    _universe: Universe,
}

/// The tags of a question whether a rank waits too, and of the answer.
const QUESTION: i32 = 1;
const ANSWER: i32 = 2;

/// The answer of a rank that waits for others to end, with all of its communicators.
const IN_ALL: u64 = 0;

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
        Ok(Communicators { groups: vec![(world, members)], limit, timeout: None, state, _universe: universe })
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
        let (mut request, start) = (communicator.immediate_barrier(), Instant::now());
        while let Err(unfinished) = request.test() {
            request = unfinished;
            if start.elapsed() > self.limit {
                let ranks = self.absent(members);
                // MPI has it for ever: it can be neither finished nor cancelled.
                mem::forget(request);
                self.timeout = Some(ranks.clone());
                return Err(Error::Timeout { ranks, limit: self.limit });
            }
            self.pause(start, members.hash());
        }
        Ok(())
    }

    /// What a rank does between two looks for others, having waited for them since `start`: it answers questions.
    fn pause(&self, start: Instant, answer: u64) {
        if start.elapsed() < EAGER {
            return thread::yield_now();
        }
        if self.state.has_failed() {
            self.groups[0].0.abort(1);
        }
        self.answer(answer);
        thread::sleep(NAP);
    }

    /// Tells those who ask what this rank waits for.
    fn answer(&self, answer: u64) {
        let (world, _) = &self.groups[0];
        while let Some(status) = world.any_process().immediate_probe_with_tag(QUESTION) {
            let asks = world.process_at_rank(status.source_rank());
            let _: (u64, _) = asks.receive_with_tag(QUESTION);
            asks.send_with_tag(&answer, ANSWER);
        }
    }

    /// The members that have not come: those that do not answer, or else those that wait for another communicator.
    fn absent(&self, members: &Members) -> Vec<usize> {
        let ((world, _), own, start) = (&self.groups[0], members.hash(), Instant::now());
        let mut silent = BTreeSet::from_iter(members.others());
        let mut elsewhere = Vec::new();
        silent.iter().for_each(|&rank| world.process_at_rank(rank as i32).send_with_tag(&own, QUESTION));
        while !silent.is_empty() && start.elapsed() < GRACE {
            self.answer(own);
            while let Some(status) = world.any_process().immediate_probe_with_tag(ANSWER) {
                let rank = status.source_rank();
                let (answer, _): (u64, _) = world.process_at_rank(rank).receive_with_tag(ANSWER);
                silent.remove(&(rank as usize));
                if ![own, IN_ALL].contains(&answer) {
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

    /// Waits until the ranks of all communicators end. Another rank that comes with an operation gets an error instead of a
    /// result. The whole program ends at once if MPI can do nothing more, or a thread of this process has panicked.
    pub(super) fn end(mut self) {
        if let (None, false) = (&self.timeout, self.state.has_failed()) {
            self.timeout = self.absent_at_the_end();
        }
        if let Some(ranks) = &self.timeout {
            let error = Error::Timeout { ranks: ranks.clone(), limit: self.limit };
            eprintln!("rank {}: {error}", self.groups[0].1.rank);
        }
        if self.timeout.is_some() || self.state.has_failed() {
            self.groups[0].0.abort(1);
        }
        self.groups.clear();
    }

    /// Waits until all ranks end; returns those that have not come in time.
    fn absent_at_the_end(&self) -> Option<Vec<usize>> {
        let barrier = |group: usize| (group, self.groups[group].0.immediate_barrier());
        let mut open: Vec<(usize, Request<'static, ()>)> = (0..self.groups.len()).map(barrier).collect();
        let mut start = Instant::now();
        while !open.is_empty() {
            let mut still_open = Vec::new();
            for (group, request) in open {
                let (communicator, _) = &self.groups[group];
                match request.test() {
                    Err(unfinished) => still_open.push((group, unfinished)),
                    Ok(_) => {
                        let announcement = Announcement::new(Operation::End, 0);
                        let of_ranks = self.state.inside(|| announcements(communicator, announcement));
                        if of_ranks[0].iter().any(|operation| *operation != Operation::End as u64) {
                            still_open.push(barrier(group));
                        }
                        start = Instant::now();
                    }
                }
            }
            open = still_open;
            if start.elapsed() > self.limit {
                let (first, _) = &open[0];
                let ranks = self.absent(&self.groups[*first].1);
                open.into_iter().for_each(|(_, request)| mem::forget(request));
                return Some(ranks);
            }
            self.pause(start, IN_ALL);
        }
        None
    }
}

/// What all ranks of a communicator announce, of each argument in the order of the ranks.
fn announcements(communicator: &SimpleCommunicator, Announcement(own): Announcement) -> Vec<Vec<u64>> {
    let mut all = vec![0; own.len() * communicator.size() as usize];
    communicator.all_gather_into(&own[..], &mut all[..]);
    (0..own.len()).map(|i| all.iter().copied().skip(i).step_by(own.len()).collect()).collect()
}
