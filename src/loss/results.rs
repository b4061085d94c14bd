//! The results of a loss, and its backward pass.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId, Var};

use crate::error::{Error, Result};
use crate::tensors::autograd;
use crate::tensors::checks::{check_alike, read_ids};
use crate::tensors::transfer::sum_all;

/// The results of a loss, all from one pass. They are tensors, so that the caller decides when to read them: f32, or
/// f64 for heads in f64.
///
/// # Examples
///
/// The mean over the targets of two batches (for their gradient see [`GradientSum`](crate::GradientSum)):
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let options = LossOptions::evaluation().with_ignore_index(0);
/// let (mut sum, mut count) = (0.0, 0.0);
/// for targets in [[1u32, 2, 0], [3, 0, 0]] {
///     let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
///     let loss = head.loss(&hidden, &Tensor::new(&targets, &Device::Cpu)?, &options)?;
///     let (sum_of_batch, count_of_batch) = loss.sum_and_count()?;
///     sum += sum_of_batch;
///     count += count_of_batch;
/// }
/// println!("perplexity {} of {count} targets", (sum / count).exp());
/// # assert_eq!(count, 3.0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loss {
    /// The differentiable value: a scalar, or of the targets' shape for [`Reduction::None`](crate::Reduction::None).
    pub value: Tensor,
    /// Scalar: the weighted sum of the objective over the positions. It is detached, as all fields below.
    pub sum: Tensor,
    /// Scalar: the denominator of the mean; without weights the number of positions that are not ignored.
    pub count: Tensor,
    /// `[..]`, the targets' shape: the negative log-likelihood `-log p(y)` of each position in nats, without weights,
    /// smoothing or z-loss; zero where the target is ignored.
    pub nll: Tensor,
    /// `[..]`, the targets' shape, in u8: one where the target is the most probable token id (among equals the lowest),
    /// and zero elsewhere, as where the target is ignored or the distribution is NaN. It is computed if requested
    /// ([`LossOptions::with_correct`](crate::LossOptions::with_correct)).
    pub is_correct: Option<Tensor>,
    /// Scalar: the number of positions whose target is the most probable token id, if requested
    /// ([`LossOptions::with_correct`](crate::LossOptions::with_correct)).
    pub correct: Option<Tensor>,
    /// The decoder's rows that a sampled loss read, if requested
    /// ([`LossOptions::with_decoder_rows`](crate::LossOptions::with_decoder_rows)); `None` if there are no positions.
    pub decoder_rows: Option<DecoderRows>,
    /// The variables of the head that these options or targets leave without a gradient.
    pub(crate) spared: Vec<TensorId>,
    /// The targets, if they are on a GPU, where the loss does not check them.
    pub(crate) unchecked: Option<UncheckedTargets>,
    /// Whether it is the loss of an evaluation, which has no gradients.
    pub(crate) is_evaluation: bool,
}

/// The decoder's rows that a sampled loss read, as variables of their own: their gradients are the rows of the
/// decoder's gradient that are not zero.
///
/// # Examples
///
/// A step of gradient descent that reads and writes these rows alone:
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use mos_head::sampled::NoiseDistribution;
/// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Var::randn(0f32, 1., (1000, 8), &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
/// let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
/// let negatives = NoiseDistribution::log_uniform(1000)?.draw(16, 42)?;
/// let options = LossOptions::new().with_sampled_softmax(negatives).with_decoder_rows(true);
/// let loss = head.loss(&hidden, &Tensor::new(&[1u32, 2, 3], &Device::Cpu)?, &options)?;
/// let gradients = loss.backward()?;
/// # let before = weight.copy()?;
/// let rows = loss.decoder_rows.as_ref().unwrap();
/// let updated = (rows.weight.as_tensor() - (gradients.get(&rows.weight).unwrap() * 0.1)?)?;
/// let index = rows.token_ids.unsqueeze(1)?.broadcast_as(updated.shape())?.contiguous()?;
/// weight.as_tensor().scatter_set(&index, &updated, 0)?;
/// # let changed = (weight.as_tensor() - before)?.abs()?.sum(1)?.gt(0.)?.to_vec1::<u8>()?;
/// # assert_eq!(changed.iter().filter(|changed| **changed == 1).count(), updated.dim(0)?);
/// # assert!(gradients.get(&weight).is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DecoderRows {
    /// `[n]`, u32: the token ids, each once.
    pub token_ids: Tensor,
    /// `[n, d]`: their rows of the weight.
    pub weight: Var,
    /// `[n]`: their bias, in f32 for half-precision heads.
    pub bias: Option<Var>,
}

/// Targets that were not checked, because reading them would wait for the GPU.
#[derive(Clone, Debug)]
pub(crate) struct UncheckedTargets {
    pub(crate) targets: Tensor,
    pub(crate) ignore_index: Option<i64>,
    pub(crate) vocab_size: usize,
}

impl Loss {
    /// Makes the loss of a head that computes all results itself. If it also computes `is_correct` and `correct`, it
    /// sets these fields.
    ///
    /// # Shapes
    ///
    /// - value: a scalar, or of the targets' shape for [`Reduction::None`](crate::Reduction::None)
    /// - sum, count: scalars
    /// - nll: of the targets' shape
    pub fn new(value: Tensor, sum: Tensor, count: Tensor, nll: Tensor) -> Self {
        let detached = |tensor: Tensor| tensor.detach();
        let (sum, count, nll) = (detached(sum), detached(count), detached(nll));
        Loss {
            value,
            sum,
            count,
            nll,
            is_correct: None,
            correct: None,
            decoder_rows: None,
            spared: Vec::new(),
            unchecked: None,
            is_evaluation: false,
        }
    }

    /// Sets which positions are correct, and their number.
    pub(crate) fn with_is_correct(self, is_correct: Tensor) -> Result<Self> {
        // A GPU cannot launch zero blocks.
        let correct = match is_correct.elem_count() {
            0 => self.sum.zeros_like()?,
            _ => sum_all(&is_correct.to_dtype(self.sum.dtype())?)?,
        };
        Ok(Loss { is_correct: Some(is_correct), correct: Some(correct), ..self })
    }

    /// Computes the gradients of the value with respect to every variable that it depends on. `loss.value.backward()`
    /// computes the same, with one more copy of the gradients of the head's variables.
    ///
    /// A variable whose every path to the value leads through one of candle's fused operations, such as
    /// `candle_nn::RmsNorm`, has no gradient: [`Loss::check_gradients`] names it.
    ///
    /// # Errors
    ///
    /// If it is the loss of an [evaluation](crate::LossOptions::evaluation), which has no gradients (with no positions
    /// it is not an error), if the backward pass of an operation before the head fails, or if memory runs out.
    pub fn backward(&self) -> Result<GradStore> {
        self.check_training()?;
        autograd::backward(&self.value, None)
    }

    /// Computes the gradients of the value plus a penalty, as [`Loss::backward`] does, in one pass over the graph that
    /// both share. The penalty is another differentiable scalar, such as a regulariser of the hidden states or the loss
    /// of another head.
    ///
    /// # Shapes
    ///
    /// - penalty: a scalar, of the dtype of the value
    ///
    /// # Errors
    ///
    /// If the value or the penalty is not a scalar, their dtypes or devices differ, candle's backward pass fails, or as
    /// for [`Loss::backward`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
    /// let hidden = Var::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    /// let loss = head.loss(&hidden, &Tensor::new(&[1u32, 2, 3], &Device::Cpu)?, &LossOptions::default())?;
    /// let activation_regularization = (hidden.sqr()?.mean_all()? * 2.0)?;
    /// let gradients = loss.backward_with(&activation_regularization)?;
    /// # assert!(gradients.get(&hidden).is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn backward_with(&self, penalty: &Tensor) -> Result<GradStore> {
        self.check_training()?;
        for (argument, tensor) in [("value", &self.value), ("penalty", penalty)] {
            if tensor.rank() != 0 {
                return Err(Error::shape(argument, "a scalar", tensor.dims()));
            }
        }
        check_alike("penalty", penalty, "value", &self.value)?;
        autograd::backward(&self.value, Some(penalty))
    }

    /// Returns an error if this is the loss of an evaluation.
    fn check_training(&self) -> Result<()> {
        // If there are no positions, the gradients of a training step are zero too.
        if self.is_evaluation && self.nll.elem_count() > 0 {
            let got = "that of LossOptions::evaluation(), or with train = false, which has none";
            return Err(Error::config("loss", "the loss of a training step, which has gradients", got));
        }
        Ok(())
    }

    /// Reads `sum` and `count` as numbers, in one transfer, which waits for the device.
    ///
    /// # Errors
    ///
    /// On a GPU, where the loss itself does not read the targets: if the sum is NaN because a target is not in the
    /// vocabulary. The error names the first of them.
    pub fn sum_and_count(&self) -> Result<(f64, f64)> {
        let numbers = Tensor::stack(&[&self.sum, &self.count], 0)?.to_device(&Device::Cpu)?;
        let numbers = numbers.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        let (sum, count) = (numbers[0], numbers[1]);
        if let Some(unchecked) = self.unchecked.as_ref().filter(|_| sum.is_nan()) {
            let UncheckedTargets { targets, ignore_index, vocab_size } = unchecked;
            read_ids("targets", targets, *ignore_index, *vocab_size)?;
        }
        Ok((sum, count))
    }
}
