//! The thread that calls MPI: it starts MPI, runs the operations that other threads send to it, and ends MPI.

use std::fmt;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::communicators::{print_error, Announcement, Communicators, Members};
use super::operations::ReadyRanks;
use super::state::State;
use crate::error::{Error, Result};

/// The handle of the thread that calls MPI, which runs one operation at a time. MPI needs no support for several
/// threads then, and other threads can give up an operation that does not return.
pub(super) struct Engine {
    /// `None` once MPI ends.
    operations: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    state: Arc<State>,
    /// How long ranks wait for each other.
    limit: Duration,
    /// The ranks of the whole program.
    world: Members,
}

/// An operation that the thread runs.
type Job = Box<dyn FnOnce(&mut Communicators) + Send>;

/// The time after which a thread that waits for MPI checks again whether MPI is stuck.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl Engine {
    /// Starts MPI, and returns the ranks of the whole program too.
    pub(super) fn start(limit: Duration) -> Result<(Self, Members)> {
        let (operations, calls) = channel::<Job>();
        let (started, is_started) = channel();
        let state = Arc::new(State::new());
        let thread_state = state.clone();
        let serve = move || {
            let mut communicators = match Communicators::start(limit, thread_state) {
                Ok(communicators) => communicators,
                Err(error) => return drop(started.send(Err(error))),
            };
            // The thread that starts MPI waits for this.
            let _ = started.send(Ok(communicators.world()));
            for call in calls {
                call(&mut communicators);
            }
            communicators.end();
        };
        let thread = thread::Builder::new().name("mpi".into()).spawn(serve).map_err(candle_core::Error::wrap)?;
        let world = is_started.recv().map_err(|_| ended_error())??;
        let engine = Engine { operations: Some(operations), thread: Some(thread), state, limit, world: world.clone() };
        Ok((engine, world))
    }

    /// Runs an operation that all of these ranks run together, and returns its result.
    pub(super) fn call<T: Send + 'static>(
        &self,
        members: &Members,
        announcement: Announcement,
        operation: impl FnOnce(&mut ReadyRanks) -> T + Send + 'static,
    ) -> Result<T> {
        let group = members.group;
        self.run(move |communicators| communicators.run_together(group, announcement, operation))
    }

    /// Returns those of these ranks that call with the same color.
    pub(super) fn split(&self, members: &Members, color: i32) -> Result<Members> {
        let group = members.group;
        self.run(move |communicators| communicators.split(group, color))
    }

    /// Notes that a thread of this process has panicked, so that the program must end.
    pub(super) fn fail(&self) {
        self.state.fail();
    }

    /// Runs a call in the thread that calls MPI, and waits for the result.
    fn run<T: Send + 'static>(&self, call: impl FnOnce(&mut Communicators) -> Result<T> + Send + 'static) -> Result<T> {
        let (answer, answers) = channel();
        // The caller waits for the answer, unless MPI is stuck.
        let call: Job = Box::new(move |communicators| drop(answer.send(call(communicators))));
        let operations = self.operations.as_ref().ok_or_else(ended_error)?;
        operations.send(call).map_err(|_| ended_error())?;
        self.wait(&answers)?
    }

    /// Makes the error of an operation from which MPI does not return. It names all other ranks, since any may hang.
    fn stuck_error(&self) -> Error {
        Error::Timeout { ranks: self.world.other_ranks(), limit: self.limit }
    }

    /// Waits for the thread's answer, as long as MPI is not stuck.
    fn wait<T>(&self, answers: &Receiver<T>) -> Result<T> {
        loop {
            match answers.recv_timeout(CHECK_INTERVAL) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(ended_error()),
                Err(RecvTimeoutError::Timeout) if self.state.is_stuck(self.limit) => return Err(self.stuck_error()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Makes the error of an operation after the thread that calls MPI has ended.
fn ended_error() -> Error {
    candle_core::Error::Msg("the thread that calls MPI has ended".into()).into()
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// Dropping the engine waits until all ranks of the program end.
impl Drop for Engine {
    fn drop(&mut self) {
        self.operations = None;
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            if self.state.is_stuck(self.limit) {
                print_error(&self.world, &self.stuck_error());
                // The thread is inside MPI, which could hold up an orderly exit. mpirun ends the other processes.
                std::process::abort();
            }
            thread::sleep(Duration::from_millis(1));
        }
        // If the thread has panicked, the panic has been printed.
        let _ = thread.join();
    }
}
