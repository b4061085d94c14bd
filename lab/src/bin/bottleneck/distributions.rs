//! This file measures what the distributions of many contexts have in common, in one pass over them.

/// The mean Kullback-Leibler divergence between the distributions of two different contexts, KL(P_i || P_j), over all
/// ordered pairs (Yang et al., 2018, appendix C.1).
///
/// The sum over all pairs needs no pairs: `sum_ij sum_v p_iv (log p_iv - log p_jv)` is
/// `n sum_iv p_iv log p_iv - sum_v (sum_i p_iv) (sum_j log p_jv)`.
pub(crate) struct PairwiseDivergence {
    probabilities: Vec<f64>,
    log_probabilities: Vec<f64>,
    negative_entropy: f64,
    count: f64,
}

impl PairwiseDivergence {
    pub(crate) fn new(vocab: usize) -> Self {
        Self { probabilities: vec![0.0; vocab], log_probabilities: vec![0.0; vocab], negative_entropy: 0.0, count: 0.0 }
    }

    pub(crate) fn push(&mut self, log_probabilities: &[f64]) {
        for (v, &log_p) in log_probabilities.iter().enumerate() {
            let p = log_p.exp();
            self.probabilities[v] += p;
            self.log_probabilities[v] += log_p;
            self.negative_entropy += p * log_p;
        }
        self.count += 1.0;
    }

    /// Returns the mean divergence, in nats; `None` for fewer than two contexts.
    pub(crate) fn mean(&self) -> Option<f64> {
        let crossed: f64 = self.probabilities.iter().zip(&self.log_probabilities).map(|(p, log_p)| p * log_p).sum();
        let sum = self.count * self.negative_entropy - crossed;
        (self.count > 1.0).then(|| sum / (self.count * (self.count - 1.0)))
    }
}

/// The effective number of components: the perplexity of a distribution over them.
pub(crate) struct Components {
    /// Sums over the contexts.
    entropy: f64,
    mass: Vec<f64>,
    count: f64,
}

impl Components {
    pub(crate) fn new(components: usize) -> Self {
        Self { entropy: 0.0, mass: vec![0.0; components], count: 0.0 }
    }

    pub(crate) fn push(&mut self, log_weights: &[f64]) {
        for (mass, &log_weight) in self.mass.iter_mut().zip(log_weights) {
            let weight = log_weight.exp();
            *mass += weight;
            self.entropy -= if weight > 0.0 { weight * log_weight } else { 0.0 };
        }
        self.count += 1.0;
    }

    /// Returns the effective number in one context, which is the perplexity of the mean entropy.
    pub(crate) fn in_a_context(&self) -> f64 {
        (self.entropy / self.count).exp()
    }

    /// Returns the effective number in all contexts together, which is the perplexity of the mean distribution.
    pub(crate) fn in_all(&self) -> f64 {
        let shares = self.mass.iter().map(|mass| mass / self.count).filter(|&share| share > 0.0);
        (-shares.map(|share| share * share.ln()).sum::<f64>()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, Rng, SeedableRng};

    fn random(rng: &mut StdRng, count: usize) -> Vec<f64> {
        let weights: Vec<f64> = (0..count).map(|_| rng.random_range(0.01..1.0)).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| (weight / sum).ln()).collect()
    }

    #[test]
    fn the_divergence_is_the_mean_over_all_pairs() {
        let mut rng = StdRng::seed_from_u64(1);
        let rows: Vec<Vec<f64>> = (0..9).map(|_| random(&mut rng, 13)).collect();
        let mut divergence = PairwiseDivergence::new(13);
        rows.iter().for_each(|row| divergence.push(row));
        let pair = |p: &[f64], q: &[f64]| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        let sum: f64 = rows.iter().map(|p| rows.iter().map(|q| pair(p, q)).sum::<f64>()).sum();
        let mean = divergence.mean().expect("many contexts");
        assert!((mean - sum / 72.0).abs() < 1e-12 && mean > 0.1, "{mean} {sum}");
    }

    #[test]
    fn one_context_has_no_divergence() {
        let mut divergence = PairwiseDivergence::new(2);
        divergence.push(&[-0.7, -0.7]);
        assert_eq!(divergence.mean(), None);
    }

    #[test]
    fn components_in_turn_are_one_in_a_context_and_all_together() {
        let mut components = Components::new(3);
        for k in 0..3 {
            let log_weights: Vec<f64> = (0..3).map(|i| if i == k { 0.0 } else { f64::NEG_INFINITY }).collect();
            components.push(&log_weights);
        }
        assert!((components.in_a_context() - 1.0).abs() < 1e-12);
        assert!((components.in_all() - 3.0).abs() < 1e-12);
    }
}
