//! The soft masses of a single component. Its responsibility for every id is one, so that no id needs a share.

use super::mix::IdMasses;
use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::vector::logit_map::LogitMap;
use crate::backend::cpu::vector::math::exp;
use crate::backend::cpu::vector::simd::{Float, Vector};

/// The sums over the ids of a row.
pub(super) struct SingleSums<F> {
    /// The sum of the masses.
    pub(super) mass: F,
    /// `sum_v q_v (-log p(v))` of given masses; zero for masses that follow from probabilities.
    pub(super) objective: F,
}

/// Replaces the masses of ids whose logits are minus infinity by zero: these ids contribute no gradient.
#[inline(always)]
fn possible<F: Float, V: Vector<F>>(v: V, z: V::Reg, mass: V::Reg) -> V::Reg {
    v.if_equal(z, v.splat(F::neg_infinity()), v.splat(F::zero()), mass)
}

/// Adds up the masses of a row of logits, and their objective.
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

/// The factors of a row's gradient.
#[derive(Clone, Copy)]
pub(super) struct GradientFactors<F> {
    /// The factor of `exp(z - largest)`: `scale (R_k + 2 zeta lse_k / K)` over the sum of these exponentials.
    pub(super) exp_scale: F,
    /// The factor of the masses.
    pub(super) scale: F,
}

/// Computes `z := exp_scale exp(z - largest) - scale q_v`, times the slope of the logit function.
#[inline(always)]
pub(super) fn single_gradient<F: Float, V: Vector<F>>(
    v: V,
    row: &mut [F],
    masses: IdMasses<'_, F>,
    components: &Components<F>,
    factors: GradientFactors<F>,
    logit_map: Option<LogitMap<F>>,
) {
    let (largest, log_scale) = (v.splat(components.lse[0].largest), v.splat(components.log_scale[0]));
    let (exp_scale, scale, zero) = (v.splat(factors.exp_scale), v.splat(-factors.scale), v.splat(F::zero()));
    let least = v.splat(F::LEAST_GRADIENT);
    for (i, z) in V::registers_mut(row).iter_mut().enumerate() {
        let relative = v.sub(*z, largest);
        let mass = possible(v, *z, masses.at(v, i, v.add(relative, log_scale)));
        let mut g = v.mul_add(mass, scale, v.mul(exp(v, relative), exp_scale));
        if let Some(map) = logit_map {
            // The padding is minus infinity; its softmax is already zero.
            g = v.if_equal(g, zero, zero, v.mul(g, map.slope(v, *z)));
        }
        *z = v.if_less(v.max(g, v.sub(zero, g)), least, zero, g);
    }
}
