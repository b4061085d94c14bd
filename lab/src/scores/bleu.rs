//! BLEU (Papineni et al. 2002) of a corpus, and smoothed BLEU of one sentence, on whitespace tokens.

use std::collections::HashMap;

const ORDERS: usize = 4;

/// The n-gram counts of a hypothesis and its references, or the sums over a corpus.
#[derive(Clone, Copy, Default)]
struct Counts {
    matches: [usize; ORDERS],
    totals: [usize; ORDERS],
    hypothesis: usize,
    reference: usize,
}

impl Counts {
    /// Counts the n-grams. An n-gram matches as often as it occurs in the reference that has it most often. The length
    /// of the references is the one closest to the hypothesis's, the shorter of two that are equally close.
    fn new(hypothesis: &[&str], references: &[Vec<&str>]) -> Self {
        let length = hypothesis.len();
        let closest = references.iter().map(Vec::len).min_by_key(|&other| (other.abs_diff(length), other));
        let mut counts = Counts { hypothesis: length, reference: closest.unwrap_or(0), ..Counts::default() };
        for order in 1..=ORDERS {
            let mut left = HashMap::<&[&str], usize>::new();
            for reference in references {
                let mut reference_counts = HashMap::<&[&str], usize>::new();
                for gram in reference.windows(order) {
                    let count = reference_counts.entry(gram).or_default();
                    *count += 1;
                    let most = left.entry(gram).or_default();
                    *most = (*most).max(*count);
                }
            }
            for gram in hypothesis.windows(order) {
                counts.totals[order - 1] += 1;
                if let Some(left) = left.get_mut(gram).filter(|left| **left > 0) {
                    *left -= 1;
                    counts.matches[order - 1] += 1;
                }
            }
        }
        counts
    }

    fn add(&mut self, other: &Counts) {
        for order in 0..ORDERS {
            self.matches[order] += other.matches[order];
            self.totals[order] += other.totals[order];
        }
        self.hypothesis += other.hypothesis;
        self.reference += other.reference;
    }

    /// Returns the brevity penalty: 1, or less for hypotheses that are shorter than their references.
    fn brevity(&self) -> f64 {
        match self.hypothesis {
            0 => 0.0,
            length => (1.0 - self.reference as f64 / length as f64).min(0.0).exp(),
        }
    }
}

/// Computes BLEU-4 in percent of hypotheses, each with its references, whose tokens are separated by whitespace. It is
/// not smoothed, so that it is 0 if the corpus has no matching 4-gram.
pub fn corpus_bleu<'a, R>(pairs: impl Iterator<Item = (&'a str, R)>) -> f64
where
    R: IntoIterator<Item = &'a str>,
{
    let mut counts = Counts::default();
    for (hypothesis, references) in pairs {
        let references: Vec<Vec<&str>> = references.into_iter().map(words).collect();
        counts.add(&Counts::new(&words(hypothesis), &references));
    }
    if counts.matches.contains(&0) {
        return 0.0;
    }
    let logs = (0..ORDERS).map(|i| (counts.matches[i] as f64 / counts.totals[i] as f64).ln());
    100.0 * counts.brevity() * (logs.sum::<f64>() / ORDERS as f64).exp()
}

/// Computes BLEU-1 to BLEU-4 of one sentence, from 0 to 1, smoothed by adding one to matches and totals for n of at
/// least 2: Lin and Och (2004), method 2 of Chen and Cherry (2014) and of NLTK.
pub fn sentence_bleu(hypothesis: &str, reference: &str) -> [f64; ORDERS] {
    let counts = Counts::new(&words(hypothesis), &[words(reference)]);
    let mut logs = 0.0;
    std::array::from_fn(|i| {
        let (matches, total) = (counts.matches[i] as f64, counts.totals[i].max(1) as f64);
        logs += if i == 0 { (matches / total).ln() } else { ((matches + 1.0) / (total + 1.0)).ln() };
        counts.brevity() * (logs / (i + 1) as f64).exp()
    })
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scores::cider::tests::{captions, golden};
    use serde_json::Value;
    use std::ops::Range;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, expected {expected}");
    }

    /// Returns hypotheses and references.
    fn sentences(golden: &Value) -> Vec<(&str, &str)> {
        let sentences = golden["sentences"].as_array().unwrap().iter();
        sentences
            .map(|sentence| (sentence["hypothesis"].as_str().unwrap(), sentence["reference"].as_str().unwrap()))
            .collect()
    }

    /// The values of sacrebleu 2.6.0: `corpus_bleu(hypotheses, [references], tokenize="none", force=True).score`.
    #[test]
    fn corpus_bleu_equals_sacrebleu() {
        let golden = golden();
        let sentences = sentences(&golden);
        let bleu = |range: Range<usize>| {
            corpus_bleu(sentences[range].iter().map(|&(hypothesis, reference)| (hypothesis, [reference])))
        };
        close(bleu(0..5), 47.73528017075043);
        close(bleu(0..1), 81.96501312471537);
        close(bleu(0..2), 64.2726950903272);
        close(corpus_bleu(sentences.iter().map(|&(_, reference)| (reference, [reference]))), 100.0);
        close(bleu(4..5), 0.0);
    }

    /// The values of sacrebleu 2.6.0, as above, with `[[references[0], ..], [references[1], ..], [references[2], ..]]`.
    #[test]
    fn corpus_bleu_of_several_references_equals_sacrebleu() {
        let expected = [75.10499815709778, 70.39848207052137, 61.604926348104726, 54.22596206835203];
        for (count, expected) in (1..).zip(expected) {
            close(corpus_bleu(captions(&golden(), count).into_iter()), expected);
        }
    }

    #[test]
    fn the_shorter_of_two_references_that_are_equally_close_counts() {
        let length = |references: &[&str]| {
            let references: Vec<_> = references.iter().map(|text| words(text)).collect();
            Counts::new(&words("a b c d"), &references).reference
        };
        assert_eq!(
            [length(&["a b c d e", "a b c"]), length(&["a b c", "a b c d e"]), length(&["a", "a b c d e"])],
            [3, 3, 5]
        );
    }

    /// The values of NLTK 3.10.4: `sentence_bleu([reference], hypothesis, [1/n] * n, SmoothingFunction().method2)`.
    #[test]
    fn sentence_bleu_equals_nltk() {
        let golden = golden();
        for (i, (hypothesis, reference)) in sentences(&golden).into_iter().enumerate() {
            let expected: [f64; ORDERS] = serde_json::from_value(golden["sentences"][i]["bleu"].clone()).unwrap();
            let found = sentence_bleu(hypothesis, reference);
            found.into_iter().zip(expected).for_each(|(found, expected)| close(found, expected));
        }
    }
}
