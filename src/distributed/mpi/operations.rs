//! The operations of MPI, which run once all ranks have come to the same one.

use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Equivalence, Root};

use super::state::State;

/// An operation, as a rank announces it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// The rank makes no more operations.
    End,
    SumF32,
    SumF64,
    Gather,
    BroadcastF32,
    BroadcastF64,
    Split,
}

/// A number that MPI adds up and sends.
pub(super) trait MpiNumber: Equivalence + Copy + Default + Send + 'static {
    const SUM: Operation;
    const BROADCAST: Operation;

    /// Returns the buffer of this type.
    fn buffer(buffers: &mut SendBuffers) -> &mut Vec<Self>;
}

/// Copies of the numbers that an operation sends; the memory is reused by the next one.
#[derive(Default)]
pub(super) struct SendBuffers(Vec<f32>, Vec<f64>);

impl MpiNumber for f32 {
    const SUM: Operation = Operation::SumF32;
    const BROADCAST: Operation = Operation::BroadcastF32;

    fn buffer(SendBuffers(buffer, _): &mut SendBuffers) -> &mut Vec<f32> {
        buffer
    }
}

impl MpiNumber for f64 {
    const SUM: Operation = Operation::SumF64;
    const BROADCAST: Operation = Operation::BroadcastF64;

    fn buffer(SendBuffers(_, buffer): &mut SendBuffers) -> &mut Vec<f64> {
        buffer
    }
}

/// The largest number of numbers that MPI is given at a time, since it counts in 32 bits, and sent numbers are copied.
const MAX_COUNT: usize = 1 << 20;

/// The ranks of a communicator, once all of them have come to an operation.
pub(super) struct ReadyRanks<'a> {
    pub(super) ranks: &'a SimpleCommunicator,
    pub(super) state: &'a State,
    pub(super) buffers: &'a mut SendBuffers,
}

impl ReadyRanks<'_> {
    /// Replaces numbers by their sums over all ranks.
    pub(super) fn add_up<T: MpiNumber>(&mut self, numbers: &mut [T]) {
        let sent = T::buffer(self.buffers);
        for sum in numbers.chunks_mut(MAX_COUNT) {
            sent.clear();
            sent.extend_from_slice(sum);
            self.state.watch(|| self.ranks.all_reduce_into(&sent[..], sum, SystemOperation::sum()));
        }
    }

    /// Replaces numbers by those of the rank `root`.
    pub(super) fn broadcast<T: MpiNumber>(&mut self, numbers: &mut [T], root: usize) {
        let root = self.ranks.process_at_rank(root as i32);
        for sent in numbers.chunks_mut(MAX_COUNT) {
            self.state.watch(|| root.broadcast_into(sent));
        }
    }

    /// Returns the numbers of all ranks, one rank after the other.
    pub(super) fn gather(&mut self, numbers: &[f64]) -> Vec<f64> {
        let ranks = self.ranks.size() as usize;
        let mut all = vec![0.0; numbers.len() * ranks];
        let mut received = Vec::new();
        for (piece, sent) in numbers.chunks(MAX_COUNT).enumerate() {
            received.resize(sent.len() * ranks, 0.0);
            self.state.watch(|| self.ranks.all_gather_into(sent, &mut received[..]));
            for (to, from) in all.chunks_exact_mut(numbers.len()).zip(received.chunks_exact(sent.len())) {
                to[piece * MAX_COUNT..][..from.len()].copy_from_slice(from);
            }
        }
        all
    }
}
