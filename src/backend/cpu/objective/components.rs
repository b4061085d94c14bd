//! The objective of one position, from the log-sum-exps of its components and the logits of its targets. One pass and
//! two passes share it.
//!
//! With the logits `z` of component k (after bias and logit function), its prior `pi` and the target `y`:
//!
//! ```text
//! lse_k     = log sum_v exp z_kv                                       row log-sum-exp
//! log p_k(v) = z_kv - lse_k                                            the component
//! log p(v)  = logsumexp_k (log pi_k + log p_k(v))                      the mixture
//! r_k(v)    = exp(log pi_k + log p_k(v) - log p(v))                    responsibility of k for v
//! ```
//!
//! The objective is `sum_v q_v (-log p(v)) + zeta mean_k lse_k^2` with the masses `q_v = hard [v = y] + soft_v`. With
//! `R_k = sum_v q_v r_k(v)`, its gradient is:
//!
//! ```text
//! d/d z_kv      = (R_k + 2 zeta lse_k / K) softmax_k(v) - q_v r_k(v)
//! d/d log pi_k  = -R_k
//! ```

use crate::backend::cpu::vector::math::{not_negative, weighted, LogSumExp};
use crate::backend::cpu::vector::simd::Float;
use crate::backend::objective::LossTerms;

/// The masses `q` of one position, and the terms of its objective.
#[derive(Clone, Copy, Default)]
pub(crate) struct Target<'a, F> {
    /// The target id and its mass in `q`.
    pub(crate) hard: Option<(usize, F)>,
    /// The candidates and their masses in `q`.
    pub(crate) candidates: &'a [(usize, F)],
    /// The mass outside the candidates in `q`, which those ids share in proportion to their probabilities. If there are
    /// soft masses, it is a part of these.
    pub(crate) outside: F,
    /// The masses of all ids, if `q` has more than the masses above.
    pub(crate) soft: Option<SoftMasses<'a, F>>,
    pub(crate) terms: LossTerms,
}

/// The masses of all ids. Any scalar function F of a position's distribution has the gradient of an objective whose
/// masses are `q_v = -dF / d log p(v)`.
#[derive(Clone, Copy)]
pub(crate) enum SoftMasses<'a, F> {
    /// One number for each id, padded with zeros: label smoothing, or minus the upstream gradient of the
    /// log-probabilities.
    Given(&'a [F]),
    /// With the tempered distribution `log Q(v) = power log p(v) - log sum_u p(u)^power`: the masses of a sum of
    /// `log Q(y)`, of `H(Q)`, of `log Q(outside)` and of `log sum_v Q(v)^2`, besides the candidates' own.
    Scores { upstream: ScoreUpstream<F>, power: F },
}

/// The upstream gradients of a position's scores.
#[derive(Clone, Copy)]
pub(crate) struct ScoreUpstream<F> {
    /// The sum of the derivatives by all `log Q(v)`, but for those of the entropy.
    pub(crate) log_probs: F,
    pub(crate) entropy: F,
    pub(crate) outside: F,
    pub(crate) collision: F,
}

impl<F: Float> ScoreUpstream<F> {
    /// Returns whether no score but the log-probabilities has an upstream gradient.
    pub(crate) fn is_plain(&self) -> bool {
        [self.entropy, self.outside, self.collision].iter().all(|&upstream| upstream == F::zero())
    }
}

/// The results of one position.
#[derive(Clone, Copy, Default)]
pub(crate) struct PositionLoss {
    pub(crate) nll: f64,
    pub(crate) objective: f64,
    /// Whether the target is the most probable id; false if the caller does not ask for it.
    pub(crate) is_correct: bool,
}

/// The K components of one position, in buffers that a thread reuses for every position.
pub(crate) struct Components<F> {
    /// `lse_k`.
    pub(crate) lse: Vec<LogSumExp<F>>,
    /// `log pi_k - log sum_v exp(z_kv - max_u z_ku)`, which is added to `z_kv - max_u z_ku`.
    pub(crate) log_scale: Vec<F>,
    /// The target's part of `R_k`.
    pub(crate) hard_mass: Vec<F>,
    /// `R_k`.
    pub(crate) mass: Vec<F>,
    /// `[candidates, K]`: each candidate's part of `R_k`, times the slope of the logit function at its logit.
    pub(crate) candidate_masses: Vec<F>,
}

impl<F: Float> Components<F> {
    /// Allocates the buffers of so many components.
    pub(crate) fn new(components: usize) -> Self {
        let zeros = || vec![F::zero(); components];
        let lse = vec![LogSumExp::default(); components];
        Components { lse, log_scale: zeros(), hard_mass: zeros(), mass: zeros(), candidate_masses: Vec::new() }
    }

    /// Starts a position with these log-sum-exps and log-priors.
    pub(crate) fn set(&mut self, lse: &[LogSumExp<F>], log_priors: &[F]) {
        self.lse.copy_from_slice(lse);
        for ((log_scale, lse), &log_prior) in self.log_scale.iter_mut().zip(lse).zip(log_priors) {
            *log_scale = log_prior - lse.log_sum;
        }
    }

    /// Returns the largest logit and the `log_scale` of each component.
    #[inline(always)]
    pub(crate) fn scales(&self) -> impl ExactSizeIterator<Item = (F, F)> + Clone + '_ {
        self.lse.iter().zip(&self.log_scale).map(|(lse, &log_scale)| (lse.largest, log_scale))
    }

    /// Computes `log p` of an id, in two parts, from its logit of each component.
    pub(crate) fn log_prob(&self, logit: impl Fn(usize) -> F) -> LogSumExp<F> {
        LogSumExp::from_terms((0..self.lse.len()).map(|k| logit(k) - self.lse[k].largest + self.log_scale[k]))
    }

    /// Adds the candidates' masses. `candidate_logit` returns the logit of a component and the j-th candidate, `slope`
    /// the slope of the logit function at a logit.
    pub(crate) fn add_candidates(
        &mut self,
        candidates: &[(usize, F)],
        candidate_logit: impl Fn(usize, usize) -> F,
        slope: impl Fn(F) -> F,
    ) {
        self.candidate_masses.clear();
        for (j, &(_, mass)) in candidates.iter().enumerate() {
            let log_p = self.log_prob(|k| candidate_logit(k, j));
            for k in 0..self.lse.len() {
                let z = candidate_logit(k, j);
                let joint = z - self.lse[k].largest + self.log_scale[k];
                let r = if self.lse.len() == 1 { F::one() } else { (joint - log_p.largest - log_p.log_sum).exp() };
                let row_mass = weighted(mass, r);
                self.mass[k] += row_mass;
                self.candidate_masses.push(row_mass * slope(z));
            }
        }
    }

    /// Computes the part of the loss that depends only on the target's logits and the log-sum-exps, and sets the masses
    /// to the target's. `target_logit` returns the logit of a component and an id.
    pub(crate) fn hard_loss(
        &mut self,
        target: &Target<'_, F>,
        target_logit: impl Fn(usize, usize) -> F,
    ) -> PositionLoss {
        let components = self.lse.len();
        let mut loss = PositionLoss::default();
        self.hard_mass.fill(F::zero());
        if let Some((y, hard)) = target.hard {
            let joint = |k: usize| target_logit(k, y) - self.lse[k].largest + self.log_scale[k];
            let log_p = LogSumExp::from_terms((0..components).map(joint));
            let nll = not_negative(-log_p.value());
            loss.nll = nll.f64();
            loss.objective = weighted(hard, nll).f64();
            for k in 0..components {
                // A single component has responsibility one, even for an impossible target.
                let r = if components == 1 { F::one() } else { (joint(k) - log_p.largest - log_p.log_sum).exp() };
                self.hard_mass[k] = weighted(hard, r);
            }
        }
        let z_loss = F::from_f64(target.terms.z_loss);
        if z_loss != F::zero() {
            let squares: F = self.lse.iter().map(|lse| lse.value() * lse.value()).sum();
            loss.objective += (z_loss * squares).f64() / components as f64;
        }
        self.mass.copy_from_slice(&self.hard_mass);
        loss
    }

    /// Computes `R_k + 2 zeta lse_k / K`, the factor of component k's softmax in the gradient of its logits.
    #[inline(always)]
    pub(crate) fn softmax_mass(&self, target: &Target<'_, F>, k: usize) -> F {
        let z_loss = F::from_f64(target.terms.z_loss) / F::from_f64(self.lse.len() as f64);
        self.mass[k] + F::from_f64(2.0) * z_loss * self.lse[k].value()
    }

    /// Computes [`Components::softmax_mass`] in f64; if there is no z-loss, it is finite even if the log-sum-exp is
    /// not.
    pub(crate) fn precise_softmax_mass(&self, target: &Target<'_, F>, k: usize) -> f64 {
        let z_loss = 2.0 * F::from_f64(target.terms.z_loss).f64() / self.lse.len() as f64;
        self.mass[k].f64() + weighted(z_loss, self.lse[k].value().f64())
    }
}
