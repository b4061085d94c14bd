//! The mixture's log-probability of every id of one position, from its K rows of logits.

use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::vector::log_sum_exp::{finite_or_zero, LogSumExp};
use crate::backend::cpu::vector::math::{exp, ln, not_negative};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::cpu::vector::softcap::Softcap;

/// The logits of one position.
pub(super) struct PositionLogits<'a, F> {
    /// `[K, stride]`: `vocab` logits per row, after bias and softcap, padded with minus infinity
    pub(super) rows: &'a mut [F],
    pub(super) stride: usize,
    pub(super) vocab: usize,
    /// `[K]`
    pub(super) lse: &'a [LogSumExp<F>],
    /// `[K]`
    pub(super) log_priors: &'a [F],
    pub(super) softcap: Option<Softcap<F>>,
}

/// Buffers that a thread reuses for every position.
pub(super) struct Scratch<F> {
    pub(super) components: Components<F>,
    /// `[stride]`: log p(v)
    pub(super) log_probs: Vec<F>,
    /// `[stride]`: the largest of log(pi_k p_k(v)) over k, subtracted before exponentiation
    pub(super) reference: Vec<F>,
    /// `[stride]`: soft_v over the sum of pi_k p_k(v) / exp(reference_v), so that soft_v r_k(v) = share_v pi_k p_k(v) /
    /// exp(reference_v)
    pub(super) share: Vec<F>,
    /// The candidates and their masses
    pub(super) candidates: Vec<(usize, F)>,
}

impl<F: Float> Scratch<F> {
    /// Buffers for rows of `stride` elements; the ones that the task does not need are empty.
    pub(super) fn new(components: usize, stride: usize, all_ids: bool, soft_targets: bool) -> Self {
        let row = |is_needed| vec![F::zero(); if is_needed { stride } else { 0 }];
        let components = Components::new(components);
        let (log_probs, reference, share) = (row(all_ids), row(soft_targets), row(soft_targets));
        Scratch { components, log_probs, reference, share, candidates: Vec::new() }
    }
}

/// The log-probabilities of one position, written to `scratch.log_probs`.
pub(super) struct LogProbRows<'a, F> {
    pub(super) logits: PositionLogits<'a, F>,
    pub(super) scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LogProbRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        self.scratch.components.set(self.logits.lse, self.logits.log_priors);
        self.logits.mix(v, None, self.scratch);
    }
}

/// The masses `soft_v` of ids.
#[derive(Clone, Copy)]
pub(super) enum IdMasses<'a, F> {
    /// Padded with zeros
    Given(&'a [F]),
    /// `Q(v) (constant + slope log Q(v))`, and of the ids outside the candidates a share of `outside` besides
    OfProbability { tempered: Tempered<F>, constant: F, slope: F, outside: Option<(F, Outside<F>)> },
}

impl<F: Float> IdMasses<'_, F> {
    /// The masses of the ids of register `i`, which have these log-probabilities.
    #[inline(always)]
    pub(super) fn at<V: Vector<F>>(self, v: V, i: usize, log_p: V::Reg) -> V::Reg {
        match self {
            IdMasses::Given(masses) => V::registers(masses)[i],
            IdMasses::OfProbability { tempered, constant, slope, outside } => {
                let (log_q, q) = tempered.temper(v, log_p);
                let mass = v.mul(q, v.mul_add(v.splat(slope), log_q, v.splat(constant)));
                let zero = v.splat(F::zero());
                let mass = v.if_equal(q, zero, zero, mass);
                match outside {
                    Some((of_all, outside)) => {
                        v.mul_add(v.splat(of_all), outside.share(v, tempered.power, log_p), mass)
                    }
                    None => mass,
                }
            }
        }
    }
}

/// `log Q(v) = power log p(v) - log_norm`
#[derive(Clone, Copy)]
pub(super) struct Tempered<F> {
    pub(super) power: F,
    pub(super) log_norm: F,
}

impl<F: Float> Tempered<F> {
    /// The distribution of log-probabilities, which are padded with minus infinity; without a change for a power of one.
    #[inline(always)]
    pub(super) fn new<V: Vector<F>>(v: V, log_probs: &[F], power: F) -> Self {
        if power == F::one() {
            return Tempered { power, log_norm: F::zero() };
        }
        Tempered { power, log_norm: PowerSum::new(v, log_probs, power).value(power) }
    }

    /// What remains of the distribution once the candidates' log-probabilities are minus infinity, which this sets.
    #[inline(always)]
    pub(super) fn outside<V: Vector<F>>(
        self,
        v: V,
        log_probs: &mut [F],
        candidates: impl Iterator<Item = usize>,
    ) -> Outside<F> {
        candidates.for_each(|id| log_probs[id] = F::neg_infinity());
        Outside(PowerSum::new(v, log_probs, self.power))
    }

    /// The logarithm of the mass outside; at most zero.
    pub(super) fn log_outside(self, outside: Outside<F>) -> F {
        // Not `neg`, which makes a minus zero.
        F::zero() - not_negative(self.log_norm - outside.0.value(self.power))
    }

    /// `log Q(v)` of an id.
    pub(super) fn log_prob(self, log_p: F) -> F {
        self.power * log_p - self.log_norm
    }

    /// `log Q(v)` and `Q(v)`
    #[inline(always)]
    fn temper<V: Vector<F>>(self, v: V, log_p: V::Reg) -> (V::Reg, V::Reg) {
        let log_q = v.sub(v.mul(log_p, v.splat(self.power)), v.splat(self.log_norm));
        (log_q, exp(v, log_q))
    }

    /// `-sum_v Q(v) log Q(v)`, from 0 to `ln vocab` whatever the rounding.
    #[inline(always)]
    pub(super) fn entropy<V: Vector<F>>(self, v: V, log_probs: &[F], vocab: usize) -> F {
        let mut sum = v.splat(F::zero());
        for &log_p in V::registers(log_probs) {
            let (log_q, q) = self.temper(v, log_p);
            sum = v.add(sum, product(v, q, log_q));
        }
        within_bounds(-v.sum(sum), vocab)
    }
}

/// The ids outside the candidates.
#[derive(Clone, Copy)]
pub(super) struct Outside<F>(PowerSum<F>);

impl<F: Float> Outside<F> {
    /// Whether no id has a probability.
    pub(super) fn is_empty(self) -> bool {
        self.0.log_sum == F::neg_infinity()
    }

    /// `Q(v) / Q(outside)`, from the logarithm of its parts: both may be below the smallest number.
    #[inline(always)]
    fn share<V: Vector<F>>(self, v: V, power: F, log_p: V::Reg) -> V::Reg {
        let relative = v.mul(v.sub(log_p, v.splat(self.0.largest)), v.splat(power));
        exp(v, v.sub(relative, v.splat(self.0.log_sum)))
    }
}

/// `sum_v p(v)^power`, relative to the largest.
#[derive(Clone, Copy)]
struct PowerSum<F> {
    /// The largest log-probability; zero if all are minus infinity
    largest: F,
    /// The logarithm of the sum over `exp(power largest)`
    log_sum: F,
}

impl<F: Float> PowerSum<F> {
    #[inline(always)]
    fn new<V: Vector<F>>(v: V, log_probs: &[F], power: F) -> Self {
        let mut largest = v.splat(F::neg_infinity());
        for &log_p in V::registers(log_probs) {
            largest = v.max(largest, log_p);
        }
        let largest = finite_or_zero(v.largest(largest));
        let (reference, power_register) = (v.splat(largest * power), v.splat(power));
        let mut sum = v.splat(F::zero());
        for &log_p in V::registers(log_probs) {
            sum = v.add(sum, exp(v, v.sub(v.mul(log_p, power_register), reference)));
        }
        PowerSum { largest, log_sum: v.sum(sum).ln() }
    }

    /// The logarithm of the sum.
    fn value(self, power: F) -> F {
        self.largest * power + self.log_sum
    }
}

/// `q log q`, which is zero for `q` of zero.
#[inline(always)]
fn product<F: Float, V: Vector<F>>(v: V, q: V::Reg, log_q: V::Reg) -> V::Reg {
    let zero = v.splat(F::zero());
    v.if_equal(q, zero, zero, v.mul(q, log_q))
}

/// An entropy that rounding has not moved beyond 0 or `ln vocab`; NaN stays NaN.
fn within_bounds<F: Float>(entropy: F, vocab: usize) -> F {
    match (entropy, F::from_f64((vocab as f64).ln())) {
        // Minus zero too.
        (x, _) if x <= F::zero() => F::zero(),
        (x, most) if x > most => most,
        (x, _) => x,
    }
}

impl<F: Float> PositionLogits<'_, F> {
    /// `-sum_v p(v) log p(v)`, in one pass over the logits.
    #[inline(always)]
    pub(super) fn entropy<V: Vector<F>>(&self, v: V, scratch: &Scratch<F>) -> F {
        let (rows, components) = (V::registers(self.rows), scratch.components.scales());
        let width = rows.len() / components.len();
        let mut sum = v.splat(F::zero());
        for i in 0..width {
            let largest = largest_term(v, &rows[i..], width, components.clone());
            let log_p = mix_register(v, &rows[i..], width, components.clone(), largest).0;
            sum = v.add(sum, product(v, exp(v, log_p), log_p));
        }
        within_bounds(-v.sum(sum), self.vocab)
    }

    /// Computes `log p(v)` for every id and, for soft targets, its `reference` and `share`.
    #[inline(always)]
    pub(super) fn mix<V: Vector<F>>(&self, v: V, soft: Option<IdMasses<'_, F>>, scratch: &mut Scratch<F>) {
        let rows = V::registers(self.rows);
        let log_probs = V::registers_mut(&mut scratch.log_probs);
        let (references, shares) = (V::registers_mut(&mut scratch.reference), V::registers_mut(&mut scratch.share));
        let width = log_probs.len();
        let components = scratch.components.scales();
        let zero = v.splat(F::zero());
        for i in 0..width {
            let largest = largest_term(v, &rows[i..], width, components.clone());
            let (log_p, reference, sum) = mix_register(v, &rows[i..], width, components.clone(), largest);
            log_probs[i] = log_p;
            if let Some(soft) = soft {
                references[i] = reference;
                let mass = soft.at(v, i, log_p);
                // An id without mass gets no share, nor does an id of probability zero: it contributes no gradient.
                shares[i] = v.if_equal(mass, zero, zero, v.if_equal(sum, zero, zero, v.div(mass, sum)));
            }
        }
    }
}

/// The largest of `log(pi_k p_k(v))` for the ids of one register, from the logits of K components, `stride` registers
/// apart. `components` yields the largest logit and the `log_scale` of each.
#[inline(always)]
pub(super) fn largest_term<F: Float, V: Vector<F>>(
    v: V,
    logits: &[V::Reg],
    stride: usize,
    components: impl Iterator<Item = (F, F)>,
) -> V::Reg {
    let mut largest = v.splat(F::neg_infinity());
    for (k, (row_largest, log_scale)) in components.enumerate() {
        let term = v.add(v.sub(logits[k * stride], v.splat(row_largest)), v.splat(log_scale));
        largest = v.max(largest, term);
    }
    largest
}

/// For the ids of one register: `log p(v)`, the reference that is subtracted from its terms, and the sum of their
/// exponentials.
#[inline(always)]
pub(super) fn mix_register<F: Float, V: Vector<F>>(
    v: V,
    logits: &[V::Reg],
    stride: usize,
    components: impl ExactSizeIterator<Item = (F, F)>,
    largest: V::Reg,
) -> (V::Reg, V::Reg, V::Reg) {
    let zero = v.splat(F::zero());
    // If an id has probability zero, every term is exp(-inf - 0) = 0 instead of exp(-inf + inf).
    let reference = v.if_equal(largest, v.splat(F::neg_infinity()), zero, largest);
    // Rounding may give a value above zero.
    let log_probability = |x| v.if_less(zero, x, zero, x);
    if components.len() == 1 {
        return (log_probability(largest), reference, v.splat(F::one()));
    }
    let mut sum = zero;
    for (k, (row_largest, log_scale)) in components.enumerate() {
        let term = v.add(v.sub(logits[k * stride], v.splat(row_largest)), v.splat(log_scale));
        sum = v.add(sum, exp(v, v.sub(term, reference)));
    }
    (log_probability(v.add(reference, ln(v, sum))), reference, sum)
}
