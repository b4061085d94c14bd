//! This file computes the log-probabilities of words under a model of codes.

use candle_core::{Device, Tensor};

use crate::checks::{check_float, MOST_ELEMENTS};
use crate::codebook::Codebook;
use crate::error::{Error, Result};
use crate::transfer::matrix;

impl Codebook {
    /// Computes the log-probability of a word at each position, in nats.
    ///
    /// `first` has the log-probabilities of the first codes, in nats. `second(positions, codes)` takes the step of the
    /// model that reads a first code: it returns the log-probabilities of the second codes after these codes at these
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
    /// If shapes do not match, a word is not in the codebook, or `second` fails.
    pub fn word_log_probs<E: From<Error>>(
        &self,
        words: &[u32],
        first: &Tensor,
        second: impl FnOnce(&Tensor, &Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Vec<f64>, E> {
        let device = first.device();
        let first = self.log_prob_rows("first", first, words.len())?;
        let check_word = |(index, word): (usize, &u32)| self.codes_of(*word).map_err(|error| error.at_index(index));
        let codes = words.iter().enumerate().map(check_word).collect::<Result<Vec<_>>>()?;
        let mut log_probs: Vec<f64> = first.iter().zip(&codes).map(|(row, codes)| row[codes[0] as usize]).collect();
        let firsts: Vec<(usize, u32)> =
            codes.iter().enumerate().filter(|(_, codes)| codes.len() > 1).map(|(i, codes)| (i, codes[0])).collect();
        for ((position, _), row) in firsts.iter().zip(self.second_rows(&firsts, device, second)?) {
            log_probs[*position] += row[codes[*position][1] as usize];
        }
        Ok(log_probs)
    }

    /// Computes the log-probabilities of the second codes after these first codes at these positions.
    pub(crate) fn second_rows<E: From<Error>>(
        &self,
        firsts: &[(usize, u32)],
        device: &Device,
        second: impl FnOnce(&Tensor, &Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Vec<Vec<f64>>, E> {
        if firsts.is_empty() {
            return Ok(Vec::new());
        }
        let positions =
            Tensor::from_iter(firsts.iter().map(|(position, _)| *position as u32), device).map_err(Error::from)?;
        let codes = Tensor::from_iter(firsts.iter().map(|(_, code)| *code), device).map_err(Error::from)?;
        Ok(self.log_prob_rows("the result of second", &second(&positions, &codes)?, firsts.len())?)
    }

    /// Checks log-probabilities of codes, and returns them row by row.
    pub(crate) fn log_prob_rows(
        &self,
        argument: &'static str,
        log_probs: &Tensor,
        rows: usize,
    ) -> Result<Vec<Vec<f64>>> {
        if log_probs.dims() != [rows, self.code_count()] {
            return Err(Error::shape(argument, format!("[{rows}, {}]", self.code_count()), log_probs.dims()));
        }
        check_float(argument, log_probs)?;
        if rows.checked_mul(self.code_count()).is_none_or(|elements| elements > MOST_ELEMENTS) {
            return Err(Error::shape(argument, format!("of at most {MOST_ELEMENTS} elements"), log_probs.dims()));
        }
        if rows == 0 {
            return Ok(Vec::new());
        }
        matrix(log_probs)
    }
}
