//! Divergences from a teacher's distributions, and their derivatives, in one sweep over each row of log-probabilities.

use candle_core::{Device, Tensor};

use super::acceptance::{Acceptance, AcceptanceSweeps};
use super::divergence_row::{if_below, map_student, weighted, DivergenceRow};
use crate::backend::cpu::operands::dtype::{with_slice, Accumulator};
use crate::backend::cpu::vector::math::{exp, ln, not_negative, RowSum};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::backend::divergence::{Divergence, DivergenceTerms};
use crate::backend::parallel;
use crate::error::Result;
use crate::tensors::autograd::take_values;

/// Computes the divergences `[n]`, and their derivatives by the log-probabilities `[n, vocab]`, which are written over
/// these.
pub(crate) fn divergence<F: Accumulator>(
    log_probs: &Tensor,
    log_teacher: &Tensor,
    terms: &DivergenceTerms,
) -> Result<(Tensor, Tensor)> {
    let ((n, vocab), isa) = (log_probs.dims2()?, Isa::detected()?);
    let mut rows: Vec<F> = take_values(log_probs)?;
    let scales: Vec<F> = terms.scales.to_vec1()?;
    let power = F::from_f64(1.0 / terms.temperature);
    let mut values = vec![F::zero(); n];
    with_slice("log_teacher", log_teacher, |teacher: &[F]| {
        let rows = rows.chunks_exact_mut(vocab).zip(teacher.chunks_exact(vocab));
        let values = values.iter_mut().zip(&scales);
        parallel::for_each(rows.zip(values), |((student, teacher), (value, &scale))| {
            let row = DivergenceRow { student, teacher, power, scale };
            *value = match terms.divergence {
                Divergence::ForwardKl => F::dispatch(isa, Sweep(row, Forward)),
                Divergence::ReverseKl => F::dispatch(isa, Sweep(row, Reverse)),
                Divergence::JensenShannon(beta) => F::dispatch(isa, Sweep(row, JensenShannon::new(beta))),
                Divergence::TotalVariation => F::dispatch(isa, Sweep(row, Variation)),
                Divergence::NegLogAcceptance => F::dispatch(isa, AcceptanceSweeps(row, Acceptance::NegLog)),
                Divergence::LkHybrid(eta) => F::dispatch(isa, AcceptanceSweeps(row, Acceptance::LkHybrid(eta))),
            };
        });
        Ok(())
    })?;
    Ok((Tensor::from_vec(values, n, &Device::Cpu)?, Tensor::from_vec(rows, (n, vocab), &Device::Cpu)?))
}

/// A divergence as a sum over ids.
trait Term<F: Float>: Copy {
    /// Computes the term of each id of a register from the log-probabilities of student and teacher, and the derivative
    /// of the divergence by the student's log-probability of the id, up to a constant times the probability.
    fn value_and_slope<V: Vector<F>>(self, v: V, log_q: V::Reg, log_t: V::Reg) -> (V::Reg, V::Reg);
}

/// `sum_v T(v) (log T(v) - log Q(v))`
#[derive(Clone, Copy)]
struct Forward;

impl<F: Float> Term<F> for Forward {
    #[inline(always)]
    fn value_and_slope<V: Vector<F>>(self, v: V, log_q: V::Reg, log_t: V::Reg) -> (V::Reg, V::Reg) {
        let t = exp(v, log_t);
        (weighted(v, t, v.sub(log_t, log_q)), v.sub(v.splat(F::zero()), t))
    }
}

/// `sum_v Q(v) (log Q(v) - log T(v))`
#[derive(Clone, Copy)]
struct Reverse;

impl<F: Float> Term<F> for Reverse {
    #[inline(always)]
    fn value_and_slope<V: Vector<F>>(self, v: V, log_q: V::Reg, log_t: V::Reg) -> (V::Reg, V::Reg) {
        let term = weighted(v, exp(v, log_q), v.sub(log_q, log_t));
        (term, term)
    }
}

/// `sum_v max(0, T(v) - Q(v))`
#[derive(Clone, Copy)]
struct Variation;

impl<F: Float> Term<F> for Variation {
    #[inline(always)]
    fn value_and_slope<V: Vector<F>>(self, v: V, log_q: V::Reg, log_t: V::Reg) -> (V::Reg, V::Reg) {
        let (zero, q, t) = (v.splat(F::zero()), exp(v, log_q), exp(v, log_t));
        (v.if_less(t, q, zero, v.sub(t, q)), v.sub(zero, if_below(v, q, t)))
    }
}

/// `beta sum_v T(v) log(T(v) / M(v)) + (1 - beta) sum_v Q(v) log(Q(v) / M(v))` for `M = beta T + (1 - beta) Q`
#[derive(Clone, Copy)]
struct JensenShannon<F> {
    beta: F,
    log_beta: F,
    /// `log(1 - beta)`.
    log_complement: F,
}

impl<F: Float> JensenShannon<F> {
    /// Computes the logarithms of the teacher's share `beta` and of the student's.
    fn new(beta: f64) -> Self {
        JensenShannon {
            beta: F::from_f64(beta),
            log_beta: F::from_f64(beta.ln()),
            log_complement: F::from_f64((1.0 - beta).ln()),
        }
    }
}

impl<F: Float> Term<F> for JensenShannon<F> {
    #[inline(always)]
    fn value_and_slope<V: Vector<F>>(self, v: V, log_q: V::Reg, log_t: V::Reg) -> (V::Reg, V::Reg) {
        let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
        let (a, b) = (v.add(log_t, v.splat(self.log_beta)), v.add(log_q, v.splat(self.log_complement)));
        let largest = v.max(a, b);
        let least = v.sub(zero, v.max(v.sub(zero, a), v.sub(zero, b)));
        let log_m = v.add(largest, ln(v, v.add(one, exp(v, v.sub(least, largest)))));
        let teacher_term = v.mul(v.splat(self.beta), weighted(v, exp(v, log_t), v.sub(log_t, log_m)));
        let student_term = v.mul(v.splat(F::one() - self.beta), weighted(v, exp(v, log_q), v.sub(log_q, log_m)));
        (v.add(teacher_term, student_term), student_term)
    }
}

/// The kernel that computes the divergence of a row, and replaces the student's log-probabilities by the derivatives.
struct Sweep<'a, F, T>(DivergenceRow<'a, F>, T);

impl<F: Float, T: Term<F>> Kernel<F> for Sweep<'_, F, T> {
    type Output = F;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> F {
        let Sweep(row, term) = self;
        let tempered = row.tempered(v);
        let DivergenceRow { student, teacher, power, scale } = row;
        let (mut value, mut slope) = (RowSum::new(v), RowSum::new(v));
        if power == F::one() {
            let scale = v.splat(scale);
            map_student(v, student, teacher, |log_q, log_t| {
                let (id_value, id_slope) = term.value_and_slope(v, log_q, log_t);
                value.add(v, id_value);
                weighted(v, scale, id_slope)
            });
            return not_negative(value.value(v));
        }
        map_student(v, student, teacher, |log_q, log_t| {
            let (tempered_q, tempered_t) = tempered(log_q, log_t);
            let (id_value, id_slope) = term.value_and_slope(v, tempered_q, tempered_t);
            value.add(v, id_value);
            slope.add(v, id_slope);
            log_q
        });
        let (slope, scale) = (v.splat(slope.value(v)), v.splat(scale * power));
        map_student(v, student, teacher, |log_q, log_t| {
            let (tempered_q, tempered_t) = tempered(log_q, log_t);
            let id_slope = term.value_and_slope(v, tempered_q, tempered_t).1;
            weighted(v, scale, v.sub(id_slope, weighted(v, exp(v, tempered_q), slope)))
        });
        not_negative(value.value(v))
    }
}
