//! The ranks that share a vocabulary, and the sum over ranks that runs beside a loss's products.

use std::ops::Range;
use std::thread::JoinHandle;

use crate::backend::cpu::vector::simd::Float;
use crate::backend::operands::Real;
use crate::backend::shard::VocabShard;
use crate::error::Result;

/// The ranks that share the vocabulary with this one.
pub(crate) struct Ranks<'a, F> {
    pub(crate) shard: &'a VocabShard,
    /// The sum that a thread computes, if one has been started.
    pending: Option<PendingSum<F>>,
}

/// The sum over ranks of some contexts' gradient, which a thread of its own computes.
struct PendingSum<F> {
    /// The elements of the gradient that are added up.
    range: Range<usize>,
    thread: JoinHandle<Result<Vec<F>>>,
}

impl<'a, F: Float + Real> Ranks<'a, F> {
    /// Makes the ranks of a shard, without a pending sum.
    pub(crate) fn new(shard: &'a VocabShard) -> Self {
        Ranks { shard, pending: None }
    }

    /// Starts to add up a range of the contexts' gradient, in a thread of its own: products go on until the ranks
    /// exchange something else.
    pub(crate) fn start_sum(&mut self, gradient: &[F], range: Range<usize>) {
        let (shard, mut sum) = (self.shard.clone(), gradient[range.clone()].to_vec());
        let add_up = move || shard.collectives().all_reduce_sum(Real::numbers(&mut sum)).map(|()| sum);
        self.pending = Some(PendingSum { range, thread: std::thread::spawn(add_up) });
    }

    /// Waits for the pending sum, if there is one, and writes it to the gradient.
    pub(crate) fn finish_sum(&mut self, gradient: &mut [F]) -> Result<()> {
        if let Some(PendingSum { range, thread }) = self.pending.take() {
            // A panic of the engine goes on as if this thread had called it.
            let sum = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            gradient[range].copy_from_slice(&sum);
        }
        Ok(())
    }
}
