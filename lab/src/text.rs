//! Texts as token ids: whitespace-separated files, their vocabulary, and their entropy if it is known.

use crate::{model::Data, Result};
use std::collections::HashMap;
use std::path::Path;

/// The token that ends each sentence.
pub const END_OF_SENTENCE: &str = "<eos>";
const UNKNOWN: &str = "<unk>";

/// Texts as token ids. The first token of every text is an input only; all others are targets.
pub struct Corpus {
    /// The texts to train on and to evaluate.
    pub data: Data<u32>,
    /// The words, by token id.
    pub words: Vec<String>,
    /// The text of `test.txt`, if there is one.
    pub test: Option<Vec<u32>>,
    /// Mean entropy of the true next-token distribution over the targets of `valid`, in nats.
    pub entropy: Option<f64>,
}

impl Corpus {
    /// Reads train.txt, valid.txt and, if it exists, test.txt: one sentence per line.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let mut vocabulary = Vocabulary::default();
        let train = vocabulary.encode(&read(&folder.join("train.txt"))?, true);
        let valid = vocabulary.encode(&read(&folder.join("valid.txt"))?, false);
        let test = folder.join("test.txt");
        let test = match test.exists() {
            true => Some(vocabulary.encode(&read(&test)?, false)),
            false => None,
        };
        for (text, file) in [(Some(&train), "train.txt"), (Some(&valid), "valid.txt"), (test.as_ref(), "test.txt")] {
            if text.is_some_and(|text| text.len() < 2) {
                return Err(format!("{} is empty", folder.join(file).display()).into());
            }
        }
        let name = folder.display().to_string();
        let words = vocabulary.words;
        Ok(Self { data: Data::new(name, &words, train, valid), words, test, entropy: None })
    }

    /// The same texts with ids in the order of falling frequency in the training text.
    pub fn by_frequency(self) -> Self {
        let mut counts = vec![0usize; self.words.len()];
        self.data.train.iter().for_each(|&id| counts[id as usize] += 1);
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|&id| std::cmp::Reverse(counts[id]));
        let mut ranks = vec![0u32; order.len()];
        order.iter().zip(0..).for_each(|(&id, rank)| ranks[id] = rank);
        let renumbered = |text: Vec<u32>| text.into_iter().map(|id| ranks[id as usize]).collect::<Vec<_>>();
        let words: Vec<String> = order.iter().map(|&id| self.words[id].clone()).collect();
        let Data { name, train, valid, .. } = self.data;
        let data = Data::new(name, &words, renumbered(train), renumbered(valid));
        Corpus { data, words, test: self.test.map(renumbered), entropy: self.entropy }
    }

    /// Token ids as readable text, one sentence per line.
    pub fn decode(&self, ids: &[u32]) -> String {
        let words = ids.iter().map(|&id| self.words[id as usize].as_str());
        let lines = words.collect::<Vec<_>>().join(" ").replace(&format!(" {END_OF_SENTENCE} "), "\n");
        lines.trim_end_matches(END_OF_SENTENCE).trim().to_owned()
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}

/// Words in the order of their first occurrence, as in the released code of the mixture of softmaxes.
#[derive(Default)]
struct Vocabulary {
    words: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// The words of each line followed by `<eos>`, after one `<eos>` at the start. With `grow`, new words are added;
    /// without, they become `<unk>` if the vocabulary has it, and are added if not.
    fn encode(&mut self, text: &str, grow: bool) -> Vec<u32> {
        let unknown = if grow { None } else { self.ids.get(UNKNOWN).copied() };
        let words = text.lines().flat_map(|line| line.split_whitespace().chain([END_OF_SENTENCE]));
        let ids: Vec<u32> = words.map(|word| self.id(word, unknown)).collect();
        let start = self.ids.get(END_OF_SENTENCE).copied();
        start.into_iter().chain(ids).collect()
    }

    fn id(&mut self, word: &str, unknown: Option<u32>) -> u32 {
        if let Some(id) = self.ids.get(word).copied().or(unknown) {
            return id;
        }
        let id = self.words.len() as u32;
        self.words.push(word.to_owned());
        self.ids.insert(word.to_owned(), id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unseen_words_become_unk_where_train_has_it() {
        let mut vocabulary = Vocabulary::default();
        assert_eq!(vocabulary.encode("a <unk> a\nb", true), [2, 0, 1, 0, 2, 3, 2]);
        assert_eq!(vocabulary.encode("b c", false), [2, 3, 1, 2]);
    }

    #[test]
    fn unseen_words_are_added_where_train_has_no_unk() {
        let mut vocabulary = Vocabulary::default();
        vocabulary.encode("a b", true);
        assert_eq!(vocabulary.encode("b c", false), [2, 1, 3, 2]);
        assert_eq!(vocabulary.words, ["a", "b", "<eos>", "c"]);
    }

    #[test]
    fn ids_are_renumbered_by_frequency() {
        let words = ["a", "b", "c"].map(String::from);
        let data = Data::new("x".into(), &words, vec![0, 2, 2, 1, 2, 1], vec![0, 1]);
        let corpus = Corpus { data, words: words.to_vec(), test: Some(vec![2, 0]), entropy: None }.by_frequency();
        assert_eq!(corpus.words, ["c", "b", "a"]);
        assert_eq!((corpus.data.train, corpus.data.valid), (vec![2, 0, 0, 1, 0, 1], vec![2, 1]));
        assert_eq!(corpus.test, Some(vec![0, 2]));
    }

    #[test]
    fn a_missing_file_is_an_error_that_names_it() {
        let error = Corpus::from_folder(Path::new("no-such-folder")).err().expect("must fail").to_string();
        assert!(error.contains("train.txt"), "{error}");
    }
}
