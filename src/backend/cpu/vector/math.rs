//! Elementary functions for the row kernels, by range reduction and a Taylor series, accurate to about one unit in the
//! last place; guards of single numbers; log-sum-exps.

use super::simd::{Float, Vector};
use crate::backend::distribution::Defect;

/// The sum of the registers of a row, in blocks whose sums are added up in f64: one after the other in f32, many small
/// numbers would be lost beside a large one.
#[derive(Clone, Copy)]
pub(crate) struct RowSum<R> {
    /// The sum of the blocks before the last.
    total: f64,
    /// The sum of the last block.
    block: R,
    /// The number of registers in the last block.
    len: usize,
}

impl<R: Copy> RowSum<R> {
    /// Begins at zero.
    #[inline(always)]
    pub(crate) fn new<F: Float, V: Vector<F, Reg = R>>(v: V) -> Self {
        RowSum { total: 0.0, block: v.splat(F::zero()), len: 0 }
    }

    /// Adds a register.
    #[inline(always)]
    pub(crate) fn add<F: Float, V: Vector<F, Reg = R>>(&mut self, v: V, x: R) {
        /// The number of registers of a block.
        const BLOCK: usize = 16;
        self.block = v.add(self.block, x);
        self.len += 1;
        if self.len == BLOCK {
            *self = RowSum { total: self.total + v.sum(self.block).f64(), ..RowSum::new(v) };
        }
    }

    /// Returns the sum of all lanes.
    #[inline(always)]
    pub(crate) fn value<F: Float, V: Vector<F, Reg = R>>(self, v: V) -> F {
        F::from_f64(self.total + v.sum(self.block).f64())
    }
}

/// Computes `e^x` for `x` up to the logarithm of the largest finite number; zero where the result would be subnormal;
/// NaN for NaN.
#[inline(always)]
pub(crate) fn exp<F: Float, V: Vector<F>>(v: V, x: V::Reg) -> V::Reg {
    exp_or_zero(v, x, v.splat(F::EXP_UNDERFLOW))
}

/// Computes [`exp`], but zero for `x` below `least`, which is no less than [`Float::EXP_UNDERFLOW`].
#[inline(always)]
pub(crate) fn exp_or_zero<F: Float, V: Vector<F>>(v: V, x: V::Reg, least: V::Reg) -> V::Reg {
    // x = n ln 2 + r with |r| <= ln 2 / 2.
    let shifted = v.mul_add(x, v.splat(F::LOG2_E()), v.splat(F::ROUND));
    let n = v.sub(shifted, v.splat(F::ROUND));
    let r = v.mul_add(n, v.splat(-F::LN_2_HIGH), x);
    let r = v.mul_add(n, v.splat(-F::LN_2_LOW), r);
    let result = v.scale_by_power(polynomial(v, F::EXP_COEFFICIENTS, r), shifted);
    let result = v.if_less(x, least, v.splat(F::zero()), result);
    // The exponent arithmetic does not propagate NaN.
    v.if_equal(x, x, result, x)
}

/// Computes `ln x` for finite `x >= 1`; minus infinity for zero; NaN for NaN. This covers sums of exponentials relative
/// to the largest.
#[inline(always)]
pub(crate) fn ln<F: Float, V: Vector<F>>(v: V, x: V::Reg) -> V::Reg {
    // x = m 2^e with m in [sqrt 1/2, sqrt 2), and ln m = 2 artanh s for s = (m - 1) / (m + 1).
    let one = v.splat(F::one());
    let (m, e) = v.mantissa_exponent(x);
    let sqrt_2 = v.splat(F::SQRT_2());
    let e = v.if_less(m, sqrt_2, e, v.add(e, one));
    let m = v.if_less(m, sqrt_2, m, v.mul(m, v.splat(F::from_f64(0.5))));
    let s = v.div(v.sub(m, one), v.add(m, one));
    let series = polynomial(v, F::ARTANH_COEFFICIENTS, v.mul(s, s));
    let ln_m = v.mul(v.add(s, s), series);
    let result = v.mul_add(e, v.splat(F::LN_2_HIGH), v.mul_add(e, v.splat(F::LN_2_LOW), ln_m));
    let result = v.if_equal(x, v.splat(F::zero()), v.splat(F::neg_infinity()), result);
    v.if_equal(x, x, result, x)
}

/// Computes `tanh x`.
#[inline(always)]
pub(crate) fn tanh<F: Float, V: Vector<F>>(v: V, x: V::Reg) -> V::Reg {
    let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
    let magnitude = v.max(x, v.sub(zero, x));
    let t = exp(v, v.mul(magnitude, v.splat(F::from_f64(-2.0))));
    let far = v.div(v.sub(one, t), v.add(one, t));
    let far = v.if_less(x, zero, v.sub(zero, far), far);
    // 1 - t cancels near zero; there the series x - x^3/3 + 2x^5/15 - .. is exact to f32 rounding.
    let square = v.mul(x, x);
    let coefficients = [-1382.0 / 155_925.0, 62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0];
    let mut near = v.splat(F::zero());
    for c in coefficients {
        near = v.mul_add(near, square, v.splat(F::from_f64(c)));
    }
    let near = v.mul(near, x);
    // The bound is where the first omitted term, x^13 / 500, falls below the rounding error of the other branch.
    let bound = if F::epsilon() < F::from_f64(1e-10) { 0.03 } else { 0.25 };
    v.if_less(magnitude, v.splat(F::from_f64(bound)), near, far)
}

/// Evaluates a polynomial whose coefficients are given from the highest power down.
#[inline(always)]
fn polynomial<F: Float, V: Vector<F>>(v: V, coefficients: &[F], x: V::Reg) -> V::Reg {
    let mut sum = v.splat(coefficients[0]);
    for &c in &coefficients[1..] {
        sum = v.mul_add(sum, x, v.splat(c));
    }
    sum
}

/// Returns `x`, or zero if its absolute value is below [`Float::LEAST_GRADIENT`].
pub(crate) fn flushed<F: Float>(x: F) -> F {
    if x.abs() < F::LEAST_GRADIENT {
        F::zero()
    } else {
        x
    }
}

/// Returns `x`, or plus zero if rounding has made it negative.
pub(crate) fn not_negative<F: Float>(x: F) -> F {
    if x <= F::zero() {
        F::zero()
    } else {
        x
    }
}

/// Returns `weight * x`, or zero for weight zero even if `x` is infinite or NaN.
pub(crate) fn weighted<F: Float>(weight: F, x: F) -> F {
    if weight == F::zero() {
        F::zero()
    } else {
        weight * x
    }
}

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

    /// Combines the log-sum-exps of disjoint sets of ids, which may be many, into that of their union.
    pub(crate) fn joined(sets: impl Iterator<Item = Self> + Clone) -> Self {
        let possible = sets.clone().filter(|set| set.log_sum != F::neg_infinity());
        let largest = finite_or_zero(possible.map(|set| set.largest).fold(F::neg_infinity(), num_traits::Float::max));
        let sum: f64 = sets.map(|set| (set.largest - largest + set.log_sum).exp().f64()).sum();
        LogSumExp { largest, log_sum: F::from_f64(sum.ln()) }
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

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, Kernel, ROW_ALIGN};
    use super::*;

    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        Ln,
        Tanh,
    }

    struct Apply<'a, F>(Function, &'a mut [F]);

    impl<F: Float> Kernel<F> for Apply<'_, F> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector<F>>(self, v: V) {
            for x in V::registers_mut(self.1) {
                *x = match self.0 {
                    Function::Exp => exp(v, *x),
                    Function::Ln => ln(v, *x),
                    Function::Tanh => tanh(v, *x),
                };
            }
        }
    }

    fn check<F: Float>(function: Function, inputs: &[f64], truth: fn(f64) -> f64, tolerance: f64) {
        for isa in Isa::available() {
            let mut row: Vec<F> = inputs.iter().map(|&x| F::from_f64(x)).collect();
            row.resize(row.len().next_multiple_of(ROW_ALIGN), F::one());
            F::dispatch(isa, Apply(function, &mut row));
            for (&x, got) in inputs.iter().zip(row) {
                let (want, got) = (truth(F::from_f64(x).f64()), got.f64());
                let same = got == want || (got.is_nan() && want.is_nan());
                let error = (got - want).abs() / want.abs().max(f64::MIN_POSITIVE);
                assert!(
                    same || error <= tolerance || (want > 0.0 && want < F::min_positive_value().f64() * 2.0),
                    "{} of {x}: expected {want:e}, got {got:e} (relative error {error:e})",
                    isa.kernels()
                );
            }
        }
    }

    fn sweep(from: f64, to: f64) -> Vec<f64> {
        (0..=20_000).map(|i| from + (to - from) * f64::from(i) / 20_000.0).collect()
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut inputs = sweep(-87.3, 3.0);
        inputs.extend([0.0, -0.0, f64::NEG_INFINITY, f64::NAN, -1e30, -88.0, -1000.0]);
        check::<f32>(Function::Exp, &inputs, f64::exp, 2.5e-7);
        inputs.extend(sweep(-708.0, -87.0));
        check::<f64>(Function::Exp, &inputs, f64::exp, 5e-16);
    }

    #[test]
    fn exp_of_nan_is_nan() {
        for isa in Isa::available() {
            let mut row = [f32::from_bits(0x7fff_ffff); ROW_ALIGN];
            f32::dispatch(isa, Apply(Function::Exp, &mut row));
            assert!(row.iter().all(|x| x.is_nan()), "{}", isa.kernels());
        }
    }

    #[test]
    fn ln_is_accurate_from_one_up() {
        let mut inputs = sweep(1.0, 5.0);
        inputs.extend(sweep(5.0, 1e6));
        check::<f32>(Function::Ln, &inputs, f64::ln, 3e-7);
        inputs.extend([0.0, f64::NAN]);
        check::<f64>(Function::Ln, &inputs, f64::ln, 5e-16);
    }

    #[test]
    fn tanh_is_accurate_for_all_arguments() {
        let mut inputs = sweep(-3.0, 3.0);
        inputs.extend(sweep(-1e-3, 1e-3));
        inputs.extend([0.0, 1e4, -1e4, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]);
        check::<f32>(Function::Tanh, &inputs, f64::tanh, 6e-7);
        check::<f64>(Function::Tanh, &inputs, f64::tanh, 2e-14);
    }
}
