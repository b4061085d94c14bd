//! The request for a loss: the targets and the options, which are checked once, and what follows from them, such as the
//! positions that are ignored and the weight of each position.
//!
//! Heads make a request where hidden states and targets meet. The mixture, the losses over a sample, the heads of two
//! levels and [`Loss::from_nll`] compute a loss from it.

use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};

use super::options::{LossOptions, Reduction, SampledLoss};
use super::results::Loss;
use crate::backend::objective::{GradScale, TargetLoss};
use crate::error::{Error, OptionName, Result};
use crate::tensors::checks::{check_device, check_float, check_targets, check_weights, leading, read_ids};

/// The arguments of a loss over targets, which have been checked.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) options: &'a LossOptions,
    /// `[..]`: the target of each position
    pub(crate) targets: &'a Tensor,
    /// Where targets are ignored; it is computed when it is first needed.
    ignored: OnceLock<Option<Tensor>>,
}

impl<'a> Request<'a> {
    /// Checks the targets of positions with these leading dimensions, the weights and the numbers of the options.
    /// `like` is a tensor on the device of the loss. If `vocab_size` is `None`, the caller must check the number of
    /// class weights.
    pub(crate) fn new(
        leading: &[usize],
        vocab_size: Option<usize>,
        like: &Tensor,
        targets: &'a Tensor,
        options: &'a LossOptions,
    ) -> Result<Self> {
        options.validate()?;
        check_targets("targets", targets, leading)?;
        check_device("targets", targets, like)?;
        if let Some(weights) = &options.position_weights {
            check_weights("position_weights", weights, leading, like)?;
        }
        if let Some(weights) = &options.class_weights {
            match vocab_size {
                Some(vocab_size) => check_weights("class_weights", weights, &[vocab_size], like)?,
                None => check_weights("class_weights", weights, &weights.dims()[..weights.rank().min(1)], like)?,
            }
        }
        Ok(Request { options, targets, ignored: OnceLock::new() })
    }

    /// Returns an error that names `head` if an option is set that it does not support.
    pub(crate) fn check_support(&self, head: &'static str, supported: &[OptionName]) -> Result<()> {
        match self.options.needed_support().find(|option| !supported.contains(option)) {
            Some(option) => Err(Error::Unsupported { option, head }),
            None => Ok(()),
        }
    }

    /// The number of positions.
    pub(crate) fn positions(&self) -> usize {
        self.targets.elem_count()
    }

    /// Returns the loss over all ids that the kernels compute, with its numbers in this dtype. The kernels check the
    /// targets, and leave out ignored positions.
    pub(crate) fn target_loss(&self, dtype: DType) -> Result<TargetLoss> {
        let options = self.options;
        let flat = |weights: &Option<Tensor>| {
            let flat = |weights: &Tensor| Ok::<_, Error>(weights.flatten_all()?.to_dtype(dtype)?.detach());
            weights.as_ref().map(flat).transpose()
        };
        Ok(TargetLoss {
            targets: self.targets.flatten_all()?,
            ignore_index: options.ignore_index,
            position_weights: flat(&options.position_weights)?,
            class_weights: flat(&options.class_weights)?,
            terms: options.terms(),
            scale: self.gradient_scale(),
            own_shifts: None,
            shard: None,
            so_far: None,
        })
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
    /// their weights, and `objective` returns all of them, if there is no reduction.
    pub(crate) fn value(
        &self,
        sum: &Tensor,
        count: &Tensor,
        objective: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        match self.options.reduction {
            Reduction::Mean => {
                if let Some(denominator) = self.options.denominator {
                    return Ok((sum / denominator)?);
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

    /// Computes the loss from the negative log-likelihoods of the targets, `[..]`, which are differentiable.
    pub(crate) fn loss_from_nll(&self, nll: &Tensor) -> Result<Loss> {
        let options = self.options;
        let zeros = nll.zeros_like()?.detach();
        if nll.elem_count() == 0 && nll.device().is_cuda() {
            // candle cannot launch its kernels for empty tensors.
            let zero = Tensor::zeros((), nll.dtype(), nll.device())?;
            let value = match options.reduction {
                Reduction::None if options.train => nll.clone(),
                Reduction::None => zeros,
                Reduction::Mean | Reduction::Sum => zero.clone(),
            };
            let loss = Loss::new(value, zero.clone(), zero, nll.clone());
            return Ok(Loss { is_evaluation: !options.train, ..loss });
        }
        let mut weights = zeros.ones_like()?;
        if let Some(position_weights) = &options.position_weights {
            weights = position_weights.to_dtype(nll.dtype())?.detach();
        }
        if let Some(class_weights) = &options.class_weights {
            let ids = self.target_ids()?.flatten_all()?;
            let target_weights = class_weights.to_dtype(nll.dtype())?.detach().index_select(&ids, 0)?;
            weights = (weights * target_weights.reshape(nll.shape())?)?;
        }
        let mut nll = nll.clone();
        if let Some(ignored) = self.ignored()? {
            (nll, weights) = (ignored.where_cond(&zeros, &nll)?, ignored.where_cond(&zeros, &weights)?);
        }
        // A weight of zero removes even an infinite loss.
        let objective = weights.ne(0f64)?.where_cond(&(&nll * &weights)?, &zeros)?;
        let (sum, count) = (objective.sum_all()?, weights.sum_all()?);
        let value = self.value(&sum, &count, || Ok(objective))?;
        let value = if options.train { value } else { value.detach() };
        Ok(Loss { is_evaluation: !options.train, ..Loss::new(value, sum, count, nll) })
    }

    /// Returns where targets are ignored, `[..]` in u8, or `None` if none is. On a GPU, where reading the targets would
    /// wait, it is `None` only if the options ignore no index.
    fn ignored(&self) -> Result<Option<&Tensor>> {
        if let Some(ignored) = self.ignored.get() {
            return Ok(ignored.as_ref());
        }
        let ignored = match self.options.ignore_index.filter(|_| self.positions() > 0) {
            Some(index) => {
                let ignored = self.targets.to_dtype(DType::I64)?.eq(index)?;
                let are_none = ignored.device().is_cpu() && ignored.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0;
                (!are_none).then_some(ignored)
            }
            None => None,
        };
        Ok(self.ignored.get_or_init(|| ignored).as_ref())
    }

    /// Whether contexts must be masked at ignored positions. The CPU's kernels leave these positions out, but those of
    /// a GPU multiply them by zero, and NCE is composed of candle's operations.
    pub(crate) fn needs_mask(&self) -> bool {
        let is_nce = matches!(self.options.sampled_step(), Some(SampledLoss::Nce(_)));
        self.options.ignore_index.is_some() && (is_nce || !self.targets.device().is_cpu())
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

    /// Returns the targets `[..]` as i64, with id 0 in place of ignored ones.
    pub(super) fn target_ids(&self) -> Result<Tensor> {
        let targets = self.targets;
        let ids = if self.positions() == 0 { targets.clone() } else { targets.to_dtype(DType::I64)? };
        match self.ignored()? {
            Some(ignored) => Ok(ignored.where_cond(&ids.zeros_like()?, &ids)?),
            None => Ok(ids),
        }
    }

    /// Reads the targets on the host, which waits for their device, and checks that they are in the vocabulary. An
    /// ignored target is `None`.
    pub(crate) fn read_ids(&self, vocab_size: usize) -> Result<Vec<Option<usize>>> {
        read_ids("targets", self.targets, self.options.ignore_index, vocab_size)
    }

    /// Whether positions or token ids have weights.
    pub(crate) fn is_weighted(&self) -> bool {
        self.options.position_weights.is_some() || self.options.class_weights.is_some()
    }

    /// Reads the weight of each position on the host, which waits for the weights' device. It is the product of
    /// position weight and class weight of the target, or zero if the target is ignored.
    pub(crate) fn read_weights(&self, targets: &[Option<usize>]) -> Result<Vec<f64>> {
        let read = |weights: &Option<Tensor>| match weights {
            None => Ok(None),
            Some(weights) => {
                let weights = weights.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
                Ok::<_, Error>(Some(weights.to_vec1::<f64>()?))
            }
        };
        let position_weights = read(&self.options.position_weights)?;
        let class_weights = read(&self.options.class_weights)?;
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
}

impl LossOptions {
    /// Returns hidden states `[.., hidden]` with zeros at ignored positions, and targets `[..]` (i64) with id 0 there.
    /// A head of your own computes its loss from these, so that nothing at an ignored position reaches a gradient, not
    /// even a NaN. Pass the original targets to [`Loss::from_nll`](crate::Loss::from_nll).
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - targets: `[..]`; u8, u32 or i64
    /// - returns `[.., hidden]` and `[..]`, i64
    ///
    /// # Errors
    ///
    /// If `targets` do not have the leading dimensions of `hidden`, an integer dtype and its device, or an option is
    /// out of range.
    pub fn mask_ignored(&self, hidden: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
        let request = Request::new(leading(hidden)?, None, hidden, targets, self)?;
        Ok((request.mask(hidden)?, request.target_ids()?))
    }
}

impl Loss {
    /// Makes the loss of a head that computes the negative log-likelihood of each target itself. The options decide
    /// which targets are ignored, the weights of positions and classes, and the reduction.
    ///
    /// # Shapes
    ///
    /// - nll: `[..]`, of the targets' shape; f32 or f64, differentiable
    /// - targets: `[..]`; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not match, or an option is out of range. [`Error::Unsupported`] for options that
    /// need more than the negative log-likelihoods: label smoothing, z-loss, correct predictions, sampled losses. The
    /// head itself must check that targets are in the vocabulary.
    pub fn from_nll(nll: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Self> {
        check_float("nll", nll)?;
        let request = Request::new(nll.dims(), None, nll, targets, options)?;
        request.check_support("Loss::from_nll", &[])?;
        request.loss_from_nll(nll)
    }
}
