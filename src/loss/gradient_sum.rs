//! Gradient accumulation: the gradients of several losses are added up, with memory for one gradient.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::Tensor;

use super::results::Loss;
use crate::backend::objective::GradientSoFar;
use crate::error::Result;

/// The sum of the gradients of several losses, such as the losses of the batches of one optimizer step.
///
/// candle's [`GradStore::extend`] adds two stores, which holds the decoder's gradient three times for a moment. A loss
/// that is asked with the sum ([`LossOptions::with_gradient_sum`](crate::LossOptions::with_gradient_sum)) takes the
/// decoder's gradient so far, and its kernels add to it in place: there is one (with CUDA, where it is in half
/// precision, a copy in f32 for the time of the loss). The decoder's weight must be a variable itself (not the
/// transpose or another function of one), the reduction a mean or a sum, and the loss over the whole vocabulary;
/// otherwise, and for all other variables, gradients are added as candle does.
///
/// A loss that was asked with a sum has taken the decoder's gradient out of it: unless the loss is added to the sum,
/// this gradient is lost.
///
/// # Examples
///
/// The mean over the targets of three batches:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
/// use mos_head::{GradientSum, LossOptions, OutputLayer, SoftmaxConfig, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = SoftmaxHead::new(&SoftmaxConfig::new(8, 100), vb)?;
/// let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW::default())?;
///
/// let batches = [[1u32, 2, 0], [3, 0, 0], [4, 5, 6]]; // 0 is ignored
/// let targets = batches.iter().flatten().filter(|id| **id != 0).count();
/// let sum = GradientSum::new();
/// let options = LossOptions::new().with_ignore_index(0).with_denominator(targets as f64).with_gradient_sum(&sum);
/// let mut mean = 0.0;
/// for ids in batches {
///     let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
///     let loss = head.loss(&hidden, &Tensor::new(&ids, &Device::Cpu)?, &options)?;
///     mean += loss.value.to_scalar::<f32>()?;
///     sum.add(&loss)?;
/// }
/// optimizer.step(&sum.take())?;
/// println!("{mean} nats per target");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct GradientSum(Arc<Mutex<GradStore>>);

impl GradientSum {
    /// Makes a sum without gradients. Its clones share the sum.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradients of a loss, as [`Loss::backward`] returns them.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Loss::backward`].
    pub fn add(&self, loss: &Loss) -> Result<()> {
        let gradients = loss.backward()?;
        Ok(self.lock().extend(gradients)?)
    }

    /// Takes the gradients out, for an optimizer, and leaves an empty sum.
    pub fn take(&self) -> GradStore {
        std::mem::take(&mut *self.lock())
    }

    /// Locks the gradients. After a panic of another thread they are used as they are.
    fn lock(&self) -> MutexGuard<'_, GradStore> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a reference to this variable's gradient, to which the kernels add the next one.
    pub(crate) fn so_far(&self, variable: &Tensor) -> GradientSoFar {
        GradientSoFar { gradients: self.0.clone(), variable: variable.clone() }
    }
}
