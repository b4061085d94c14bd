//! Ranks the most probable token ids of a distribution, with their log-probabilities.

use candle_core::{DType, Device, Tensor};

use crate::backend::ranking::{tensors, Ranked, TopKQuery};
use crate::error::{Error, Result};
use crate::tensors::transfer;

/// The most probable token ids at each position, from [`OutputLayer::top_k`](crate::OutputLayer::top_k).
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::new(&[[0f32], [3.], [1.], [2.]], &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight, None)?;
/// let top = head.top_k(&Tensor::ones((2, 1), DType::F32, &Device::Cpu)?, 3)?;
/// assert_eq!(top.token_ids.to_vec2::<u32>()?, [[1, 3, 2], [1, 3, 2]]);
/// assert_eq!(top.log_probs.dims(), [2, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopK {
    /// `[.., k]`, u32: token ids, the most probable first; among equals the lowest id comes first.
    pub token_ids: Tensor,
    /// `[.., k]`: their log-probabilities in nats, f32 (f64 for heads in f64). They are not differentiable.
    pub log_probs: Tensor,
}

impl TopK {
    /// Ranks the `k` most probable token ids of log-probabilities `[.., vocab]`, in nats, for distributions from
    /// outside this crate.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[.., vocab]`, a float type
    /// - returns ids, u32, and log-probabilities, `[.., k]` each
    ///
    /// # Errors
    ///
    /// If `k` is not between 1 and the size of the vocabulary; [`Error::Distribution`] if a log-probability is NaN or
    /// plus infinity, [`Error::Value`] if one is above zero by more than rounding, and [`Error::Impossible`] if all
    /// those of a position are minus infinity.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::decode::TopK;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let log_probs = Tensor::new(&[[0.1f32, 0.6, 0.3]], &Device::Cpu)?.log()?;
    /// assert_eq!(TopK::from_log_probs(&log_probs, 2)?.token_ids.to_vec2::<u32>()?, [[1, 2]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_log_probs(log_probs: &Tensor, k: usize) -> Result<Self> {
        Self::from_rounded(log_probs, log_probs.dtype(), k)
    }

    /// Ranks as [`TopK::from_log_probs`] does, log-probabilities that were rounded to the dtype `rounded` before they
    /// were given in another one.
    pub(crate) fn from_rounded(log_probs: &Tensor, rounded: DType, k: usize) -> Result<Self> {
        let dims = log_probs.dims();
        let &[ref leading @ .., vocab] = dims else { return Err(Error::shape("log_probs", "[.., vocab]", dims)) };
        Self::check_k(k, vocab)?;
        let found = super::log_probs::visit(log_probs, rounded, &TopKQuery { k })?;
        let dtype = transfer::accurate_dtype(log_probs);
        Self::from_ranked(&found, &[leading, &[k]].concat(), dtype, log_probs.device())
    }

    /// Makes tensors of this shape from the ranked ids of each position, with log-probabilities in this dtype.
    pub(crate) fn from_ranked(found: &[Vec<Ranked>], shape: &[usize], dtype: DType, device: &Device) -> Result<Self> {
        let (token_ids, log_probs) = tensors(found, shape, dtype, device)?;
        Ok(TopK { token_ids, log_probs })
    }

    /// Checks that `k` is from 1 to the size of the vocabulary.
    pub(crate) fn check_k(k: usize, vocab: usize) -> Result<()> {
        if (1..=vocab).contains(&k) {
            Ok(())
        } else {
            Err(Error::config("k", format!("a number from 1 to vocab_size {vocab}"), k))
        }
    }
}
