//! Words under a model of codes: their log-probabilities, and the most probable ones.

use candle_core::{Device, Tensor};

use super::codebook::{Codebook, Words};
use crate::decoding::transfer::{matrix, to_device};
use crate::decoding::TopK;
use crate::error::{Error, Result};
use crate::validate::{check_float, check_sizes};

/// First codes of a position that are tried at a time, in the search for its most probable words.
const TRIED: usize = 4;

impl Codebook {
    /// The log-probability of a word at each position, in nats.
    ///
    /// `first` are the log-probabilities of the first codes. `second(positions, codes)` takes the step of the model
    /// that reads a first code: it returns the log-probabilities of the second codes after these codes at these
    /// positions. Positions whose word has one code take no step.
    ///
    /// # Shapes
    ///
    /// - words: one for each position
    /// - first: `[positions, codes]`
    /// - positions, codes of `second`: `[n]`, u32; its result: `[n, codes]`
    ///
    /// # Errors
    ///
    /// If shapes do not match, a word is not in the book, or `second` fails.
    pub fn word_log_probs(
        &self,
        words: &[u32],
        first: &Tensor,
        second: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<f64>> {
        let device = first.device();
        let first = self.rows("first", first, words.len())?;
        let codes = words.iter().map(|word| self.codes_of(*word)).collect::<Result<Vec<_>>>()?;
        let mut log_probs: Vec<f64> = first.iter().zip(&codes).map(|(row, codes)| row[codes[0] as usize]).collect();
        let two: Vec<(usize, u32)> =
            codes.iter().enumerate().filter(|(_, codes)| codes.len() > 1).map(|(i, codes)| (i, codes[0])).collect();
        for ((position, _), row) in two.iter().zip(self.second_rows(&two, device, second)?) {
            log_probs[*position] += row[codes[*position][1] as usize];
        }
        Ok(log_probs)
    }

    /// The `k` most probable words of each position; of equals the lowest. Arguments as those of
    /// [`Codebook::word_log_probs`]; `second` is called until no other first code is as probable as the words found.
    ///
    /// # Shapes
    ///
    /// - first: `[positions, codes]`
    /// - returns `[positions, k]`
    ///
    /// # Errors
    ///
    /// If shapes do not match, `k` is zero or above the number of words, a log-probability is NaN, or `second` fails.
    pub fn top_words(
        &self,
        first: &Tensor,
        k: usize,
        mut second: impl FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<TopK> {
        check_sizes(&[("k", k)])?;
        if k > self.words() {
            return Err(Error::config("k", format!("at most {}, the number of words", self.words()), k));
        }
        let device = first.device();
        let first = self.rows("first", first, first.dims().first().copied().unwrap_or(0))?;
        let mut found: Vec<Vec<(f64, u32)>> = vec![Vec::new(); first.len()];
        let mut open: Vec<std::vec::IntoIter<(f64, u32)>> = Vec::with_capacity(first.len());
        for (position, row) in first.iter().enumerate() {
            if row.iter().any(|x| x.is_nan()) {
                return Err(Error::Distribution { position });
            }
            let mut codes = Vec::new();
            for &code in self.continuations(None)? {
                match self.words_of(code) {
                    Words::One(word) => found[position].push((row[code as usize], word)),
                    Words::Two(..) => codes.push((row[code as usize], code)),
                }
            }
            codes.sort_by(best_first);
            open.push(codes.into_iter());
        }
        loop {
            let mut tried = Vec::new();
            for (position, (open, found)) in open.iter_mut().zip(&mut found).enumerate() {
                found.sort_by(best_first);
                found.truncate(k);
                // A word is not more probable than its first code.
                let least = if found.len() == k { found[k - 1].0 } else { f64::NEG_INFINITY };
                let worth =
                    open.as_slice().iter().take(TRIED).take_while(|(log_prob, _)| {
                        found.len() < k || *log_prob >= least && *log_prob > f64::NEG_INFINITY
                    });
                let count = worth.count();
                tried.extend(open.take(count).map(|(log_prob, code)| (position, log_prob, code)));
            }
            if tried.is_empty() {
                break;
            }
            let rows: Vec<(usize, u32)> = tried.iter().map(|&(position, _, code)| (position, code)).collect();
            for (&(position, of_first, code), row) in tried.iter().zip(self.second_rows(&rows, device, &mut second)?) {
                if row.iter().any(|x| x.is_nan()) {
                    return Err(Error::Distribution { position });
                }
                if let Words::Two(seconds, words) = self.words_of(code) {
                    found[position].extend(seconds.iter().zip(words).map(|(&s, &w)| (of_first + row[s as usize], w)));
                }
            }
        }
        let shape = (found.len(), k);
        let tokens: Vec<u32> = found.iter().flatten().map(|(_, word)| *word).collect();
        let log_probs: Vec<f32> = found.iter().flatten().map(|(log_prob, _)| *log_prob as f32).collect();
        Ok(TopK { tokens: to_device(tokens, shape, device)?, log_probs: to_device(log_probs, shape, device)? })
    }

    /// Log-probabilities of the second codes after these first codes at these positions.
    fn second_rows(
        &self,
        firsts: &[(usize, u32)],
        device: &Device,
        second: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Vec<f64>>> {
        if firsts.is_empty() {
            return Ok(Vec::new());
        }
        let positions = Tensor::from_iter(firsts.iter().map(|(position, _)| *position as u32), device)?;
        let codes = Tensor::from_iter(firsts.iter().map(|(_, code)| *code), device)?;
        self.rows("the result of second", &second(&positions, &codes)?, firsts.len())
    }

    /// Log-probabilities of codes, checked.
    fn rows(&self, argument: &'static str, log_probs: &Tensor, rows: usize) -> Result<Vec<Vec<f64>>> {
        if log_probs.dims() != [rows, self.codes()] {
            return Err(Error::shape(argument, format!("[{rows}, {}]", self.codes()), log_probs.dims()));
        }
        check_float(argument, log_probs)?;
        if rows == 0 {
            return Ok(Vec::new());
        }
        matrix(log_probs)
    }
}

/// The order of words or codes by their log-probabilities; of equals the lowest first.
fn best_first(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}
