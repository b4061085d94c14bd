//! The row kernels, between the products: the loss of one position from its K rows of logits, and their gradient.
//!
//! With `z` the logits of component k (after bias and softcap), `pi` the prior and `y` the target:
//!
//! ```text
//! lse_k     = log sum_v exp z_kv                                       row log-sum-exp
//! log p_k(v) = z_kv - lse_k                                            the component
//! log p(v)  = logsumexp_k (log pi_k + log p_k(v))                      the mixture
//! r_k(v)    = exp(log pi_k + log p_k(v) - log p(v))                    responsibility of k for v
//! ```
//!
//! The objective of a position is `sum_v q_v (-log p(v)) + zeta mean_k lse_k^2` with `q_v = hard [v = y] + soft_v`. Its
//! gradient, written over the logits, is, with `R_k = sum_v q_v r_k(v)`:
//!
//! ```text
//! d/d z_kv      = (R_k + 2 zeta lse_k / K) softmax_k(v) - q_v r_k(v)
//! d/d log pi_k  = -R_k
//! ```

use super::log_sum_exp::LogSumExp;
use super::math::{exp, ln};
use super::simd::{Float, Kernel, Vector};

/// The inputs of a position's objective other than its logits.
#[derive(Clone, Copy)]
pub(super) struct Target<'a, F> {
    /// The target id and its mass in `q`.
    pub(super) hard: Option<(usize, F)>,
    /// The rest of `q`, padded with zeros, if any: label smoothing, or minus the upstream gradient of the
    /// log-probabilities.
    pub(super) soft: Option<&'a [F]>,
    pub(super) z_loss: F,
    /// Rows with less than this share of the position's mass get no gradient.
    pub(super) filter: F,
    /// Whether to compare the target with the most probable id.
    pub(super) hits: bool,
}

/// The logits of one position.
pub(super) struct Logits<'a, F> {
    /// `[K, stride]`: `vocab` logits per row, after bias and softcap, padded with minus infinity
    pub(super) rows: &'a mut [F],
    pub(super) stride: usize,
    pub(super) vocab: usize,
    /// `[K]`
    pub(super) lse: &'a [LogSumExp<F>],
    /// `[K]`
    pub(super) log_priors: &'a [F],
    pub(super) softcap: Option<F>,
}

/// Buffers that a thread reuses for every position.
pub(super) struct Scratch<F> {
    /// `[stride]`: log p(v)
    pub(super) log_probs: Vec<F>,
    /// `[stride]`: the largest of log(pi_k p_k(v)) over k, subtracted before exponentiation
    reference: Vec<F>,
    /// `[stride]`: soft_v over the sum of pi_k p_k(v) / exp(reference_v), so that soft_v r_k(v) = share_v pi_k p_k(v) /
    /// exp(reference_v)
    share: Vec<F>,
    /// `[K]`: lse_k
    lse: Vec<LogSumExp<F>>,
    /// `[K]`: log pi_k - log sum_v exp(z_kv - max_u z_ku), which is added to z_kv - max_u z_ku
    log_scale: Vec<F>,
    /// `[K]`: the target's part of R_k
    pub(super) hard_mass: Vec<F>,
    /// `[K]`: R_k
    pub(super) mass: Vec<F>,
    /// `[K]`: `sum_v |q_v| r_k(v)`, which the filter compares: weights of both signs may cancel in the mass
    magnitude: Vec<F>,
}

impl<F: Float> Scratch<F> {
    /// Buffers for rows of `stride` elements; those not needed are empty.
    pub(super) fn new(components: usize, stride: usize, all_ids: bool, soft_targets: bool) -> Self {
        let zeros = |n| vec![F::zero(); n];
        let soft = if soft_targets { stride } else { 0 };
        Scratch {
            log_probs: zeros(if all_ids { stride } else { 0 }),
            reference: zeros(soft),
            share: zeros(soft),
            lse: vec![LogSumExp::default(); components],
            log_scale: zeros(components),
            hard_mass: zeros(components),
            mass: zeros(components),
            magnitude: zeros(components),
        }
    }

    /// Sets the log-sum-exps and log-priors of the components.
    pub(super) fn set_components(&mut self, lse: &[LogSumExp<F>], log_priors: &[F]) {
        self.lse.copy_from_slice(lse);
        for ((log_scale, lse), &log_prior) in self.log_scale.iter_mut().zip(lse).zip(log_priors) {
            *log_scale = log_prior - lse.log_sum;
        }
    }

    /// The part of the loss that depends only on the target's logits and the log-sum-exps. Sets the masses accordingly.
    pub(super) fn hard_loss(
        &mut self,
        target: &Target<'_, F>,
        target_logit: impl Fn(usize, usize) -> F,
    ) -> PositionLoss {
        let components = self.lse.len();
        let mut loss = PositionLoss::default();
        self.hard_mass.fill(F::zero());
        if let Some((y, hard)) = target.hard {
            let joint = |k: usize| target_logit(k, y) - self.lse[k].largest + self.log_scale[k];
            let log_p = LogSumExp::of((0..components).map(joint));
            let nll = not_negative(-log_p.value());
            loss.nll = nll.f64();
            loss.objective = weighted(hard, nll).f64();
            for k in 0..components {
                // A single component has responsibility one, even for an impossible target.
                let r = if components == 1 { F::one() } else { (joint(k) - log_p.largest - log_p.log_sum).exp() };
                self.hard_mass[k] = weighted(hard, r);
            }
        }
        if target.z_loss != F::zero() {
            let squares: F = self.lse.iter().map(|lse| lse.value() * lse.value()).sum();
            loss.objective += (target.z_loss * squares).f64() / components as f64;
        }
        self.mass.copy_from_slice(&self.hard_mass);
        for (magnitude, mass) in self.magnitude.iter_mut().zip(&self.mass) {
            *magnitude = mass.abs();
        }
        loss
    }

    /// The magnitude below which the filter drops a row; records the dropped magnitude in `loss`.
    pub(super) fn least_magnitude(&self, target: &Target<'_, F>, loss: &mut PositionLoss) -> F {
        if target.filter == F::zero() {
            return F::zero();
        }
        let total: F = self.magnitude.iter().copied().sum();
        let least = target.filter * total;
        loss.mass = total.f64();
        loss.dropped = self.magnitude.iter().copied().filter(|&magnitude| magnitude < least).sum::<F>().f64();
        least
    }
}

/// The destinations and factors of the gradients of one position.
pub(super) struct RowGradients<'a, F> {
    /// Factor of the position's objective.
    pub(super) scale: F,
    /// Factor of contexts and bias in the logits.
    pub(super) logit_scale: F,
    /// `[K]`
    pub(super) log_priors: &'a mut [F],
    /// `[stride]`, accumulated
    pub(super) bias: Option<&'a mut [F]>,
    /// `[K]`: whether the row of logits now holds a gradient that is not all zeros
    pub(super) live: &'a mut [bool],
}

/// The results of one position.
#[derive(Clone, Copy, Default)]
pub(super) struct PositionLoss {
    pub(super) nll: f64,
    pub(super) objective: f64,
    pub(super) hit: bool,
    /// With a filter: the absolute mass of all rows.
    pub(super) mass: f64,
    /// With a filter: the absolute mass of the dropped rows.
    pub(super) dropped: f64,
}

/// The objective of one position; its gradient replaces the logits.
pub(super) struct LossRows<'a, F> {
    pub(super) logits: Logits<'a, F>,
    pub(super) target: Target<'a, F>,
    pub(super) gradients: Option<RowGradients<'a, F>>,
    pub(super) scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LossRows<'_, F> {
    type Output = PositionLoss;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> PositionLoss {
        let LossRows { mut logits, target, gradients, scratch } = self;
        let components = logits.log_priors.len();
        scratch.set_components(logits.lse, logits.log_priors);
        if target.soft.is_some() || target.hits {
            logits.mix(v, target.soft, scratch);
        }

        let target_logit = |k: usize, y: usize| logits.rows[k * logits.stride + y];
        let mut loss = scratch.hard_loss(&target, target_logit);
        if let (true, Some((y, _))) = (target.hits, target.hard) {
            loss.hit = !loss.nll.is_nan() && first_largest(&scratch.log_probs[..logits.vocab]) == y;
        }
        if let Some(soft) = target.soft {
            let mut objective = F::zero();
            for (&q, &log_p) in soft[..logits.vocab].iter().zip(&scratch.log_probs) {
                objective += weighted(q, -log_p);
            }
            loss.objective += objective.f64();
            for k in 0..components {
                let row = &logits.rows[k * logits.stride..][..logits.stride];
                let terms = RowTerms::new(k, scratch);
                let (mass, magnitude) = soft_mass(v, row, &terms);
                scratch.mass[k] += mass;
                scratch.magnitude[k] += magnitude;
            }
        }
        let least_magnitude = scratch.least_magnitude(&target, &mut loss);
        if let Some(gradients) = gradients {
            logits.gradient(v, &target, least_magnitude, gradients, scratch);
        }
        loss
    }
}

/// The log-probabilities of one position, written to `scratch.log_probs`.
pub(super) struct LogProbRows<'a, F> {
    pub(super) logits: Logits<'a, F>,
    pub(super) scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LogProbRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        self.scratch.set_components(self.logits.lse, self.logits.log_priors);
        self.logits.mix(v, None, self.scratch);
    }
}

impl<F: Float> Logits<'_, F> {
    /// `log p(v)` of every id and, for soft targets, the `reference` and `share` of each.
    #[inline(always)]
    fn mix<V: Vector<F>>(&self, v: V, soft: Option<&[F]>, scratch: &mut Scratch<F>) {
        let rows = V::registers(self.rows);
        let log_probs = V::registers_mut(&mut scratch.log_probs);
        let (references, shares) = (V::registers_mut(&mut scratch.reference), V::registers_mut(&mut scratch.share));
        let soft = soft.map(V::registers);
        let width = log_probs.len();
        let components = scratch.lse.iter().zip(&scratch.log_scale).map(|(lse, &log_scale)| (lse.largest, log_scale));
        let zero = v.splat(F::zero());
        for i in 0..width {
            let largest = largest_term(v, &rows[i..], width, components.clone());
            let (log_p, reference, sum) = mix_register(v, &rows[i..], width, components.clone(), largest);
            log_probs[i] = log_p;
            if let Some(soft) = soft {
                references[i] = reference;
                // An id without mass gets no share, nor does an id of probability zero: it contributes no gradient.
                shares[i] = v.if_equal(soft[i], zero, zero, v.if_equal(sum, zero, zero, v.div(soft[i], sum)));
            }
        }
    }

    /// Writes the gradient over the logits.
    #[inline(always)]
    fn gradient<V: Vector<F>>(
        &mut self,
        v: V,
        target: &Target<'_, F>,
        least_magnitude: F,
        mut gradients: RowGradients<'_, F>,
        scratch: &Scratch<F>,
    ) {
        let (scale, logits_scale) = (gradients.scale, gradients.scale * gradients.logit_scale);
        let z_loss = target.z_loss / F::of(scratch.lse.len() as f64);
        for (k, row) in self.rows.chunks_exact_mut(self.stride).enumerate() {
            let mass = scratch.mass[k];
            gradients.log_priors[k] = flushed(weighted(scale, -mass));
            let lse = scratch.lse[k];
            let softmax_scale = logits_scale * (mass + F::of(2.0) * z_loss * lse.value());
            let hard = logits_scale * scratch.hard_mass[k];
            // Both parts must be zero: they may cancel in the sum over the row, yet not in any logit.
            let is_zero = scale == F::zero()
                || (target.soft.is_none() && flushed(softmax_scale) == F::zero() && flushed(hard) == F::zero());
            gradients.live[k] = !(is_zero || scratch.magnitude[k] < least_magnitude);
            if !gradients.live[k] {
                continue;
            }
            let target_logit = target.hard.map(|(y, _)| (y, row[y]));
            let terms = RowTerms {
                exp_scale: softmax_scale * (-lse.log_sum).exp(),
                scale: logits_scale,
                softcap: self.softcap.unwrap_or_else(F::one),
                ..RowTerms::new(k, scratch)
            };
            match (target.soft.is_some(), self.softcap.is_some()) {
                (false, false) => gradient_row::<false, false, F, V>(v, row, &terms),
                (false, true) => gradient_row::<false, true, F, V>(v, row, &terms),
                (true, false) => gradient_row::<true, false, F, V>(v, row, &terms),
                (true, true) => gradient_row::<true, true, F, V>(v, row, &terms),
            }
            if let Some((y, z)) = target_logit {
                let slope = match self.softcap {
                    Some(cap) => F::one() - (z / cap) * (z / cap),
                    None => F::one(),
                };
                row[y] = flushed(row[y] - hard * slope);
            }
            if let Some(bias) = gradients.bias.as_deref_mut() {
                for (sum, &g) in V::registers_mut(bias).iter_mut().zip(V::registers(row)) {
                    *sum = v.add(*sum, g);
                }
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
    // For an id of probability zero, every term is exp(-inf - 0) = 0 instead of exp(-inf + inf).
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

/// The inputs of the gradient of one row other than its logits.
struct RowTerms<'a, F> {
    /// The largest logit.
    largest: F,
    log_scale: F,
    reference: &'a [F],
    share: &'a [F],
    /// Factor of `exp(z - largest)`: `scale (R_k + 2 zeta lse_k / K)` over the sum of these exponentials.
    exp_scale: F,
    scale: F,
    softcap: F,
}

impl<'a, F: Float> RowTerms<'a, F> {
    /// The terms of component `k`, without the factors of the gradient.
    #[inline(always)]
    fn new(k: usize, scratch: &'a Scratch<F>) -> Self {
        RowTerms {
            largest: scratch.lse[k].largest,
            log_scale: scratch.log_scale[k],
            reference: &scratch.reference,
            share: &scratch.share,
            exp_scale: F::zero(),
            scale: F::one(),
            softcap: F::one(),
        }
    }
}

/// `z := exp_scale exp(z - largest) - scale soft_v r(v)`, times the slope of the softcap.
#[inline(always)]
fn gradient_row<const SOFT: bool, const CAP: bool, F: Float, V: Vector<F>>(
    v: V,
    row: &mut [F],
    terms: &RowTerms<'_, F>,
) {
    let (largest, exp_scale) = (v.splat(terms.largest), v.splat(terms.exp_scale));
    let (log_scale, scale) = (v.splat(terms.log_scale), v.splat(-terms.scale));
    let inverse_cap = v.splat(F::one() / terms.softcap);
    let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
    // Exponentials below this give gradients that are flushed to zero. They are set to zero before the multiplication,
    // which would otherwise be as slow as the products that flushing speeds up. (Comparisons with NaN are false.)
    let least = v.splat(F::LEAST_GRADIENT / terms.exp_scale.abs());
    let (reference, share) = (V::registers(terms.reference), V::registers(terms.share));
    for (i, z) in V::registers_mut(row).iter_mut().enumerate() {
        let relative = v.sub(*z, largest);
        let e = exp(v, relative);
        let mut g = v.mul(v.if_less(e, least, zero, e), exp_scale);
        if SOFT {
            let term = relative_term(v, v.sub(v.add(relative, log_scale), reference[i]));
            g = v.mul_add(v.mul(term, share[i]), scale, g);
        }
        if CAP {
            // The padding is minus infinity; its softmax is already zero.
            let t = v.mul(*z, inverse_cap);
            let slope = v.sub(one, v.mul(t, t));
            g = v.if_equal(g, zero, zero, v.mul(g, slope));
        }
        if SOFT || CAP {
            g = v.if_less(v.max(g, v.sub(zero, g)), v.splat(F::LEAST_GRADIENT), zero, g);
        }
        *z = g;
    }
}

/// The exponential of a mixture term relative to the largest; zero where it is negligible.
#[inline(always)]
fn relative_term<F: Float, V: Vector<F>>(v: V, relative: V::Reg) -> V::Reg {
    let e = exp(v, relative);
    v.if_less(e, v.splat(F::LEAST_GRADIENT), v.splat(F::zero()), e)
}

/// `sum_v soft_v r(v)` and `sum_v |soft_v| r(v)` of one row.
#[inline(always)]
fn soft_mass<F: Float, V: Vector<F>>(v: V, row: &[F], terms: &RowTerms<'_, F>) -> (F, F) {
    let (largest, log_scale) = (v.splat(terms.largest), v.splat(terms.log_scale));
    let (reference, share) = (V::registers(terms.reference), V::registers(terms.share));
    let zero = v.splat(F::zero());
    let (mut sum, mut magnitude) = (zero, zero);
    for (i, &z) in V::registers(row).iter().enumerate() {
        let term = relative_term(v, v.sub(v.add(v.sub(z, largest), log_scale), reference[i]));
        sum = v.mul_add(term, share[i], sum);
        magnitude = v.mul_add(term, v.max(share[i], v.sub(zero, share[i])), magnitude);
    }
    (v.sum(sum), v.sum(magnitude))
}

/// `x`, or zero if its absolute value is below [`Float::LEAST_GRADIENT`].
pub(super) fn flushed<F: Float>(x: F) -> F {
    if x.abs() < F::LEAST_GRADIENT {
        F::zero()
    } else {
        x
    }
}

/// `x`, or plus zero if rounding has made it negative.
fn not_negative<F: Float>(x: F) -> F {
    if x <= F::zero() {
        F::zero()
    } else {
        x
    }
}

/// `weight * x`, or zero for weight zero even if `x` is infinite or NaN.
pub(super) fn weighted<F: Float>(weight: F, x: F) -> F {
    if weight == F::zero() {
        F::zero()
    } else {
        weight * x
    }
}

/// Index of the largest value, the first of equals; that of the first NaN if there is one.
pub(super) fn first_largest<F: Float>(values: &[F]) -> usize {
    let mut best = 0;
    for (i, &x) in values.iter().enumerate() {
        if x.is_nan() {
            return i;
        }
        if x > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::simd::Isa;
    use super::*;

    /// The gradient of one position: that of the logits of its live rows, then that of its log-priors.
    fn gradient<F: Float>(
        isa: Isa,
        rows: &mut [F],
        log_priors: &[F],
        soft: Option<&[F]>,
        softcap: Option<F>,
    ) -> Vec<F> {
        let components = log_priors.len();
        let stride = rows.len() / components;
        let lse: Vec<_> = rows.chunks(stride).map(|row| LogSumExp::of(row.iter().copied())).collect();
        let mut gradients = vec![F::zero(); components];
        let mut live = vec![false; components];
        let kernel = LossRows {
            logits: Logits { rows, stride, vocab: stride, lse: &lse, log_priors, softcap },
            target: Target { hard: Some((0, F::of(0.9))), soft, z_loss: F::zero(), filter: F::zero(), hits: false },
            gradients: Some(RowGradients {
                scale: F::one(),
                logit_scale: F::one(),
                log_priors: &mut gradients,
                bias: None,
                live: &mut live,
            }),
            scratch: &mut Scratch::new(components, stride, soft.is_some(), soft.is_some()),
        };
        F::dispatch(isa, kernel);
        let rows = rows.chunks(stride).zip(&live).filter(|(_, &live)| live);
        rows.flat_map(|(row, _)| row).copied().chain(gradients).collect()
    }

    fn check_flush<F: Float>() {
        let stride = 64;
        // Logits from 0 down to -126, and log-priors from 0 down to -88, where an f32 exponential underflows.
        let logits = |k: usize| (0..stride).map(move |v| F::of(-2.0 * ((v * 5 + k) % stride) as f64));
        let log_priors: Vec<F> = (0..12).map(|k| F::of(-8.0 * f64::from(k))).collect();
        let soft = vec![F::of(0.1 / 64.0); stride];
        for isa in Isa::available() {
            for soft in [None, Some(&soft[..])] {
                for softcap in [None, Some(F::of(200.0))] {
                    let mut rows: Vec<F> = (0..log_priors.len()).flat_map(logits).collect();
                    let found = gradient(isa, &mut rows, &log_priors, soft, softcap);
                    let small = found.iter().filter(|g| **g != F::zero() && g.abs() < F::LEAST_GRADIENT).count();
                    assert_eq!(small, 0, "{} soft {} cap {}", isa.name(), soft.is_some(), softcap.is_some());
                    assert!(found.iter().any(|g| g.abs() > F::of(0.1)), "{}", isa.name());
                    assert!(found.len() > stride + log_priors.len(), "more than one row must be live");
                }
            }
        }
    }

    #[test]
    fn gradients_below_the_least_are_flushed_to_zero() {
        check_flush::<f32>();
        check_flush::<f64>();
    }
}
