//! The fused loss of a linear layer, for models that have the weight at hand.

use candle_core::Tensor;

use super::Distributions;
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions};
use crate::mixture::Mixture;
use crate::tensors::checks::{check_elements, check_float, check_hidden, check_targets, leading};

/// Computes the cross-entropy of a linear layer, `cross_entropy(linear(hidden), targets)`, and its gradients, with one
/// chunk of logits in memory at a time. It is the loss of a [`SoftmaxHead`](crate::SoftmaxHead) made from these
/// tensors.
///
/// # Shapes
///
/// - hidden: `[.., hidden]`, f16, bf16, f32 or f64
/// - weight: `[vocab, hidden]`, of the same dtype; a variable, a view of one, or computed from variables
/// - bias: `[vocab]`
/// - targets: `[..]`; u8, u32 or i64
///
/// # Errors
///
/// The errors are those of [`OutputLayer::loss`](crate::OutputLayer::loss).
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use mos_head::{linear_cross_entropy, LossOptions};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Var::randn(0f32, 0.1, (1000, 64), &Device::Cpu)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 7, 64), &Device::Cpu)?;
/// let targets = Tensor::zeros((2, 7), DType::U32, &Device::Cpu)?;
/// let loss = linear_cross_entropy(&hidden, &weight, None, &targets, &LossOptions::default())?;
/// assert!(loss.backward()?.get(&weight).is_some());
/// # Ok(())
/// # }
/// ```
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    options: &LossOptions,
) -> Result<Loss> {
    let &[_, width] = weight.dims() else {
        return Err(Error::shape("weight", "[vocab, hidden]", weight.dims()));
    };
    check_elements("weight", weight.dims())?;
    check_float("weight", weight)?;
    check_hidden(hidden, width, || format!("weight {:?}", weight.dims()), weight)?;
    check_targets("targets", targets, leading(hidden)?)?;
    Mixture::new(&hidden.unsqueeze(hidden.rank() - 1)?, None, weight, bias)?.loss(targets, options)
}
