//! A low-rank adapter of the decoder, whose weight becomes `W + s B A`, a sum that is never formed (Hu et al., 2021,
//! arXiv 2106.09685).
//!
//! ```text
//! z = c W^T + (s c A^T) B^T + b
//! ```
//!
//! The kernels multiply contexts `[c, s c A^T]` of size d + r by a decoder `[W, B]`, whose two matrices they read in
//! place.

use candle_core::{DType, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::backend;
use crate::error::{Error, Result};
use crate::tensors::autograd::converted;
use crate::tensors::checks::{
    accumulation_dtype, check_alike, check_elements, check_float, check_number, check_product, check_sizes, check_vocab,
};
use crate::tensors::initial_values::linear_init;
use crate::tensors::linear::{linear_layer, LinearOperands};

/// The sizes and the scale of a [`LowRankAdapter`].
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use mos_head::parts::{LowRankAdapter, LowRankConfig};
///
/// # fn main() -> mos_head::Result<()> {
/// let config = LowRankConfig::new(1000, 64, 8).with_alpha(16.0);
/// let adapter = LowRankAdapter::new(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// assert_eq!((adapter.a().dims(), adapter.b().dims()), (&[8, 64][..], &[1000, 8][..]));
/// assert_eq!(adapter.scale(), 2.0); // alpha / rank
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "AdapterFields"))]
#[non_exhaustive]
pub struct LowRankConfig {
    /// The number of token ids.
    pub vocab_size: usize,
    /// The size of a context, d.
    pub context_dim: usize,
    /// The rank, r.
    pub rank: usize,
    /// The numerator of the factor `alpha / rank` that multiplies the adapter. The default is the rank.
    pub alpha: f64,
}

impl LowRankConfig {
    /// Makes the configuration of an adapter of this rank with the factor 1.
    pub fn new(vocab_size: usize, context_dim: usize, rank: usize) -> Self {
        LowRankConfig { vocab_size, context_dim, rank, alpha: rank as f64 }
    }

    /// Sets the numerator of the factor `alpha / rank`.
    pub fn with_alpha(self, alpha: f64) -> Self {
        LowRankConfig { alpha, ..self }
    }
}

/// The fields of a configuration that is deserialized: sizes are required, and alpha has the default of `new`.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct AdapterFields {
    vocab_size: usize,
    context_dim: usize,
    rank: usize,
    alpha: Option<f64>,
}

#[cfg(feature = "serde")]
impl From<AdapterFields> for LowRankConfig {
    fn from(read: AdapterFields) -> Self {
        let default = LowRankConfig::new(read.vocab_size, read.context_dim, read.rank);
        LowRankConfig { alpha: read.alpha.unwrap_or(default.alpha), ..default }
    }
}

/// Low-rank adaptation of a decoder (LoRA): `W + s B A` in place of the weight W, with A `[r, d]` and B `[vocab, r]`.
///
/// [`Decoder::with_adapter`](crate::parts::Decoder::with_adapter) and [`Head::with_adapter`](crate::Head::with_adapter)
/// add it to a decoder. The sum is never formed: unless the weight itself needs a gradient, a training step holds no
/// other tensor of shape `[vocab, d]`. The factor s is not in A or B: [`LowRankAdapter::save`] writes it beside them,
/// as PEFT does, and [`LowRankAdapter::load`] reads both.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::parts::{LowRankAdapter, LowRankConfig};
/// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::randn(0f32, 0.1, (1000, 64), &Device::Cpu)?; // frozen
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let adapter = LowRankAdapter::new(&LowRankConfig::new(1000, 64, 8).with_alpha(16.0), vb.pp("lm_head"))?;
/// let head = SoftmaxHead::from_tensors(weight, None)?.with_adapter(adapter)?;
///
/// let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// assert_eq!(vars.all_vars().iter().filter(|var| gradients.get(var).is_some()).count(), 2);
///
/// let exported = head.merged()?; // its weight is W + 2 B A
/// # assert!(exported.decoder().adapter().is_none());
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022,
/// arXiv 2106.09685.
#[derive(Clone, Debug)]
pub struct LowRankAdapter {
    /// `[r, d]`
    a: Tensor,
    /// `[vocab, r]`
    b: Tensor,
    scale: f64,
}

impl LowRankAdapter {
    /// Makes an adapter with the variables `lora_A.weight` `[r, d]`, uniform within `1 / sqrt(d)`, and `lora_B.weight`
    /// `[vocab, r]`, zero, which are the names and initial values of Hugging Face PEFT. (Under
    /// `vb.pp("base_model.model.lm_head")` they are the names in PEFT's file of a language model.)
    ///
    /// # Errors
    ///
    /// If a size is zero, a matrix would have more than 2^40 elements, there are more than 2^32 - 1 token ids, `alpha`
    /// is not finite, or a variable is missing or of another shape.
    pub fn new(config: &LowRankConfig, vb: VarBuilder) -> Result<Self> {
        let &LowRankConfig { vocab_size, context_dim, rank, alpha } = config;
        check_sizes(&[("context_dim", context_dim), ("rank", rank)])?;
        check_vocab(vocab_size)?;
        check_product("rank * context_dim", &[rank, context_dim])?;
        check_product("vocab_size * rank", &[vocab_size, rank])?;
        check_number(alpha.is_finite(), "alpha", "a finite number", alpha)?;
        let a = vb.get_with_hints((rank, context_dim), "lora_A.weight", linear_init(context_dim))?;
        let b = vb.get_with_hints((vocab_size, rank), "lora_B.weight", Init::Const(0.0))?;
        Self::from_tensors(a, b, alpha / rank as f64)
    }

    /// Makes an adapter from its matrices and its factor s.
    ///
    /// # Shapes
    ///
    /// - a: `[r, d]`; f16, bf16, f32 or f64
    /// - b: `[vocab, r]`, of the same dtype
    ///
    /// # Errors
    ///
    /// If the shapes do not match, a size is zero, the dtypes are not the same float type, the devices differ, or the
    /// factor is not finite.
    pub fn from_tensors(a: Tensor, b: Tensor, scale: f64) -> Result<Self> {
        let &[rank, context_dim] = a.dims() else {
            return Err(Error::shape("lora_A", "[rank, context_dim]", a.dims()));
        };
        let vocab_size = match *b.dims() {
            [vocab_size, columns] if columns == rank => vocab_size,
            _ => return Err(Error::shape("lora_B", format!("[vocab_size, {rank}]"), b.dims())),
        };
        check_sizes(&[("rank", rank), ("context_dim", context_dim)])?;
        check_vocab(vocab_size)?;
        check_elements("lora_A", a.dims())?;
        check_elements("lora_B", b.dims())?;
        check_float("lora_A", &a)?;
        check_alike("lora_B", &b, "lora_A", &a)?;
        check_number(scale.is_finite(), "scale", "a finite number", scale)?;
        Ok(LowRankAdapter { a, b, scale })
    }

    /// Returns A, `[r, d]`.
    pub fn a(&self) -> &Tensor {
        &self.a
    }

    /// Returns B, `[vocab, r]`.
    pub fn b(&self) -> &Tensor {
        &self.b
    }

    /// Returns the factor s of the product B A.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Returns the rank, r.
    pub fn rank(&self) -> usize {
        self.a.dims()[0]
    }

    /// Returns the size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.b.dims()[0]
    }

    /// Returns the size of a context, d.
    pub fn context_dim(&self) -> usize {
        self.a.dims()[1]
    }

    /// Returns the adapter as a constant.
    pub(super) fn frozen(&self) -> Self {
        LowRankAdapter { a: self.a.detach(), b: self.b.detach(), scale: self.scale }
    }

    /// Returns whether the adapter is in f32, beside a weight in half precision.
    pub(super) fn widens(&self, weight: DType) -> bool {
        self.b.dtype() == DType::F32 && matches!(weight, DType::F16 | DType::BF16)
    }

    /// Converts the adapter to the dtype of the contexts. Its own matrices get the gradients.
    pub(super) fn converted(&self, dtype: DType) -> Result<Self> {
        Ok(LowRankAdapter { a: converted(&self.a, dtype)?, b: converted(&self.b, dtype)?, scale: self.scale })
    }

    /// Returns the adapter of a decoder whose vocabulary is these ids `[n]`.
    pub(super) fn select_ids(&self, ids: &Tensor) -> Result<Self> {
        Ok(LowRankAdapter { b: self.b.contiguous()?.index_select(ids, 0)?, ..self.clone() })
    }

    /// Checks that the adapter is for a weight of this shape.
    pub(super) fn check_shape(&self, vocab_size: usize, context_dim: usize) -> Result<()> {
        if [self.vocab_size(), self.context_dim()] == [vocab_size, context_dim] {
            Ok(())
        } else {
            Err(Error::config(
                "adapter",
                format!("an adapter of [{vocab_size}, {context_dim}], the shape of the weight"),
                format!("one of [{}, {}]", self.vocab_size(), self.context_dim()),
            ))
        }
    }

    /// Computes `s c A^T`, `[rows, r]`, for contexts `[rows, d]`.
    pub(super) fn contexts(&self, contexts: &Tensor) -> Result<Tensor> {
        let (rows, scale) = (contexts.dim(0)?, self.scale);
        let forward = |layer: LinearOperands<'_>| Ok((backend::linear(layer.input, layer.weight)? * scale)?);
        let gradient = move |_: &Tensor, upstream: &Tensor| Ok((upstream * scale)?);
        let operands = LinearOperands { input: contexts, weight: &self.a, bias: None };
        linear_layer("adapter", operands, &[rows, self.rank()], &forward, backend::matmul, Box::new(gradient))
    }

    /// Computes `W + s B A` in f32 (f64 for f64), and returns it as a constant in the dtype of the weight.
    pub(super) fn merge(&self, weight: &Tensor) -> Result<Tensor> {
        let accumulation = accumulation_dtype("decoder.weight", weight.dtype())?;
        let [a, b, w] = [&self.a, &self.b, weight].map(|tensor| tensor.detach().to_dtype(accumulation));
        Ok(((b?.matmul(&a?)? * self.scale)? + w?)?.to_dtype(weight.dtype())?)
    }
}
