//! Distributions that are given as log-probabilities, such as those of a head of the user's own.

use candle_core::{DType, Tensor, D};

use super::{Distributions, Sealed};
use crate::decoding::Sampler;
use crate::error::{Error, Result};
use crate::loss::{Loss, OutputShape, Request};
use crate::tensors::transfer::select_positions;

/// Distributions that are given as log-probabilities. Every result is computed from them.
pub(crate) struct GivenLogProbs {
    /// `[.., vocab]`
    log_probs: Tensor,
    /// A tensor of the dtype that the log-probabilities may have been rounded to.
    like: Tensor,
    name: &'static str,
}

impl GivenLogProbs {
    /// Takes log-probabilities `[.., vocab]`, of a head with this name, which may have been rounded to the dtype of
    /// `like`.
    pub(crate) fn new(log_probs: Tensor, like: Tensor, name: &'static str) -> Result<Self> {
        match log_probs.rank() {
            0 => Err(Error::shape("log_probs", "[.., vocab]", log_probs.dims())),
            _ => Ok(GivenLogProbs { log_probs, like, name }),
        }
    }
}

impl Sealed for GivenLogProbs {
    fn shape(&self) -> OutputShape<'_> {
        let (vocab, leading) = self.log_probs.dims().split_last().unwrap_or((&0, &[]));
        OutputShape { leading, vocab: *vocab, like: &self.like }
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn select(&self, positions: &[u32]) -> Result<Box<dyn Distributions + '_>> {
        let log_probs = select_positions(&self.log_probs, positions)?;
        Ok(Box::new(GivenLogProbs { log_probs, like: self.like.clone(), name: self.name }))
    }
}

impl Distributions for GivenLogProbs {
    fn request_loss(&self, request: &Request) -> Result<Loss> {
        request.check_support(self.name, &[])?;
        request.positions.read_ids(self.shape().vocab)?;
        let ids = request.target_ids()?.unsqueeze(D::Minus1)?;
        let log_prob = self.log_probs.contiguous()?.gather(&ids, D::Minus1)?.squeeze(D::Minus1)?;
        request.loss_from_nll(&log_prob.affine(-1.0, 0.0)?)
    }

    fn log_probs_as(&self, dtype: DType) -> Result<Tensor> {
        Ok(self.log_probs.to_dtype(dtype)?)
    }

    fn sample(&self, sampler: &mut Sampler) -> Result<Tensor> {
        sampler.reject_components(self.name)?;
        sampler.sample_rounded(&self.log_probs, self.like.dtype())
    }
}
