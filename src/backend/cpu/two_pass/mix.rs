//! The mixture's log-probability of every id of one position, from its K rows of logits, and functions of all ids: the
//! tempered distribution `log Q(v) = power log p(v) - log sum_u p(u)^power`, its entropy, the mass outside candidates,
//! and the collision probability `sum_v Q(v)^2`.

use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::vector::logit_map::LogitMap;
use crate::backend::cpu::vector::math::{exp, finite_or_zero, ln, not_negative, LogSumExp, RowSum};
use crate::backend::cpu::vector::simd::{Float, Vector};

/// The logits of one position.
pub(super) struct PositionLogits<'a, F> {
    /// `[K, stride]`: `vocab` logits per row, after bias and logit function, padded with minus infinity.
    pub(super) rows: &'a mut [F],
    pub(super) stride: usize,
    pub(super) vocab: usize,
    /// `[K]`.
    pub(super) lse: &'a [LogSumExp<F>],
    /// `[K]`.
    pub(super) log_priors: &'a [F],
    pub(super) logit_map: Option<LogitMap<F>>,
}

/// The buffers that a thread reuses for every position.
pub(super) struct Scratch<F> {
    pub(super) components: Components<F>,
    /// `[stride]`: `log p(v)`.
    pub(super) log_probs: Vec<F>,
    /// `[stride]`: the largest of `log(pi_k p_k(v))` over k, which is subtracted before exponentiation.
    pub(super) reference: Vec<F>,
    /// `[stride]`: `soft_v` over the sum of `pi_k p_k(v) / exp(reference_v)`, so that `soft_v r_k(v) = share_v pi_k
    /// p_k(v) / exp(reference_v)`.
    pub(super) share: Vec<F>,
    /// The candidates and their masses.
    pub(super) candidates: Vec<(usize, F)>,
}

impl<F: Float> Scratch<F> {
    /// Allocates buffers for rows of `stride` elements. The row of log-probabilities is empty unless the task
    /// `needs_all_ids`, and the other two unless it `has_soft_targets`.
    pub(super) fn new(components: usize, stride: usize, needs_all_ids: bool, has_soft_targets: bool) -> Self {
        let row = |is_needed| vec![F::zero(); if is_needed { stride } else { 0 }];
        let components = Components::new(components);
        let (log_probs, reference, share) = (row(needs_all_ids), row(has_soft_targets), row(has_soft_targets));
        Scratch { components, log_probs, reference, share, candidates: Vec::new() }
    }
}

/// The masses `soft_v` of all ids.
#[derive(Clone, Copy)]
pub(super) enum IdMasses<'a, F> {
    /// One number for each id, padded with zeros.
    Given(&'a [F]),
    /// Each id's mass is `Q(v) (constant + slope log Q(v))`. All ids also share the first number of `collision`, and
    /// the ids outside the candidates that of `outside`.
    FromProbability {
        tempered: Tempered<F>,
        constant: F,
        slope: F,
        collision: Option<(F, Collision<F>)>,
        outside: Option<(F, Outside<F>)>,
    },
}

impl<F: Float> IdMasses<'_, F> {
    /// Computes the masses of the ids of register `i`, which have these log-probabilities.
    #[inline(always)]
    pub(super) fn at<V: Vector<F>>(self, v: V, i: usize, log_p: V::Reg) -> V::Reg {
        match self {
            IdMasses::Given(masses) => V::registers(masses)[i],
            IdMasses::FromProbability { tempered, constant, slope, collision, outside } => {
                let (log_q, q) = tempered.temper(v, log_p);
                let mass = v.mul(q, v.mul_add(v.splat(slope), log_q, v.splat(constant)));
                let zero = v.splat(F::zero());
                let mut mass = v.if_equal(q, zero, zero, mass);
                if let Some((collision_mass, collision)) = collision {
                    mass = v.mul_add(v.splat(collision_mass), collision.share(v, log_p), mass);
                }
                match outside {
                    Some((outside_mass, outside)) => {
                        v.mul_add(v.splat(outside_mass), outside.share(v, tempered.power, log_p), mass)
                    }
                    None => mass,
                }
            }
        }
    }
}

/// The tempered distribution `log Q(v) = power log p(v) - log_norm`.
#[derive(Clone, Copy)]
pub(super) struct Tempered<F> {
    pub(super) power: F,
    pub(super) log_norm: F,
}

impl<F: Float> Tempered<F> {
    /// Tempers the distribution with these log-probabilities, which are padded with minus infinity. A power of one
    /// changes nothing, and then the log-probabilities are not read.
    #[inline(always)]
    pub(super) fn new<V: Vector<F>>(v: V, log_probs: &[F], power: F) -> Self {
        if power == F::one() {
            return Tempered { power, log_norm: F::zero() };
        }
        Tempered { power, log_norm: PowerSum::new(v, log_probs, power).value(power) }
    }

    /// Sets the candidates' log-probabilities to minus infinity, and adds up the other ids.
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

    /// Computes the logarithm of the mass outside; at most zero.
    pub(super) fn log_outside(self, outside: Outside<F>) -> F {
        // Not `neg`, which makes a minus zero.
        F::zero() - not_negative(self.log_norm - outside.0.value(self.power))
    }

    /// Computes `log Q(v)` of an id.
    pub(super) fn log_prob(self, log_p: F) -> F {
        self.power * log_p - self.log_norm
    }

    /// Computes `log Q(v)` and `Q(v)` of the ids of a register.
    #[inline(always)]
    fn temper<V: Vector<F>>(self, v: V, log_p: V::Reg) -> (V::Reg, V::Reg) {
        let log_q = v.sub(v.mul(log_p, v.splat(self.power)), v.splat(self.log_norm));
        (log_q, exp(v, log_q))
    }

    /// Computes `-sum_v Q(v) log Q(v)`, from 0 to `ln vocab` whatever the rounding.
    #[inline(always)]
    pub(super) fn entropy<V: Vector<F>>(self, v: V, log_probs: &[F], vocab: usize) -> F {
        let mut sum = RowSum::new(v);
        for &log_p in V::registers(log_probs) {
            let (log_q, q) = self.temper(v, log_p);
            sum.add(v, product(v, q, log_q));
        }
        within_bounds(-sum.value(v), vocab)
    }

    /// Computes the collision probability `sum_v Q(v)^2`.
    #[inline(always)]
    pub(super) fn collision<V: Vector<F>>(self, v: V, log_probs: &[F]) -> Collision<F> {
        let power = self.power + self.power;
        let squares = PowerSum::new(v, log_probs, power);
        // Not `neg`, which makes a minus zero.
        let log = F::zero() - not_negative(self.log_norm + self.log_norm - squares.value(power));
        Collision { squares, power, log }
    }
}

/// The collision probability `sum_v Q(v)^2`: the probability that two draws from Q are equal.
#[derive(Clone, Copy)]
pub(super) struct Collision<F> {
    /// The sum of the squares, which are powers of `p(v)`.
    squares: PowerSum<F>,
    /// Twice the power of Q.
    power: F,
    /// The logarithm; at most zero.
    pub(super) log: F,
}

impl<F: Float> Collision<F> {
    /// Computes `Q(v)^2 / sum_u Q(u)^2`.
    #[inline(always)]
    fn share<V: Vector<F>>(self, v: V, log_p: V::Reg) -> V::Reg {
        self.squares.share(v, self.power, log_p)
    }

    /// Computes the share of one id.
    pub(super) fn share_of_id(self, log_p: F) -> F {
        ((log_p - self.squares.largest) * self.power - self.squares.log_sum).exp()
    }
}

/// The sum over the ids outside the candidates.
#[derive(Clone, Copy)]
pub(super) struct Outside<F>(PowerSum<F>);

impl<F: Float> Outside<F> {
    /// Returns whether no id has a probability.
    pub(super) fn is_empty(self) -> bool {
        self.0.log_sum == F::neg_infinity()
    }

    /// Computes `Q(v) / Q(outside)`.
    #[inline(always)]
    fn share<V: Vector<F>>(self, v: V, power: F, log_p: V::Reg) -> V::Reg {
        self.0.share(v, power, log_p)
    }
}

/// `sum_v p(v)^power`, relative to the largest.
#[derive(Clone, Copy)]
struct PowerSum<F> {
    /// The largest log-probability; zero if all are minus infinity.
    largest: F,
    /// The logarithm of the sum, divided by `exp(power largest)`.
    log_sum: F,
}

impl<F: Float> PowerSum<F> {
    /// Adds up the powers of the probabilities.
    #[inline(always)]
    fn new<V: Vector<F>>(v: V, log_probs: &[F], power: F) -> Self {
        let mut largest = v.splat(F::neg_infinity());
        for &log_p in V::registers(log_probs) {
            largest = v.max(largest, log_p);
        }
        let largest = finite_or_zero(v.largest(largest));
        let (reference, power_register) = (v.splat(largest * power), v.splat(power));
        let mut sum = RowSum::new(v);
        for &log_p in V::registers(log_probs) {
            sum.add(v, exp(v, v.sub(v.mul(log_p, power_register), reference)));
        }
        PowerSum { largest, log_sum: sum.value(v).ln() }
    }

    /// Computes `p(v)^power` over the sum, from the logarithms of both, which may be below the smallest number
    /// themselves.
    #[inline(always)]
    fn share<V: Vector<F>>(self, v: V, power: F, log_p: V::Reg) -> V::Reg {
        let relative = v.mul(v.sub(log_p, v.splat(self.largest)), v.splat(power));
        exp(v, v.sub(relative, v.splat(self.log_sum)))
    }

    /// Returns the logarithm of the sum.
    fn value(self, power: F) -> F {
        self.largest * power + self.log_sum
    }
}

/// Computes `q log q`, which is zero for a `q` of zero.
#[inline(always)]
fn product<F: Float, V: Vector<F>>(v: V, q: V::Reg, log_q: V::Reg) -> V::Reg {
    let zero = v.splat(F::zero());
    v.if_equal(q, zero, zero, v.mul(q, log_q))
}

/// Bounds an entropy, which rounding may have moved beyond 0 or `ln vocab`; NaN stays NaN.
fn within_bounds<F: Float>(entropy: F, vocab: usize) -> F {
    match (entropy, F::from_f64((vocab as f64).ln())) {
        // Minus zero becomes zero, too.
        (x, _) if x <= F::zero() => F::zero(),
        (x, most) if x > most => most,
        (x, _) => x,
    }
}

impl<F: Float> PositionLogits<'_, F> {
    /// Computes `-sum_v p(v) log p(v)`, in one pass over the logits.
    #[inline(always)]
    pub(super) fn entropy<V: Vector<F>>(&self, v: V, scratch: &Scratch<F>) -> F {
        let (rows, components) = (V::registers(self.rows), scratch.components.scales());
        let width = rows.len() / components.len();
        let mut sum = RowSum::new(v);
        for i in 0..width {
            let largest = largest_term(v, &rows[i..], width, components.clone());
            let log_p = mix_register(v, &rows[i..], width, components.clone(), largest).0;
            sum.add(v, product(v, exp(v, log_p), log_p));
        }
        within_bounds(-sum.value(v), self.vocab)
    }

    /// Computes `log p(v)` of every id and, if there are soft masses, its `reference` and `share`.
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

/// Returns a number below every term `log(pi_k p_k(v))` that matters for an id whose log-probability is at least
/// `log_prob`.
pub(super) fn least_term<F: Float>(log_prob: F, components: usize) -> F {
    // A sum of K terms is at most K times the largest; 1e-2 leaves room for rounding.
    log_prob - F::from_f64((components as f64).ln() + 1e-2)
}

/// Computes the largest of `log(pi_k p_k(v))` for the ids of one register, from the logits of K components, `stride`
/// registers apart. `components` yields the largest logit and the `log_scale` of each.
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

/// Computes, for the ids of one register, `log p(v)`, the reference that is subtracted from its terms, and the sum of
/// their exponentials. `largest` is from [`largest_term`].
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
