//! The most probable words and their log-probabilities.

use candle_core::Tensor;

use super::best::best;
use super::host;
use crate::backend::{self, accumulation_dtype, Distribution, Float, Visit};
use crate::mixture::Mixture;
use crate::{Error, Result};

/// The most probable words of each distribution, from [`OutputLayer::top_k`](crate::OutputLayer::top_k).
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
/// assert_eq!(top.tokens.to_vec2::<u32>()?, [[1, 3, 2], [1, 3, 2]]);
/// assert_eq!(top.log_probs.dims(), [2, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopK {
    /// `[.., k]`, u32: the most probable first; of equals the one with the lowest id.
    pub tokens: Tensor,
    /// `[.., k]`: their log-probabilities under the whole mixture, f32 (f64 for heads in f64). Not differentiable.
    pub log_probs: Tensor,
}

/// Looks for the k best.
struct Best {
    k: usize,
}

impl Visit for Best {
    type Output = Vec<(f64, u32)>;

    fn visit<F: Float>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<Self::Output> {
        if !distribution.is_valid() {
            return Err(Error::Distribution { position });
        }
        Ok(best(distribution, self.k).into_iter().map(|(log_prob, word)| (log_prob.f64(), word)).collect())
    }
}

impl Mixture {
    /// The `k` most probable words of each token; of equals the one with the lowest id.
    ///
    /// # Errors
    ///
    /// If `k` is not between 1 and the number of words, or a distribution is NaN.
    pub fn top_k(&self, k: usize) -> Result<TopK> {
        let operands = self.operands();
        let vocab = operands.sizes.vocab;
        if !(1..=vocab).contains(&k) {
            return Err(Error::config("k", format!("a number from 1 to vocab_size {vocab}"), k));
        }
        let shape = [self.leading(), &[k]].concat();
        if let Some((tokens, log_probs)) = backend::top_k(operands, k)? {
            // A NaN comes first.
            let position = host::matrix(&log_probs)?.iter().position(|row| row[0].is_nan());
            if let Some(position) = position {
                return Err(Error::Distribution { position });
            }
            return Ok(TopK {
                tokens: tokens.reshape(shape.as_slice())?,
                log_probs: log_probs.reshape(shape.as_slice())?,
            });
        }
        let found = backend::visit(operands, &Best { k })?;
        let device = operands.contexts.device();
        let tokens: Vec<u32> = found.iter().flatten().map(|word| word.1).collect();
        let log_probs: Vec<f64> = found.iter().flatten().map(|word| word.0).collect();
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        Ok(TopK {
            tokens: host::to_device(tokens, shape.as_slice(), device)?,
            log_probs: host::rounded(log_probs, &shape, dtype, device)?,
        })
    }
}
