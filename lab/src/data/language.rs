//! A built-in language whose next-token distribution is known: a random mixture of softmaxes given the current token.
//!
//! P(next | current) = sum_k pi_k(current) softmax(E c_k(current)) with 4 components, d = 8 and a vocabulary of 512.
//! The logarithm of a mixture is not a low-rank matrix, so one softmax over few dimensions cannot reach its entropy.

use super::{dataset::Data, text::Corpus};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// The language's name in reports.
pub const NAME: &str = "the built-in language";

/// Numbers of targets of the texts.
const TRAIN_TOKENS: usize = 256_000;
const VALID_TOKENS: usize = 50_000;

const VOCAB: usize = 512;
const COMPONENTS: usize = 4;
const CONTEXT: usize = 8;
/// Standard deviations of the contexts' elements (the embedding's are 1) and of the priors' logits.
const CONTEXT_SCALE: f64 = 2.5;
const PRIOR_SCALE: f64 = 3.0;
const LANGUAGE_SEED: u64 = 1711;

/// A teacher is the language, as the distributions of the next token.
pub struct Teacher {
    /// Row `current`: the distribution of the next token.
    probabilities: Vec<f64>,
}

/// The same language in every run.
impl Default for Teacher {
    fn default() -> Self {
        let mut rng = StdRng::seed_from_u64(LANGUAGE_SEED);
        let mut normals = |count: usize, scale: f64| -> Vec<f64> {
            let mut normal = || {
                let (u, v): (f64, f64) = (rng.random(), rng.random());
                (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
            };
            (0..count).map(|_| scale * normal()).collect()
        };
        let embedding = normals(VOCAB * CONTEXT, 1.0);
        let mut probabilities = vec![0.0; VOCAB * VOCAB];
        for row in probabilities.chunks_mut(VOCAB) {
            for prior in softmax(normals(COMPONENTS, PRIOR_SCALE)) {
                let context = normals(CONTEXT, CONTEXT_SCALE);
                let logits = embedding.chunks(CONTEXT).map(|next| dot(next, &context)).collect();
                for (p, component) in row.iter_mut().zip(softmax(logits)) {
                    *p += prior * component;
                }
            }
        }
        Self { probabilities }
    }
}

impl Teacher {
    /// Returns the distribution of the token after `current`.
    #[cfg(test)]
    fn row(&self, current: u32) -> &[f64] {
        &self.probabilities[current as usize * VOCAB..][..VOCAB]
    }

    /// Returns the corpus of a program that is given no data.
    pub fn built_in(&self, seed: u64) -> Corpus {
        self.corpus(TRAIN_TOKENS, VALID_TOKENS, seed)
    }

    /// Returns texts of this language with the given numbers of targets, and the exact entropy of the second.
    pub fn corpus(&self, train: usize, valid: usize, seed: u64) -> Corpus {
        let mut rng = StdRng::seed_from_u64(seed);
        let train = self.text(train, &mut rng);
        let valid = self.text(valid, &mut rng);
        let entropy = Some(self.entropy(&valid[..valid.len() - 1]));
        let words: Vec<String> = (0..VOCAB).map(word).collect();
        let data = Data::new(NAME.into(), &words, train, valid);
        Corpus { data, words, test: None, entropy }
    }

    /// Returns a start token and `targets` more.
    fn text(&self, targets: usize, rng: &mut StdRng) -> Vec<u32> {
        let mut cumulative = self.probabilities.clone();
        for row in cumulative.chunks_mut(VOCAB) {
            let mut sum = 0.0;
            row.iter_mut().for_each(|p| {
                sum += *p;
                *p = sum;
            });
        }
        let mut text = vec![0];
        for i in 0..targets {
            let row = &cumulative[text[i] as usize * VOCAB..][..VOCAB];
            let u = rng.random::<f64>() * row[VOCAB - 1];
            text.push(row.partition_point(|&p| p <= u).min(VOCAB - 1) as u32);
        }
        text
    }

    /// Returns the mean entropy of the next token after each of `contexts`, in nats.
    fn entropy(&self, contexts: &[u32]) -> f64 {
        let rows: Vec<f64> =
            self.probabilities.chunks(VOCAB).map(|row| -row.iter().map(|p| p * p.ln()).sum::<f64>()).collect();
        contexts.iter().map(|&id| rows[id as usize]).sum::<f64>() / contexts.len() as f64
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn softmax(logits: Vec<f64>) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.into_iter().map(|z| (z - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// Returns a pronounceable word of two syllables for each token id.
fn word(id: usize) -> String {
    let syllable =
        |i: usize| [["b", "d", "k", "l", "m", "n", "s", "t"][i / 4 % 8], ["a", "e", "i", "o"][i % 4]].concat();
    syllable(id / 32) + &syllable(id % 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_distributions() {
        let teacher = Teacher::default();
        for current in 0..VOCAB as u32 {
            let row = teacher.row(current);
            assert!(row.iter().all(|&p| p > 0.0));
            assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }

    /// Gaussian elimination with full pivoting, stopped where the pivot falls below a thousandth of the first.
    #[test]
    fn log_probabilities_have_a_rank_far_above_the_context_size() {
        let mut matrix: Vec<Vec<f64>> =
            Teacher::default().probabilities.chunks(VOCAB).map(|row| row.iter().map(|p| p.ln()).collect()).collect();
        let mut rank = 0;
        let mut first = 0.0;
        while rank < VOCAB {
            let entries = (rank..VOCAB).flat_map(|i| (rank..VOCAB).map(move |j| (i, j)));
            let size = |&(i, j): &(usize, usize)| f64::abs(matrix[i][j]);
            let (i, j) = entries.max_by(|a, b| size(a).total_cmp(&size(b))).expect("not empty");
            let pivot = size(&(i, j));
            first = f64::max(first, pivot);
            if pivot < 1e-3 * first {
                break;
            }
            matrix.swap(rank, i);
            matrix.iter_mut().for_each(|row| row.swap(rank, j));
            let (done, rest) = matrix.split_at_mut(rank + 1);
            for row in rest {
                let factor = row[rank] / done[rank][rank];
                row.iter_mut().zip(&done[rank]).skip(rank).for_each(|(x, p)| *x -= factor * p);
            }
            rank += 1;
        }
        assert!(rank > 10 * CONTEXT, "rank {rank}");
    }

    #[test]
    fn a_text_has_the_likelihood_of_its_entropy() {
        let teacher = Teacher::default();
        let corpus = teacher.corpus(10, 200_000, 3);
        let nll = corpus.data.valid.windows(2).map(|pair| -teacher.row(pair[0])[pair[1] as usize].ln()).sum::<f64>()
            / 200_000.0;
        let entropy = corpus.entropy.expect("known");
        assert!((nll - entropy).abs() < 0.02, "{nll} against {entropy}");
    }

    #[test]
    fn words_differ() {
        let words: std::collections::HashSet<String> = (0..VOCAB).map(word).collect();
        assert_eq!(words.len(), VOCAB);
    }
}
