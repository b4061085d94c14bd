//! Encodes spellings as numbers, the input of the network of a char-CNN.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};

/// The number that stands for padding.
const PADDING: u32 = 0;
/// The number that stands for the mark before a spelling.
const START: u32 = 1;
/// The number that stands for the mark after a spelling.
const END: u32 = 2;

/// The characters that spellings may have, and their numbers.
#[derive(Clone, Debug)]
pub(super) struct Alphabet(BTreeMap<char, u32>);

impl Alphabet {
    /// Numbers these characters, each once.
    pub(super) fn new(characters: impl Iterator<Item = char>) -> Self {
        let characters: BTreeSet<char> = characters.collect();
        Alphabet(characters.into_iter().zip(END + 1..).collect())
    }

    /// Returns how many numbers there are: padding, both marks, and one for each character.
    pub(super) fn size(&self) -> usize {
        self.0.len() + END as usize + 1
    }

    /// Encodes spellings, each between its marks. An error names the first character that is not in the alphabet.
    pub(super) fn encode(&self, spellings: &[impl AsRef<str>]) -> Result<Vec<Vec<u32>>> {
        let encode = |(index, spelling): (usize, &str)| {
            let got = |c| format!("{c:?} in {spelling:?} at index {index}");
            let unknown = |c| Error::config("spellings", "characters of the alphabet", got(c));
            let number = |c: char| self.0.get(&c).copied().ok_or_else(|| unknown(c));
            let marked = [Ok(START)].into_iter().chain(spelling.chars().map(number)).chain([Ok(END)]);
            marked.collect()
        };
        spellings.iter().map(AsRef::as_ref).enumerate().map(encode).collect()
    }
}

/// Pads spellings at the end to the same length.
pub(super) fn padded(spellings: &[&[u32]], length: usize) -> Vec<u32> {
    let padding = std::iter::repeat(PADDING);
    spellings.iter().flat_map(|spelling| spelling.iter().copied().chain(padding.clone()).take(length)).collect()
}
