//! A row of log-probabilities of student and teacher, and how kernels read it.

use crate::backend::cpu::vector::math::{exp, RowSum};
use crate::backend::cpu::vector::simd::{Float, Vector, ROW_ALIGN};

/// A row of log-probabilities of student and teacher.
pub(super) struct DivergenceRow<'a, F> {
    /// The student's log-probabilities, then the derivatives.
    pub(super) student: &'a mut [F],
    pub(super) teacher: &'a [F],
    /// The inverse of the temperature.
    pub(super) power: F,
    /// The factor of the derivatives.
    pub(super) scale: F,
}

impl<F: Float> DivergenceRow<'_, F> {
    /// Returns the function that applies the temperature to registers of log-probabilities of student and teacher.
    #[inline(always)]
    pub(super) fn tempered<V: Vector<F>>(&self, v: V) -> impl Fn(V::Reg, V::Reg) -> (V::Reg, V::Reg) + Copy {
        let power = self.power;
        let (norm_q, norm_t) = if power != F::one() {
            (log_norm(v, self.student, power), log_norm(v, self.teacher, power))
        } else {
            (F::zero(), F::zero())
        };
        let [power, norm_q, norm_t] = [power, norm_q, norm_t].map(|x| v.splat(x));
        move |log_q, log_t| (v.sub(v.mul(log_q, power), norm_q), v.sub(v.mul(log_t, power), norm_t))
    }
}

/// Computes `probability x`, which is zero for a probability of zero, whatever `x` is.
#[inline(always)]
pub(super) fn weighted<F: Float, V: Vector<F>>(v: V, probability: V::Reg, x: V::Reg) -> V::Reg {
    let zero = v.splat(F::zero());
    v.if_equal(probability, zero, zero, v.mul(probability, x))
}

/// Returns the student's probability of an id if the teacher's is larger, and zero otherwise.
#[inline(always)]
pub(super) fn if_below<F: Float, V: Vector<F>>(v: V, q: V::Reg, t: V::Reg) -> V::Reg {
    let zero = v.splat(F::zero());
    v.if_less(t, q, zero, v.if_equal(t, q, zero, q))
}

/// Replaces each register of a student's row by a function of it and of the teacher's. The last register is padded with
/// minus infinity.
#[inline(always)]
pub(super) fn map_student<F: Float, V: Vector<F>>(
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
    let mut sum = RowSum::new(v);
    for registers in all {
        for &x in registers {
            sum.add(v, exp(v, v.sub(v.mul(x, power), reference)));
        }
    }
    largest + sum.value(v).ln()
}
