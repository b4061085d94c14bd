//! The state that the thread that calls MPI shares with the other threads of its process.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether MPI is stuck, and whether the program must end.
pub(super) struct State {
    since: Instant,
    /// One more than the milliseconds from `since` to the start of MPI's current operation; 0 if there is none.
    operation_start: AtomicU64,
    has_been_stuck: AtomicBool,
    has_failed: AtomicBool,
}

impl State {
    /// Makes the state of MPI outside an operation.
    pub(super) fn new() -> Self {
        State {
            since: Instant::now(),
            operation_start: AtomicU64::new(0),
            has_been_stuck: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Runs an operation from which MPI may not return, so that other threads see when it started.
    pub(super) fn watch<T>(&self, operation: impl FnOnce() -> T) -> T {
        self.operation_start.store(1 + self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
        let result = operation();
        self.operation_start.store(0, Ordering::Relaxed);
        result
    }

    /// Returns whether MPI has not returned for longer than `limit`. It is given up then, even if it returns later.
    pub(super) fn is_stuck(&self, limit: Duration) -> bool {
        let start = self.operation_start.load(Ordering::Relaxed);
        if start > 0 && self.since.elapsed() > Duration::from_millis(start).saturating_add(limit) {
            self.has_been_stuck.store(true, Ordering::Relaxed);
        }
        self.has_been_stuck()
    }

    /// Returns whether MPI has been given up.
    pub(super) fn has_been_stuck(&self) -> bool {
        self.has_been_stuck.load(Ordering::Relaxed)
    }

    /// Notes that a thread of this process has panicked.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether a thread of this process has panicked.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }
}
