//! The row kernels: what happens to the K rows of logits of one token between the products.
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
//! The objective of a token is `sum_v q_v (-log p(v)) + zeta mean_k lse_k^2` with `q_v = hard [v = y] + soft_v`, and
//! its gradient, written over the logits, with `R_k = sum_v q_v r_k(v)`:
//!
//! ```text
//! d/d z_kv      = (R_k + 2 zeta lse_k / K) softmax_k(v) - q_v r_k(v)
//! d/d log pi_k  = -R_k
//! ```

use super::math::{exp, ln, tanh};
use super::simd::{Float, Kernel, Vector};

/// What the objective of a token is made of, beyond its logits.
#[derive(Clone, Copy)]
pub(super) struct Target<'a, F> {
    /// The target word and its mass in `q`.
    pub(super) hard: Option<(usize, F)>,
    /// The rest of `q`, padded with zeros, where there is any: label smoothing, or the upstream gradient of log-probabilities.
    pub(super) soft: Option<&'a [F]>,
    pub(super) z_loss: F,
    /// Rows with less than this share of the responsibility get no gradient.
    pub(super) filter: F,
    /// Whether to look for the most probable word.
    pub(super) hits: bool,
}

/// The logits of one token: K rows as the first product left them.
pub(super) struct Logits<'a, F> {
    /// `[K, stride]`, of which `[K, vocab]` are logits; the kernels read and write all of it.
    pub(super) rows: &'a mut [F],
    pub(super) stride: usize,
    pub(super) vocab: usize,
    /// `[stride]`: the decoder's bias, or zeros, then minus infinity.
    pub(super) bias: &'a [F],
    /// `[K]`
    pub(super) log_priors: &'a [F],
    pub(super) softcap: Option<F>,
}

/// Buffers that a thread uses again for every token.
pub(super) struct Scratch<F> {
    /// `[stride]`: log p(v)
    pub(super) log_probs: Vec<F>,
    /// `[K]` each: lse_k, the target's part of R_k, and R_k
    lse: Vec<F>,
    hard_mass: Vec<F>,
    mass: Vec<F>,
}

impl<F: Float> Scratch<F> {
    pub(super) fn new(components: usize, stride: usize) -> Self {
        let zeros = |n| vec![F::zero(); n];
        Scratch {
            log_probs: zeros(stride),
            lse: zeros(components),
            hard_mass: zeros(components),
            mass: zeros(components),
        }
    }
}

impl<F: Float> Scratch<F> {
    /// Takes in the log-sum-exp of component k.
    pub(super) fn set_lse(&mut self, k: usize, lse: F) {
        self.lse[k] = lse;
    }

    /// The loss as far as it depends on the target's logits alone, and the responsibilities.
    pub(super) fn hard_loss(
        &mut self,
        target: &Target<'_, F>,
        log_priors: &[F],
        target_logit: impl Fn(usize, usize) -> F,
    ) -> TokenLoss {
        let components = self.lse.len();
        let mut loss = TokenLoss::default();
        self.hard_mass.fill(F::zero());
        if let Some((y, hard)) = target.hard {
            // The logit and its log-sum-exp first: they may be large, and their difference is exact where it matters.
            let joint = |k: usize| log_priors[k] + (target_logit(k, y) - self.lse[k]);
            let log_p = log_sum_exp_scalar(components, joint);
            loss.nll = -log_p.f64();
            loss.objective = weighted(hard, -log_p).f64();
            for k in 0..components {
                // One component has all the responsibility, even for an impossible target.
                let r = if components == 1 { F::one() } else { (joint(k) - log_p).exp() };
                self.hard_mass[k] = weighted(hard, r);
            }
        }
        if target.z_loss != F::zero() {
            let squares: F = self.lse.iter().map(|&lse| lse * lse).sum();
            loss.objective += (target.z_loss * squares).f64() / components as f64;
        }
        self.mass.copy_from_slice(&self.hard_mass);
        loss
    }

    /// The mass below which the filter drops a row, with the share that this drops noted in `loss`.
    pub(super) fn least_mass(&self, target: &Target<'_, F>, loss: &mut TokenLoss) -> F {
        if target.filter == F::zero() {
            // Nothing is below this, not even the negative masses of a gradient from upstream.
            return F::neg_infinity();
        }
        let total: F = self.mass.iter().copied().sum();
        let least = target.filter * total;
        let dropped: F = self.mass.iter().copied().filter(|&mass| mass < least).sum();
        if dropped > F::zero() {
            loss.dropped = (dropped / total).f64();
        }
        least
    }
}

/// The log-sum-exp of one row of a tile of logits.
pub(super) struct TileLogSumExp<'a, F> {
    /// `[stride]`, of which `vocab` are logits
    pub(super) row: &'a mut [F],
    pub(super) vocab: usize,
    /// `[stride]`, minus infinity after `vocab`
    pub(super) bias: &'a [F],
    pub(super) softcap: Option<F>,
}

impl<F: Float> Kernel<F> for TileLogSumExp<'_, F> {
    type Output = F;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> F {
        add_bias_and_log_sum_exp::<false, F, V>(v, self.row, self.vocab, self.bias, self.softcap)
    }
}

/// The log-sum-exp of a row after bias and softcap, which `KEEP` leaves in the row.
#[inline(always)]
fn add_bias_and_log_sum_exp<const KEEP: bool, F: Float, V: Vector<F>>(
    v: V,
    row: &mut [F],
    vocab: usize,
    bias: &[F],
    softcap: Option<F>,
) -> F {
    row[vocab..].fill(F::zero());
    match softcap {
        None if KEEP => log_sum_exp::<{ bias::ADD }, F, V>(v, row, bias),
        None => log_sum_exp::<{ bias::ON_THE_WAY }, F, V>(v, row, bias),
        Some(cap) => {
            soft_cap(v, row, bias, cap);
            row[vocab..].fill(F::neg_infinity());
            log_sum_exp::<{ bias::ADDED }, F, V>(v, row, bias)
        }
    }
}

/// Where the gradients of one token go.
pub(super) struct RowGradients<'a, F> {
    /// What the token's objective is multiplied by.
    pub(super) scale: F,
    /// `[K]`
    pub(super) log_priors: &'a mut [F],
    /// `[stride]`, added to
    pub(super) bias: Option<&'a mut [F]>,
    /// `[K]`: whether the row of logits now holds a gradient that is not zero everywhere.
    pub(super) live: &'a mut [bool],
}

/// The results of one token.
#[derive(Clone, Copy, Default)]
pub(super) struct TokenLoss {
    pub(super) nll: f64,
    pub(super) objective: f64,
    pub(super) hit: bool,
    /// Share of the responsibility in rows that were filtered out.
    pub(super) dropped: f64,
}

/// The objective of one token, and its gradient in place of the logits.
pub(super) struct LossRows<'a, F> {
    pub(super) logits: Logits<'a, F>,
    pub(super) target: Target<'a, F>,
    pub(super) gradients: Option<RowGradients<'a, F>>,
    pub(super) scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LossRows<'_, F> {
    type Output = TokenLoss;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> TokenLoss {
        let LossRows { mut logits, target, gradients, scratch } = self;
        let components = logits.log_priors.len();
        logits.normalise(v, scratch);
        if target.soft.is_some() || target.hits {
            logits.mix(v, &scratch.lse, &mut scratch.log_probs);
        }

        let target_logit = |k: usize, y: usize| logits.rows[k * logits.stride + y];
        let mut loss = scratch.hard_loss(&target, logits.log_priors, target_logit);
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
                let (log_prior, lse) = (logits.log_priors[k], scratch.lse[k]);
                scratch.mass[k] += soft_mass(v, row, log_prior, lse, &scratch.log_probs, soft);
            }
        }
        let least_mass = scratch.least_mass(&target, &mut loss);
        if let Some(gradients) = gradients {
            logits.gradient(v, &target, least_mass, gradients, scratch);
        }
        loss
    }
}

/// The mixture's log-probabilities of one token, in `scratch.log_probs`.
pub(super) struct LogProbRows<'a, F> {
    pub(super) logits: Logits<'a, F>,
    pub(super) scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LogProbRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(mut self, v: V) {
        self.logits.normalise(v, self.scratch);
        self.logits.mix(v, &self.scratch.lse, &mut self.scratch.log_probs);
    }
}

impl<F: Float> Logits<'_, F> {
    /// Adds the bias, applies the softcap, and finds `lse_k` of every component.
    #[inline(always)]
    fn normalise<V: Vector<F>>(&mut self, v: V, scratch: &mut Scratch<F>) {
        for (k, row) in self.rows.chunks_exact_mut(self.stride).enumerate() {
            let lse = add_bias_and_log_sum_exp::<true, F, V>(v, row, self.vocab, self.bias, self.softcap);
            scratch.set_lse(k, lse);
        }
    }

    /// `log p(v)` of every word.
    #[inline(always)]
    fn mix<V: Vector<F>>(&self, v: V, lse: &[F], log_probs: &mut [F]) {
        let rows = V::registers(self.rows);
        let out = V::registers_mut(log_probs);
        let width = out.len();
        let terms = || self.log_priors.iter().zip(lse).enumerate();
        if let ([log_prior], [lse]) = (self.log_priors, lse) {
            let (log_prior, lse) = (v.splat(*log_prior), v.splat(*lse));
            for (out, &z) in out.iter_mut().zip(rows) {
                *out = v.add(v.sub(z, lse), log_prior);
            }
            return;
        }
        let minus_infinity = v.splat(F::neg_infinity());
        let zero = v.splat(F::zero());
        for (i, out) in out.iter_mut().enumerate() {
            let mut largest = minus_infinity;
            for (k, (&log_prior, &lse)) in terms() {
                let term = v.add(v.sub(rows[k * width + i], v.splat(lse)), v.splat(log_prior));
                largest = v.max(largest, term);
            }
            // A word that no component can produce: every term is exp(-inf - 0) = 0, not exp(-inf + inf).
            let reference = v.if_equal(largest, minus_infinity, zero, largest);
            let mut sum = zero;
            for (k, (&log_prior, &lse)) in terms() {
                let term = v.add(v.sub(rows[k * width + i], v.splat(lse)), v.splat(log_prior));
                sum = v.add(sum, exp(v, v.sub(term, reference)));
            }
            *out = v.add(reference, ln(v, sum));
        }
    }

    /// Writes the gradient over the logits.
    #[inline(always)]
    fn gradient<V: Vector<F>>(
        &mut self,
        v: V,
        target: &Target<'_, F>,
        least_mass: F,
        mut gradients: RowGradients<'_, F>,
        scratch: &Scratch<F>,
    ) {
        let scale = gradients.scale;
        let z_loss = target.z_loss / F::of(scratch.lse.len() as f64);
        for (k, row) in self.rows.chunks_exact_mut(self.stride).enumerate() {
            let mass = scratch.mass[k];
            gradients.log_priors[k] = weighted(scale, -mass);
            let softmax_scale = scale * (mass + F::of(2.0) * z_loss * scratch.lse[k]);
            let is_zero = scale == F::zero() || (softmax_scale == F::zero() && target.soft.is_none());
            gradients.live[k] = !(is_zero || mass < least_mass);
            if !gradients.live[k] {
                continue;
            }
            let target_logit = target.hard.map(|(y, _)| (y, row[y]));
            let terms = RowTerms {
                lse: scratch.lse[k],
                softmax_scale,
                scale,
                log_prior: self.log_priors[k],
                log_probs: &scratch.log_probs,
                soft: target.soft.unwrap_or_default(),
                softcap: self.softcap.unwrap_or_else(F::one),
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
                row[y] -= scale * scratch.hard_mass[k] * slope;
            }
            if let Some(bias) = gradients.bias.as_deref_mut() {
                for (sum, &g) in V::registers_mut(bias).iter_mut().zip(V::registers(row)) {
                    *sum = v.add(*sum, g);
                }
            }
        }
    }
}

/// What the gradient of one row is made of, beyond its logits.
struct RowTerms<'a, F> {
    lse: F,
    /// Factor of the softmax: `scale (R_k + 2 zeta lse_k / K)`.
    softmax_scale: F,
    scale: F,
    log_prior: F,
    log_probs: &'a [F],
    soft: &'a [F],
    softcap: F,
}

/// `z := softmax_scale exp(z - lse) - scale soft_v r(v)`, times the slope of the softcap.
#[inline(always)]
fn gradient_row<const SOFT: bool, const CAP: bool, F: Float, V: Vector<F>>(
    v: V,
    row: &mut [F],
    terms: &RowTerms<'_, F>,
) {
    let (lse, softmax_scale) = (v.splat(terms.lse), v.splat(terms.softmax_scale));
    let (log_prior, scale) = (v.splat(terms.log_prior), v.splat(-terms.scale));
    let inverse_cap = v.splat(F::one() / terms.softcap);
    let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
    let (log_probs, soft) = (V::registers(terms.log_probs), V::registers(terms.soft));
    for (i, z) in V::registers_mut(row).iter_mut().enumerate() {
        let log_p = v.sub(*z, lse);
        let mut g = v.mul(exp(v, log_p), softmax_scale);
        if SOFT {
            let r = exp(v, v.sub(v.add(log_p, log_prior), log_probs[i]));
            // Words without mass have no responsibility to share, even where both logarithms are infinite.
            let r = v.if_equal(soft[i], zero, zero, r);
            g = v.mul_add(v.mul(r, soft[i]), scale, g);
        }
        if CAP {
            // Padding is minus infinity, where the softmax is already zero.
            let t = v.mul(*z, inverse_cap);
            let slope = v.sub(one, v.mul(t, t));
            g = v.if_equal(g, zero, zero, v.mul(g, slope));
        }
        *z = g;
    }
}

/// `R = sum_v soft_v r(v)` of one row.
#[inline(always)]
fn soft_mass<F: Float, V: Vector<F>>(v: V, row: &[F], log_prior: F, lse: F, log_probs: &[F], soft: &[F]) -> F {
    let (log_prior, lse, zero) = (v.splat(log_prior), v.splat(lse), v.splat(F::zero()));
    let (log_probs, soft) = (V::registers(log_probs), V::registers(soft));
    let mut sum = zero;
    for (i, &z) in V::registers(row).iter().enumerate() {
        let r = exp(v, v.sub(v.add(v.sub(z, lse), log_prior), log_probs[i]));
        sum = v.add(sum, v.if_equal(soft[i], zero, zero, v.mul(r, soft[i])));
    }
    v.sum(sum)
}

/// `z := cap tanh((z + bias) / cap)`.
#[inline(always)]
fn soft_cap<F: Float, V: Vector<F>>(v: V, row: &mut [F], bias: &[F], cap: F) {
    let (cap, inverse) = (v.splat(cap), v.splat(F::one() / cap));
    for (z, &b) in V::registers_mut(row).iter_mut().zip(V::registers(bias)) {
        *z = v.mul(cap, tanh(v, v.mul(v.add(*z, b), inverse)));
    }
}

/// How [`log_sum_exp`] treats the bias.
mod bias {
    /// It is in the logits already.
    pub(super) const ADDED: u8 = 0;
    /// It is added to the logits in place.
    pub(super) const ADD: u8 = 1;
    /// It is added on the way, and the logits stay as they are: less to write where nobody reads them again.
    pub(super) const ON_THE_WAY: u8 = 2;
}

/// `log sum_v exp(z_v + bias_v)` of a row.
///
/// One pass over memory: block by block, the sum so far is rescaled whenever a block has a larger maximum. Minus infinity
/// for a row of minus infinities; NaN if the row has a NaN or plus infinity.
#[inline(always)]
fn log_sum_exp<const BIAS: u8, F: Float, V: Vector<F>>(v: V, row: &mut [F], bias: &[F]) -> F {
    /// Registers per block: small enough for the first-level cache.
    const BLOCK: usize = 64;
    /// Independent accumulators, which keep the processor busy while each waits for its last addition.
    const LANES: usize = 4;
    let mut largest = F::neg_infinity();
    let mut sum = F::zero();
    for (block, bias) in V::registers_mut(row).chunks_mut(BLOCK).zip(V::registers(bias).chunks(BLOCK)) {
        let (bias_groups, bias_rest) = bias.as_chunks::<LANES>();
        let mut maxima = [v.splat(F::neg_infinity()); LANES];
        let (groups, rest) = block.as_chunks_mut::<LANES>();
        for (group, bias) in groups.iter_mut().zip(bias_groups) {
            for lane in 0..LANES {
                maxima[lane] = v.max(maxima[lane], with_bias::<BIAS, F, V>(v, &mut group[lane], bias[lane]));
            }
        }
        for (z, &b) in rest.iter_mut().zip(bias_rest) {
            maxima[0] = v.max(maxima[0], with_bias::<BIAS, F, V>(v, z, b));
        }
        let block_largest = v.largest(v.max(v.max(maxima[0], maxima[1]), v.max(maxima[2], maxima[3])));
        if block_largest > largest {
            sum *= (largest - block_largest).exp();
            largest = block_largest;
        }
        // All minus infinity so far: exp(-inf - 0) is the zero that exp(-inf + inf) is not, and a NaN stays one.
        let reference = v.splat(finite_or_zero(largest));
        let mut sums = [v.splat(F::zero()); LANES];
        let (groups, rest) = block.as_chunks::<LANES>();
        for (group, bias) in groups.iter().zip(bias_groups) {
            for lane in 0..LANES {
                let logit = if BIAS == bias::ON_THE_WAY { v.add(group[lane], bias[lane]) } else { group[lane] };
                sums[lane] = v.add(sums[lane], exp(v, v.sub(logit, reference)));
            }
        }
        for (&z, &b) in rest.iter().zip(bias_rest) {
            let logit = if BIAS == bias::ON_THE_WAY { v.add(z, b) } else { z };
            sums[0] = v.add(sums[0], exp(v, v.sub(logit, reference)));
        }
        sum += v.sum(v.add(v.add(sums[0], sums[1]), v.add(sums[2], sums[3])));
    }
    finite_or_zero(largest) + sum.ln()
}

/// The logit with its bias, which is put in its place if it is to be.
#[inline(always)]
fn with_bias<const BIAS: u8, F: Float, V: Vector<F>>(v: V, z: &mut V::Reg, bias: V::Reg) -> V::Reg {
    if BIAS == bias::ADDED {
        return *z;
    }
    let logit = v.add(*z, bias);
    if BIAS == bias::ADD {
        *z = logit;
    }
    logit
}

fn finite_or_zero<F: Float>(x: F) -> F {
    if x == F::neg_infinity() {
        F::zero()
    } else {
        x
    }
}

/// `log sum_k exp x(k)` of a few numbers.
pub(super) fn log_sum_exp_scalar<F: Float>(n: usize, x: impl Fn(usize) -> F) -> F {
    if n == 1 {
        return x(0);
    }
    let largest = (0..n).map(&x).fold(F::neg_infinity(), num_traits::Float::max);
    let reference = finite_or_zero(largest);
    reference + (0..n).map(|k| (x(k) - reference).exp()).sum::<F>().ln()
}

/// `weight * x`, where weight zero takes away even an infinite or undefined `x`.
pub(super) fn weighted<F: Float>(weight: F, x: F) -> F {
    if weight == F::zero() {
        F::zero()
    } else {
        weight * x
    }
}

/// The position of the largest value; the first of equals; the first NaN if there is one.
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
