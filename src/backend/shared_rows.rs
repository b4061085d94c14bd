//! Rows of logits whose ids the ranks share: their log-sum-exps and the logits of their targets.

use super::shard::VocabShard;
use crate::backend::operands::Real;
use crate::error::Result;

/// A row of a shard, which becomes a row of the whole vocabulary.
pub(super) struct SharedRow<'r, F> {
    /// The largest logit; zero if all are minus infinity.
    pub(super) largest: &'r mut F,
    /// `log sum_v exp(z_v - largest)`.
    pub(super) log_sum: &'r mut F,
    /// The logit of the target; any number if another rank has the target.
    pub(super) target_logit: &'r mut F,
}

/// Replaces the log-sum-exps of a shard's rows, and the logits of their targets, by those of the whole vocabulary. All
/// positions have equally many rows. `owners` are the ranks that have the positions' targets, `None` for a position
/// without a target. Every rank calls it.
pub(super) fn join<F: Real>(shard: &VocabShard, owners: &[Option<usize>], rows: Vec<SharedRow<'_, F>>) -> Result<()> {
    let components = rows.len() / owners.len().max(1);
    let mut sent = Vec::with_capacity(2 * rows.len());
    for row in &rows {
        sent.extend([row.largest.f64() + row.log_sum.f64(), row.target_logit.f64()]);
    }
    let received = shard.collectives().all_gather(&sent)?;
    let rank_numbers: Vec<&[f64]> = received.chunks_exact(sent.len().max(1)).collect();
    for (i, row) in rows.into_iter().enumerate() {
        let log_sums = || rank_numbers.iter().map(|numbers| numbers[2 * i]);
        let largest = match log_sums().fold(f64::NEG_INFINITY, f64::max) {
            f64::NEG_INFINITY => F::from_f64(0.0),
            largest => F::from_f64(largest),
        };
        let sum: f64 = log_sums().map(|x| (x - largest.f64()).exp()).sum();
        (*row.largest, *row.log_sum) = (largest, F::from_f64(sum.ln()));
        if let Some(owner) = owners.get(i / components).copied().flatten() {
            *row.target_logit = F::from_f64(rank_numbers[owner][2 * i + 1]);
        }
    }
    Ok(())
}
