//! What the ranks that share a vocabulary exchange in a loss.

use std::ops::Range;
use std::thread::JoinHandle;

use super::log_sum_exp::LogSumExp;
use super::simd::Float;
use crate::backend::contract::Real;
use crate::backend::shard::VocabShard;
use crate::error::Result;

/// The ranks that have the rest of the vocabulary.
pub(super) struct Ranks<'a, F> {
    pub(super) shard: &'a VocabShard,
    adding: Option<Adding<F>>,
}

/// The gradient of some contexts, which a thread adds up.
struct Adding<F> {
    of: Range<usize>,
    sum: JoinHandle<Result<Vec<F>>>,
}

/// A row of a shard, which becomes the whole vocabulary's.
pub(super) struct SharedRow<'r, F> {
    pub(super) lse: &'r mut LogSumExp<F>,
    /// Minus infinity if another rank has the target.
    pub(super) target_logit: &'r mut F,
    /// The rank that has the target, if there is one.
    pub(super) owner: Option<usize>,
}

impl<'a, F: Float + Real> Ranks<'a, F> {
    pub(super) fn new(shard: &'a VocabShard) -> Self {
        Ranks { shard, adding: None }
    }

    /// Replaces the log-sum-exps of a shard's rows, and the logits of their targets, by those of the whole vocabulary.
    pub(super) fn join<'r>(&self, rows: impl Iterator<Item = SharedRow<'r, F>>) -> Result<()>
    where
        F: 'r,
    {
        let mut rows: Vec<_> = rows.collect();
        let sent: Vec<f64> = rows.iter().flat_map(|row| [row.lse.precise(), row.target_logit.f64()]).collect();
        let received = self.shard.collectives().all_gather(&sent)?;
        let of_ranks: Vec<&[f64]> = received.chunks_exact(sent.len().max(1)).collect();
        for (i, row) in rows.iter_mut().enumerate() {
            *row.lse = LogSumExp::of_ranks(of_ranks.iter().map(|of_rank| of_rank[2 * i]));
            if let Some(owner) = row.owner {
                *row.target_logit = F::of(of_ranks[owner][2 * i + 1]);
            }
        }
        Ok(())
    }

    /// Starts to add up the gradient of some contexts, in a thread of its own: products go on until the ranks exchange
    /// something else.
    pub(super) fn start_sum(&mut self, gradient: &[F], of: Range<usize>) {
        let (shard, mut sum) = (self.shard.clone(), gradient[of.clone()].to_vec());
        let add_up = move || shard.collectives().all_reduce_sum(Real::numbers(&mut sum)).map(|()| sum);
        self.adding = Some(Adding { of, sum: std::thread::spawn(add_up) });
    }

    /// Waits for the sum that has been started, if there is one.
    pub(super) fn finish_sum(&mut self, gradient: &mut [F]) -> Result<()> {
        if let Some(Adding { of, sum }) = self.adding.take() {
            // As if this thread had called the engine.
            let sum = sum.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            gradient[of].copy_from_slice(&sum);
        }
        Ok(())
    }
}
