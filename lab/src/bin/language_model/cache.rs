//! The continuous cache: a distribution over recent ids, each weighted by how similar its hidden state is to the
//! current one (Grave, Joulin, Usunier: Improving Neural Language Models with a Continuous Cache. ICLR 2017).

use candle_core::Tensor;
use lab::Result;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CacheSettings {
    /// The number of positions that are kept.
    pub(crate) window: usize,
    /// The factor of the inner products of hidden states.
    pub(crate) theta: f64,
    /// The weight of the cache in the mixture with the model, below 1.
    pub(crate) lambda: f64,
}

pub(crate) struct Cache {
    settings: CacheSettings,
    /// The last hidden states, [positions, hidden], and the ids that followed them.
    states: Option<Tensor>,
    ids: Vec<u32>,
}

impl Cache {
    pub(crate) fn new(settings: CacheSettings) -> Self {
        Self { settings, states: None, ids: vec![] }
    }

    /// Returns the negative log-likelihoods of the ids that follow these hidden states, [positions, hidden], in the
    /// mixture of the model and the cache, from those of the model. Every position sees those before it, the ones of
    /// this call included.
    pub(crate) fn mix(&mut self, hidden: &Tensor, targets: &[u32], nll: &[f64]) -> Result<Vec<f64>> {
        let CacheSettings { window, theta, lambda } = self.settings;
        let before = self.ids.len();
        let states = match &self.states {
            Some(states) => Tensor::cat(&[states, hidden], 0)?,
            None => hidden.clone(),
        };
        self.ids.extend(targets);
        let scores = (hidden.matmul(&states.t()?)? * theta)?.to_vec2::<f32>()?;
        let mixed = scores.iter().zip(targets).zip(nll).enumerate().map(|(i, ((scores, &target), &nll))| {
            let seen = (before + i).saturating_sub(window)..before + i;
            let seen = scores[seen.clone()].iter().zip(&self.ids[seen]);
            let most = seen.clone().map(|(score, _)| *score).fold(f32::NEG_INFINITY, f32::max);
            let (mut all, mut right) = (0.0, 0.0);
            for (score, &id) in seen {
                let weight = f64::from(score - most).exp();
                all += weight;
                right += if id == target { weight } else { 0.0 };
            }
            // An empty cache has no distribution.
            if all == 0.0 {
                return nll;
            }
            -log_sum((1.0 - lambda).ln() - nll, lambda.ln() + f64::ln(right / all))
        });
        let mixed = mixed.collect();
        let kept = self.ids.len().min(window);
        self.ids.drain(..self.ids.len() - kept);
        self.states = match kept {
            0 => None,
            kept => Some(states.narrow(0, states.dim(0)? - kept, kept)?.contiguous()?),
        };
        Ok(mixed)
    }
}

/// Computes `ln(exp(a) + exp(b))`.
fn log_sum(a: f64, b: f64) -> f64 {
    let (high, low) = (a.max(b), a.min(b));
    if high == f64::NEG_INFINITY {
        return high;
    }
    high + (low - high).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Returns hidden states of width 2 that repeat with period 3.
    fn hidden(positions: usize) -> Tensor {
        let values: Vec<f32> = (0..positions).flat_map(|i| [[3.0, 0.0], [0.0, 3.0], [-3.0, 0.0]][i % 3]).collect();
        Tensor::from_vec(values, (positions, 2), &Device::Cpu).unwrap()
    }

    fn settings(lambda: f64) -> CacheSettings {
        CacheSettings { window: 100, theta: 1.0, lambda }
    }

    #[test]
    fn a_weight_of_zero_changes_nothing() {
        let nll: Vec<f64> = (0..9).map(|i| 0.1 + f64::from(i)).collect();
        let ids: Vec<u32> = (0..9).map(|i| i % 3).collect();
        assert_eq!(Cache::new(settings(0.0)).mix(&hidden(9), &ids, &nll).unwrap(), nll);
    }

    #[test]
    fn what_followed_a_similar_state_becomes_probable() {
        let ids: Vec<u32> = (0..9).map(|i| i % 3).collect();
        let nll = vec![(1000f64).ln(); 9];
        let mixed = Cache::new(settings(0.5)).mix(&hidden(9), &ids, &nll).unwrap();
        assert_eq!(mixed[0], nll[0], "an empty cache");
        // In the first period nothing right is in the cache: half of the model's probability is left.
        assert!((mixed[2] - 2000f64.ln()).abs() < 1e-9);
        // Then half of the mass is on the right id, and the model's.
        assert!(mixed[3..].iter().all(|nll| (nll + 0.5f64.ln()).abs() < 0.01), "{mixed:?}");
        let other = Cache::new(settings(0.5)).mix(&hidden(9), &[0, 1, 2, 1, 1, 1, 1, 1, 1], &nll).unwrap();
        assert!(other[3] > 5.0, "{other:?}");
    }

    #[test]
    fn calls_of_any_length_give_the_same() {
        let (ids, nll) = ((0..20).map(|i| i * i % 5).collect::<Vec<u32>>(), vec![3.0; 20]);
        for window in [0, 1, 4, 100] {
            let settings = CacheSettings { window, ..settings(0.3) };
            let whole = Cache::new(settings).mix(&hidden(20), &ids, &nll).unwrap();
            let mut cache = Cache::new(settings);
            let mut parts = vec![];
            for (at, count) in [(0, 1), (1, 6), (7, 2), (9, 11)] {
                let states = hidden(20).narrow(0, at, count).unwrap();
                parts.extend(cache.mix(&states, &ids[at..at + count], &nll[at..at + count]).unwrap());
            }
            for (a, b) in whole.iter().zip(&parts) {
                assert!((a - b).abs() < 1e-5, "window {window}: {whole:?} {parts:?}");
            }
        }
    }

    #[test]
    fn the_mixture_is_a_distribution() {
        // Over all ids that could come next, the probabilities of the mixture sum to one.
        let ids = [0u32, 1, 2, 0, 1];
        let total: f64 = (0..4)
            .map(|next| {
                let ids = [&ids[..], &[next]].concat();
                let nll = vec![4f64.ln(); 6]; // a uniform model of four ids
                (-Cache::new(settings(0.3)).mix(&hidden(6), &ids, &nll).unwrap()[5]).exp()
            })
            .sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
    }
}
