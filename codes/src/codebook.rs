//! A codebook is a bijection of words and sequences of one or two codes.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};

use crate::checks::{check_at_most, check_product, check_sizes};
use crate::error::{Error, Result};
use crate::transfer::to_device;

/// A codebook writes each word as a sequence of one or two codes over a smaller vocabulary (Li et al., 2016; Kong et
/// al., 2019).
///
/// A model of codes is a model of words: it reads and predicts the codes of a text with any head over the vocabulary of
/// codes, and
///
/// ```text
/// log P(word | text) = log P(first code | text) + log P(second code | text, first code)
/// ```
///
/// No code that is a word by itself begins another word, so that a sequence of codes has one reading. The probability
/// that a model gives to sequences of codes that spell no word is lost: the probabilities of words sum to at most one.
///
/// # Examples
///
/// ```
/// use mos_codes::Codebook;
///
/// # fn main() -> mos_codes::Result<()> {
/// // Three words in five codes: the first has one of its own.
/// let book = Codebook::new(5, &[&[0][..], &[1, 3], &[2, 3]])?;
/// let codes = book.encode(&[2, 0, 1])?;
/// assert_eq!(codes, [2, 3, 0, 1, 3]);
/// assert_eq!(book.decode(&codes)?, [2, 0, 1]);
/// assert_eq!(book.continuations(None)?, [0, 1, 2]);
/// assert_eq!(book.continuations(Some(2))?, [3]);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - Li, Qin, Yang, Hu, Liu: LightRNN: Memory and Computation-Efficient Recurrent Neural Networks. NIPS 2016, arXiv
///   1610.09893.
/// - Kong et al.: Fast and Simple Mixture of Softmaxes with BPE and Hybrid-LightRNN for Language Generation. AAAI 2019,
///   arXiv 1809.09296.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codebook {
    code_count: usize,
    /// The codes of each word.
    words: Vec<Sequence>,
    /// The codes that begin a word, ascending.
    firsts: Vec<u32>,
    /// The words that each code begins.
    begins: Vec<Begins>,
}

/// This holds the codes of a word. A word with one code has it twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sequence {
    codes: [u32; 2],
    length: usize,
}

/// A code begins no word, is a word by itself, or is the first code of several words.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Begins {
    Nothing,
    Word(u32),
    /// The second codes ascend; `words[i]` is completed by `seconds[i]`.
    Words {
        seconds: Vec<u32>,
        words: Vec<u32>,
    },
}

/// The largest number of words, and of codes. Each code takes memory, whether a word has it or not.
pub(crate) const MOST_IDS: usize = 1 << 24;

impl Codebook {
    /// Makes a codebook from sequences, one for each word, over `code_count` codes.
    ///
    /// # Errors
    ///
    /// If there are no words, there are more than 2^24 words or codes, a sequence is empty or longer than two codes, a
    /// code is not below `code_count`, two words have the same sequence, or one word's sequence begins with another's.
    pub fn new(code_count: usize, sequences: &[impl AsRef<[u32]>]) -> Result<Self> {
        check_sizes(&[("words", sequences.len()), ("codes", code_count)])?;
        check_at_most("words", sequences.len(), MOST_IDS)?;
        check_at_most("codes", code_count, MOST_IDS)?;
        let error = |word: usize, expected: &str, got: &[u32]| {
            Err(Error::config("sequences", format!("{expected} for word {word}"), format!("{got:?}")))
        };
        let mut words = Vec::with_capacity(sequences.len());
        // For each code: the word that it is by itself, and the words that it begins, by their second code.
        let (mut own_words, mut longer_words) = (vec![None; code_count], vec![BTreeMap::new(); code_count]);
        for (word, sequence) in sequences.iter().map(AsRef::as_ref).enumerate() {
            if let Some(code) = sequence.iter().find(|&&code| code as usize >= code_count) {
                return error(word, &format!("codes below {code_count}"), &[*code]);
            }
            let free = "a sequence that no other word has or begins with";
            match *sequence {
                [code] => {
                    let is_free = own_words[code as usize].is_none() && longer_words[code as usize].is_empty();
                    if !is_free {
                        return error(word, free, sequence);
                    }
                    own_words[code as usize] = Some(word as u32);
                    words.push(Sequence { codes: [code; 2], length: 1 });
                }
                [first, second] => {
                    let is_taken = longer_words[first as usize].insert(second, word as u32).is_some();
                    if is_taken || own_words[first as usize].is_some() {
                        return error(word, free, sequence);
                    }
                    words.push(Sequence { codes: [first, second], length: 2 });
                }
                _ => return error(word, "one or two codes", sequence),
            }
        }
        let begins = own_words.into_iter().zip(longer_words).map(|(own_word, longer_words)| match own_word {
            Some(word) => Begins::Word(word),
            None if longer_words.is_empty() => Begins::Nothing,
            None => {
                let (seconds, words) = longer_words.into_iter().unzip();
                Begins::Words { seconds, words }
            }
        });
        let begins: Vec<Begins> = begins.collect();
        let firsts = (0u32..).zip(&begins).filter(|(_, begins)| **begins != Begins::Nothing).map(|(code, _)| code);
        Ok(Codebook { code_count, words, firsts: firsts.collect(), begins })
    }

    /// Returns the number of words.
    pub fn word_count(&self) -> usize {
        self.words.len()
    }

    /// Returns the number of codes, which is the size of a head's vocabulary.
    pub fn code_count(&self) -> usize {
        self.code_count
    }

    /// Returns the codes of a word.
    ///
    /// # Errors
    ///
    /// If the word is not in the codebook.
    pub fn codes_of(&self, word: u32) -> Result<&[u32]> {
        match self.words.get(word as usize) {
            Some(Sequence { codes, length }) => Ok(&codes[..*length]),
            None => Err(Error::config("word", format!("below {}, the number of words", self.words.len()), word)),
        }
    }

    /// Returns the codes of a text.
    ///
    /// # Errors
    ///
    /// If a word is not in the codebook.
    pub fn encode(&self, words: &[u32]) -> Result<Vec<u32>> {
        let mut codes = Vec::with_capacity(2 * words.len());
        for (index, word) in words.iter().enumerate() {
            codes.extend(self.codes_of(*word).map_err(|error| error.at_index(index))?);
        }
        Ok(codes)
    }

    /// Returns the words of a text of codes.
    ///
    /// # Errors
    ///
    /// If the codes spell no sequence of words, or end within a word.
    pub fn decode(&self, codes: &[u32]) -> Result<Vec<u32>> {
        let (mut words, mut first) = (Vec::with_capacity(codes.len()), None);
        for (index, &code) in codes.iter().enumerate() {
            first = match self.read(first, code).map_err(|error| error.at_index(index))? {
                Read::Word(word) => {
                    words.push(word);
                    None
                }
                Read::First => Some(code),
            };
        }
        match first {
            None => Ok(words),
            Some(code) => Err(Error::config("codes", "whole words", format!("{code} at the end, which begins one"))),
        }
    }

    /// Reads the next code of a text. Returns `None` if the code completes a word, and else the code itself, which
    /// begins a word. `first` is the result for the previous code.
    ///
    /// # Errors
    ///
    /// If the code is not a continuation.
    pub fn advance(&self, first: Option<u32>, code: u32) -> Result<Option<u32>> {
        Ok(match self.read(first, code)? {
            Read::Word(_) => None,
            Read::First => Some(code),
        })
    }

    /// Returns the codes that may come after `first`, ascending and never empty: the second codes of its words, or, if
    /// `first` is `None` or a word by itself, the codes that begin a word.
    ///
    /// # Errors
    ///
    /// If `first` begins no word.
    pub fn continuations(&self, first: Option<u32>) -> Result<&[u32]> {
        let Some(code) = first else { return Ok(&self.firsts) };
        match self.begins.get(code as usize) {
            Some(Begins::Word(_)) => Ok(&self.firsts),
            Some(Begins::Words { seconds, .. }) => Ok(seconds),
            _ => Err(Error::config("first", "a code that begins a word", code)),
        }
    }

    /// Returns a mask to add to the logits or log-probabilities of the next code, with one row for each of `firsts`. It
    /// is zero where a word begins or continues ([`Codebook::continuations`]) and minus infinity elsewhere.
    ///
    /// # Shapes
    ///
    /// - returns `[firsts, codes]`, f32
    ///
    /// # Errors
    ///
    /// If one of `firsts` begins no word, or the mask would have more than 2^40 numbers.
    pub fn mask(&self, firsts: &[Option<u32>], device: &Device) -> Result<Tensor> {
        check_product("firsts * codes", firsts.len(), self.code_count)?;
        let mut mask = vec![f32::NEG_INFINITY; firsts.len() * self.code_count];
        for (index, (row, first)) in mask.chunks_mut(self.code_count).zip(firsts).enumerate() {
            let continuations = self.continuations(*first).map_err(|error| error.at_index(index))?;
            continuations.iter().for_each(|&code| row[code as usize] = 0.0);
        }
        to_device(mask, (firsts.len(), self.code_count), device)
    }

    /// Reads a code. `first` is the first code of the word that the code may complete, and `None` at the start of a
    /// word.
    pub(crate) fn read(&self, first: Option<u32>, code: u32) -> Result<Read> {
        let found = match first {
            None => match self.begins.get(code as usize) {
                Some(Begins::Word(word)) => Some(Read::Word(*word)),
                Some(Begins::Words { .. }) => Some(Read::First),
                _ => None,
            },
            Some(first) => match self.begins.get(first as usize) {
                Some(Begins::Words { seconds, words }) => {
                    seconds.binary_search(&code).ok().map(|at| Read::Word(words[at]))
                }
                _ => None,
            },
        };
        let expected = || match first {
            None => "a code that begins a word".to_owned(),
            Some(first) => format!("a code that follows {first}"),
        };
        found.ok_or_else(|| Error::config("codes", expected(), code))
    }

    /// Returns the words that a code begins: the word that it is by itself, or all that continue with a second code.
    pub(crate) fn words_of(&self, first: u32) -> Words<'_> {
        match &self.begins[first as usize] {
            Begins::Nothing => Words::WithTwoCodes { seconds: &[], words: &[] },
            Begins::Word(word) => Words::WithOneCode(*word),
            Begins::Words { seconds, words } => Words::WithTwoCodes { seconds, words },
        }
    }
}

/// A code that is read completes a word or begins one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// The code is the last one of this word.
    Word(u32),
    /// The code is the first of two.
    First,
}

/// A first code begins these words.
pub(crate) enum Words<'a> {
    /// The first code is this word by itself.
    WithOneCode(u32),
    /// `words[i]` is completed by `seconds[i]`.
    WithTwoCodes { seconds: &'a [u32], words: &'a [u32] },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_that_are_no_bijection_are_errors_that_name_the_word() {
        let error = |sequences: &[&[u32]]| Codebook::new(4, sequences).unwrap_err().to_string();
        assert!(error(&[&[0], &[0]]).contains("word 1"));
        assert!(error(&[&[0, 1], &[1, 0], &[0, 1]]).contains("word 2"));
        assert!(error(&[&[0, 1], &[0]]).contains("begins with"));
        assert!(error(&[&[0], &[0, 1]]).contains("begins with"));
        assert!(error(&[&[0, 4]]).contains("codes below 4"));
        assert!(error(&[&[1], &[]]).contains("one or two codes for word 1"));
        assert!(error(&[&[0, 1, 2]]).contains("one or two codes"));
        assert!(error(&[]).contains("words"));
    }

    #[test]
    fn codes_that_are_no_words_are_errors() {
        let book = Codebook::new(4, &[&[0][..], &[1, 2], &[1, 0]]).unwrap();
        assert_eq!(book.decode(&[1, 0, 0, 1, 2]).unwrap(), [2, 0, 1]);
        for (codes, expected) in [(&[3][..], "begins a word"), (&[1, 1], "follows 1"), (&[0, 1], "whole words")] {
            let error = book.decode(codes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(book.encode(&[0, 3]).unwrap_err().to_string().contains("below 3"));
        assert!(book.continuations(Some(3)).is_err() && book.continuations(Some(9)).is_err());
        assert_eq!(book.continuations(Some(0)).unwrap(), [0, 1]);
    }
}
