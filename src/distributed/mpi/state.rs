//! What the thread that calls MPI and the other threads tell each other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether MPI is stuck, and whether the program must end.
pub(super) struct State {
    since: Instant,
    /// Milliseconds from `since` to the start of the operation that MPI is in; 0 outside of one.
    inside: AtomicU64,
    was_stuck: AtomicBool,
    has_failed: AtomicBool,
}

impl State {
    pub(super) fn new() -> Self {
        State {
            since: Instant::now(),
            inside: AtomicU64::new(0),
            was_stuck: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Runs what MPI may not return from.
    pub(super) fn inside<T>(&self, operation: impl FnOnce() -> T) -> T {
        self.inside.store(1 + self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
        let result = operation();
        self.inside.store(0, Ordering::Relaxed);
        result
    }

    /// Whether MPI has not returned for longer than `limit`. It is given up then, even if it returns later.
    pub(super) fn is_stuck(&self, limit: Duration) -> bool {
        let inside = self.inside.load(Ordering::Relaxed);
        if inside > 0 && self.since.elapsed() > Duration::from_millis(inside).saturating_add(limit) {
            self.was_stuck.store(true, Ordering::Relaxed);
        }
        self.was_stuck()
    }

    /// Whether MPI has been given up.
    pub(super) fn was_stuck(&self) -> bool {
        self.was_stuck.load(Ordering::Relaxed)
    }

    /// Notes that a thread of this process has panicked.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Whether a thread of this process has panicked.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }
}
