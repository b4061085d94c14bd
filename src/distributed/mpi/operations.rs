//! The operations of MPI, once all ranks have come to one.

use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Equivalence, Root};

use super::state::State;

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

/// A number that MPI adds up and sends.
pub(super) trait MpiNumber: Equivalence + Copy + Default + Send + 'static {
    const SUM: Operation;
    const BROADCAST: Operation;

    fn buffer(buffers: &mut SendBuffers) -> &mut Vec<Self>;
}

/// What an operation sends, kept for the next one.
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

/// Numbers that MPI is given at most at a time: it counts them in 32 bits, and what is sent is copied.
const MOST: usize = 1 << 20;

/// The ranks, all of which have come.
pub(super) struct Together<'a> {
    pub(super) ranks: &'a SimpleCommunicator,
    pub(super) state: &'a State,
    pub(super) buffers: &'a mut SendBuffers,
}

impl Together<'_> {
    /// Replaces numbers by their sums over all ranks.
    pub(super) fn add_up<T: MpiNumber>(&mut self, numbers: &mut [T]) {
        let sent = T::buffer(self.buffers);
        for sum in numbers.chunks_mut(MOST) {
            sent.clear();
            sent.extend_from_slice(sum);
            self.state.inside(|| self.ranks.all_reduce_into(&sent[..], sum, SystemOperation::sum()));
        }
    }

    /// Replaces numbers by a rank's.
    pub(super) fn broadcast<T: MpiNumber>(&mut self, numbers: &mut [T], root: usize) {
        let root = self.ranks.process_at_rank(root as i32);
        for sent in numbers.chunks_mut(MOST) {
            self.state.inside(|| root.broadcast_into(sent));
        }
    }

    /// The numbers of all ranks, one rank after the other.
    pub(super) fn gather(&mut self, numbers: &[f64]) -> Vec<f64> {
        let ranks = self.ranks.size() as usize;
        let mut all = vec![0.0; numbers.len() * ranks];
        let mut received = Vec::new();
        for (piece, sent) in numbers.chunks(MOST).enumerate() {
            received.resize(sent.len() * ranks, 0.0);
            self.state.inside(|| self.ranks.all_gather_into(sent, &mut received[..]));
            for (to, from) in all.chunks_exact_mut(numbers.len()).zip(received.chunks_exact(sent.len())) {
                to[piece * MOST..][..from.len()].copy_from_slice(from);
            }
        }
        all
    }
}
