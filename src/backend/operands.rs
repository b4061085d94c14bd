//! The operands of a mixture, which of them need a gradient, and the types of numbers.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, TensorId};

use crate::backend::collectives::Numbers;
use crate::backend::logit_function::LogitFunction;
use crate::backend::weight::Weight;
use crate::error::Result;
use crate::tensors::id_lists::matrix_rows;

/// The precision of matrix products: of a loss ([`LossOptions::with_precision`](crate::LossOptions::with_precision)),
/// or of all results of a mixture ([`Mixture::with_precision`](crate::Mixture::with_precision)). All sums,
/// exponentials, results and gradients keep their dtype.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor, TensorId};
/// use mos_head::{LossOptions, OutputLayer, Precision, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?; // [batch, seq]
/// let options = LossOptions::new().with_precision(Precision::Bf16Products);
/// let loss = head.loss(&hidden, &targets, &options)?.value; // f32, as with Precision::Full
/// # assert!((loss.to_scalar::<f32>()? - 100f32.ln()).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// The operands' own precision. On CPUs with Intel AMX, losses over hard targets, and scores that take one pass,
    /// split each number of f32 or f16 into three of bf16, where chunks have 240 rows or more. Such scores are the
    /// log-probabilities of at most 512 ids, and the entropy of a single softmax without gradients. The products and
    /// sums have no larger errors than those of f32; an infinite hidden state or weight makes them NaN. On a CUDA
    /// device, products of f32 use TF32 if candle's `set_gemm_reduced_precision_f32` allows it.
    #[default]
    Full,
    /// Operands of f32 or f16 may be rounded to bf16 before they are multiplied; sums stay f32. PyTorch's
    /// `torch.set_float32_matmul_precision("medium")` allows the same.
    ///
    /// It has an effect on CPUs with Intel AMX, and on those whose AVX512-BF16 is faster than their products in f32: on
    /// all products of losses over hard targets, and on the logits of other losses and of log-probabilities, unless the
    /// budget is too small for the rounded operands. A few rows, whose products take no longer than reading the
    /// decoder, are not rounded. Decoding rounds on Intel AMX alone, and only for more than 24 components: how many
    /// positions there are does not matter. `docs/measurements.md` has the errors: they grow with the logits.
    ///
    /// On a CUDA device it has an effect on operands of f32, in losses and scores of at least 256 rows (positions times
    /// components): the contexts and the decoder are copied in bf16.
    Bf16Products,
}

/// The sizes of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// The number of positions: the product of the leading dimensions of the hidden states.
    pub(crate) positions: usize,
    /// The number of components, K.
    pub(crate) components: usize,
    /// The size of a context: d, or with an adapter d + r.
    pub(crate) context_dim: usize,
    /// The number of ids.
    pub(crate) vocab: usize,
}

/// The tensors of a mixture, on one device and with checked shapes; all but the decoder's weight are contiguous.
///
/// The logits are `z = f(scale (c W^T + b))` for the logit function f.
#[derive(Clone, Debug)]
pub(crate) struct Operands {
    pub(crate) sizes: Sizes,
    /// `[positions, K, context_dim]`.
    pub(crate) contexts: Tensor,
    /// A tensor with the elements of the contexts of this id in another shape, which gets their gradient: candle adds
    /// the gradient of each tensor in between to zeros.
    pub(crate) source: Option<(TensorId, Tensor)>,
    /// `[positions, K]`, in the accumulation dtype.
    pub(crate) log_priors: Option<Tensor>,
    /// `[vocab, d]`. A sampled softmax appends a row for each target outside its vocabulary
    /// ([`TargetLoss::own_shifts`]).
    pub(crate) weight: Weight,
    /// `[vocab, r]`: columns to the right of the weight's. The decoder is `[W B]`, which nothing concatenates.
    pub(crate) adapter: Option<Tensor>,
    /// `[rows of the weight]`, in the accumulation dtype.
    pub(crate) bias: Option<Tensor>,
    pub(crate) logit_scale: f64,
    pub(crate) logit_function: LogitFunction,
    pub(crate) precision: Precision,
}

impl Operands {
    /// Returns the device of the tensors.
    pub(crate) fn device(&self) -> &Device {
        self.contexts.device()
    }

    /// Returns the tensor that gets the gradient of the contexts.
    pub(crate) fn contexts_source(&self) -> &Tensor {
        match &self.source {
            Some((contexts, source)) if *contexts == self.contexts.id() => source,
            _ => &self.contexts,
        }
    }

    /// Detaches the operands from the graph.
    pub(crate) fn detach(&self) -> Self {
        let detached = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::detach);
        Operands {
            contexts: self.contexts.detach(),
            source: None,
            log_priors: detached(&self.log_priors),
            weight: self.weight.detach(),
            adapter: detached(&self.adapter),
            bias: detached(&self.bias),
            ..self.clone()
        }
    }

    /// Returns the operands of these positions alone.
    pub(crate) fn narrow(&self, positions: &Range<usize>) -> Result<Self> {
        let narrow = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        Ok(Operands {
            sizes: Sizes { positions: positions.len(), ..self.sizes },
            contexts: narrow(&self.contexts)?,
            log_priors: self.log_priors.as_ref().map(narrow).transpose()?,
            ..self.clone()
        })
    }

    /// Returns the operands whose vocabulary is these ids `[n]`: the decoder's rows are copied, differentiably.
    pub(crate) fn select_ids(&self, ids: &Tensor) -> Result<Self> {
        let bias = self.bias.as_ref().map(|bias| bias.index_select(ids, 0)).transpose()?;
        Ok(Operands {
            sizes: Sizes { vocab: ids.elem_count(), ..self.sizes },
            weight: Weight::Dense(self.weight.rows(ids)?),
            adapter: self.adapter.as_ref().map(|adapter| matrix_rows(adapter, ids)).transpose()?,
            bias,
            ..self.clone()
        })
    }

    /// Returns the operands with the adapter's columns copied into the weight, where the decoder has few rows.
    pub(crate) fn join_adapter(&self) -> Result<Self> {
        let Some(adapter) = &self.adapter else { return Ok(self.clone()) };
        let joined = Tensor::cat(&[&self.weight.dequantised()?, adapter], 1)?;
        Ok(Operands { weight: Weight::Dense(joined), adapter: None, ..self.clone() })
    }

    /// Computes logits by candle's operations, differentiably: `f(scale (products + bias))`, in the dtype of
    /// the products of contexts and decoder. `bias`, if there is one, is that of the products' ids.
    pub(crate) fn finish_logits(&self, products: Tensor, bias: Option<Tensor>) -> Result<Tensor> {
        let mut z = products;
        if let Some(bias) = bias {
            z = z.broadcast_add(&bias.to_dtype(z.dtype())?)?;
        }
        if self.logit_scale != 1.0 {
            z = (z * self.logit_scale)?;
        }
        self.logit_function.composed(z)
    }

    /// Returns whether the mixture is a single softmax without a log-prior.
    pub(crate) fn is_single(&self) -> bool {
        self.sizes.components == 1 && self.log_priors.is_none()
    }

    /// Returns the number of rows of the weight: the vocabulary, and the targets outside it.
    pub(crate) fn weight_rows(&self) -> Result<usize> {
        Ok(self.weight.dims2()?.0)
    }

    /// Returns whether products read copies of the decoder's rows, widened or dequantised.
    pub(crate) fn copies_rows(&self) -> bool {
        match &self.weight {
            Weight::Dense(weight) => matches!(weight.dtype(), DType::F16 | DType::BF16),
            Weight::Quantised(matrix) => matrix.is_copied(),
        }
    }

    /// Returns the columns of the decoder that are the adapter's.
    pub(crate) fn adapter_columns(&self) -> Result<Range<usize>> {
        Ok(self.weight.dims2()?.1..self.sizes.context_dim)
    }
}

/// The operands that need a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NeedsGrad {
    pub(crate) contexts: bool,
    pub(crate) log_priors: bool,
    pub(crate) weight: bool,
    pub(crate) adapter: bool,
    pub(crate) bias: bool,
}

impl NeedsGrad {
    /// Returns whether any operand needs a gradient.
    pub(crate) fn any(self) -> bool {
        self.contexts || self.log_priors || self.decoder()
    }

    /// Returns whether the weight, the adapter or the bias needs a gradient.
    pub(crate) fn decoder(self) -> bool {
        self.weight || self.adapter || self.bias
    }
}

/// A type that log-probabilities are computed in.
pub(crate) trait Real: num_traits::Float + candle_core::WithDType {
    /// Converts the number to f64.
    fn f64(self) -> f64;

    /// Wraps numbers of this type for the collective operations of ranks.
    fn numbers(values: &mut [Self]) -> Numbers<'_>;
}

impl Real for f32 {
    #[inline(always)]
    fn f64(self) -> f64 {
        self.into()
    }

    fn numbers(values: &mut [f32]) -> Numbers<'_> {
        Numbers::F32(values)
    }
}

impl Real for f64 {
    #[inline(always)]
    fn f64(self) -> f64 {
        self
    }

    fn numbers(values: &mut [f64]) -> Numbers<'_> {
        Numbers::F64(values)
    }
}
