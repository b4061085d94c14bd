//! The functions of the logits other than the identity, and their slopes.

use super::math::{exp, ln, tanh};
use super::simd::{Float, Isa, Kernel, Vector, ROW_ALIGN};
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

/// From this value on, sigsoftmax is the identity to rounding; below twice its negation, it is twice the product.
const LINEAR: f64 = 40.0;

/// Computes the product u from which sigsoftmax makes the logit z.
#[inline(always)]
pub(crate) fn before_sigsoftmax<F: Float, V: Vector<F>>(v: V, z: V::Reg) -> V::Reg {
    let (one, two) = (v.splat(F::one()), v.splat(F::from_f64(2.0)));
    // u = z - log sigma(u) = z + log(1 + exp(-u))
    let u = v.add(z, ln(v, v.add(one, v.div(two, twice_exp(v, z)))));
    v.if_less(z, v.splat(F::from_f64(-2.0 * LINEAR)), v.mul(z, v.splat(F::from_f64(0.5))), u)
}

/// Computes `2 exp(u)` of the product u from which sigsoftmax makes the logit z, up to that of [`LINEAR`].
#[inline(always)]
fn twice_exp<F: Float, V: Vector<F>>(v: V, z: V::Reg) -> V::Reg {
    // exp(u)^2 / (1 + exp(u)) = w for w = exp(z)
    let limit = v.splat(F::from_f64(LINEAR));
    let w = exp(v, v.if_less(limit, z, limit, z));
    v.add(w, v.sqrt(v.mul(w, v.add(w, v.splat(F::from_f64(4.0))))))
}

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

    /// Computes the logit z from a single product u, to the bits of [`Self::apply`].
    pub(crate) fn apply_at(self, isa: Isa, u: F) -> F {
        let mut tile = [u; ROW_ALIGN];
        F::dispatch(isa, ApplyLogitMap { tile: &mut tile, map: self });
        tile[0]
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
                // 1 + sigma(-u) = 1 + 1 / (1 + exp(u))
                let two = v.splat(F::from_f64(2.0));
                v.add(one, v.div(two, v.add(two, twice_exp(v, z))))
            }
        }
    }

    /// Computes the slope at a single logit. It divides, which is more precise and too slow for every logit.
    pub(crate) fn slope_at(self, z: F) -> F {
        match self {
            LogitMap::Softcap { cap, .. } => F::one() - (z / cap) * (z / cap),
            LogitMap::Sigsoftmax => {
                let two = F::from_f64(2.0);
                let w = num_traits::Float::min(z, F::from_f64(LINEAR)).exp();
                F::one() + two / (two + w + (w * (w + two + two)).sqrt())
            }
        }
    }
}

/// Applies a function to a tile of logits.
pub(crate) struct ApplyLogitMap<'a, F> {
    pub(crate) tile: &'a mut [F],
    pub(crate) map: LogitMap<F>,
}

impl<F: Float> Kernel<F> for ApplyLogitMap<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        for z in V::registers_mut(self.tile) {
            *z = self.map.apply(v, *z);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replaces products by the values of sigsoftmax, and writes its slopes and the products that the values say.
    struct Sigsoftmax<'a, F> {
        values: &'a mut [F],
        slopes: &'a mut [F],
        products: &'a mut [F],
    }

    impl<F: Float> Kernel<F> for Sigsoftmax<'_, F> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector<F>>(self, v: V) {
            let slopes = V::registers_mut(self.slopes).iter_mut().zip(V::registers_mut(self.products));
            for (z, (slope, product)) in V::registers_mut(self.values).iter_mut().zip(slopes) {
                *z = LogitMap::Sigsoftmax.apply(v, *z);
                *slope = LogitMap::Sigsoftmax.slope(v, *z);
                *product = before_sigsoftmax(v, *z);
            }
        }
    }

    /// The tolerance is relative to the larger of one and the product, on which the slope depends.
    fn check<F: Float>(tolerance: f64) {
        let infinite = [f64::NEG_INFINITY, f64::INFINITY, -1e30, 1e30];
        let inputs = (-4000..=4000).map(|i| 0.05 * f64::from(i)).chain(infinite).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut values: Vec<F> = inputs.iter().map(|&u| F::from_f64(u)).collect();
            values.resize(values.len().next_multiple_of(ROW_ALIGN), F::one());
            let (mut slopes, mut products) = (values.clone(), values.clone());
            let rows = Sigsoftmax { values: &mut values, slopes: &mut slopes, products: &mut products };
            F::dispatch(isa, rows);
            for (i, &u) in inputs.iter().enumerate() {
                let u = F::from_f64(u);
                let t = (-u.f64().abs()).exp();
                let (limited, sigma) = if u < F::zero() { (2.0, 1.0 / (1.0 + t)) } else { (1.0, t / (1.0 + t)) };
                let (value, slope) = (limited * u.f64() - t.ln_1p(), 1.0 + sigma);
                let map = LogitMap::Sigsoftmax;
                for (what, got, expected, scale) in [
                    ("value", values[i], value, u.f64().abs().max(1.0)),
                    ("value alone", map.apply_at(isa, u), value, u.f64().abs().max(1.0)),
                    ("slope", slopes[i], slope, u.f64().abs().clamp(1.0, 100.0)),
                    ("slope alone", map.slope_at(values[i]), slope, u.f64().abs().clamp(1.0, 100.0)),
                    ("product", products[i], u.f64(), u.f64().abs().max(1.0)),
                ] {
                    let (got, name) = (got.f64(), isa.kernels());
                    let is_close = got == expected || (got - expected).abs() <= tolerance * scale;
                    assert!(is_close, "{name}: {what} at {}: {got}, not {expected}", u.f64());
                }
            }
        }
    }

    #[test]
    fn sigsoftmax_is_accurate_everywhere() {
        check::<f32>(5e-7);
        check::<f64>(2e-15);
    }

    #[test]
    fn nan_stays_nan() {
        for isa in Isa::available() {
            let mut rows = [[f32::NAN; ROW_ALIGN]; 3];
            let [values, slopes, products] = &mut rows;
            f32::dispatch(isa, Sigsoftmax { values, slopes, products });
            assert!(rows[0].iter().all(|z| z.is_nan()), "{}", isa.kernels());
        }
    }
}
