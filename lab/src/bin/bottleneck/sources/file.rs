//! A safetensors file that any program may have written, whose tensors have a row for each position.

use crate::source::{named, values};
use candle_core::{DType, Device, Tensor};
use lab::{layers::Checkpoint, Result};
use std::error::Error;
use std::path::Path;

/// How far the probabilities of a row may sum from one.
const TOLERANCE: f64 = 1e-3;

/// A file, with its path for the errors.
pub(super) struct File<'a> {
    path: &'a Path,
    content: Checkpoint,
}

/// The positions that are studied.
pub(super) struct Positions {
    all: usize,
    chosen: Vec<u32>,
}

impl Positions {
    /// Chooses `count` positions, evenly spaced.
    pub(super) fn spread(all: usize, count: usize) -> Self {
        let count = count.min(all);
        Self { all, chosen: (0..count).map(|i| (i * all / count) as u32).collect() }
    }

    /// Returns the chosen rows of a tensor `[positions, ..]`.
    pub(super) fn rows(&self, all: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(all.index_select(&Tensor::new(self.chosen.as_slice(), all.device())?, 0)?.to_dtype(dtype)?)
    }
}

impl<'a> File<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        Ok(Self { path, content: Checkpoint::load(path, &Device::Cpu)? })
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.content.tensors.contains_key(key)
    }

    pub(super) fn tensor(&self, key: &str) -> Result<&Tensor> {
        named(&self.content, self.path, key)
    }

    pub(super) fn error(&self, what: String) -> Box<dyn Error> {
        format!("{}: {what}", self.path.display()).into()
    }

    pub(super) fn unexpected(&self, key: &str, tensor: &Tensor, expected: &str) -> Box<dyn Error> {
        self.error(format!("{key} is {:?}, expected {expected}", tensor.dims()))
    }

    /// Returns the next tokens after the chosen positions.
    pub(super) fn targets(&self, key: &str, positions: &Positions, vocab: usize) -> Result<Vec<u32>> {
        let all = self.tensor(key)?;
        if all.elem_count() != positions.all {
            return Err(self.unexpected(key, all, &positions.all.to_string()));
        }
        let targets = positions.rows(&all.flatten_all()?, DType::I64)?.to_vec1::<i64>()?;
        let id = |&id: &i64| u32::try_from(id).ok().filter(|&id| (id as usize) < vocab).ok_or(id);
        let ids: std::result::Result<Vec<u32>, i64> = targets.iter().map(id).collect();
        ids.map_err(|id| self.error(format!("target {id} is not below vocab {vocab}")))
    }

    /// Fails if a chosen row `[.., ..]` of a tensor has NaN or an infinity.
    pub(super) fn check_finite(&self, key: &str, rows: &Tensor, positions: &Positions) -> Result<()> {
        for (i, row) in positions.chosen.iter().enumerate() {
            let values = values(&rows.get(i)?)?;
            if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                return Err(self.error(format!("row {row} of {key} has {value}, expected finite numbers")));
            }
        }
        Ok(())
    }

    /// Fails if the probabilities of a chosen row do not sum to one.
    pub(super) fn check_sums(&self, key: &str, log_probs: &Tensor, positions: &Positions, hint: &str) -> Result<()> {
        for (i, row) in positions.chosen.iter().enumerate() {
            let sum: f64 = values(&log_probs.get(i)?)?.iter().map(|value| value.exp()).sum();
            // NaN is not within it.
            let is_within = (sum - 1.0).abs() <= TOLERANCE;
            if !is_within {
                return Err(
                    self.error(format!("the probabilities in row {row} of {key} sum to {sum:.6}, expected 1{hint}"))
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::sources::open;
    use crate::sources::tests::{args, file, Temporary};
    use crate::study::{study, Study};
    use candle_core::D;

    pub(crate) const VOCAB: usize = 40;
    pub(crate) const WIDTH: usize = 7;

    pub(crate) fn random(shape: &[usize]) -> Tensor {
        Tensor::randn(0f64, 1.0, shape, &Device::Cpu).expect("draws")
    }

    pub(crate) fn log_softmax(logits: &Tensor) -> Tensor {
        candle_nn::ops::log_softmax(logits, D::Minus1).expect("normalises")
    }

    /// Returns the next tokens of 14 x 5 positions, more than are computed at a time.
    pub(crate) fn targets() -> Tensor {
        let ids = (0..70).map(|i| i * 3 % VOCAB as i64).collect();
        Tensor::from_vec::<_, i64>(ids, (14, 5), &Device::Cpu).expect("70 positions")
    }

    pub(crate) struct Decoder {
        weight: Tensor,
        bias: Tensor,
        path: Temporary,
    }

    impl Decoder {
        pub(crate) fn new(name: &str) -> Self {
            let (weight, bias) = (random(&[VOCAB, WIDTH]), random(&[VOCAB]));
            let path = file(&format!("{name}_decoder"), &[("w", &weight), ("b", &bias)]);
            Self { weight, bias, path }
        }

        /// Computes the logits [.., vocab] of contexts [.., d].
        pub(crate) fn logits(&self, contexts: &Tensor) -> Tensor {
            let transposed = self.weight.t().expect("a matrix");
            let logits = contexts.broadcast_matmul(&transposed).expect("fits");
            logits.broadcast_add(&self.bias).expect("fits")
        }

        /// Measures the decoder with a second file of these tensors.
        pub(crate) fn study(&self, states: &[(&str, &Tensor)], more: &[&str]) -> Result<Study> {
            let states = file(self.path.file_stem().and_then(|stem| stem.to_str()).expect("a text"), states);
            let flags = ["--weight", "w", "--bias", "b", "--hidden", states.to_str().expect("a text")];
            let args = args(&[&flags, more].concat(), &[&self.path]);
            open(&args).and_then(|sources| study(&sources[0], &args))
        }
    }

    /// Measures the tensor `p` of a file with these tensors.
    pub(crate) fn study_log_probs(name: &str, tensors: &[(&str, &Tensor)], more: &[&str]) -> Result<Study> {
        let path = file(name, tensors);
        let args = args(&[&["--log-probs", "p"], more].concat(), &[&path]);
        open(&args).and_then(|sources| study(&sources[0], &args))
    }

    pub(crate) fn assert_close(a: Option<f64>, b: Option<f64>) {
        let (a, b) = (a.expect("a number"), b.expect("a number"));
        assert!((a - b).abs() < 1e-9 * a.abs(), "{a} {b}");
    }

    pub(crate) fn assert_same(a: &Study, b: &Study) {
        assert_eq!((a.rank, a.contexts, a.vocab), (b.rank, b.contexts, b.vocab));
        assert_eq!(a.spectrum.values.len(), b.spectrum.values.len());
        for (x, y) in a.spectrum.values.iter().zip(&b.spectrum.values) {
            assert!((x - y).abs() < 1e-12 * a.spectrum.values[0], "{x} {y}");
        }
        assert_close(a.divergence, b.divergence);
        assert_close(a.perplexity, b.perplexity);
        assert_close(a.low_rank.first().map(|(_, perplexity)| *perplexity), b.low_rank.first().map(|pair| pair.1));
    }

    #[track_caller]
    pub(crate) fn assert_fails(result: Result<Study>, parts: &[&str]) {
        let error = result.err().expect("must fail").to_string();
        parts.iter().for_each(|part| assert!(error.contains(part), "{part:?} is not in: {error}"));
    }

    /// Returns the tensor with this value at the first place of a row.
    pub(crate) fn with(rows: &Tensor, row: usize, value: f64) -> Tensor {
        let mut values = rows.to_vec2::<f64>().expect("a matrix");
        values[row][0] = value;
        Tensor::new(values, &Device::Cpu).expect("copies")
    }
}
