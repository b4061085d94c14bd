//! Divergences that are functions of the probability with which the teacher accepts what the student drafts, in two
//! sweeps over each row of log-probabilities: one for the sums, one for the derivatives.

use super::divergence_row::{if_below, map_student, weighted, DivergenceRow};
use crate::backend::cpu::vector::math::{exp, not_negative, RowSum};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};

/// A function of the sums of a row.
#[derive(Clone, Copy)]
pub(super) enum Acceptance {
    NegLog,
    /// With eta.
    LkHybrid(f64),
}

/// The value of a divergence, and its derivatives by the sums that have them.
struct Combined<F> {
    value: F,
    by_variation: F,
    by_kl: F,
}

impl Acceptance {
    /// Combines the acceptance, the total variation and the forward divergence of a row.
    fn combine<F: Float>(self, acceptance: F, variation: F, kl: F) -> Combined<F> {
        let (zero, one) = (F::zero(), F::one());
        match self {
            Acceptance::NegLog => {
                Combined { value: zero - acceptance.ln(), by_variation: one / acceptance, by_kl: zero }
            }
            Acceptance::LkHybrid(eta) => {
                let lambda = (F::from_f64(-eta) * acceptance).exp();
                // A divergence that is infinite remains so where its weight is rounded to zero.
                let value = if kl == F::infinity() { kl } else { lambda * kl + (one - lambda) * variation };
                Combined { value, by_variation: one - lambda, by_kl: lambda }
            }
        }
    }
}

/// The kernel that computes the divergence of a row, and replaces the student's log-probabilities by the derivatives.
pub(super) struct AcceptanceSweeps<'a, F>(pub(super) DivergenceRow<'a, F>, pub(super) Acceptance);

impl<F: Float> Kernel<F> for AcceptanceSweeps<'_, F> {
    type Output = F;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> F {
        let AcceptanceSweeps(row, divergence) = self;
        let zero = v.splat(F::zero());
        let tempered = row.tempered(v);
        let DivergenceRow { student, teacher, power, scale } = row;
        // The probability of those ids that the teacher finds more probable than the student, which alone have
        // derivatives, and that of the teacher's ids.
        let [mut acceptance, mut variation, mut kl, mut below, mut mass] = [RowSum::new(v); 5];
        map_student(v, student, teacher, |log_q, log_t| {
            let (tempered_q, tempered_t) = tempered(log_q, log_t);
            let (q, t) = (exp(v, tempered_q), exp(v, tempered_t));
            acceptance.add(v, v.if_less(t, q, t, q));
            variation.add(v, v.if_less(t, q, zero, v.sub(t, q)));
            kl.add(v, weighted(v, t, v.sub(tempered_t, tempered_q)));
            below.add(v, if_below(v, q, t));
            mass.add(v, t);
            log_q
        });
        let Combined { value, by_variation, by_kl } =
            divergence.combine(acceptance.value(v), variation.value(v), kl.value(v));
        // The derivative of the student's normalisation at the temperature.
        let normalisation =
            if power == F::one() { F::zero() } else { by_variation * below.value(v) + by_kl * mass.value(v) };
        let [scale, by_variation, by_kl, normalisation] =
            [scale * power, by_variation, by_kl, normalisation].map(|x| v.splat(x));
        map_student(v, student, teacher, |log_q, log_t| {
            let (tempered_q, tempered_t) = tempered(log_q, log_t);
            let (q, t) = (exp(v, tempered_q), exp(v, tempered_t));
            let slope = v.add(weighted(v, by_variation, if_below(v, q, t)), weighted(v, by_kl, t));
            weighted(v, scale, v.sub(weighted(v, q, normalisation), slope))
        });
        not_negative(value)
    }
}
