//! The options that losses and distillations share: which positions count, with which weights, and how the objectives of
//! the positions become one value.

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::tensors::checks::check_number;

/// The reduction of the losses of the positions to one value.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{LossOptions, OutputLayer, Reduction, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?; // [batch, seq]
/// let loss = head.loss(&hidden, &targets, &LossOptions::new().with_reduction(Reduction::None))?;
/// assert_eq!(loss.value.dims(), [2, 3]); // each is the logarithm of 100
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reduction {
    /// The weighted mean: the sum divided by [`Loss::count`](crate::Loss::count). Zero if the weights sum to zero.
    ///
    /// Do not use it with weights of both signs, such as advantages: their sum may be close to zero, or negative, which
    /// makes value and gradients huge, or flips their sign. Use [`Reduction::Sum`] and divide by the number of
    /// positions.
    #[default]
    Mean,
    /// The weighted sum.
    Sum,
    /// One loss per position. The gradients are computed in the backward pass, when the upstream gradient is known, so
    /// that the logits are computed twice. To weight positions, [`LossOptions::with_position_weights`](crate::LossOptions::with_position_weights) is cheaper.
    None,
}

/// Which positions count in an objective, with which weights and denominator. The default is the mean over all positions.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PositionOptions {
    /// The target of positions that are ignored. The default is none.
    pub ignore_index: Option<i64>,
    /// The weights of the positions, `[..]`. The default is one for each.
    pub position_weights: Option<Tensor>,
    /// The reduction. The default is the mean.
    pub reduction: Reduction,
    /// The denominator of the mean, in place of the sum of the weights. The default is none.
    pub denominator: Option<f64>,
}

impl PositionOptions {
    /// Checks the denominator.
    pub(super) fn validate(&self) -> Result<()> {
        let Some(denominator) = self.denominator else { return Ok(()) };
        check_number(denominator > 0.0 && denominator.is_finite(), "denominator", "finite, above 0", denominator)?;
        if self.reduction != Reduction::Mean {
            return Err(Error::config("denominator", "the reduction to a mean", format!("{:?}", self.reduction)));
        }
        Ok(())
    }
}
