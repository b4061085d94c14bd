//! Words and their token ids, for models that begin and end a text with tokens of their own.

use crate::Result;
use std::collections::HashMap;

/// The id after the end of a text in a batch of longer ones.
pub const PAD: u32 = 0;
/// The first input of a decoder.
pub const START: u32 = 1;
/// The end of a text.
pub const END: u32 = 2;
/// The id of all words that are not in the vocabulary.
pub const UNKNOWN: u32 = 3;
/// The names of these ids.
pub const SPECIAL: [&str; 4] = ["<pad>", "<s>", "</s>", "<unk>"];

/// A vocabulary of words.
#[derive(Clone)]
pub struct Words {
    words: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Words {
    /// Returns the words, by token id.
    pub fn new(words: Vec<String>) -> Self {
        let ids = words.iter().enumerate().map(|(id, word)| (word.clone(), id as u32)).collect();
        Self { words, ids }
    }

    /// Returns the special tokens, the `marks`, and the whitespace-separated words that occur at least `min_count`
    /// times, the most frequent first.
    pub fn from_texts<'a>(texts: impl Iterator<Item = &'a str>, min_count: usize, marks: &[&str]) -> Self {
        let mut counts = HashMap::<&str, usize>::new();
        for word in texts.flat_map(str::split_whitespace) {
            *counts.entry(word).or_default() += 1;
        }
        let mut counts: Vec<_> = counts.into_iter().filter(|&(_, count)| count >= min_count).collect();
        counts.sort_by(|(a, m), (b, n)| n.cmp(m).then(a.cmp(b)));
        let special: Vec<&str> = SPECIAL.iter().chain(marks).copied().collect();
        let known = counts.into_iter().map(|(word, _)| word).filter(|word| !special.contains(word));
        Self::new(special.iter().copied().chain(known).map(str::to_owned).collect())
    }

    /// Returns the number of words.
    #[allow(clippy::len_without_is_empty)] // no vocabulary is empty
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Returns the words, by token id.
    pub fn all(&self) -> &[String] {
        &self.words
    }

    /// Returns the ids of the whitespace-separated words.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        text.split_whitespace().map(|word| self.ids.get(word).copied().unwrap_or(UNKNOWN)).collect()
    }

    /// Returns the words of these ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let word = |&id: &u32| self.words.get(id as usize).map(String::as_str);
        let text: Option<Vec<&str>> = ids.iter().map(word).collect();
        Ok(text.ok_or_else(|| format!("expected ids below {}, got {ids:?}", self.len()))?.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_words_come_first_and_rare_ones_are_unknown() {
        let words = Words::from_texts(["b a b <go>", "c b a"].into_iter(), 2, &["<go>"]);
        assert_eq!(words.all()[..4], SPECIAL);
        assert_eq!(words.all()[4..], ["<go>", "b", "a"]);
        assert_eq!(words.encode("a  c <go>"), [6, UNKNOWN, 4]);
        assert_eq!(words.decode(&[5, 6]).expect("known ids"), "b a");
        let error = words.decode(&[5, 7]).expect_err("an id too large").to_string();
        assert!(error.contains("below 7") && error.contains("[5, 7]"), "{error}");
    }
}
