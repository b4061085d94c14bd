//! The row kernel between the products. It computes the loss of one position from its K rows of logits, and writes
//! their gradient over them. The equations are in `objective/components.rs`.

use super::mix::{IdMasses, PositionLogits, Scratch, Tempered};
use super::rank_sums::RankTerms;
use super::single_softmax::{single_gradient, single_sums, GradientFactors};
use crate::backend::cpu::objective::components::{PositionLoss, ScoreUpstream, SoftMasses, Target};
use crate::backend::cpu::vector::logit_map::LogitMap;
use crate::backend::cpu::vector::math::{exp, flushed, weighted};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::shard::ELSEWHERE;

/// The destinations and factors of the gradients of one position.
pub(super) struct RowGradients<'a, F> {
    /// The factor of the position's objective.
    pub(super) scale: F,
    /// The factor of contexts and bias in the logits.
    pub(super) logit_scale: F,
    /// `[K]`.
    pub(super) log_priors: &'a mut [F],
    /// `[stride]`: the sum to which the kernel adds.
    pub(super) bias: Option<&'a mut [F]>,
    /// `[K]`: whether the row of logits now holds a gradient that is not all zeros.
    pub(super) live: &'a mut [bool],
}

/// The kernel that computes the objective of one position, and replaces the logits by its gradient.
pub(super) struct LossRows<'a, F> {
    pub(super) logits: PositionLogits<'a, F>,
    pub(super) target: Target<'a, F>,
    /// The position's sums over all ids, if ranks share the vocabulary.
    pub(super) rank_terms: Option<RankTerms<'a, F>>,
    pub(super) gradients: Option<RowGradients<'a, F>>,
    pub(super) scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LossRows<'_, F> {
    type Output = PositionLoss;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> PositionLoss {
        let LossRows { mut logits, target, rank_terms, gradients, scratch } = self;
        scratch.components.set(logits.lse, logits.log_priors);
        scratch.candidates.clear();
        scratch.candidates.extend_from_slice(target.candidates);
        let masses = target.soft.map(|soft| logits.masses(v, soft, scratch));
        // One component needs no shares, unless there is a mass outside, which changes the masses of the candidates.
        let single = masses.filter(|_| logits.log_priors.len() == 1 && target.outside == F::zero());
        // If there are no gradients, the sums of the ranks suffice.
        let needs_shares = gradients.is_some() || rank_terms.is_none();
        if masses.is_some() && single.is_none() && needs_shares {
            logits.mix(v, masses, scratch);
        }
        if target.outside != F::zero() {
            // Only the other ids have soft masses.
            target.candidates.iter().for_each(|&(y, _)| scratch.share[y] = F::zero());
        }

        let own_logit = |k: usize, y: usize| logits.rows[k * logits.stride + y];
        let target_logit =
            |k: usize, y: usize| rank_terms.map_or_else(|| own_logit(k, y), |terms| terms.target_logits[k]);
        let mut loss = scratch.components.hard_loss(&target, target_logit);
        if let (true, Some((y, _))) = (target.terms.needs_correct, target.hard) {
            loss.is_correct = match rank_terms {
                Some(rank_terms) => rank_terms.is_correct(),
                None => logits.argmax_among(v, &[y], &scratch.components) == Some(y),
            };
        }
        let slope = |z| logits.logit_map.map_or(F::one(), |map| map.slope_at(z));
        let candidate_logit = |k: usize, j: usize| own_logit(k, target.candidates[j].0);
        scratch.components.add_candidates(&scratch.candidates, candidate_logit, slope);
        loss.objective += match (masses, rank_terms) {
            (None, _) => 0.0,
            (Some(_), Some(rank_terms)) => rank_terms.add_to(&mut scratch.components),
            (Some(masses), None) => logits.add_masses(v, masses, single.is_some(), scratch),
        };
        if let Some(gradients) = gradients {
            logits.gradient(v, &target, single, gradients, scratch);
        }
        loss
    }
}

impl<F: Float> PositionLogits<'_, F> {
    /// Computes the masses of all ids, and, if these depend on the whole distribution, its log-probabilities. If there
    /// is a mass outside, only the ids outside share it, and the candidates' masses get all of their own here.
    #[inline(always)]
    fn masses<'m, V: Vector<F>>(&self, v: V, soft: SoftMasses<'m, F>, scratch: &mut Scratch<F>) -> IdMasses<'m, F> {
        match soft {
            SoftMasses::Given(masses) => IdMasses::Given(masses),
            SoftMasses::Scores { upstream: ScoreUpstream { log_probs, entropy, outside, collision }, power } => {
                let (is_plain, zero) = (power == F::one(), F::zero());
                if !is_plain || outside != zero || collision != zero {
                    self.mix(v, None, scratch);
                }
                let tempered = Tempered::new(v, &scratch.log_probs, power);
                let constant = if is_plain {
                    entropy
                } else {
                    log_probs + weighted(entropy, tempered.entropy(v, &scratch.log_probs, self.vocab))
                };
                let (constant, slope) = (power * constant, power * entropy);
                let collision = (collision != zero).then(|| {
                    // The derivative of log sum_v Q(v)^2 by log Q(v) is twice the share of v.
                    let mass = -power * (collision + collision);
                    (mass, tempered.collision(v, &scratch.log_probs))
                });
                let mut others = None;
                if outside != zero {
                    for (id, mass) in &mut scratch.candidates {
                        let log_q = tempered.log_prob(scratch.log_probs[*id]);
                        *mass += weighted(log_q.exp(), weighted(slope, log_q) + constant);
                        if let Some((collision_mass, collision)) = collision {
                            *mass += collision_mass * collision.share_of_id(scratch.log_probs[*id]);
                        }
                    }
                    let candidates = scratch.candidates.iter().map(|&(id, _)| id);
                    let ids = tempered.outside(v, &mut scratch.log_probs, candidates);
                    others = (!ids.is_empty()).then_some((-power * outside, ids));
                }
                IdMasses::FromProbability { tempered, constant, slope, collision, outside: others }
            }
        }
    }

    /// Adds the masses of all ids to the components', and returns the objective of these masses. The ids have their
    /// shares, unless the component `is_single`.
    #[inline(always)]
    pub(super) fn add_masses<V: Vector<F>>(
        &self,
        v: V,
        masses: IdMasses<'_, F>,
        is_single: bool,
        scratch: &mut Scratch<F>,
    ) -> f64 {
        if is_single {
            let sums = single_sums(v, &self.rows[..self.stride], masses, &scratch.components);
            scratch.components.mass[0] += sums.mass;
            return sums.objective.f64();
        }
        for k in 0..self.log_priors.len() {
            let row = &self.rows[k * self.stride..][..self.stride];
            let terms = RowOperands::new(k, scratch);
            let mass = soft_mass(v, row, &terms);
            scratch.components.mass[k] += mass;
        }
        let mut objective = F::zero();
        if let IdMasses::Given(masses) = masses {
            for (&q, &log_p) in masses[..self.vocab].iter().zip(&scratch.log_probs) {
                objective += weighted(q, -log_p);
            }
        }
        objective.f64()
    }

    /// Writes the gradient over the logits. `single` are the masses of all ids if the only component needs no shares.
    #[inline(always)]
    fn gradient<V: Vector<F>>(
        &mut self,
        v: V,
        target: &Target<'_, F>,
        single: Option<IdMasses<'_, F>>,
        mut gradients: RowGradients<'_, F>,
        scratch: &Scratch<F>,
    ) {
        let (scale, logits_scale) = (gradients.scale, gradients.scale * gradients.logit_scale);
        let components = &scratch.components;
        for (k, row) in self.rows.chunks_exact_mut(self.stride).enumerate() {
            gradients.log_priors[k] = flushed(weighted(scale, -components.mass[k]));
            let lse = components.lse[k];
            let softmax_scale = logits_scale * components.softmax_mass(target, k);
            let hard = logits_scale * components.hard_mass[k];
            // Both parts must be zero: they may cancel in the sum over the row, yet not in any logit.
            let is_zero = scale == F::zero()
                || (target.soft.is_none()
                    && target.candidates.is_empty()
                    && flushed(softmax_scale) == F::zero()
                    && flushed(hard) == F::zero());
            gradients.live[k] = !is_zero;
            if is_zero {
                continue;
            }
            let target_logit = target.hard.filter(|&(y, _)| y != ELSEWHERE).map(|(y, _)| (y, row[y]));
            let terms = RowOperands {
                exp_scale: softmax_scale * (-lse.log_sum).exp(),
                scale: logits_scale,
                logit_map: self.logit_map,
                ..RowOperands::new(k, scratch)
            };
            match (single, target.soft.is_some(), self.logit_map.is_some()) {
                (Some(masses), ..) => {
                    let factors = GradientFactors { exp_scale: terms.exp_scale, scale: logits_scale };
                    single_gradient(v, row, masses, components, factors, self.logit_map)
                }
                (None, false, false) => gradient_row::<false, false, F, V>(v, row, &terms),
                (None, false, true) => gradient_row::<false, true, F, V>(v, row, &terms),
                (None, true, false) => gradient_row::<true, false, F, V>(v, row, &terms),
                (None, true, true) => gradient_row::<true, true, F, V>(v, row, &terms),
            }
            if let Some((y, z)) = target_logit {
                let slope = self.logit_map.map_or(F::one(), |map| map.slope_at(z));
                row[y] = flushed(row[y] - hard * slope);
            }
            let row_masses = components.candidate_masses.iter().skip(k).step_by(components.lse.len());
            for (&(y, _), &mass) in target.candidates.iter().zip(row_masses) {
                row[y] = flushed(row[y] - logits_scale * mass);
            }
            if let Some(bias) = gradients.bias.as_deref_mut() {
                for (sum, &g) in V::registers_mut(bias).iter_mut().zip(V::registers(row)) {
                    *sum = v.add(*sum, g);
                }
            }
        }
    }
}

/// The operands of the gradient of one row besides its logits.
struct RowOperands<'a, F> {
    /// The largest logit.
    largest: F,
    log_scale: F,
    reference: &'a [F],
    share: &'a [F],
    /// The factor of `exp(z - largest)`: `scale (R_k + 2 zeta lse_k / K)` over the sum of these exponentials.
    exp_scale: F,
    /// The factor of the soft masses.
    scale: F,
    logit_map: Option<LogitMap<F>>,
}

impl<'a, F: Float> RowOperands<'a, F> {
    /// Returns the operands of component `k`, for sums of masses: the gradient has other factors.
    #[inline(always)]
    fn new(k: usize, scratch: &'a Scratch<F>) -> Self {
        RowOperands {
            largest: scratch.components.lse[k].largest,
            log_scale: scratch.components.log_scale[k],
            reference: &scratch.reference,
            share: &scratch.share,
            exp_scale: F::zero(),
            scale: F::one(),
            logit_map: None,
        }
    }
}

/// Replaces a row of logits z by their gradient, `exp_scale exp(z - largest) - scale soft_v r(v)` times the slope of
/// the function, where `soft_v` is the soft mass of id v and `r(v)` the component's responsibility for it.
#[inline(always)]
fn gradient_row<const SOFT: bool, const MAPPED: bool, F: Float, V: Vector<F>>(
    v: V,
    row: &mut [F],
    terms: &RowOperands<'_, F>,
) {
    let (largest, exp_scale) = (v.splat(terms.largest), v.splat(terms.exp_scale));
    let (log_scale, scale) = (v.splat(terms.log_scale), v.splat(-terms.scale));
    let zero = v.splat(F::zero());
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
        if MAPPED {
            // The padding is minus infinity; its softmax is already zero.
            let slope = terms.logit_map.map_or(v.splat(F::one()), |map| map.slope(v, *z));
            g = v.if_equal(g, zero, zero, v.mul(g, slope));
        }
        if SOFT || MAPPED {
            g = v.if_less(v.max(g, v.sub(zero, g)), v.splat(F::LEAST_GRADIENT), zero, g);
        }
        *z = g;
    }
}

/// Computes the exponential of a mixture's term relative to the largest; it is zero where it is negligible.
#[inline(always)]
fn relative_term<F: Float, V: Vector<F>>(v: V, relative: V::Reg) -> V::Reg {
    let e = exp(v, relative);
    v.if_less(e, v.splat(F::LEAST_GRADIENT), v.splat(F::zero()), e)
}

/// Computes `sum_v soft_v r(v)` of one row.
#[inline(always)]
fn soft_mass<F: Float, V: Vector<F>>(v: V, row: &[F], terms: &RowOperands<'_, F>) -> F {
    let (largest, log_scale) = (v.splat(terms.largest), v.splat(terms.log_scale));
    let (reference, share) = (V::registers(terms.reference), V::registers(terms.share));
    let mut sum = v.splat(F::zero());
    for (i, &z) in V::registers(row).iter().enumerate() {
        let term = relative_term(v, v.sub(v.add(v.sub(z, largest), log_scale), reference[i]));
        sum = v.mul_add(term, share[i], sum);
    }
    v.sum(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::vector::math::LogSumExp;
    use crate::backend::cpu::vector::simd::Isa;
    use crate::backend::logit_function::LogitFunction;

    /// Computes the gradient of one position by the logits of its live rows, and then by its log-priors.
    fn gradient<F: Float>(
        isa: Isa,
        rows: &mut [F],
        log_priors: &[F],
        soft: Option<&[F]>,
        logit_map: Option<LogitMap<F>>,
    ) -> Vec<F> {
        let components = log_priors.len();
        let stride = rows.len() / components;
        let lse: Vec<_> = rows.chunks(stride).map(|row| LogSumExp::from_terms(row.iter().copied())).collect();
        let mut gradients = vec![F::zero(); components];
        let mut live = vec![false; components];
        let kernel = LossRows {
            logits: PositionLogits { rows, stride, vocab: stride, lse: &lse, log_priors, logit_map },
            rank_terms: None,
            target: Target {
                hard: Some((0, F::from_f64(0.9))),
                candidates: &[],
                outside: F::zero(),
                soft: soft.map(SoftMasses::Given),
                terms: Default::default(),
            },
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
        let logits = |k: usize| (0..stride).map(move |v| F::from_f64(-2.0 * ((v * 5 + k) % stride) as f64));
        let log_priors: Vec<F> = (0..12).map(|k| F::from_f64(-8.0 * f64::from(k))).collect();
        let soft = vec![F::from_f64(0.1 / 64.0); stride];
        for isa in Isa::available() {
            for soft in [None, Some(&soft[..])] {
                for function in [LogitFunction::Identity, LogitFunction::Softcap(200.0), LogitFunction::Sigsoftmax] {
                    let mut rows: Vec<F> = (0..log_priors.len()).flat_map(logits).collect();
                    let found = gradient(isa, &mut rows, &log_priors, soft, LogitMap::new(function));
                    let small = found.iter().filter(|g| **g != F::zero() && g.abs() < F::LEAST_GRADIENT).count();
                    assert_eq!(small, 0, "{} soft {} {function:?}", isa.kernels(), soft.is_some());
                    assert!(found.iter().any(|g| g.abs() > F::from_f64(0.1)), "{}", isa.kernels());
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
