//! Divergences from a teacher's distributions, and their derivatives, in one sweep over each row of log-probabilities.

use candle_core::{Device, Tensor};

use crate::backend::cpu::operands::dtype::{with_slice, Accumulator};
use crate::backend::cpu::vector::math::{exp, ln, not_negative};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector, ROW_ALIGN};
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
            };
        });
        Ok(())
    })?;
    Ok((Tensor::from_vec(values, n, &Device::Cpu)?, Tensor::from_vec(rows, (n, vocab), &Device::Cpu)?))
}

/// A row of log-probabilities of student and teacher.
struct DivergenceRow<'a, F> {
    /// The student's log-probabilities, then the derivatives.
    student: &'a mut [F],
    teacher: &'a [F],
    /// The inverse of the temperature.
    power: F,
    /// The factor of the derivatives.
    scale: F,
}

/// A divergence as a sum over ids.
trait Term<F: Float>: Copy {
    /// Computes the term of each id of a register from the log-probabilities of student and teacher, and the derivative of
    /// the divergence by the student's log-probability of the id, up to a constant times the probability.
    fn value_and_slope<V: Vector<F>>(self, v: V, log_q: V::Reg, log_t: V::Reg) -> (V::Reg, V::Reg);
}

/// Computes `probability x`, which is zero for a probability of zero, whatever `x` is.
#[inline(always)]
fn weighted<F: Float, V: Vector<F>>(v: V, probability: V::Reg, x: V::Reg) -> V::Reg {
    let zero = v.splat(F::zero());
    v.if_equal(probability, zero, zero, v.mul(probability, x))
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
        let Sweep(DivergenceRow { student, teacher, power, scale }, term) = self;
        let zero = v.splat(F::zero());
        let is_tempered = power != F::one();
        let (norm_q, norm_t) = if is_tempered {
            (log_norm(v, student, power), log_norm(v, teacher, power))
        } else {
            (F::zero(), F::zero())
        };
        let (power_register, norm_q, norm_t) = (v.splat(power), v.splat(norm_q), v.splat(norm_t));
        let tempered =
            |log_q, log_t| (v.sub(v.mul(log_q, power_register), norm_q), v.sub(v.mul(log_t, power_register), norm_t));
        let (mut value, mut slope) = (zero, zero);
        if !is_tempered {
            let scale = v.splat(scale);
            map_student(v, student, teacher, |log_q, log_t| {
                let (id_value, id_slope) = term.value_and_slope(v, log_q, log_t);
                value = v.add(value, id_value);
                weighted(v, scale, id_slope)
            });
            return not_negative(v.sum(value));
        }
        map_student(v, student, teacher, |log_q, log_t| {
            let (tempered_q, tempered_t) = tempered(log_q, log_t);
            let (id_value, id_slope) = term.value_and_slope(v, tempered_q, tempered_t);
            (value, slope) = (v.add(value, id_value), v.add(slope, id_slope));
            log_q
        });
        let (slope, scale) = (v.splat(v.sum(slope)), v.splat(scale * power));
        map_student(v, student, teacher, |log_q, log_t| {
            let (tempered_q, tempered_t) = tempered(log_q, log_t);
            let id_slope = term.value_and_slope(v, tempered_q, tempered_t).1;
            weighted(v, scale, v.sub(id_slope, weighted(v, exp(v, tempered_q), slope)))
        });
        not_negative(v.sum(value))
    }
}

/// Replaces each register of a student's row by a function of it and of the teacher's. The last register is padded with
/// minus infinity.
#[inline(always)]
fn map_student<F: Float, V: Vector<F>>(
    v: V,
    student: &mut [F],
    teacher: &[F],
    mut f: impl FnMut(V::Reg, V::Reg) -> V::Reg,
) {
    let (teacher, teacher_rest) = V::split(teacher);
    let (student, rest) = V::split_mut(student);
    let mut padded = [[F::neg_infinity(); ROW_ALIGN]; 2];
    padded[0][..rest.len()].copy_from_slice(rest);
    padded[1][..rest.len()].copy_from_slice(teacher_rest);
    let last = [V::registers(&padded[0])[0], V::registers(&padded[1])[0]];
    // The function is called in one place, so that it becomes part of the kernel and has its target features.
    for i in 0..student.len() + usize::from(!rest.is_empty()) {
        let [q, t] = if i < student.len() { [student[i], teacher[i]] } else { last };
        let result = f(q, t);
        match student.get_mut(i) {
            Some(q) => *q = result,
            None => v.store_partial(result, rest),
        }
    }
}

/// Computes `log sum_v exp(power log p(v))`.
#[inline(always)]
fn log_norm<F: Float, V: Vector<F>>(v: V, log_probs: &[F], power: F) -> F {
    let (registers, rest) = V::split(log_probs);
    let mut padded = [F::neg_infinity(); ROW_ALIGN];
    padded[..rest.len()].copy_from_slice(rest);
    // Loops, because the closure of a chain's `for_each` would be compiled without the target features of the kernel.
    let all = [registers, &V::registers(&padded)[..1]];
    let mut largest = v.splat(F::neg_infinity());
    for registers in all {
        for &x in registers {
            largest = v.max(largest, x);
        }
    }
    let largest = v.largest(largest) * power;
    let (reference, power) = (v.splat(largest), v.splat(power));
    let mut sum = v.splat(F::zero());
    for registers in all {
        for &x in registers {
            sum = v.add(sum, exp(v, v.sub(v.mul(x, power), reference)));
        }
    }
    largest + v.sum(sum).ln()
}
