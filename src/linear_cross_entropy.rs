//! The fused loss of a linear layer, for models that have the weight at hand.

use candle_core::Tensor;

use crate::error::Result;
use crate::loss::{Loss, LossOptions};
use crate::output_layer::OutputLayer;
use crate::softmax_head::SoftmaxHead;

/// The cross-entropy of a linear layer, without its logits: what `cross_entropy(linear(hidden), targets)` gives, and
/// its gradients, at the memory of one chunk of logits. The same as [`SoftmaxHead`] made from these tensors.
///
/// # Shapes
///
/// - hidden: `[.., hidden]`, f16, bf16, f32 or f64
/// - weight: `[vocab, hidden]`, of the same dtype; a variable, a view of one, or computed of some
/// - bias: `[vocab]`
/// - targets: `[..]`; u8, u32 or i64
///
/// # Errors
///
/// As for [`OutputLayer::loss`].
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
    SoftmaxHead::from_tensors(weight.clone(), bias.cloned())?.loss(hidden, targets, options)
}
