//! A text as character ids, split into three parts.

use lab::data::{read, Data};
use lab::Result;
use std::collections::BTreeSet;
use std::path::Path;

/// The parts are consecutive: 90 %, 5 % and 5 % of the text. Each starts with the last character of the part before it,
/// as an input only; all other characters are targets, so that only the first character of the text is not one.
#[derive(Debug)]
pub(crate) struct Corpus {
    pub(crate) data: Data<u32>,
    /// All characters of the text, of every part, in the order of their code points.
    pub(crate) alphabet: Vec<char>,
    pub(crate) test: Vec<u32>,
}

/// The least number of characters: with fewer, some part would have no target.
const SHORTEST: usize = 40;

impl Corpus {
    pub(crate) fn from_file(path: &Path) -> Result<Self> {
        Self::new(path.display().to_string(), &read(path)?)
    }

    pub(crate) fn new(name: String, text: &str) -> Result<Self> {
        let alphabet: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let ids: Vec<u32> = text.chars().map(|c| alphabet.partition_point(|&other| other < c) as u32).collect();
        if ids.len() < SHORTEST {
            return Err(format!("{name} has {} characters, expected at least {SHORTEST}", ids.len()).into());
        }
        let (valid, test) = (ids.len() * 90 / 100, ids.len() * 95 / 100);
        let part = |from: usize, to: usize| ids[from..to].to_vec();
        let (train, valid, test) = (part(0, valid), part(valid - 1, test), part(test - 1, ids.len()));
        let data = Data::new(name, alphabet.iter().map(char::to_string), train, valid);
        Ok(Self { data, alphabet, test })
    }

    /// Returns the character that sampled text continues: a newline, if the alphabet has one.
    pub(crate) fn start(&self) -> u32 {
        self.alphabet.iter().position(|&c| c == '\n').unwrap_or(0) as u32
    }

    pub(crate) fn decode(&self, ids: &[u32]) -> String {
        ids.iter().map(|&id| self.alphabet[id as usize]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_together_are_the_text() {
        for length in [SHORTEST, 41, 99, 1000, 1234] {
            let text: String = (0..length).map(|i| ['a', 'é', '\n', ' ', '水'][i * i % 23 % 5]).collect();
            let corpus = Corpus::new("test".into(), &text).expect("long enough");
            let (train, valid, test) = (&corpus.data.train, &corpus.data.valid, &corpus.test);
            assert_eq!((train.last(), valid.last()), (valid.first(), test.first()), "each continues the part before");
            assert!(valid.len() > 1 && test.len() > 1);
            let whole = [&train[..], &valid[1..], &test[1..]].concat();
            assert_eq!(corpus.decode(&whole), text);
            assert_eq!(corpus.alphabet, ['\n', ' ', 'a', 'é', '水']);
        }
    }

    #[test]
    fn a_short_text_is_an_error() {
        let error = Corpus::new("words".into(), "too short").expect_err("must fail").to_string();
        assert_eq!(error, "words has 9 characters, expected at least 40");
    }

    #[test]
    fn a_missing_file_is_an_error_that_names_it() {
        let error = Corpus::from_file(Path::new("no-such-file")).expect_err("must fail").to_string();
        assert!(error.contains("no-such-file"), "{error}");
    }
}
