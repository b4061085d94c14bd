//! Sums and means of log-probabilities over the positions of each sequence.

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::scores::Scores;
use crate::tensors::checks::{check_device, check_targets};
use crate::tensors::transfer::{number_like, sum_rows};

impl Scores {
    /// Sums the log-probabilities of the tokens of each sequence, which is the log-probability of the sequence if all
    /// of its tokens count. The scores are those of one token at each position. Differentiable; positions that do not
    /// count get a gradient of zero, even if their log-probability is minus infinity. A sequence without a position
    /// that counts has the sum 0.
    ///
    /// # Shapes
    ///
    /// - log_prob: `[batch, seq]`, the log-probabilities of these scores
    /// - mask: `[batch, seq]`; u8, u32 or i64, not zero where a position counts
    /// - returns `[batch]`, of the dtype of `log_prob`, in nats
    ///
    /// # Errors
    ///
    /// If the scores are not `[batch, seq]`, or the shape, dtype or device of the mask does not match.
    ///
    /// # Examples
    ///
    /// Two sequences of a vocabulary of 100 equally probable ids; the second begins with a prompt of one token:
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use mos_head::score::ScoreOptions;
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
    /// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
    /// let token_ids = Tensor::new(&[[3u32, 5, 7], [1, 0, 99]], &Device::Cpu)?;
    /// let mask = Tensor::new(&[[1u8, 1, 1], [0, 1, 1]], &Device::Cpu)?;
    /// let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
    /// let sums = scores.sum_by_sequence(&mask)?.to_vec1::<f32>()?;
    /// assert!((sums[0] + 3.0 * 100f32.ln()).abs() < 1e-4);
    /// assert!((sums[1] + 2.0 * 100f32.ln()).abs() < 1e-4);
    /// # Ok(())
    /// # }
    /// ```
    pub fn sum_by_sequence(&self, mask: &Tensor) -> Result<Tensor> {
        let batch = self.check_sequences(mask)?;
        let log_prob = &self.log_prob;
        if log_prob.elem_count() == 0 {
            // candle's GPU backends do not reduce empty tensors.
            return Ok(Tensor::zeros(batch, log_prob.dtype(), log_prob.device())?);
        }
        sum_rows(&mask.ne(0f64)?.where_cond(log_prob, &log_prob.zeros_like()?)?)
    }

    /// Computes the mean log-probability of the tokens of each sequence: the sum, as [`Scores::sum_by_sequence`]
    /// returns it, divided by the number of positions that count. A sequence without one has the mean 0.
    /// Differentiable.
    ///
    /// # Shapes
    ///
    /// - log_prob: `[batch, seq]`, the log-probabilities of these scores
    /// - mask: `[batch, seq]`; u8, u32 or i64, not zero where a position counts
    /// - returns `[batch]`, of the dtype of `log_prob`, in nats per token
    ///
    /// # Errors
    ///
    /// The errors of [`Scores::sum_by_sequence`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use mos_head::score::ScoreOptions;
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
    /// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
    /// let token_ids = Tensor::new(&[[3u32, 5, 7], [1, 0, 99]], &Device::Cpu)?;
    /// let mask = Tensor::new(&[[0u8, 1, 1], [0, 0, 0]], &Device::Cpu)?;
    /// let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
    /// let means = scores.mean_by_sequence(&mask)?.to_vec1::<f32>()?;
    /// assert!((means[0] + 100f32.ln()).abs() < 1e-5);
    /// assert_eq!(means[1], 0.0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn mean_by_sequence(&self, mask: &Tensor) -> Result<Tensor> {
        let sums = self.sum_by_sequence(mask)?;
        if mask.elem_count() == 0 {
            return Ok(sums);
        }
        let lengths = sum_rows(&mask.ne(0f64)?.to_dtype(sums.dtype())?)?;
        Ok((sums / lengths.broadcast_maximum(&number_like(&lengths, 1.0)?)?)?)
    }

    /// Checks that the scores are those of one token at each position of some sequences, and that the mask fits them.
    /// Returns the number of sequences.
    fn check_sequences(&self, mask: &Tensor) -> Result<usize> {
        let &[batch, _] = self.log_prob.dims() else {
            return Err(Error::shape("log_prob", "[batch, seq]", self.log_prob.dims()));
        };
        check_targets("mask", mask, self.log_prob.dims())?;
        check_device("mask", mask, &self.log_prob)?;
        Ok(batch)
    }
}
