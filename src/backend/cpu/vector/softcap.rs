//! The softcap of the logits, `z = cap tanh(u / cap)`, and its slope `dz/du = 1 - (z / cap)^2`, which follows from the
//! result alone.

use super::math::tanh;
use super::simd::{Float, Vector};

/// The softcap `cap`, and its inverse.
#[derive(Clone, Copy)]
pub(crate) struct Softcap<F> {
    cap: F,
    inverse: F,
}

impl<F: Float> Softcap<F> {
    pub(crate) fn new(cap: F) -> Self {
        Softcap { cap, inverse: F::one() / cap }
    }

    /// Computes the logits z from the products u.
    #[inline(always)]
    pub(crate) fn apply<V: Vector<F>>(self, v: V, u: V::Reg) -> V::Reg {
        v.mul(v.splat(self.cap), tanh(v, v.mul(u, v.splat(self.inverse))))
    }

    /// Computes the slopes from the logits z.
    #[inline(always)]
    pub(crate) fn slope<V: Vector<F>>(self, v: V, z: V::Reg) -> V::Reg {
        let t = v.mul(z, v.splat(self.inverse));
        v.sub(v.splat(F::one()), v.mul(t, t))
    }

    /// Computes the slope at a single logit. It divides, which is more precise and too slow for every logit.
    pub(crate) fn slope_at(self, z: F) -> F {
        F::one() - (z / self.cap) * (z / self.cap)
    }
}
