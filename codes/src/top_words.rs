//! This file finds the most probable words under a model of codes, without a step of the model after every first code.

use candle_core::{DType, Tensor};

use crate::checks::check_sizes;
use crate::codebook::{Codebook, Words};
use crate::error::{Error, Result};
use crate::transfer::{rounded, to_device};

/// The result of [`Codebook::top_words`]: the most probable words of each position, by falling log-probability.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopWords {
    /// The words `[positions, k]`, in u32.
    pub words: Tensor,
    /// Their log-probabilities `[positions, k]`, in nats: in f64 if those of the codes are in f64, and in f32
    /// otherwise.
    pub log_probs: Tensor,
}

/// The number of first codes of a position that are tried in one step of the model.
const FIRSTS_PER_STEP: usize = 4;

impl Codebook {
    /// Returns the `k` most probable words of each position and their log-probabilities in nats. Among equals the
    /// lowest id comes first. The arguments mean the same as in [`Codebook::word_log_probs`], but `second` is called
    /// several times, until no other first code is as probable as the words that are found.
    ///
    /// # Shapes
    ///
    /// - first: `[positions, codes]`
    /// - returns `[positions, k]`
    ///
    /// # Errors
    ///
    /// If shapes do not match, `k` is zero or above the number of words, a log-probability is NaN or plus infinity, or
    /// `second` fails.
    pub fn top_words<E: From<Error>>(
        &self,
        first: &Tensor,
        k: usize,
        mut second: impl FnMut(&Tensor, &Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<TopWords, E> {
        check_sizes(&[("k", k)])?;
        if k > self.word_count() {
            return Err(Error::config("k", format!("at most {}, the number of words", self.word_count()), k).into());
        }
        let device = first.device();
        let dtype = if first.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let first = self.log_prob_rows("first", first, first.dims().first().copied().unwrap_or(0))?;
        let searches = first.iter().enumerate().map(|(position, row)| Search::new(self, row, position));
        let mut searches = searches.collect::<Result<Vec<_>>>()?;
        loop {
            let tried = searches.iter_mut().enumerate().flat_map(|(position, search)| {
                let codes = search.next_codes(k).into_iter();
                codes.map(move |(log_prob, code)| (position, code, log_prob)).collect::<Vec<_>>()
            });
            let tried: Vec<(usize, u32, f64)> = tried.collect();
            if tried.is_empty() {
                break;
            }
            let firsts: Vec<(usize, u32)> = tried.iter().map(|&(position, code, _)| (position, code)).collect();
            let rows = self.second_rows(&firsts, device, &mut second)?;
            for ((position, code, log_prob), row) in tried.into_iter().zip(rows) {
                check_numbers(&row, position)?;
                if let Words::WithTwoCodes { seconds, words } = self.words_of(code) {
                    let words =
                        seconds.iter().zip(words).map(|(&second, &word)| (log_prob + row[second as usize], word));
                    searches[position].found.extend(words);
                }
            }
        }
        let shape = (searches.len(), k);
        let found = || searches.iter().flat_map(|search| &search.found);
        Ok(TopWords {
            words: to_device(found().map(|(_, word)| *word).collect(), shape, device)?,
            log_probs: rounded(found().map(|(log_prob, _)| *log_prob).collect(), &[shape.0, shape.1], dtype, device)?,
        })
    }
}

/// A search finds the most probable words of one position.
struct Search {
    /// The words whose log-probability is known, with it.
    found: Vec<(f64, u32)>,
    /// The first codes of the other words, the most probable first.
    open: std::vec::IntoIter<(f64, u32)>,
}

impl Search {
    /// Begins the search with the log-probabilities of the first codes.
    fn new(book: &Codebook, firsts: &[f64], position: usize) -> Result<Self> {
        check_numbers(firsts, position)?;
        let (mut found, mut open) = (Vec::new(), Vec::new());
        for &code in book.continuations(None)? {
            let log_prob = firsts[code as usize];
            match book.words_of(code) {
                Words::WithOneCode(word) => found.push((log_prob, word)),
                // An impossible first code needs no step of the model.
                Words::WithTwoCodes { words, .. } if log_prob == f64::NEG_INFINITY => {
                    found.extend(words.iter().map(|word| (log_prob, *word)));
                }
                Words::WithTwoCodes { .. } => open.push((log_prob, code)),
            }
        }
        open.sort_by(by_falling_log_prob);
        Ok(Search { found, open: open.into_iter() })
    }

    /// Keeps the `k` most probable of the words that are known. Returns the next first codes, whose words may be among
    /// the `k` most probable ones.
    fn next_codes(&mut self, k: usize) -> Vec<(f64, u32)> {
        self.found.sort_by(by_falling_log_prob);
        self.found.truncate(k);
        // No word is more probable than its first code.
        let least = self.found.get(k - 1).map(|(log_prob, _)| *log_prob);
        let may_win = |first: f64| least.is_none_or(|least| first >= least);
        let count = self.open.as_slice().iter().take(FIRSTS_PER_STEP).take_while(|(first, _)| may_win(*first)).count();
        self.open.by_ref().take(count).collect()
    }
}

/// Orders words or codes by falling log-probability. Among equals the lowest comes first.
fn by_falling_log_prob(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Checks that no log-probability is NaN or plus infinity.
fn check_numbers(log_probs: &[f64], position: usize) -> Result<()> {
    if log_probs.iter().any(|log_prob| log_prob.is_nan() || *log_prob == f64::INFINITY) {
        Err(Error::Distribution { position })
    } else {
        Ok(())
    }
}
