//! The trait of heads that reduce to one mixture.

use candle_core::Tensor;

use super::output_layer::OutputLayer;
use crate::backend::plan::Plan;
use crate::decoding::Pruned;
use crate::error::Result;
use crate::loss::LossOptions;
use crate::mixture::Mixture;
use crate::tensors::dropout::DropoutMasks;

/// An output layer that reduces to one [`Mixture`] of softmaxes, as every [`Head`](crate::Head) does.
///
/// A layer of your own that is not a [`Projection`](crate::parts::Projection) and a decoder implements `mixture`, and
/// the methods of [`OutputLayer`] by it, such as `self.mixture(hidden, options.dropout)?.loss(targets, options)`.
///
/// # Examples
///
/// The priors of the components:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{DropoutMasks, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes};
///
/// # fn main() -> mos_head::Result<()> {
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(32, 500, 4), vb)?;
/// let hidden = Tensor::zeros((2, 7, 32), DType::F32, &Device::Cpu)?;
/// let log_priors = head.mixture(&hidden, DropoutMasks::Off)?.log_priors()?; // [batch, seq, K]
/// assert_eq!((head.components(), log_priors.dims()), (4, &[2, 7, 4][..]));
/// # Ok(())
/// # }
/// ```
///
/// The entropy of the priors as a regulariser, which keeps components alive: the loss less 0.01 times the mean entropy,
/// with its gradient in the same backward pass:
///
/// ```
/// # use candle_core::{DType, Device, Tensor, D};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use mos_head::{Distributions, DropoutMasks, LossOptions, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes};
/// # fn main() -> mos_head::Result<()> {
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(32, 500, 4), vb)?;
/// # let hidden = Tensor::randn(0f32, 1., (2, 7, 32), &Device::Cpu)?;
/// # let targets = Tensor::zeros((2, 7), DType::U32, &Device::Cpu)?;
/// let mixture = head.mixture(&hidden, DropoutMasks::Off)?;
/// let log_priors = mixture.log_priors()?;
/// let penalty = ((log_priors.exp()? * &log_priors)?.sum(D::Minus1)?.mean_all()? * 0.01)?;
/// let gradients = mixture.loss(&targets, &LossOptions::default())?.backward_with(&penalty)?;
/// # assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(())
/// # }
/// ```
pub trait MixtureLayer: OutputLayer {
    /// Returns the number of softmaxes that are mixed: 1 for a [`MixtureOfContexts`](crate::MixtureOfContexts), which
    /// mixes contexts.
    fn components(&self) -> usize;

    /// Computes the mixture of these hidden states `[.., hidden]`. A loss passes [`LossOptions::dropout`]; decoding has
    /// no dropout.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    ///
    /// # Errors
    ///
    /// If the last dimension, dtype or device of the hidden states does not match the head.
    fn mixture(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<Mixture>;

    /// Plans how [`OutputLayer::loss`] would split the work into chunks.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::loss`], or if the budget cannot hold one position.
    fn plan(&self, hidden: &Tensor, options: &LossOptions) -> Result<Plan> {
        self.mixture(hidden, DropoutMasks::Off)?.plan(options)
    }

    /// Returns the layer as a constant, as [`OutputLayer::frozen`] does, but still as a mixture, for a head that is
    /// built from this layer. By default it is the layer itself, whose parameters still get gradients.
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::frozen`].
    fn frozen_mixture(&self) -> Result<Box<dyn MixtureLayer + '_>> {
        Ok(Box::new(self))
    }

    /// Computes the mixture without its least probable components, see [`Mixture::prune`].
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    ///
    /// # Errors
    ///
    /// The errors of [`Mixture::prune`].
    fn prune(&self, hidden: &Tensor, mass: f64) -> Result<Pruned> {
        self.mixture(hidden, DropoutMasks::Off)?.prune(mass)
    }
}
