//! Finds the most probable words under a model of codes, without a step of the model after every first code.

use candle_core::{DType, Tensor};

use crate::checks::check_sizes;
use crate::codebook::{Codebook, Words};
use crate::error::{Error, Result};
use crate::transfer::{rounded, to_device};

/// The most probable words of each position, by falling log-probability.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopWords {
    /// `[positions, k]`, u32
    pub words: Tensor,
    /// `[positions, k]`, in nats: f64 for log-probabilities of codes in f64, f32 otherwise
    pub log_probs: Tensor,
}

/// How many first codes of a position are tried at a time.
const TRIED: usize = 4;

impl Codebook {
    /// The `k` most probable words of each position and their log-probabilities in nats; among equals the lowest id
    /// comes first. The arguments mean what they mean in [`Codebook::word_log_probs`]; `second` is called until no
    /// other first code is as probable as the words found.
    ///
    /// # Shapes
    ///
    /// - first: `[positions, codes]`
    /// - returns `[positions, k]`
    ///
    /// # Errors
    ///
    /// If shapes do not match, `k` is zero or above the number of words, a log-probability is NaN or infinite, or
    /// `second` fails.
    pub fn top_words<E: From<Error>>(
        &self,
        first: &Tensor,
        k: usize,
        mut second: impl FnMut(&Tensor, &Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<TopWords, E> {
        check_sizes(&[("k", k)])?;
        if k > self.words() {
            return Err(Error::config("k", format!("at most {}, the number of words", self.words()), k).into());
        }
        let device = first.device();
        let dtype = if first.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let first = self.rows("first", first, first.dims().first().copied().unwrap_or(0))?;
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
                if let Words::Two(seconds, words) = self.words_of(code) {
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

/// The search at one position.
struct Search {
    /// Words that are known, with their log-probabilities.
    found: Vec<(f64, u32)>,
    /// First codes of other words, the most probable first.
    open: std::vec::IntoIter<(f64, u32)>,
}

impl Search {
    /// `row` has the log-probabilities of the first codes.
    fn new(book: &Codebook, row: &[f64], position: usize) -> Result<Self> {
        check_numbers(row, position)?;
        let (mut found, mut open) = (Vec::new(), Vec::new());
        for &code in book.continuations(None)? {
            let log_prob = row[code as usize];
            match book.words_of(code) {
                Words::One(word) => found.push((log_prob, word)),
                // What is impossible needs no step of the model.
                Words::Two(_, words) if log_prob == f64::NEG_INFINITY => {
                    found.extend(words.iter().map(|word| (log_prob, *word)));
                }
                Words::Two(..) => open.push((log_prob, code)),
            }
        }
        open.sort_by(best_first);
        Ok(Search { found, open: open.into_iter() })
    }

    /// Keeps the `k` best of the words that are known; returns the next first codes whose words may be among the best.
    fn next_codes(&mut self, k: usize) -> Vec<(f64, u32)> {
        self.found.sort_by(best_first);
        self.found.truncate(k);
        // No word is more probable than its first code.
        let least = self.found.get(k - 1).map(|(log_prob, _)| *log_prob);
        let may_win = |first: f64| least.is_none_or(|least| first >= least);
        let count = self.open.as_slice().iter().take(TRIED).take_while(|(first, _)| may_win(*first)).count();
        self.open.by_ref().take(count).collect()
    }
}

/// Orders words or codes by falling log-probability; among equals the lowest comes first.
fn best_first(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

fn check_numbers(log_probs: &[f64], position: usize) -> Result<()> {
    if log_probs.iter().any(|log_prob| log_prob.is_nan() || *log_prob == f64::INFINITY) {
        Err(Error::Distribution { position })
    } else {
        Ok(())
    }
}
