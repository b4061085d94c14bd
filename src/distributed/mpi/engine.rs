//! The thread that calls MPI, as other threads see it.

use std::fmt;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::communicators::{print, Announcement, Communicators, Members};
use super::operations::Together;
use super::state::State;
use crate::error::{Error, Result};

/// MPI, which serves one operation at a time, in a thread of its own: it needs no more of MPI than that one thread calls
/// it, and other threads can give up an operation that does not return.
pub(super) struct Engine {
    /// `None` once MPI ends.
    operations: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    state: Arc<State>,
    limit: Duration,
    /// The ranks of the whole program.
    world: Members,
}

/// What the thread runs.
type Job = Box<dyn FnOnce(&mut Communicators) + Send>;

/// How often a thread that waits for MPI looks whether it is stuck.
const LOOK: Duration = Duration::from_millis(500);

impl Engine {
    /// Starts MPI; returns the ranks of the whole program too.
    pub(super) fn start(limit: Duration) -> Result<(Self, Members)> {
        let (operations, calls) = channel::<Job>();
        let (started, is_started) = channel();
        let state = Arc::new(State::new());
        let of_thread = state.clone();
        let serve = move || {
            let mut communicators = match Communicators::start(limit, of_thread) {
                Ok(communicators) => communicators,
                Err(error) => return drop(started.send(Err(error))),
            };
            // Whoever starts MPI waits for this.
            let _ = started.send(Ok(communicators.world()));
            for call in calls {
                call(&mut communicators);
            }
            communicators.end();
        };
        let thread = thread::Builder::new().name("mpi".into()).spawn(serve).map_err(candle_core::Error::wrap)?;
        let world = is_started.recv().map_err(|_| ended())??;
        let engine = Engine { operations: Some(operations), thread: Some(thread), state, limit, world: world.clone() };
        Ok((engine, world))
    }

    /// The result of an operation of all of these ranks.
    pub(super) fn call<T: Send + 'static>(
        &self,
        members: &Members,
        announcement: Announcement,
        operation: impl FnOnce(&mut Together) -> T + Send + 'static,
    ) -> Result<T> {
        let group = members.group;
        self.run(move |communicators| communicators.together(group, announcement, operation))
    }

    /// Those of these ranks that call with the same color.
    pub(super) fn split(&self, members: &Members, color: i32) -> Result<Members> {
        let group = members.group;
        self.run(move |communicators| communicators.split(group, color))
    }

    /// Notes that a thread of this process has panicked, so that the program must end.
    pub(super) fn fail(&self) {
        self.state.fail();
    }

    fn run<T: Send + 'static>(&self, call: impl FnOnce(&mut Communicators) -> Result<T> + Send + 'static) -> Result<T> {
        let (answer, answers) = channel();
        // Whoever calls waits for the answer, unless MPI is stuck.
        let call: Job = Box::new(move |communicators| drop(answer.send(call(communicators))));
        let operations = self.operations.as_ref().ok_or_else(ended)?;
        operations.send(call).map_err(|_| ended())?;
        self.wait(&answers)?
    }

    /// The error of an operation from which MPI does not return: any other rank may hang.
    fn stuck(&self) -> Error {
        Error::Timeout { ranks: self.world.other_ranks(), limit: self.limit }
    }

    /// Waits for the thread's answer, as long as MPI is not stuck.
    fn wait<T>(&self, answers: &Receiver<T>) -> Result<T> {
        loop {
            match answers.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) if self.state.is_stuck(self.limit) => return Err(self.stuck()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

fn ended() -> Error {
    candle_core::Error::Msg("the thread that calls MPI has ended".into()).into()
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// Ends when all ranks do.
impl Drop for Engine {
    fn drop(&mut self) {
        self.operations = None;
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            if self.state.is_stuck(self.limit) {
                print(&self.world, &self.stuck());
                // The thread is inside MPI, which could hold up an orderly exit. mpirun ends the other processes.
                std::process::abort();
            }
            thread::sleep(Duration::from_millis(1));
        }
        // Its panic has been printed.
        let _ = thread.join();
    }
}
