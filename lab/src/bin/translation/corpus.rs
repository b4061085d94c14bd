//! Pairs of texts, read from parallel files, and their token ids.

use crate::vocabulary::Vocabulary;
use lab::data::{read, Data, Digest};
use lab::Result;
use std::path::Path;

/// Tokens are separated by whitespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) source: String,
    pub(crate) target: String,
}

pub(crate) struct Corpus {
    pub(crate) name: String,
    pub(crate) train: Vec<Pair>,
    /// The part on which the epoch is chosen.
    pub(crate) valid: Vec<Pair>,
    /// The part that is only scored, once training is over. It may be empty.
    pub(crate) test: Vec<Pair>,
}

/// A pair as ids, without start and end.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    pub(crate) source: Vec<u32>,
    pub(crate) target: Vec<u32>,
}

impl Corpus {
    /// Reads train.SOURCE and train.TARGET, valid.SOURCE and valid.TARGET, and test.SOURCE and test.TARGET if both
    /// exist; one sentence per line.
    pub(crate) fn from_folder(folder: &Path, source: &str, target: &str) -> Result<Self> {
        let files = |name: &str| [source, target].map(|language| folder.join(format!("{name}.{language}")));
        let read = |name: &str| {
            let [source, target] = files(name);
            pairs(&source, &target)
        };
        let has_test = files("test").iter().all(|file| file.exists());
        let name = format!("{} from {source} to {target}", folder.display());
        let test = if has_test { read("test")? } else { vec![] };
        Ok(Self { name, train: read("train")?, valid: read("valid")?, test })
    }

    /// Returns the pairs that a trained model is scored on, with the name of their part: those of the test if there are
    /// any, otherwise those of validation.
    pub(crate) fn scored(&self) -> (&'static str, &[Pair]) {
        if self.test.is_empty() {
            ("valid", &self.valid)
        } else {
            ("test", &self.test)
        }
    }

    /// Leaves the first `part` of the training pairs, from 0 to 1, and at least one.
    pub(crate) fn shorten(&mut self, part: f64) {
        let pairs = (self.train.len() as f64 * part).round() as usize;
        self.train.truncate(pairs.max(1));
    }
}

/// Returns the pairs of training and validation as token ids. The digest covers their texts alone: the vocabulary comes
/// from them, or from a checkpoint, and a model may be tested on any pairs.
pub(crate) fn encode(corpus: &Corpus, source: &Vocabulary, target: &Vocabulary) -> Result<Data<Encoded>> {
    let texts = corpus.train.iter().chain(&corpus.valid).flat_map(|pair| [&pair.source, &pair.target]);
    let digest = Digest::default().texts(texts).to_string();
    let encode = |pairs: &[Pair]| encode_pairs(pairs, source, target);
    let (train, valid) = (encode(&corpus.train)?, encode(&corpus.valid)?);
    let per_word = [targets_per_word(&corpus.train, &train), targets_per_word(&corpus.valid, &valid)];
    Ok(Data { name: corpus.name.clone(), digest, train, valid, per_word })
}

/// Returns pairs as token ids.
pub(crate) fn encode_pairs(pairs: &[Pair], source: &Vocabulary, target: &Vocabulary) -> Result<Vec<Encoded>> {
    let encode =
        |pair: &Pair| Ok(Encoded { source: source.encode(&pair.source)?, target: target.encode(&pair.target)? });
    pairs.iter().map(encode).collect()
}

/// Returns the number of targets of a model for each word of the target texts, both with the end of each text.
pub(crate) fn targets_per_word(pairs: &[Pair], encoded: &[Encoded]) -> f64 {
    let words: usize = pairs.iter().map(|pair| pair.target.split_whitespace().count() + 1).sum();
    targets(encoded) as f64 / words as f64
}

/// Returns the number of targets of a model, with the end of each text.
pub(crate) fn targets(pairs: &[Encoded]) -> usize {
    pairs.iter().map(|pair| pair.target.len() + 1).sum()
}

fn pairs(source: &Path, target: &Path) -> Result<Vec<Pair>> {
    let (sources, targets) = (read(source)?, read(target)?);
    let lines = [sources.lines().count(), targets.lines().count()];
    if lines[0] != lines[1] {
        let (source, target) = (source.display(), target.display());
        return Err(format!("{source} has {} lines, but {target} has {}", lines[0], lines[1]).into());
    }
    if lines[0] == 0 {
        return Err(format!("{} is empty", source.display()).into());
    }
    let pair = |(source, target): (&str, &str)| Pair { source: source.to_owned(), target: target.to_owned() };
    Ok(sources.lines().zip(targets.lines()).map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::TableShape;
    use crate::table::tests::{random, vocabularies};

    #[test]
    fn targets_are_counted_per_word() {
        let [words, coded] = vocabularies(TableShape::Light, &random()).unwrap();
        let pair = |target: &str| Pair { source: "the dog".into(), target: target.into() };
        let (train, valid) = (vec![pair("lo kano"), pair("hodi")], vec![pair("lo zzz")]);
        let corpus = Corpus { name: "x".into(), train, valid, test: vec![] };
        assert_eq!(encode(&corpus, &words, &words).unwrap().per_word, [1.0; 2]);
        // Two codes for each word, but one for the unknown word and for each end.
        assert_eq!(encode(&corpus, &words, &coded).unwrap().per_word, [8.0 / 5.0, 4.0 / 3.0]);
    }

    #[test]
    fn test_pairs_are_read_if_both_files_exist() {
        let folder = std::env::temp_dir().join(format!("translation_test_pairs_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        let corpus = || Corpus::from_folder(&folder, "de", "en");
        for (name, text) in [("train", "a\nb\n"), ("valid", "c\n")] {
            write(&format!("{name}.de"), text);
            write(&format!("{name}.en"), text);
        }
        write("test.de", "d\ne\n");
        assert_eq!(corpus().unwrap().scored(), ("valid", [Pair { source: "c".into(), target: "c".into() }].as_slice()));
        write("test.en", "f\ng\n");
        let expected =
            [("d", "f"), ("e", "g")].map(|(source, target)| Pair { source: source.into(), target: target.into() });
        assert_eq!(corpus().unwrap().scored(), ("test", expected.as_slice()));
        write("test.en", "f\n");
        let error = corpus().err().unwrap().to_string();
        assert!(error.contains("test.de has 2 lines"), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_part_is_the_first_pairs_and_at_least_one() {
        let pair = |i: usize| Pair { source: i.to_string(), target: i.to_string() };
        let shortened = |part: f64| {
            let mut corpus =
                Corpus { name: "x".into(), train: (0..9).map(pair).collect(), valid: vec![], test: vec![] };
            corpus.shorten(part);
            corpus.train
        };
        assert_eq!(shortened(0.25), [pair(0), pair(1)]);
        assert_eq!(shortened(1.0).len(), 9);
        assert_eq!(shortened(1e-9), [pair(0)]);
    }

    #[test]
    fn files_of_different_length_are_an_error_that_says_so() {
        let folder = std::env::temp_dir().join(format!("translation_corpus_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let error = |folder: &Path| Corpus::from_folder(folder, "de", "en").err().unwrap().to_string();
        assert!(error(&folder).contains("train.de"));
        std::fs::write(folder.join("train.de"), "ein hund\neine katze\n").unwrap();
        std::fs::write(folder.join("train.en"), "a dog\n").unwrap();
        assert!(error(&folder).contains("has 2 lines") && error(&folder).contains("has 1"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
