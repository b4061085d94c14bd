//! Pairs of texts, read from two parallel files, and their token ids.

use crate::vocabulary::Vocabulary;
use lab::{digest::Digest, model::Data, Result};
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
    pub(crate) valid: Vec<Pair>,
}

/// A pair as ids, without start and end.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    pub(crate) source: Vec<u32>,
    pub(crate) target: Vec<u32>,
}

impl Corpus {
    /// Reads train.SOURCE and train.TARGET, valid.SOURCE and valid.TARGET, one sentence per line.
    pub(crate) fn from_folder(folder: &Path, source: &str, target: &str) -> Result<Self> {
        let read =
            |name: &str| pairs(&folder.join(format!("{name}.{source}")), &folder.join(format!("{name}.{target}")));
        let name = format!("{} from {source} to {target}", folder.display());
        Ok(Self { name, train: read("train")?, valid: read("valid")? })
    }
}

/// The pairs as token ids. The digest covers the texts alone: the vocabulary comes from them, or from a checkpoint.
pub(crate) fn encode(corpus: &Corpus, source: &Vocabulary, target: &Vocabulary) -> Result<Data<Encoded>> {
    let encode = |pairs: &[Pair]| -> Result<Vec<Encoded>> {
        let encode =
            |pair: &Pair| Ok(Encoded { source: source.encode(&pair.source)?, target: target.encode(&pair.target)? });
        pairs.iter().map(encode).collect()
    };
    let texts = corpus.train.iter().chain(&corpus.valid).flat_map(|pair| [&pair.source, &pair.target]);
    let digest = Digest::default().texts(texts).to_string();
    let (train, valid) = (encode(&corpus.train)?, encode(&corpus.valid)?);
    let per_word = [targets_per_word(&corpus.train, &train), targets_per_word(&corpus.valid, &valid)];
    Ok(Data { name: corpus.name.clone(), digest, train, valid, per_word })
}

/// Targets of a model per word of the target texts; both with the end of each.
fn targets_per_word(pairs: &[Pair], encoded: &[Encoded]) -> f64 {
    let words: usize = pairs.iter().map(|pair| pair.target.split_whitespace().count() + 1).sum();
    targets(encoded) as f64 / words as f64
}

/// The number of targets of a model, with the end of each text.
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

pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::{random, vocabularies};
    use crate::table::Shape;

    #[test]
    fn targets_are_counted_per_word() {
        let [words, coded] = vocabularies(Shape::Light, &random()).unwrap();
        let pair = |target: &str| Pair { source: "the dog".into(), target: target.into() };
        let corpus =
            Corpus { name: "x".into(), train: vec![pair("lo kano"), pair("hodi")], valid: vec![pair("lo zzz")] };
        assert_eq!(encode(&corpus, &words, &words).unwrap().per_word, [1.0; 2]);
        // Two codes for each word, but one for the unknown word and for each end.
        assert_eq!(encode(&corpus, &words, &coded).unwrap().per_word, [8.0 / 5.0, 4.0 / 3.0]);
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
