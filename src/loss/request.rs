//! What a loss is asked for, checked once: its targets, the positions that count and how much, and the options.
//!
//! Heads make a request where hidden states and targets meet; the mixture, the losses over a sample, the heads of two
//! levels and [`Loss::from_nll`] consume it.

use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};

use super::options::{LossOptions, Reduction, SampledLoss};
use super::results::Loss;
use crate::backend::objective::{GradScale, TargetLoss};
use crate::error::{Error, OptionName, Result};
use crate::tensors::checks::{check_device, check_float, check_targets, check_weights, leading, read_ids};

/// A loss over targets, with checked arguments.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) options: &'a LossOptions,
    /// `[..]`, one for each position
    pub(crate) targets: &'a Tensor,
    /// Where targets are ignored, once it has been asked for.
    ignored: OnceLock<Option<Tensor>>,
}

impl<'a> Request<'a> {
    /// Checks the targets of positions with these leading dimensions, the weights and the numbers of the options;
    /// `like` is on the device of the loss. Without a size of the vocabulary, whoever consumes the request checks the
    /// number of class weights.
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

    /// An error that names `head` if an option is set that it does not support.
    pub(crate) fn require(&self, head: &'static str, supported: &[OptionName]) -> Result<()> {
        match self.options.asked().find(|option| !supported.contains(option)) {
            Some(option) => Err(Error::Unsupported { option, head }),
            None => Ok(()),
        }
    }

    /// The number of positions.
    pub(crate) fn positions(&self) -> usize {
        self.targets.elem_count()
    }

    /// The loss that the kernels compute over all ids. They check the ids, and leave out ignored positions. Numbers are
    /// in this dtype.
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

    /// The factor of the gradient of each position's weighted objective.
    pub(crate) fn gradient_scale(&self) -> GradScale {
        match (self.options.reduction, self.options.denominator) {
            (Reduction::Mean, Some(denominator)) => GradScale::Constant(1.0 / denominator),
            (Reduction::Mean, None) => GradScale::OneOverCount,
            (Reduction::Sum | Reduction::None, _) => GradScale::Constant(1.0),
        }
    }

    /// The value of a loss: the reduction of the positions' weighted objectives, of which `sum` is the sum, and `count`
    /// the sum of their weights.
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
                // Zero without a weight; neither number is read.
                let nothing = count.eq(0f64)?;
                let divisor = nothing.where_cond(&count.ones_like()?, count)?;
                Ok(nothing.where_cond(&sum.zeros_like()?, &(sum / divisor)?)?)
            }
            Reduction::Sum => Ok(sum.clone()),
            Reduction::None => objective(),
        }
    }

    /// The loss of these negative log-likelihoods, `[..]`, which are differentiable.
    pub(crate) fn loss_of_nll(&self, nll: &Tensor) -> Result<Loss> {
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
            let of_targets = class_weights.to_dtype(nll.dtype())?.detach().index_select(&ids, 0)?;
            weights = (weights * of_targets.reshape(nll.shape())?)?;
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

    /// Where targets are ignored (u8, `[..]`); `None` if none is, or, on a GPU, where reading them would wait, if no
    /// index is.
    fn ignored(&self) -> Result<Option<&Tensor>> {
        if let Some(ignored) = self.ignored.get() {
            return Ok(ignored.as_ref());
        }
        let ignored = match self.options.ignore_index.filter(|_| self.positions() > 0) {
            Some(index) => {
                let ignored = self.targets.to_dtype(DType::I64)?.eq(index)?;
                let is_none = ignored.device().is_cpu() && ignored.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0;
                (!is_none).then_some(ignored)
            }
            None => None,
        };
        Ok(self.ignored.get_or_init(|| ignored).as_ref())
    }

    /// Whether contexts must be masked at ignored positions: the CPU's kernels leave these positions out. Those of a
    /// GPU multiply them by zero, and NCE consists of candle's operations.
    pub(crate) fn needs_mask(&self) -> bool {
        let is_nce = matches!(self.options.sampled_step(), Some(SampledLoss::Nce(_)));
        self.options.ignore_index.is_some() && (is_nce || !self.targets.device().is_cpu())
    }

    /// `values` `[.., n]` or `[.., K, d]` with zeros at ignored positions, so that a NaN there reaches no gradient.
    /// Returns `values` unchanged if no position is ignored; on a GPU, where reading the targets would wait, if no
    /// index is ignored.
    pub(crate) fn mask(&self, values: &Tensor) -> Result<Tensor> {
        let Some(ignored) = self.ignored()?.filter(|_| values.elem_count() > 0) else { return Ok(values.clone()) };
        let mut dims = ignored.dims().to_vec();
        dims.resize(values.rank(), 1);
        let ignored = ignored.reshape(dims)?.broadcast_as(values.shape())?;
        Ok(ignored.where_cond(&values.zeros_like()?, values)?)
    }

    /// The targets `[..]` as i64, with id 0 in place of ignored ones.
    pub(super) fn target_ids(&self) -> Result<Tensor> {
        let targets = self.targets;
        let ids = if self.positions() == 0 { targets.clone() } else { targets.to_dtype(DType::I64)? };
        match self.ignored()? {
            Some(ignored) => Ok(ignored.where_cond(&ids.zeros_like()?, &ids)?),
            None => Ok(ids),
        }
    }

    /// The targets on the host, `None` where ignored, checked against the vocabulary. Waits for their device.
    pub(crate) fn read_ids(&self, vocab_size: usize) -> Result<Vec<Option<usize>>> {
        read_ids("targets", self.targets, self.options.ignore_index, vocab_size)
    }

    /// Whether positions or token ids have weights.
    pub(crate) fn is_weighted(&self) -> bool {
        self.options.position_weights.is_some() || self.options.class_weights.is_some()
    }

    /// The weight of each position, its target's class weight included, on the host; zero where the target is ignored.
    /// Waits for the weights' device.
    pub(crate) fn read_weights(&self, targets: &[Option<usize>]) -> Result<Vec<f64>> {
        let read = |weights: &Option<Tensor>| match weights {
            None => Ok(None),
            Some(weights) => {
                let weights = weights.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
                Ok::<_, Error>(Some(weights.to_vec1::<f64>()?))
            }
        };
        let (of_positions, of_ids) = (read(&self.options.position_weights)?, read(&self.options.class_weights)?);
        let weight = |(position, target): (usize, &Option<usize>)| {
            let Some(id) = *target else { return 0.0 };
            of_positions.as_ref().map_or(1.0, |weights| weights[position])
                * of_ids.as_ref().map_or(1.0, |weights| weights[id])
        };
        Ok(targets.iter().enumerate().map(weight).collect())
    }

    /// The factor of each position's negative log-likelihood in the value: its weight and, for the mean, the reciprocal
    /// of the denominator. `None` if all factors are one. Waits for the weights' device.
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
    /// Hidden states `[.., hidden]` with zeros at ignored positions, and targets `[..]` (i64) with id 0 there: what a
    /// head of your own computes its loss from, so that nothing at an ignored position, NaN included, reaches a
    /// gradient. Pass the original targets to [`Loss::from_nll`](crate::Loss::from_nll).
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
    /// The loss of a head that computes the negative log-likelihood of each target itself. Ignored targets, weights of
    /// positions and classes, and the reduction follow the options.
    ///
    /// # Shapes
    ///
    /// - nll: `[..]`, of the targets' shape; f32 or f64, differentiable
    /// - targets: `[..]`; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not match, or an option is out of range. [`Error::Unsupported`] for options that
    /// need more than this: label smoothing, z-loss, counted predictions, sampled losses.
    /// Whether targets are in the vocabulary is for the head to check.
    pub fn from_nll(nll: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Self> {
        check_float("nll", nll)?;
        let request = Request::new(nll.dims(), None, nll, targets, options)?;
        request.require("Loss::from_nll", &[])?;
        request.loss_of_nll(nll)
    }
}
