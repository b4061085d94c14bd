//! A grammar whose expansions have probabilities: it writes texts, and knows the probability of every text.

use rand::Rng;

/// A phrase can be said in any of several ways.
#[derive(Clone, Debug)]
pub(crate) enum Phrase {
    /// Words, separated by spaces; none if empty.
    Words(&'static str),
    /// All of them, one after the other.
    All(Vec<Phrase>),
    /// One of them, with a probability in proportion to its weight.
    One(Vec<(f64, Phrase)>),
}

impl Phrase {
    /// Returns a phrase of one of several words, all equally probable, separated by `|`.
    pub(crate) fn any(words: &'static str) -> Self {
        Self::One(words.split('|').map(|words| (1.0, Self::Words(words))).collect())
    }

    /// Returns a random text.
    pub(crate) fn write(&self, rng: &mut impl Rng) -> String {
        let mut words = vec![];
        self.append(&mut words, rng);
        words.join(" ")
    }

    fn append(&self, text: &mut Vec<&'static str>, rng: &mut impl Rng) {
        match self {
            Self::Words(words) => text.extend(words.split_whitespace()),
            Self::All(parts) => parts.iter().for_each(|part| part.append(text, rng)),
            Self::One(ways) => {
                let mut left = rng.random::<f64>() * total(ways);
                let found = ways.iter().find(|(weight, _)| {
                    left -= weight;
                    left < 0.0
                });
                if let Some((_, way)) = found.or(ways.last()) {
                    way.append(text, rng);
                }
            }
        }
    }

    /// Returns the probability that `write` returns this text, summed over all ways to derive it; 0 if it never does.
    pub(crate) fn probability(&self, text: &str) -> f64 {
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut start = vec![0.0; words.len() + 1];
        start[0] = 1.0;
        self.read(&words, start)[words.len()]
    }

    /// Returns the probabilities that this many words are read, after this phrase, from those before it.
    fn read(&self, text: &[&str], before: Vec<f64>) -> Vec<f64> {
        let nothing = || vec![0.0; before.len()];
        match self {
            Self::Words(words) => words.split_whitespace().fold(before, |before, word| {
                let next = text.iter().zip(before).map(|(other, p)| if *other == word { p } else { 0.0 });
                std::iter::once(0.0).chain(next).collect()
            }),
            _ if before.iter().all(|&p| p == 0.0) => before,
            Self::All(parts) => parts.iter().fold(before, |before, part| part.read(text, before)),
            Self::One(ways) => ways.iter().fold(nothing(), |sum, (weight, way)| {
                let share = weight / total(ways);
                let after = way.read(text, before.clone());
                sum.iter().zip(after).map(|(sum, p)| sum + share * p).collect()
            }),
        }
    }
}

fn total(ways: &[(f64, Phrase)]) -> f64 {
    ways.iter().map(|(weight, _)| weight).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, SeedableRng};
    use std::collections::HashMap;

    #[test]
    fn probabilities_are_those_of_the_texts_that_are_written() {
        // "a b c" has two derivations.
        let first = Phrase::One(vec![(3.0, Phrase::Words("a")), (1.0, Phrase::Words("a b"))]);
        let phrase = Phrase::All(vec![first, Phrase::any("b c|c|")]);
        let mut rng = StdRng::seed_from_u64(1);
        let mut counts = HashMap::<String, f64>::new();
        (0..20_000).for_each(|_| *counts.entry(phrase.write(&mut rng)).or_default() += 1.0 / 20_000.0);
        assert!((phrase.probability("a b c") - 1.0 / 3.0).abs() < 1e-12);
        for (text, share) in &counts {
            let expected = phrase.probability(text);
            // Six standard deviations.
            assert!((share - expected).abs() < 6.0 * (0.25f64 / 20_000.0).sqrt(), "{text}: {share}, {expected}");
        }
        let sum: f64 = counts.keys().map(|text| phrase.probability(text)).sum();
        assert!((sum - 1.0).abs() < 1e-12 && counts.len() == 5, "{counts:?}");
        assert_eq!(["", "b", "a b b", "a b c c"].map(|text| phrase.probability(text)), [0.0; 4]);
    }
}
