//! The functions of the logits other than the identity, and their slopes.

use super::math::{exp, ln, tanh};
use super::simd::{Float, Vector};
use crate::backend::logit_function::LogitFunction;

/// A function of the logits other than the identity.
#[derive(Clone, Copy)]
pub(crate) enum LogitMap<F> {
    /// The softcap `cap`, and its inverse.
    Softcap {
        cap: F,
        inverse: F,
    },
    Sigsoftmax,
}

/// From this value on, the slope of sigsoftmax is one to rounding.
const STEEPEST: f64 = 40.0;

impl<F: Float> LogitMap<F> {
    /// Returns the function; `None` for the identity.
    pub(crate) fn new(function: LogitFunction) -> Option<Self> {
        match function {
            LogitFunction::Identity => None,
            LogitFunction::Softcap(cap) => {
                let cap = F::from_f64(cap);
                Some(LogitMap::Softcap { cap, inverse: F::one() / cap })
            }
            LogitFunction::Sigsoftmax => Some(LogitMap::Sigsoftmax),
        }
    }

    /// Computes the logits from the products u.
    #[inline(always)]
    pub(crate) fn apply<V: Vector<F>>(self, v: V, u: V::Reg) -> V::Reg {
        match self {
            LogitMap::Softcap { cap, inverse } => v.mul(v.splat(cap), tanh(v, v.mul(u, v.splat(inverse)))),
            LogitMap::Sigsoftmax => {
                // log sigma(u) = min(u, 0) - log(1 + exp(-|u|))
                let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
                let minus = v.sub(zero, u);
                let t = exp(v, v.sub(zero, v.max(u, minus)));
                let limited = v.if_less(u, zero, v.add(u, u), u);
                v.sub(limited, ln(v, v.add(one, t)))
            }
        }
    }

    /// Computes the slopes from the logits z.
    #[inline(always)]
    pub(crate) fn slope<V: Vector<F>>(self, v: V, z: V::Reg) -> V::Reg {
        let one = v.splat(F::one());
        match self {
            LogitMap::Softcap { inverse, .. } => {
                let t = v.mul(z, v.splat(inverse));
                v.sub(one, v.mul(t, t))
            }
            LogitMap::Sigsoftmax => {
                let steepest = v.splat(F::from_f64(STEEPEST));
                let w = exp(v, v.if_less(steepest, z, steepest, z));
                let four = v.splat(F::from_f64(4.0));
                let root = v.sqrt(v.mul(w, v.add(w, four)));
                // exp(u) = (w + sqrt(w^2 + 4 w)) / 2
                let two = v.splat(F::from_f64(2.0));
                v.add(one, v.div(two, v.add(two, v.add(w, root))))
            }
        }
    }

    /// Computes the slope at a single logit. It divides, which is more precise and too slow for every logit.
    pub(crate) fn slope_at(self, z: F) -> F {
        match self {
            LogitMap::Softcap { cap, .. } => F::one() - (z / cap) * (z / cap),
            LogitMap::Sigsoftmax => {
                let two = F::from_f64(2.0);
                let w = num_traits::Float::min(z, F::from_f64(STEEPEST)).exp();
                F::one() + two / (two + w + (w * (w + two + two)).sqrt())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, Kernel, ROW_ALIGN};
    use super::*;

    /// Replaces the first row by the values of sigsoftmax, and writes its slopes to the second.
    struct Sigsoftmax<'a, F>(&'a mut [F], &'a mut [F]);

    impl<F: Float> Kernel<F> for Sigsoftmax<'_, F> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector<F>>(self, v: V) {
            for (z, slope) in V::registers_mut(self.0).iter_mut().zip(V::registers_mut(self.1)) {
                *z = LogitMap::Sigsoftmax.apply(v, *z);
                *slope = LogitMap::Sigsoftmax.slope(v, *z);
            }
        }
    }

    /// The tolerance is relative to the larger of the value and one: a logit far from zero is as exact as its dtype is,
    /// and its slope depends on it.
    fn check<F: Float + std::fmt::Debug>(tolerance: f64) {
        let infinite = [f64::NEG_INFINITY, f64::INFINITY, -1e30, 1e30];
        let inputs = (-4000..=4000).map(|i| 0.05 * f64::from(i)).chain(infinite).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut values: Vec<F> = inputs.iter().map(|&u| F::from_f64(u)).collect();
            values.resize(values.len().next_multiple_of(ROW_ALIGN), F::one());
            let mut slopes = values.clone();
            F::dispatch(isa, Sigsoftmax(&mut values, &mut slopes));
            for ((&u, z), slope) in inputs.iter().zip(&values).zip(&slopes) {
                let u = F::from_f64(u).f64();
                let t = (-u.abs()).exp();
                let (expected, expected_slope) = if u < 0.0 {
                    (2.0 * u - t.ln_1p(), 1.0 + 1.0 / (1.0 + t))
                } else {
                    (u - t.ln_1p(), 1.0 + t / (1.0 + t))
                };
                let error = (z.f64() - expected).abs() / expected.abs().max(1.0);
                assert!(z.f64() == expected || error <= tolerance, "{} at {u}: {z:?}, not {expected}", isa.kernels());
                for slope in [*slope, LogitMap::Sigsoftmax.slope_at(*z)] {
                    let error = (slope.f64() - expected_slope).abs() / u.abs().clamp(1.0, 100.0);
                    assert!(error <= tolerance, "{} at {u}: slope {slope:?}, not {expected_slope}", isa.kernels());
                }
            }
        }
    }

    #[test]
    fn sigsoftmax_and_its_slopes_are_accurate_everywhere() {
        check::<f32>(3e-7);
        check::<f64>(1e-15);
    }

    #[test]
    fn nan_stays_nan() {
        for isa in Isa::available() {
            let (mut values, mut slopes) = ([f32::NAN; ROW_ALIGN], [0.0; ROW_ALIGN]);
            f32::dispatch(isa, Sigsoftmax(&mut values, &mut slopes));
            assert!(values.iter().all(|z| z.is_nan()), "{}", isa.kernels());
        }
    }
}
