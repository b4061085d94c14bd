//! The search for the most probable id of one position in its K rows of logits: it tells whether one of some ids is it.

use std::marker::PhantomData;
use std::ops::Range;

use super::mix::{largest_term, least_term, PositionLogits};
use crate::backend::cpu::objective::argmax_terms::{argmax_term, reference};
use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::products::panel::lanes;
use crate::backend::cpu::vector::simd::{Float, Vector};
use crate::backend::ranking::precedes;

/// The number of registers that are compared at a time.
const BLOCK: usize = 64;

/// The values of ids that are compared in place of probabilities: the logits of a single component, or the sums of the
/// terms of several, relative to a reference.
struct IdValues<'a, F, V: Vector<F>, C>
where
    F: Float,
{
    /// `[K, width]`: the logits.
    rows: &'a [V::Reg],
    width: usize,
    /// The largest logit of each component, and its `log_scale` less the reference.
    components: C,
    v: V,
    _number: PhantomData<F>,
}

impl<F: Float, V: Vector<F>, C: ExactSizeIterator<Item = (F, F)> + Clone> IdValues<'_, F, V, C> {
    /// Computes the values of the ids of register `i`.
    #[inline(always)]
    fn register(&self, i: usize) -> V::Reg {
        let v = self.v;
        if self.components.len() == 1 {
            return self.rows[i];
        }
        let mut sum = v.splat(F::zero());
        for (k, (largest, log_scale)) in self.components.clone().enumerate() {
            sum = v.add(sum, argmax_term(v, self.rows[i + k * self.width], v.splat(largest), v.splat(log_scale)));
        }
        sum
    }

    /// Computes the values of the ids of register `i` as numbers, and returns how many of these a register has.
    #[inline(always)]
    fn lanes(&self, i: usize) -> ([F; 16], usize) {
        let (mut values, n) = ([F::zero(); 16], lanes::<F, V>());
        self.v.store_partial(self.register(i), &mut values[..n]);
        (values, n)
    }

    /// Computes the value of an id.
    #[inline(always)]
    fn value(&self, id: usize) -> F {
        let n = lanes::<F, V>();
        self.lanes(id / n).0[id % n]
    }

    /// Returns whether an id of these registers has a value that is larger than `value`, or, if `or_equal`, that equals
    /// it.
    #[inline(always)]
    fn has_larger(&self, registers: Range<usize>, value: F, or_equal: bool) -> bool {
        let (v, components) = (self.v, self.components.len());
        let least_term = least_term(value.ln(), components);
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

/// Computes the exponents of a position's terms at an id with these logits.
#[inline(always)]
fn exponents<'a, F: Float>(
    logit: impl Fn(usize) -> F + 'a,
    components: &'a Components<F>,
) -> impl Iterator<Item = F> + 'a {
    components.scales().enumerate().map(move |(k, (largest, log_scale))| logit(k) - largest + log_scale)
}

impl<F: Float> PositionLogits<'_, F> {
    /// Returns whether one of these ids is more probable than an id of another rank with these logits, `[K]`, or, if
    /// `or_equal`, as probable.
    #[inline(always)]
    pub(super) fn has_more_probable<V: Vector<F>>(
        &self,
        v: V,
        logits: &[F],
        or_equal: bool,
        components: &Components<F>,
    ) -> bool {
        let Some(reference) = reference(exponents(|k| logits[k], components)) else { return false };
        let rows = V::registers(self.rows);
        let width = rows.len() / components.lse.len();
        let components = components.scales().map(|(largest, log_scale)| (largest, log_scale - reference));
        let other: Vec<V::Reg> = logits.iter().map(|&z| v.splat(z)).collect();
        let other = IdValues { rows: &other, width: 1, components: components.clone(), v, _number: PhantomData };
        let value = other.value(0);
        IdValues { rows, width, components, v, _number: PhantomData }.has_larger(0..width, value, or_equal)
    }

    /// Returns the most probable of all ids if it is one of these; among equals it is the lowest. Returns `None` if it
    /// is another id, or if none of these has a probability.
    #[inline(always)]
    pub(super) fn argmax_among<V: Vector<F>>(&self, v: V, ids: &[usize], components: &Components<F>) -> Option<usize> {
        let id_exponents = |&id: &usize| exponents(move |k| self.rows[k * self.stride + id], components);
        let reference = reference(ids.iter().flat_map(id_exponents))?;
        let rows = V::registers(self.rows);
        let width = rows.len() / components.lse.len();
        let components = components.scales().map(|(largest, log_scale)| (largest, log_scale - reference));
        let values = IdValues { rows, width, components, v, _number: PhantomData };
        let mut leader = (values.value(ids[0]), ids[0]);
        for &id in &ids[1..] {
            let other = (values.value(id), id);
            if precedes(other, leader) {
                leader = other;
            }
        }
        let (value, id) = leader;
        // The leader's register has lower and higher ids; all of the registers before it have lower ones.
        let (neighbours, lanes) = values.lanes(id / lanes::<F, V>());
        let own = id / lanes;
        for (neighbour, &other) in (own * lanes..).zip(&neighbours[..lanes]) {
            if neighbour != id && precedes((other, neighbour), leader) {
                return None;
            }
        }
        let is_beaten = values.has_larger(0..own, value, true) || values.has_larger(own + 1..width, value, false);
        (!is_beaten).then_some(id)
    }
}
