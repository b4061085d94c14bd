//! The final scores of a task on the test pairs, or on the validation pairs if there are no others.

use crate::corpus::{targets_per_word, Encoded, Pair};
use crate::search::{search, Beam};
use crate::{kinds::Task, model::Seq2Seq};
use lab::scores::bleu::{corpus_bleu, sentence_bleu};
use lab::{training::Session, Result};
use std::collections::HashSet;

/// Names with values, in percent.
pub(crate) type Measures = Vec<(&'static str, f64)>;

pub(crate) struct Scores {
    pub(crate) measures: Measures,
    /// The best texts found for each pair, the best first.
    pub(crate) found: Vec<Vec<String>>,
}

/// Returns the mean NLL per word of the target texts, in nats.
pub(crate) fn nll_per_word(session: &Session<Seq2Seq>, pairs: &[Pair], encoded: &[Encoded]) -> Result<f64> {
    Ok(targets_per_word(pairs, encoded) * session.evaluate(encoded)?)
}

pub(crate) fn score(task: Task, model: &Seq2Seq, pairs: &[Pair], encoded: &[Encoded], beam: Beam) -> Result<Scores> {
    let sources: Vec<&[u32]> = encoded.iter().map(|pair| pair.source.as_slice()).collect();
    let decode = |ids: &Vec<u32>| model.setting.target.decode(ids);
    let found = search(model, &sources, beam)?;
    let found: Vec<Vec<String>> =
        found.iter().map(|texts| texts.iter().map(decode).collect()).collect::<Result<_>>()?;
    let measures = match task {
        Task::Toy => vec![("exact match", exact_match(pairs, &found)), ("BLEU", bleu(pairs, &found))],
        Task::Translation => vec![("BLEU", bleu(pairs, &found))],
        Task::Dialogue => {
            let mut measures = precision_and_recall(pairs, &found);
            measures.push(("distinct", distinct(&found)));
            measures
        }
    };
    Ok(Scores { measures, found })
}

fn best(texts: &[String]) -> &str {
    texts.first().map_or("", String::as_str)
}

fn exact_match(pairs: &[Pair], found: &[Vec<String>]) -> f64 {
    let right = pairs.iter().zip(found).filter(|(pair, texts)| pair.target == best(texts)).count();
    100.0 * right as f64 / pairs.len() as f64
}

fn bleu(pairs: &[Pair], found: &[Vec<String>]) -> f64 {
    corpus_bleu(found.iter().zip(pairs).map(|(texts, pair)| (best(texts), [pair.target.as_str()])))
}

/// Computes BLEU with each word that no text of the training pairs has replaced by an unknown one, which never is that
/// of a reference: what words outside the vocabulary add to the score of a model of pieces (Kong et al., 2019, table
/// 8).
pub(crate) fn bleu_of_known_words(train: &[Pair], pairs: &[Pair], found: &[Vec<String>]) -> f64 {
    let known: HashSet<&str> = train.iter().flat_map(|pair| pair.target.split_whitespace()).collect();
    let replaced = |texts: &Vec<String>| {
        let words = best(texts).split_whitespace();
        vec![words.map(|word| if known.contains(word) { word } else { "<unk>" }).collect::<Vec<_>>().join(" ")]
    };
    bleu(pairs, &found.iter().map(replaced).collect::<Vec<_>>())
}

/// Computes the scores of Zhao et al. (2017): the mean over the hypotheses of the best BLEU with a reference, and the
/// mean over the references of the best BLEU with a hypothesis. Here every context has one reference.
fn precision_and_recall(pairs: &[Pair], found: &[Vec<String>]) -> Measures {
    const NAMES: [[&str; 2]; 4] =
        [["BLEU-1 P", "BLEU-1 R"], ["BLEU-2 P", "BLEU-2 R"], ["BLEU-3 P", "BLEU-3 R"], ["BLEU-4 P", "BLEU-4 R"]];
    let mut sums = [[0.0; 2]; 4];
    for (pair, texts) in pairs.iter().zip(found) {
        let bleus: Vec<[f64; 4]> = texts.iter().map(|text| sentence_bleu(text, &pair.target)).collect();
        for (order, [precision, recall]) in sums.iter_mut().enumerate() {
            let values = || bleus.iter().map(|bleu| bleu[order]);
            *precision += values().sum::<f64>() / bleus.len().max(1) as f64;
            *recall += values().fold(0.0, f64::max);
        }
    }
    let percent = |sum: f64| 100.0 * sum / pairs.len() as f64;
    let named = NAMES.iter().zip(sums);
    named.flat_map(|(names, sums)| [(names[0], percent(sums[0])), (names[1], percent(sums[1]))]).collect()
}

/// Returns the share of different texts among the best of all pairs.
fn distinct(found: &[Vec<String>]) -> f64 {
    let different: HashSet<&str> = found.iter().map(|texts| best(texts)).collect();
    100.0 * different.len() as f64 / found.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precision_is_the_mean_and_recall_the_best_of_the_hypotheses() {
        let pairs = [Pair { source: "how are you".into(), target: "i am fine".into() }];
        let found = [vec!["i am fine".to_owned(), "no".to_owned()]];
        let measures = precision_and_recall(&pairs, &found);
        assert_eq!(measures[0], ("BLEU-1 P", 50.0));
        assert_eq!(measures[1], ("BLEU-1 R", 100.0));
        assert_eq!(exact_match(&pairs, &found), 100.0);
    }

    #[test]
    fn words_that_training_did_not_have_are_unknown() {
        let pair = |target: &str| Pair { source: "x".into(), target: target.into() };
        let (train, pairs) = ([pair("a man rides a horse")], [pair("a man rides a zebra today")]);
        let found = [vec!["a man rides a zebra today".to_owned()]];
        assert_eq!(bleu(&pairs, &found), 100.0);
        let known = bleu_of_known_words(&train, &pairs, &found);
        assert_eq!(known, bleu(&pairs, &[vec!["a man rides a <unk> <unk>".to_owned()]]));
        assert!(known < 100.0);
        assert_eq!(bleu_of_known_words(&pairs, &pairs, &found), 100.0);
    }

    #[test]
    fn replies_that_are_all_the_same_are_not_distinct() {
        let found = |texts: [&str; 4]| texts.map(|text| vec![text.to_owned(), "other".into()]);
        assert_eq!(distinct(&found(["yeah"; 4])), 25.0);
        assert_eq!(distinct(&found(["a", "b", "c", "a"])), 75.0);
    }
}
