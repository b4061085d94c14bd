//! The request for a loss: the targets and the options, which are checked once, and what follows from them, such as the
//! positions that are ignored and the weight of each position.
//!
//! Heads make a request where hidden states and targets meet. The mixture, the losses over a sample, the heads of two
//! levels and [`Loss::from_nll`] compute a loss from it.

use candle_core::{DType, Tensor};

use super::options::{LossOptions, SampledLoss};
use super::positions::{OutputShape, Positions, Reduction};
use super::results::Loss;
use crate::backend::objective::TargetLoss;
use crate::error::{Error, OptionName, Result};
use crate::tensors::autograd::converted;
use crate::tensors::checks::{check_float, leading, read_ids};
use crate::tensors::transfer::{accurate_dtype, select_rows, sum_all};

/// The arguments of a loss over targets, which have been checked.
#[derive(Debug)]
pub struct Request<'a> {
    pub(crate) options: &'a LossOptions,
    /// `[..]`: the target of each position
    pub(crate) targets: &'a Tensor,
    /// Which positions count.
    pub(crate) positions: Positions<'a>,
}

impl<'a> Request<'a> {
    /// Checks the targets, the weights and the numbers of the options.
    pub(crate) fn new(shape: OutputShape<'a>, targets: &'a Tensor, options: &'a LossOptions) -> Result<Self> {
        options.validate()?;
        let positions = Positions::new(shape, &options.positions, Some(targets), options.class_weights.as_ref())?;
        Ok(Request { options, targets, positions })
    }

    /// Makes the request of a head that computes itself what depends on the size of its vocabulary: nothing says it
    /// here, so that class weights of any number are taken.
    fn without_vocab(
        leading: &'a [usize],
        like: &'a Tensor,
        targets: &'a Tensor,
        options: &'a LossOptions,
    ) -> Result<Self> {
        let vocab = options.class_weights.as_ref().map_or(0, |weights| weights.dims().first().copied().unwrap_or(1));
        Self::new(OutputShape { leading, vocab, like }, targets, options)
    }

    /// Returns an error that names `head` if an option is set that it does not support.
    pub(crate) fn check_support(&self, head: &'static str, supported: &[OptionName]) -> Result<()> {
        match self.options.needed_support().find(|option| !supported.contains(option)) {
            Some(option) => Err(Error::Unsupported { option, head }),
            None => Ok(()),
        }
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
            ignore_index: options.positions.ignore_index,
            position_weights: flat(&options.positions.position_weights)?,
            class_weights: flat(&options.class_weights)?,
            terms: options.terms(),
            scale: self.positions.gradient_scale(),
            own_shifts: None,
            shard: None,
            so_far: None,
        })
    }

    /// Computes the loss from the negative log-likelihoods of the targets, `[..]`, which are differentiable.
    pub(crate) fn loss_from_nll(&self, nll: &Tensor) -> Result<Loss> {
        let options = self.options;
        let zeros = nll.zeros_like()?.detach();
        if nll.elem_count() == 0 && !nll.device().is_cpu() {
            // candle cannot launch kernels for empty tensors on CUDA, nor allocate some of them on Metal.
            let zero = Tensor::zeros((), nll.dtype(), nll.device())?;
            let value = match options.positions.reduction {
                Reduction::None if options.train => nll.clone(),
                Reduction::None => zeros,
                Reduction::Mean | Reduction::Sum => zero.clone(),
            };
            let loss = Loss::new(value, zero.clone(), zero, nll.clone());
            return Ok(Loss { is_evaluation: !options.train, ..loss });
        }
        let mut weights = zeros.ones_like()?;
        if let Some(position_weights) = &options.positions.position_weights {
            weights = position_weights.to_dtype(nll.dtype())?.detach();
        }
        if let Some(class_weights) = &options.class_weights {
            let ids = self.target_ids()?.flatten_all()?;
            let target_weights = select_rows(&class_weights.to_dtype(nll.dtype())?.detach(), &ids)?;
            weights = (weights * target_weights.reshape(nll.shape())?)?;
        }
        let mut nll = nll.clone();
        if let Some(ignored) = self.positions.ignored()? {
            (nll, weights) = (ignored.where_cond(&zeros, &nll)?, ignored.where_cond(&zeros, &weights)?);
        }
        // A weight of zero removes even an infinite loss.
        let objective = weights.ne(0f64)?.where_cond(&(&nll * &weights)?, &zeros)?;
        let (sum, count) = (sum_all(&objective)?, sum_all(&weights)?);
        let value = self.positions.value(&sum, &count, None, || Ok(objective))?;
        let value = if options.train { value } else { value.detach() };
        Ok(Loss { is_evaluation: !options.train, ..Loss::new(value, sum, count, nll) })
    }

    /// Whether contexts must be masked at ignored positions. The CPU's kernels leave these positions out, but those of
    /// a GPU multiply them by zero, and NCE is composed of candle's operations.
    pub(crate) fn needs_mask(&self) -> bool {
        let is_nce = matches!(self.options.sampled_step(), Some(SampledLoss::Nce(_)));
        self.options.positions.ignore_index.is_some() && (is_nce || !self.targets.device().is_cpu())
    }

    /// Returns the targets `[..]` as contiguous i64, with id 0 in place of ignored ones.
    pub(crate) fn target_ids(&self) -> Result<Tensor> {
        let targets = self.targets;
        let ids = if targets.elem_count() == 0 {
            // No device converts an empty tensor.
            Tensor::zeros(targets.dims(), DType::I64, targets.device())?
        } else {
            targets.to_dtype(DType::I64)?
        };
        match self.positions.ignored()? {
            Some(ignored) => Ok(ignored.where_cond(&ids.zeros_like()?, &ids)?),
            None => Ok(ids.contiguous()?),
        }
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
        let request = Request::without_vocab(leading(hidden)?, hidden, targets, self)?;
        Ok((request.positions.mask(hidden)?, request.target_ids()?))
    }
}

impl Loss {
    /// Makes the loss of a head that computes the negative log-likelihood of each target itself. The options decide
    /// which targets are ignored, the weights of positions and classes, and the reduction.
    ///
    /// # Shapes
    ///
    /// - nll: `[..]`, of the targets' shape, differentiable; f16 and bf16 are computed in f32
    /// - targets: `[..]`; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not match, or an option is out of range. [`Error::Unsupported`] for options that
    /// need more than the negative log-likelihoods: label smoothing, z-loss, correct predictions, sampled losses.
    /// [`Error::Target`] if a target has no class weight, for which the call waits for the targets; without class
    /// weights the head itself must check that targets are in the vocabulary.
    pub fn from_nll(nll: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Self> {
        check_float("nll", nll)?;
        let request = Request::without_vocab(nll.dims(), nll, targets, options)?;
        request.check_support("Loss::from_nll", &[])?;
        if let Some(class_weights) = &options.class_weights {
            read_ids("targets", targets, options.positions.ignore_index, class_weights.elem_count())?;
        }
        request.loss_from_nll(&converted(nll, accurate_dtype(nll))?)
    }
}
