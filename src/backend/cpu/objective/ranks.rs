//! What the ranks that share a vocabulary exchange in a loss.

use std::ops::Range;
use std::thread::JoinHandle;

use crate::backend::cpu::vector::simd::Float;
use crate::backend::distribution::Real;
use crate::backend::shard::VocabShard;
use crate::error::Result;

/// The ranks that have the rest of the vocabulary.
pub(crate) struct Ranks<'a, F> {
    pub(crate) shard: &'a VocabShard,
    adding: Option<Adding<F>>,
}

/// The gradient of some contexts, which a thread adds up.
struct Adding<F> {
    of: Range<usize>,
    sum: JoinHandle<Result<Vec<F>>>,
}

impl<'a, F: Float + Real> Ranks<'a, F> {
    pub(crate) fn new(shard: &'a VocabShard) -> Self {
        Ranks { shard, adding: None }
    }

    /// Starts to add up the gradient of some contexts, in a thread of its own: products go on until the ranks exchange
    /// something else.
    pub(crate) fn start_sum(&mut self, gradient: &[F], of: Range<usize>) {
        let (shard, mut sum) = (self.shard.clone(), gradient[of.clone()].to_vec());
        let add_up = move || shard.collectives().all_reduce_sum(Real::numbers(&mut sum)).map(|()| sum);
        self.adding = Some(Adding { of, sum: std::thread::spawn(add_up) });
    }

    /// Waits for the sum that has been started, if there is one.
    pub(crate) fn finish_sum(&mut self, gradient: &mut [F]) -> Result<()> {
        if let Some(Adding { of, sum }) = self.adding.take() {
            // As if this thread had called the engine.
            let sum = sum.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            gradient[of].copy_from_slice(&sum);
        }
        Ok(())
    }
}
