//! Soft masses of a single component: its responsibility for every id is one, so that no id needs a share.

use super::mix::IdMasses;
use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::vector::math::exp;
use crate::backend::cpu::vector::simd::{Float, Vector};
use crate::backend::cpu::vector::softcap::Softcap;

/// The sums over the ids of a row.
pub(super) struct SingleSums<F> {
    pub(super) mass: F,
    /// `sum_v q_v (-log p(v))` of given masses; zero of others
    pub(super) objective: F,
}

/// The row's ids that are possible have their masses; the others contribute no gradient.
#[inline(always)]
fn possible<F: Float, V: Vector<F>>(v: V, z: V::Reg, mass: V::Reg) -> V::Reg {
    v.if_equal(z, v.splat(F::neg_infinity()), v.splat(F::zero()), mass)
}

/// The sums of a row of logits.
#[inline(always)]
pub(super) fn single_sums<F: Float, V: Vector<F>>(
    v: V,
    row: &[F],
    masses: IdMasses<'_, F>,
    components: &Components<F>,
) -> SingleSums<F> {
    let (largest, log_scale) = (v.splat(components.lse[0].largest), v.splat(components.log_scale[0]));
    let zero = v.splat(F::zero());
    let (mut sum, mut objective) = (zero, zero);
    for (i, &z) in V::registers(row).iter().enumerate() {
        let log_p = v.add(v.sub(z, largest), log_scale);
        let mass = masses.at(v, i, log_p);
        if let IdMasses::Given(_) = masses {
            // An id without mass adds nothing, whatever its probability.
            let term = v.mul(mass, log_p);
            objective = v.sub(objective, v.if_equal(mass, zero, zero, term));
        }
        sum = v.add(sum, possible(v, z, mass));
    }
    SingleSums { mass: v.sum(sum), objective: v.sum(objective) }
}

/// `z := exp_scale exp(z - largest) - scale q_v`, times the slope of the softcap.
#[inline(always)]
pub(super) fn single_gradient<F: Float, V: Vector<F>>(
    v: V,
    row: &mut [F],
    masses: IdMasses<'_, F>,
    components: &Components<F>,
    (exp_scale, scale): (F, F),
    softcap: Option<Softcap<F>>,
) {
    let (largest, log_scale) = (v.splat(components.lse[0].largest), v.splat(components.log_scale[0]));
    let (exp_scale, scale, zero) = (v.splat(exp_scale), v.splat(-scale), v.splat(F::zero()));
    let least = v.splat(F::LEAST_GRADIENT);
    for (i, z) in V::registers_mut(row).iter_mut().enumerate() {
        let relative = v.sub(*z, largest);
        let mass = possible(v, *z, masses.at(v, i, v.add(relative, log_scale)));
        let mut g = v.mul_add(mass, scale, v.mul(exp(v, relative), exp_scale));
        if let Some(softcap) = softcap {
            // The padding is minus infinity; its softmax is already zero.
            g = v.if_equal(g, zero, zero, v.mul(g, softcap.slope(v, *z)));
        }
        *z = v.if_less(v.max(g, v.sub(zero, g)), least, zero, g);
    }
}
