//! The terms by which the search for the most probable id compares ids: an id's probability is proportional to the sum
//! of its components' terms. Both computations share them.

use crate::backend::cpu::vector::math::exp;
use crate::backend::cpu::vector::simd::{Float, Vector};

/// The largest exponent of a term. An id with a larger one is more probable by far, whatever its exponential is.
const MOST_EXPONENT: f64 = 60.0;

/// Returns the reference of a search, the largest of these exponents of the ids that it compares with others. `None` if
/// an exponent is NaN, where there is no distribution, or if none of the ids has a probability.
#[inline(always)]
pub(crate) fn reference<F: Float>(exponents: impl Iterator<Item = F>) -> Option<F> {
    let larger = |largest: F, other: F| if other > largest || other.is_nan() { other } else { largest };
    let reference = exponents.fold(F::neg_infinity(), larger);
    (reference > F::neg_infinity()).then_some(reference)
}

/// Computes a component's term of each lane, `exp(z - largest + log_scale)`. `log_scale` is that of
/// [`Components`](super::components::Components), less the [`reference`].
#[inline(always)]
pub(crate) fn argmax_term<F: Float, V: Vector<F>>(v: V, z: V::Reg, largest: V::Reg, log_scale: V::Reg) -> V::Reg {
    let most = v.splat(F::from_f64(MOST_EXPONENT));
    let exponent = v.add(v.sub(z, largest), log_scale);
    exp(v, v.if_less(exponent, most, exponent, most))
}
