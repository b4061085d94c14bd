//! The negatives of a sampled loss: token ids that stand for all other ids of the vocabulary in a training step, and
//! the noise distribution that they are drawn from.

use std::collections::HashSet;
use std::sync::Arc;

use rand::distr::Distribution;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::weighted::WeightedAliasIndex;
use rand_distr::Exp1;

use crate::error::{Error, Result};
use crate::tensors::checks::{check_frequencies, check_sizes, FREQUENCY_SUM};

/// The distribution that negatives are drawn from.
///
/// # Examples
///
/// ```
/// use mos_head::sampled::NoiseDistribution;
///
/// # fn main() -> mos_head::Result<()> {
/// let by_rank = NoiseDistribution::log_uniform(10_000)?;
/// let by_count = NoiseDistribution::unigram(&[90.0, 9.0, 1.0])?;
/// assert_eq!(by_count.probability(1), 0.09);
/// let negatives = by_rank.draw(256, 42)?;
/// assert_eq!(negatives.token_ids().len(), 256);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - Sampled softmax: Jean, Cho, Memisevic, Bengio: On Using Very Large Target Vocabulary for Neural Machine
///   Translation. ACL 2015, arXiv 1412.2007.
/// - Noise-contrastive estimation: Mnih, Teh: A Fast and Simple Algorithm for Training Neural Probabilistic Language
///   Models. ICML 2012, arXiv 1206.6426.
#[derive(Clone, Debug)]
pub struct NoiseDistribution(NoiseKind);

/// The largest number of ids that can be drawn at once.
const MOST_SAMPLES: usize = 1 << 24;

/// The kinds of noise distributions.
#[derive(Clone, Debug)]
enum NoiseKind {
    /// Zipf's law over ids in the order of falling frequency.
    LogUniform { vocab_size: usize },
    /// Probabilities that are given for each id.
    Unigram(Arc<Unigram>),
}

/// A distribution with a probability for each id.
#[derive(Debug)]
struct Unigram {
    probabilities: Vec<f64>,
    /// The number of ids with a positive probability.
    possible: usize,
    /// The table of the alias method, which draws an id in constant time.
    alias: WeightedAliasIndex<f64>,
}

impl NoiseDistribution {
    /// Makes the distribution `P(c) = log((c + 2) / (c + 1)) / log(vocab_size + 1)`, which is Zipf's law for ids in the
    /// order of falling frequency.
    ///
    /// # Errors
    ///
    /// If `vocab_size` is zero.
    pub fn log_uniform(vocab_size: usize) -> Result<Self> {
        check_sizes(&[("vocab_size", vocab_size)])?;
        Ok(NoiseDistribution(NoiseKind::LogUniform { vocab_size }))
    }

    /// Makes the distribution whose probabilities are in proportion to counts, one for each token id. Ids with a count
    /// of zero are never drawn, and must not be targets.
    ///
    /// # Errors
    ///
    /// If a count is negative or not finite, or all are zero.
    pub fn unigram(counts: &[f64]) -> Result<Self> {
        let total = check_frequencies("counts", counts)?;
        let probabilities: Vec<f64> = counts.iter().map(|count| count / total).collect();
        let alias = WeightedAliasIndex::new(probabilities.clone())
            .map_err(|_| Error::config("counts", FREQUENCY_SUM, total))?;
        let possible = probabilities.iter().filter(|probability| **probability > 0.0).count();
        Ok(NoiseDistribution(NoiseKind::Unigram(Arc::new(Unigram { probabilities, possible, alias }))))
    }

    /// The number of token ids.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            NoiseKind::LogUniform { vocab_size } => *vocab_size,
            NoiseKind::Unigram(unigram) => unigram.probabilities.len(),
        }
    }

    /// Returns the probability of a token id in one draw; it is zero outside the vocabulary.
    pub fn probability(&self, id: usize) -> f64 {
        match &self.0 {
            NoiseKind::LogUniform { vocab_size } if id >= *vocab_size => 0.0,
            NoiseKind::LogUniform { vocab_size } => (1.0 / (id as f64 + 1.0)).ln_1p() / (*vocab_size as f64).ln_1p(),
            NoiseKind::Unigram(unigram) => unigram.probabilities.get(id).copied().unwrap_or(0.0),
        }
    }

    /// Draws `samples` different ids, one after the other, each from the ids that were not drawn before. Use another
    /// seed for each step. The time is at most in proportion to the vocabulary, and less for few samples.
    ///
    /// # Errors
    ///
    /// If `samples` is zero or above 2^24, or there are not so many ids of positive probability.
    pub fn draw(&self, samples: usize, seed: u64) -> Result<Negatives> {
        check_sizes(&[("samples", samples)])?;
        if samples > self.possible().min(MOST_SAMPLES) {
            let possible = self.possible();
            let expected = if possible > MOST_SAMPLES {
                format!("at most {MOST_SAMPLES}")
            } else {
                format!("at most {possible}, the number of ids of positive probability")
            };
            return Err(Error::config("samples", expected, samples));
        }
        let mut rng = StdRng::seed_from_u64(seed);
        // The ids arrive in a Poisson process, each at the rate of its probability, and are drawn in the order of their
        // first arrivals.
        let (mut ids, mut found) = (Vec::with_capacity(samples), HashSet::with_capacity(samples));
        let (mut time, mut end) = (0.0, None);
        for _ in 0..self.vocab_size() {
            time += rng.sample::<f64, _>(Exp1);
            let id = self.draw_one(&mut rng);
            if !found.insert(id) {
                continue;
            }
            if ids.len() == samples {
                end = Some(time);
                break;
            }
            ids.push(id);
        }
        let end = end.unwrap_or_else(|| {
            // Only rare ids have not arrived. The process has no memory: their times from now on are exponential too.
            let late = (0..self.vocab_size()).filter(|id| self.probability(*id) > 0.0 && !found.contains(id));
            let arrivals = late.map(|id| (time + rng.sample::<f64, _>(Exp1) / self.probability(id), id));
            let mut arrivals: Vec<(f64, usize)> = arrivals.collect();
            let missing = samples - ids.len();
            let end = if missing == arrivals.len() {
                f64::INFINITY
            } else {
                arrivals.select_nth_unstable_by(missing, |a, b| a.0.total_cmp(&b.0)).1 .0
            };
            ids.extend(arrivals[..missing].iter().map(|arrival| arrival.1));
            end
        });
        ids.sort_unstable();
        let repeats = vec![1; ids.len()];
        Ok(Negatives { noise: self.clone(), ids, repeats, scheme: Scheme::WithoutReplacement { end } })
    }

    /// Draws `samples` ids independently, so that an id can be drawn several times. Use another seed for each step.
    ///
    /// # Errors
    ///
    /// If `samples` is zero or above 2^24.
    pub fn draw_with_replacement(&self, samples: usize, seed: u64) -> Result<Negatives> {
        check_sizes(&[("samples", samples)])?;
        if samples > MOST_SAMPLES {
            return Err(Error::config("samples", format!("at most {MOST_SAMPLES}"), samples));
        }
        let mut rng = StdRng::seed_from_u64(seed);
        let mut drawn: Vec<usize> = (0..samples).map(|_| self.draw_one(&mut rng)).collect();
        drawn.sort_unstable();
        let runs = drawn.chunk_by(|a, b| a == b).map(|run| (run[0], run.len()));
        let (ids, repeats) = runs.unzip();
        Ok(Negatives { noise: self.clone(), ids, repeats, scheme: Scheme::WithReplacement { samples } })
    }

    /// Draws one id.
    fn draw_one(&self, rng: &mut StdRng) -> usize {
        match &self.0 {
            NoiseKind::LogUniform { vocab_size } => {
                ((rng.random::<f64>() * (*vocab_size as f64).ln_1p()).exp_m1() as usize).min(vocab_size - 1)
            }
            NoiseKind::Unigram(unigram) => unigram.alias.sample(rng),
        }
    }

    /// Returns the number of ids of positive probability.
    fn possible(&self) -> usize {
        match &self.0 {
            NoiseKind::LogUniform { vocab_size } => *vocab_size,
            NoiseKind::Unigram(unigram) => unigram.possible,
        }
    }
}

/// Token ids that were drawn from a [`NoiseDistribution`]: the argument of
/// [`LossOptions::with_sampled_softmax`](crate::LossOptions::with_sampled_softmax) and
/// [`LossOptions::with_nce`](crate::LossOptions::with_nce).
///
/// # Examples
///
/// ```
/// use mos_head::sampled::NoiseDistribution;
///
/// # fn main() -> mos_head::Result<()> {
/// let negatives = NoiseDistribution::unigram(&[2.0, 1.0, 1.0])?.draw_with_replacement(8, 42)?;
/// assert_eq!(negatives.expected_count(0), 4.0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Negatives {
    noise: NoiseDistribution,
    ids: Vec<usize>,
    repeats: Vec<usize>,
    scheme: Scheme,
}

/// How negatives were drawn, as far as their expected counts depend on it.
#[derive(Clone, Copy, Debug)]
enum Scheme {
    WithReplacement {
        samples: usize,
    },
    WithoutReplacement {
        /// The time of the first arrival that was not drawn.
        end: f64,
    },
}

impl Negatives {
    /// The ids in ascending order, each once.
    pub fn token_ids(&self) -> &[usize] {
        &self.ids
    }

    /// The number of times that each of [`Negatives::token_ids`] was drawn.
    pub fn repeats(&self) -> &[usize] {
        &self.repeats
    }

    /// The distribution that the ids were drawn from.
    pub fn noise(&self) -> &NoiseDistribution {
        &self.noise
    }

    /// Returns how often an id is expected among the draws: `S P(c)` times for S draws with replacement. Without
    /// replacement it is `1 - exp(-t P(c))`, an estimate of the probability that the id is among the draws; t is such
    /// that a sum over the draws, each term divided by this estimate, is unbiased. (TensorFlow has `1 - (1 - P(c))^t`,
    /// where t is the number of tries.)
    pub fn expected_count(&self, id: usize) -> f64 {
        let probability = self.noise.probability(id);
        match self.scheme {
            Scheme::WithReplacement { samples } => samples as f64 * probability,
            // Infinity times zero is NaN.
            Scheme::WithoutReplacement { .. } if probability == 0.0 => 0.0,
            Scheme::WithoutReplacement { end } => -(-end * probability).exp_m1(),
        }
    }
}
