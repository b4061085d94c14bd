//! Whether one of some ids is the most probable of all, from the K rows of logits of one position.

use std::marker::PhantomData;
use std::ops::Range;

use super::mix::{largest_term, PositionLogits};
use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::vector::math::exp;
use crate::backend::cpu::vector::simd::{Float, Vector};

/// An id with a term that exceeds the reference by more is better by far, whatever its exponential is.
const MOST_EXPONENT: f64 = 60.0;
/// Registers that are compared at a time.
const BLOCK: usize = 64;

/// The values of ids that are compared in place of probabilities: logits of a single component, or the sums of the terms
/// of several, relative to a reference.
struct Values<'a, F, V: Vector<F>, C>
where
    F: Float,
{
    /// `[K, width]`
    rows: &'a [V::Reg],
    width: usize,
    /// The largest logit of each component, and its `log_scale` less the reference.
    components: C,
    v: V,
    _of: PhantomData<F>,
}

impl<F: Float, V: Vector<F>, C: ExactSizeIterator<Item = (F, F)> + Clone> Values<'_, F, V, C> {
    /// The values of the ids of register `i`.
    #[inline(always)]
    fn register(&self, i: usize) -> V::Reg {
        let v = self.v;
        if self.components.len() == 1 {
            return self.rows[i];
        }
        let most = v.splat(F::from_f64(MOST_EXPONENT));
        let mut sum = v.splat(F::zero());
        for (k, (largest, log_scale)) in self.components.clone().enumerate() {
            let term = v.add(v.sub(self.rows[i + k * self.width], v.splat(largest)), v.splat(log_scale));
            sum = v.add(sum, exp(v, v.if_less(term, most, term, most)));
        }
        sum
    }

    /// The values of the ids of register `i`, of as many elements as a register has.
    #[inline(always)]
    fn lanes(&self, i: usize) -> ([F; 16], usize) {
        let (mut lanes, n) = ([F::zero(); 16], size_of::<V::Reg>() / size_of::<F>());
        self.v.store_partial(self.register(i), &mut lanes[..n]);
        (lanes, n)
    }

    /// The value of an id.
    #[inline(always)]
    fn at(&self, id: usize) -> F {
        let n = size_of::<V::Reg>() / size_of::<F>();
        self.lanes(id / n).0[id % n]
    }

    /// Whether one of these registers has a value that is larger than `value`, or also one that equals it.
    #[inline(always)]
    fn exceed(&self, registers: Range<usize>, value: F, or_equal: bool) -> bool {
        let (v, components) = (self.v, self.components.len());
        // A sum of K terms is at most K times the largest; 1e-2 leaves room for rounding.
        let least_term = value.ln() - F::from_f64((components as f64).ln() + 1e-2);
        let mut first = registers.start;
        while first < registers.end {
            let end = registers.end.min(first + BLOCK);
            let mut largest = v.splat(F::neg_infinity());
            for i in first..end {
                let is_small = components > 1 && {
                    let term = largest_term(v, &self.rows[i..], self.width, self.components.clone());
                    v.largest(term) < least_term
                };
                if !is_small {
                    largest = v.max(largest, self.register(i));
                }
            }
            let largest = v.largest(largest);
            if largest > value || or_equal && largest == value {
                return true;
            }
            first = end;
        }
        false
    }
}

/// The largest of a position's terms at an id with these logits; NaN if there is no distribution.
#[inline(always)]
fn reference<F: Float>(logit: impl Fn(usize) -> F, components: &Components<F>) -> F {
    let terms = components.scales().enumerate().map(|(k, (largest, log_scale))| logit(k) - largest + log_scale);
    terms.fold(F::neg_infinity(), larger)
}

/// The larger of two numbers; NaN if one is.
#[inline(always)]
fn larger<F: Float>(largest: F, other: F) -> F {
    if other > largest || other.is_nan() {
        other
    } else {
        largest
    }
}

impl<F: Float> PositionLogits<'_, F> {
    /// Whether one of these ids is more probable than an id of another rank with these logits, `[K]`; or as probable, if
    /// `or_equal`.
    #[inline(always)]
    pub(super) fn exceed<V: Vector<F>>(&self, v: V, logits: &[F], or_equal: bool, components: &Components<F>) -> bool {
        let reference = reference(|k| logits[k], components);
        if reference.is_nan() || reference == F::neg_infinity() {
            return false;
        }
        let rows = V::registers(self.rows);
        let width = rows.len() / components.lse.len();
        let components = components.scales().map(|(largest, log_scale)| (largest, log_scale - reference));
        let other: Vec<V::Reg> = logits.iter().map(|&z| v.splat(z)).collect();
        let of_other = Values { rows: &other, width: 1, components: components.clone(), v, _of: PhantomData };
        let value = of_other.at(0);
        Values { rows, width, components, v, _of: PhantomData }.exceed(0..width, value, or_equal)
    }

    /// The most probable of all ids, if it is one of these; among equals it is the lowest. `None` if another is, or none
    /// of these has a probability.
    #[inline(always)]
    pub(super) fn argmax_among<V: Vector<F>>(&self, v: V, ids: &[usize], components: &Components<F>) -> Option<usize> {
        let of_id = |id: usize| reference(|k| self.rows[k * self.stride + id], components);
        let reference = ids.iter().map(|&id| of_id(id)).fold(F::neg_infinity(), larger);
        if reference.is_nan() || reference == F::neg_infinity() {
            return None;
        }
        let rows = V::registers(self.rows);
        let width = rows.len() / components.lse.len();
        let components = components.scales().map(|(largest, log_scale)| (largest, log_scale - reference));
        let values = Values { rows, width, components, v, _of: PhantomData };
        let mut leader = ids[0];
        let mut value = values.at(leader);
        for &id in &ids[1..] {
            let other = values.at(id);
            if other > value || other == value && id < leader {
                (leader, value) = (id, other);
            }
        }
        let (of_own, lanes) = values.lanes(leader / (size_of::<V::Reg>() / size_of::<F>()));
        let own = leader / lanes;
        for (id, &other) in (own * lanes..).zip(&of_own[..lanes]) {
            if id != leader && (other > value || other == value && id < leader) {
                return None;
            }
        }
        let is_beaten = values.exceed(0..own, value, true) || values.exceed(own + 1..width, value, false);
        (!is_beaten).then_some(leader)
    }
}
