//! Which positions count in an objective, with which weight and denominator. Losses, distillations and policy losses
//! ask [`Positions`], or [`CountedPositions`] where the positions are selected before any product.

use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};

use super::counted::CountedPositions;
use crate::backend::objective::GradScale;
use crate::error::{Error, Result};
use crate::tensors::checks::{check_device, check_number, check_targets, check_weights, read_ids};

/// The target of an ignored position, where this crate makes the targets.
pub(crate) const IGNORED: i64 = -1;

/// The positions and the vocabulary of the distributions that an objective is about.
#[derive(Clone, Copy, Debug)]
pub struct OutputShape<'a> {
    /// The leading dimensions, whose product is the number of positions.
    pub(crate) leading: &'a [usize],
    pub(crate) vocab: usize,
    /// A tensor of the dtype and on the device that the distributions are computed in: hidden states or contexts.
    pub(crate) like: &'a Tensor,
}

impl OutputShape<'_> {
    /// Returns the number of positions.
    fn positions(&self) -> usize {
        self.leading.iter().product()
    }
}

/// Which positions count, from arguments that have been checked.
#[derive(Debug)]
pub(crate) struct Positions<'a> {
    shape: OutputShape<'a>,
    options: &'a PositionOptions,
    /// `[..]`: the target of each position, if there are targets.
    targets: Option<&'a Tensor>,
    /// `[vocab]`: the weight of each target.
    class_weights: Option<&'a Tensor>,
    /// Where targets are ignored; it is computed when it is first needed.
    ignored: OnceLock<Option<Tensor>>,
}

impl<'a> Positions<'a> {
    /// Checks the targets and the weights.
    pub(crate) fn new(
        shape: OutputShape<'a>,
        options: &'a PositionOptions,
        targets: Option<&'a Tensor>,
        class_weights: Option<&'a Tensor>,
    ) -> Result<Self> {
        let OutputShape { leading, vocab, like } = shape;
        options.validate()?;
        if let Some(targets) = targets {
            check_targets("targets", targets, leading)?;
            check_device("targets", targets, like)?;
        }
        if let Some(weights) = &options.position_weights {
            check_weights("position_weights", weights, leading, like)?;
        }
        if let Some(weights) = class_weights {
            check_weights("class_weights", weights, &[vocab], like)?;
        }
        Ok(Positions { shape, options, targets, class_weights, ignored: OnceLock::new() })
    }

    /// Returns the factor of the gradient of each position's weighted objective.
    pub(crate) fn gradient_scale(&self) -> GradScale {
        match (self.options.reduction, self.options.denominator) {
            (Reduction::Mean, Some(denominator)) => GradScale::Constant(1.0 / denominator),
            (Reduction::Mean, None) => GradScale::OneOverCount,
            (Reduction::Sum | Reduction::None, _) => GradScale::Constant(1.0),
        }
    }

    /// Reduces the positions' weighted objectives to the value of a loss. `sum` is their sum, `count` is the sum of
    /// their weights, `mean` their mean if it is known, and `objective` returns all of them, if there is no reduction.
    pub(crate) fn value(
        &self,
        sum: &Tensor,
        count: &Tensor,
        mean: Option<&Tensor>,
        objective: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        match self.options.reduction {
            Reduction::Mean => {
                if let Some(denominator) = self.options.denominator {
                    return Ok((sum / denominator)?);
                }
                if let Some(mean) = mean {
                    return Ok(mean.clone());
                }
                // The value is zero if the count is. Reading either number would wait for the device.
                let is_zero = count.eq(0f64)?;
                let divisor = is_zero.where_cond(&count.ones_like()?, count)?;
                Ok(is_zero.where_cond(&sum.zeros_like()?, &(sum / divisor)?)?)
            }
            Reduction::Sum => Ok(sum.clone()),
            Reduction::None => objective(),
        }
    }

    /// Returns where targets are ignored, `[..]` in u8, or `None` if none is. On a GPU, where reading the targets would
    /// wait, it is `None` only if the options ignore no index.
    pub(super) fn ignored(&self) -> Result<Option<&Tensor>> {
        if let Some(ignored) = self.ignored.get() {
            return Ok(ignored.as_ref());
        }
        let targets = self.targets.filter(|targets| targets.elem_count() > 0);
        let ignored = match (self.options.ignore_index, targets) {
            (Some(index), Some(targets)) => {
                let ignored = targets.to_dtype(DType::I64)?.eq(index)?;
                let are_none = ignored.device().is_cpu() && ignored.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0;
                (!are_none).then_some(ignored)
            }
            _ => None,
        };
        Ok(self.ignored.get_or_init(|| ignored).as_ref())
    }

    /// Sets `values`, `[.., n]` or `[.., K, d]`, to zero at ignored positions, so that a NaN there reaches no gradient.
    /// If no position is ignored, it returns `values` unchanged; on a GPU, where reading the targets would wait, only
    /// if the options ignore no index.
    pub(crate) fn mask(&self, values: &Tensor) -> Result<Tensor> {
        let Some(ignored) = self.ignored()?.filter(|_| values.elem_count() > 0) else { return Ok(values.clone()) };
        let mut dims = ignored.dims().to_vec();
        dims.resize(values.rank(), 1);
        let ignored = ignored.reshape(dims)?.broadcast_as(values.shape())?;
        Ok(ignored.where_cond(&values.zeros_like()?, values)?)
    }

    /// Reads the targets on the host, which waits for their device, and checks that they are in the vocabulary. An
    /// ignored target is `None`. Without targets each position has id 0.
    pub(crate) fn read_ids(&self, vocab_size: usize) -> Result<Vec<Option<usize>>> {
        match self.targets {
            Some(targets) => read_ids("targets", targets, self.options.ignore_index, vocab_size),
            None => Ok(vec![Some(0); self.shape.positions()]),
        }
    }

    /// Whether positions or token ids have weights.
    pub(crate) fn is_weighted(&self) -> bool {
        self.options.position_weights.is_some() || self.class_weights.is_some()
    }

    /// Reads the weight of each position on the host, which waits for the weights' device. It is the product of
    /// position weight and class weight of the target, or zero if the target is ignored.
    pub(crate) fn read_weights(&self, targets: &[Option<usize>]) -> Result<Vec<f64>> {
        let read =
            |weights: &Tensor| weights.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let position_weights = self.options.position_weights.as_ref().map(read).transpose()?;
        let class_weights = self.class_weights.map(read).transpose()?;
        let weight = |(position, target): (usize, &Option<usize>)| {
            let Some(id) = *target else { return 0.0 };
            position_weights.as_ref().map_or(1.0, |weights| weights[position])
                * class_weights.as_ref().map_or(1.0, |weights| weights[id])
        };
        Ok(targets.iter().enumerate().map(weight).collect())
    }

    /// Reads the factor of each position's negative log-likelihood in the value, which waits for the weights' device:
    /// its weight, for the mean divided by the denominator. Returns `None` if all factors are one.
    pub(crate) fn read_factors(&self, targets: &[Option<usize>]) -> Result<Option<Vec<f64>>> {
        let is_mean = self.options.reduction == Reduction::Mean;
        if !self.is_weighted() && !is_mean {
            return Ok(None);
        }
        let mut weights = self.read_weights(targets)?;
        if is_mean {
            let count = self.options.denominator.unwrap_or_else(|| weights.iter().sum());
            weights.iter_mut().for_each(|weight| *weight = if count == 0.0 { 0.0 } else { *weight / count });
        }
        Ok(Some(weights))
    }

    /// Selects the positions that count: their target is not ignored, and their weight is not zero. Targets and weights
    /// are read on the host, which waits for their device. On a GPU only targets of which some may be ignored are.
    pub(crate) fn counted(&self) -> Result<CountedPositions> {
        let OutputShape { vocab, like, .. } = self.shape;
        let are_read = self.options.ignore_index.is_some() || like.device().is_cpu();
        let ids = if are_read { self.read_ids(vocab)? } else { vec![Some(0); self.shape.positions()] };
        let weights = self.read_weights(&ids)?;
        let count = weights.iter().sum::<f64>();
        let denominator = match (self.options.reduction, self.options.denominator) {
            (Reduction::Mean, Some(denominator)) => denominator,
            // The mean of no positions is zero.
            (Reduction::Mean, None) if count != 0.0 => count,
            _ => 1.0,
        };
        let scales: Vec<_> =
            weights.iter().filter(|&&weight| weight != 0.0).map(|weight| weight / denominator).collect();
        let counts = weights.iter().map(|&weight| weight != 0.0);
        let counted = CountedPositions { count, denominator, ..CountedPositions::new(counts, scales, like)? };
        let select = |targets: &Tensor| counted.select_rows(&targets.flatten_all()?.to_dtype(DType::I64)?);
        let targets = self.targets.map(select).transpose()?;
        Ok(CountedPositions { targets, ..counted })
    }
}

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
    /// that the logits are computed twice. To weight positions,
    /// [`LossOptions::with_position_weights`](crate::LossOptions::with_position_weights) is cheaper.
    None,
}

/// Which positions count in an objective, with which weights and denominator. The default is the mean over all
/// positions.
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
