//! The logits of a mixture of one softmax.

use candle_core::Tensor;

use super::Mixture;
use crate::backend::frozen_linear::frozen_linear;
use crate::backend::weight::Weight;
use crate::error::{Error, Result};
use crate::tensors::linear::with_shape;

impl Mixture {
    /// Computes the logits of one softmax `[.., vocab]` in the dtype of the contexts, after bias, scale and logit
    /// function, for samplers and processors that expect logits. They are candle's product of contexts and decoder, and
    /// differentiable. A mixture of several softmaxes has no logits; its [`log_probs`](crate::Distributions::log_probs)
    /// are logits of the same distribution.
    ///
    /// # Shapes
    ///
    /// - returns `[.., vocab]`
    ///
    /// # Errors
    ///
    /// If there are several components.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, D};
    /// use candle_nn::ops::log_softmax;
    /// use mos_head::{Distributions, Mixture};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Tensor::randn(0f32, 1., (2, 1, 8), &Device::Cpu)?; // 2 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?; // 100 token ids
    /// let mixture = Mixture::new(&contexts, None, &weight, None)?.with_softcap(30.0)?;
    /// let log_probs = log_softmax(&mixture.logits()?, D::Minus1)?;
    /// let difference = (log_probs - mixture.log_probs()?)?.abs()?.max_all()?.to_scalar::<f32>()?;
    /// assert!(difference < 1e-4);
    /// # Ok(())
    /// # }
    /// ```
    pub fn logits(&self) -> Result<Tensor> {
        let operands = &self.operands;
        let sizes = operands.sizes;
        if sizes.components > 1 {
            return Err(Error::config("components", "one softmax, which has logits", sizes.components));
        }
        let shape = [&self.leading[..], &[sizes.vocab]].concat();
        if sizes.positions == 0 {
            return Ok(Tensor::zeros(shape, operands.contexts.dtype(), operands.contexts.device())?);
        }
        let contexts = operands.contexts.squeeze(1)?;
        let adapter_columns = operands.adapter_columns()?;
        let weight_contexts = contexts.narrow(1, 0, adapter_columns.start)?.contiguous()?;
        let mut z = match &operands.weight {
            Weight::Dense(weight) => weight_contexts.matmul(&weight.t()?)?,
            Weight::Quantised(matrix) => frozen_linear(&weight_contexts, None, matrix)?,
        };
        if let Some(adapter) = &operands.adapter {
            let contexts = contexts.narrow(1, adapter_columns.start, adapter_columns.len())?.contiguous()?;
            z = (z + contexts.matmul(&adapter.t()?)?)?;
        }
        with_shape(&operands.finish_logits(z, operands.bias.clone())?, &shape)
    }
}
