//! The words of a vocabulary as sequences of characters.

use std::collections::{BTreeMap, BTreeSet};

/// The boundary follows the last character of a word and comes before the first one.
pub(crate) const BOUNDARY: u32 = 0;

/// Every word of a vocabulary as the numbers of its characters. The characters of the words have numbers, and so has
/// the boundary.
pub(crate) struct Spellings {
    words: Vec<Vec<u32>>,
    characters: usize,
}

/// A group has words of similar length.
#[derive(Debug, PartialEq)]
pub(crate) struct Group {
    /// The places of the words in the list of all words.
    pub(crate) rows: Vec<u32>,
    /// The number of characters of the longest word, with its end.
    pub(crate) steps: usize,
}

impl Spellings {
    pub(crate) fn new(words: &[String]) -> Self {
        let alphabet: BTreeSet<char> = words.iter().flat_map(|word| word.chars()).collect();
        let numbers: BTreeMap<char, u32> = alphabet.into_iter().zip(BOUNDARY + 1..).collect();
        let words = words.iter().map(|word| word.chars().map(|c| numbers[&c]).collect()).collect();
        Self { words, characters: numbers.len() + 1 }
    }

    /// Returns the number of characters, with the boundary.
    pub(crate) fn characters(&self) -> usize {
        self.characters
    }

    /// Returns the spellings in the order of the vocabulary, without boundaries.
    pub(crate) fn words(&self) -> &[Vec<u32>] {
        &self.words
    }

    /// Returns the characters of a word and its end.
    fn steps(&self, word: u32) -> usize {
        self.words[word as usize].len() + 1
    }

    /// Returns the mean number of characters, with the end, of the words of a text after its first.
    pub(crate) fn per_word(&self, text: &[u32]) -> f64 {
        let targets = &text[1..];
        targets.iter().map(|&word| self.steps(word)).sum::<usize>() as f64 / targets.len() as f64
    }

    /// Groups words by length, so that padding to the longest of a group is at most a quarter of it.
    pub(crate) fn groups(&self, words: &[u32]) -> Vec<Group> {
        let mut rows: Vec<u32> = (0..words.len() as u32).collect();
        let steps = |row: u32| self.steps(words[row as usize]);
        rows.sort_by_key(|&row| std::cmp::Reverse(steps(row)));
        let mut groups = vec![];
        let mut rest = rows.as_slice();
        while let Some(&longest) = rest.first() {
            let longest = steps(longest);
            let (group, shorter) = rest.split_at(rest.partition_point(|&row| 4 * steps(row) >= 3 * longest));
            groups.push(Group { rows: group.to_vec(), steps: longest });
            rest = shorter;
        }
        groups
    }

    /// Returns the inputs and targets of a word in this many steps: what each of its characters and its end follows,
    /// and these themselves. Targets past the end are `ignored`.
    pub(crate) fn sequence(&self, word: u32, steps: usize, ignored: i64) -> impl Iterator<Item = (u32, i64)> + '_ {
        let word = &self.words[word as usize];
        (0..steps).map(move |i| {
            let input = i.checked_sub(1).and_then(|i| word.get(i)).copied().unwrap_or(BOUNDARY);
            let target = match word.get(i) {
                Some(&character) => i64::from(character),
                None if i == word.len() => i64::from(BOUNDARY),
                None => ignored,
            };
            (input, target)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spellings() -> Spellings {
        Spellings::new(&["bad", "a", "fabcdefab", "ba", "ä"].map(String::from))
    }

    #[test]
    fn words_start_and_end_at_the_boundary() {
        let spellings = spellings();
        // a to f, the umlaut, and the boundary.
        assert_eq!(spellings.characters(), 8);
        let sequence: Vec<_> = spellings.sequence(0, 6, -1).collect();
        assert_eq!(sequence, [(0, 2), (2, 1), (1, 4), (4, 0), (0, -1), (0, -1)]);
        assert_eq!(spellings.sequence(4, 2, -1).collect::<Vec<_>>(), [(0, 7), (7, 0)]);
        assert_eq!(spellings.per_word(&[2, 0, 1]), 3.0);
    }

    #[test]
    fn groups_have_every_word_once_and_little_padding() {
        let spellings = spellings();
        let words = [1, 0, 3, 2, 1, 4, 0];
        let groups = spellings.groups(&words);
        let mut rows: Vec<u32> = groups.iter().flat_map(|group| group.rows.clone()).collect();
        rows.sort_unstable();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(groups.iter().map(|group| group.steps).collect::<Vec<_>>(), [10, 4, 2]);
        for group in groups {
            assert!(group.rows.iter().all(|&row| 4 * spellings.steps(words[row as usize]) >= 3 * group.steps));
        }
    }
}
