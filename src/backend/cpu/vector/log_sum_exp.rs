//! The log-sum-exp of a row of logits, `log sum_v exp z_v`, and how those of several sets of ids combine.

use super::simd::Float;
use crate::backend::distribution::Defect;

/// A log-sum-exp in two parts. Added up into one number, they would lose the precision that `z - lse` needs when the
/// largest logit is far from zero.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogSumExp<F> {
    /// The largest logit; zero if all are minus infinity.
    pub(crate) largest: F,
    /// `log sum_v exp(z_v - largest)`
    pub(crate) log_sum: F,
}

impl<F: Float> LogSumExp<F> {
    /// Returns the log-sum-exp in one number.
    pub(crate) fn value(self) -> F {
        self.largest + self.log_sum
    }

    /// Computes the log-sum-exp of a few numbers.
    pub(crate) fn from_terms(values: impl Iterator<Item = F> + Clone) -> Self {
        let largest = finite_or_zero(values.clone().fold(F::neg_infinity(), num_traits::Float::max));
        let sum: F = values.map(|x| (x - largest).exp()).sum();
        LogSumExp { largest, log_sum: sum.ln() }
    }

    /// Combines the log-sum-exps of disjoint sets of ids into that of their union.
    pub(crate) fn joined(sets: impl Iterator<Item = Self> + Clone) -> Self {
        let possible = sets.clone().filter(|set| set.log_sum != F::neg_infinity());
        let largest = finite_or_zero(possible.map(|set| set.largest).fold(F::neg_infinity(), num_traits::Float::max));
        let sum: F = sets.map(|set| (set.largest - largest + set.log_sum).exp()).sum();
        LogSumExp { largest, log_sum: sum.ln() }
    }
}

/// Returns why components with these log-sum-exps and log-priors have no distribution together; `None` if they have
/// one. A component without a possible id has no distribution of its own, hence the mixture has none.
pub(crate) fn defect_of<F: Float>(components: impl Iterator<Item = (LogSumExp<F>, F)> + Clone) -> Option<Defect> {
    let is_number = |(LogSumExp { largest, log_sum }, log_prior): (LogSumExp<F>, F)| {
        largest < F::infinity() && log_sum < F::infinity() && log_prior < F::infinity()
    };
    if !components.clone().all(is_number) {
        return Some(Defect::NotFinite);
    }
    let have_ids = components.clone().all(|(lse, _)| lse.log_sum > F::neg_infinity());
    let is_possible = have_ids && components.clone().any(|(_, log_prior)| log_prior > F::neg_infinity());
    (!is_possible).then_some(Defect::Impossible)
}

/// Returns `x`, or zero if it is minus infinity.
pub(crate) fn finite_or_zero<F: Float>(x: F) -> F {
    if x == F::neg_infinity() {
        F::zero()
    } else {
        x
    }
}
