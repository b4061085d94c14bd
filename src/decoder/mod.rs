//! The decoder, which all components share: it computes the logits of a context, `z = c W^T + b`. Its rows W are a
//! matrix, perhaps a quantised one ([`quantised`]), or are computed from spellings ([`char_cnn`]); a low-rank
//! [`adapter`] can be added to them.

mod adapter;
mod char_cnn;
mod gguf;
mod peft;
mod quantised;
mod quantised_linear;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, Init, VarBuilder};

use crate::backend::logit_function::{check_logits, LogitFunction};
use crate::backend::quantised::QuantisedMatrix;
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, Request};
use crate::mixture::{Mixture, Sample};
use crate::tensors::checks::{
    check_alike, check_bias, check_device, check_elements, check_float, check_hidden_size, check_product, check_sizes,
    check_vocab,
};
pub use adapter::{LowRankAdapter, LowRankConfig};
pub use char_cnn::{CharCnn, CharCnnConfig};
pub use quantised_linear::QuantisedLinear;

/// The sizes and options of a [`Decoder`].
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::parts::{Decoder, DecoderConfig};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = DecoderConfig::new(1000, 16).with_bias(false).with_softcap(Some(30.0));
/// let decoder = Decoder::new(&config, vb)?;
/// assert_eq!(decoder.weight()?.dims(), [1000, 16]);
/// assert_eq!(vars.all_vars().len(), 1); // there is no bias
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DecoderConfig {
    /// The number of token ids.
    pub vocab_size: usize,
    /// The size of a context, d.
    pub context_dim: usize,
    /// Whether there is a bias. The default is true.
    pub bias: bool,
    /// The scale of the logits, bias included, before their function. The default is 1.
    pub logit_scale: f64,
    /// The function of the logits. The default is the identity.
    pub logit_function: LogitFunction,
}

impl DecoderConfig {
    /// Makes the configuration of a decoder of these sizes, with a bias.
    pub fn new(vocab_size: usize, context_dim: usize) -> Self {
        let logit_function = LogitFunction::Identity;
        DecoderConfig { vocab_size, context_dim, bias: true, logit_scale: 1.0, logit_function }
    }

    /// Sets whether there is a bias.
    pub fn with_bias(self, bias: bool) -> Self {
        DecoderConfig { bias, ..self }
    }

    /// Sets the scale of the logits, bias included, before their function.
    pub fn with_logit_scale(self, logit_scale: f64) -> Self {
        DecoderConfig { logit_scale, ..self }
    }

    /// Sets the function of the logits to the softcap, [`LogitFunction::Softcap`], or with `None` to the identity.
    pub fn with_softcap(self, softcap: Option<f64>) -> Self {
        self.with_logit_function(softcap.map_or(LogitFunction::Identity, LogitFunction::Softcap))
    }

    /// Sets the function of the logits.
    pub fn with_logit_function(self, logit_function: LogitFunction) -> Self {
        DecoderConfig { logit_function, ..self }
    }

    /// Checks the sizes and options.
    pub(crate) fn validate(&self) -> Result<()> {
        check_sizes(&[("context_dim", self.context_dim)])?;
        check_vocab(self.vocab_size)?;
        check_product("vocab_size * context_dim", &[self.vocab_size, self.context_dim])?;
        check_logits(self.logit_scale, self.logit_function)
    }
}

/// The rows W that are multiplied by a context, and the steps from the product to the logits:
///
/// ```text
/// z = f(scale (c W^T + b))
/// ```
///
/// where `f` is the [`LogitFunction`].
///
/// A [`Head`](crate::Head) is a projection and a decoder.
///
/// # Examples
///
/// The distribution of a model that computes contexts and log-priors itself:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::parts::Decoder;
/// use mos_head::Distributions;
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?; // 100 token ids
/// let decoder = Decoder::from_tensors(weight, None)?.with_softcap(Some(30.0))?;
/// let contexts = Tensor::randn(0f32, 1., (2, 5, 3, 8), &Device::Cpu)?; // [batch, seq, K, d]
/// let log_priors = Tensor::full(-3f32.ln(), (2, 5, 3), &Device::Cpu)?; // [batch, seq, K]
/// let log_probs = decoder.mixture(&contexts, Some(&log_priors))?.log_probs()?;
/// assert_eq!(log_probs.dims(), [2, 5, 100]);
/// let sums = log_probs.exp()?.sum(2)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-5));
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, arXiv
/// 1711.03953.
#[derive(Clone, Debug)]
pub struct Decoder {
    rows: WeightRows,
    adapter: Option<LowRankAdapter>,
    /// `[vocab]`
    bias: Option<Tensor>,
    logit_scale: f64,
    logit_function: LogitFunction,
}

/// The decoder's weight, `[vocab, d]`.
#[derive(Clone, Debug)]
enum WeightRows {
    /// The weight is a tensor.
    Matrix(Tensor),
    /// The rows are quantised, and read where they lie.
    Quantised(QuantisedMatrix),
    /// Each call computes the rows from spellings.
    Computed(Arc<CharCnn>),
}

impl Decoder {
    /// Makes a decoder with the variables `decoder.weight` `[vocab, d]`, uniform within 0.1, and `decoder.bias`
    /// `[vocab]`, zero, as in the released code of Yang et al. (2018).
    ///
    /// # Errors
    ///
    /// If a size is zero, the weight would have more than 2^40 elements or 2^32 - 1 token ids, a number is out of
    /// range, or a variable is missing or of another shape.
    pub fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let init = Init::Uniform { lo: -0.1, up: 0.1 };
        let shape = (config.vocab_size, config.context_dim);
        Self::from_rows(config, WeightRows::Matrix(vb.pp("decoder").get_with_hints(shape, "weight", init)?), &vb)
    }

    /// Makes a decoder tied to the matrix of an embedding, `[vocab, d]`, with the variable `decoder.bias`. The
    /// gradients of both uses are summed.
    ///
    /// # Shapes
    ///
    /// - embedding: `[vocab, d]`
    ///
    /// # Errors
    ///
    /// If the embedding is of another shape, and the errors of [`Decoder::new`].
    pub fn tied(config: &DecoderConfig, embedding: &Embedding, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let (weight, expected) = (embedding.embeddings(), [config.vocab_size, config.context_dim]);
        if weight.dims() == expected {
            Self::from_rows(config, WeightRows::Matrix(weight.clone()), &vb)
        } else {
            Err(Error::shape("embedding", format!("{expected:?}"), weight.dims()))
        }
    }

    /// Makes a decoder whose rows `[vocab, d]` are computed from spellings, with the variable `decoder.bias`. The rows
    /// are computed anew for each call.
    ///
    /// # Errors
    ///
    /// If the rows are of another shape, and the errors of [`Decoder::new`].
    pub fn with_char_cnn(config: &DecoderConfig, cnn: CharCnn, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let (got, expected) = ([cnn.vocab_size(), cnn.context_dim()], [config.vocab_size, config.context_dim]);
        if got == expected {
            Self::from_rows(config, WeightRows::Computed(Arc::new(cnn)), &vb)
        } else {
            Err(Error::shape("rows of the char-CNN", format!("{expected:?}"), &got))
        }
    }

    /// Makes a decoder with these rows, and with the variable `decoder.bias` if it is configured.
    fn from_rows(config: &DecoderConfig, rows: WeightRows, vb: &VarBuilder) -> Result<Self> {
        let &DecoderConfig { vocab_size, bias, logit_scale, logit_function, .. } = config;
        let bias = bias.then(|| vb.pp("decoder").get_with_hints(vocab_size, "bias", Init::Const(0.0))).transpose()?;
        Ok(Decoder { rows, adapter: None, bias, logit_scale, logit_function })
    }

    /// Makes a decoder from its weight and bias.
    ///
    /// # Shapes
    ///
    /// - weight: `[vocab, d]`
    /// - bias: `[vocab]`
    ///
    /// # Errors
    ///
    /// If the shapes do not match, or a dtype is not a float type.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let &[vocab_size, context_dim] = weight.dims() else {
            return Err(Error::shape("decoder.weight", "[vocab_size, context_dim]", weight.dims()));
        };
        check_elements("decoder.weight", weight.dims())?;
        check_vocab(vocab_size)?;
        check_sizes(&[("context_dim", context_dim)])?;
        check_float("decoder.weight", &weight)?;
        if let Some(bias) = &bias {
            check_bias("decoder.bias", bias, vocab_size)?;
            check_device("decoder.bias", bias, &weight)?;
        }
        let (rows, logit_function) = (WeightRows::Matrix(weight), LogitFunction::Identity);
        Ok(Decoder { rows, adapter: None, bias, logit_scale: 1.0, logit_function })
    }

    /// Returns the decoder with softly bounded logits, `z = cap tanh(z / cap)`, or without a bound.
    ///
    /// # Errors
    ///
    /// If the cap is not from 1e-30 to 1e30.
    pub fn with_softcap(self, softcap: Option<f64>) -> Result<Self> {
        self.with_logit_function(softcap.map_or(LogitFunction::Identity, LogitFunction::Softcap))
    }

    /// Returns the decoder with another function of the logits.
    ///
    /// # Errors
    ///
    /// If the cap of a softcap is not from 1e-30 to 1e30.
    pub fn with_logit_function(self, logit_function: LogitFunction) -> Result<Self> {
        check_logits(self.logit_scale, logit_function)?;
        Ok(Decoder { logit_function, ..self })
    }

    /// Returns the decoder with another scale of the logits, bias included, before their function.
    ///
    /// # Errors
    ///
    /// If the scale is not from 1e-30 to 1e30.
    pub fn with_logit_scale(self, logit_scale: f64) -> Result<Self> {
        check_logits(logit_scale, self.logit_function)?;
        Ok(Decoder { logit_scale, ..self })
    }

    /// Returns the decoder with a low-rank adapter, in place of another one: its weight acts as `W + s B A`.
    ///
    /// # Errors
    ///
    /// If the adapter is for another shape, or of another dtype or on another device than the weight. A weight in half
    /// precision also takes one in f32, which is rounded to the weight's dtype in each call and whose gradients are in
    /// f32; a quantised weight takes one in f32.
    pub fn with_adapter(self, adapter: LowRankAdapter) -> Result<Self> {
        adapter.check_shape(self.vocab_size(), self.context_dim())?;
        match self.parameter() {
            Some(parameter) if adapter.widens(parameter.dtype()) => check_device("adapter", adapter.b(), parameter)?,
            Some(parameter) => check_alike("adapter", adapter.b(), "decoder.weight", parameter)?,
            None => quantised::check_operand("adapter", adapter.b(), &[DType::F32])?,
        }
        Ok(Decoder { adapter: Some(adapter), ..self })
    }

    /// Returns the low-rank adapter.
    pub fn adapter(&self) -> Option<&LowRankAdapter> {
        self.adapter.as_ref()
    }

    /// Returns the decoder whose weight is the constant `W + s B A`, without an adapter: to export it, or to serve it. A
    /// decoder that has no adapter is returned as it is. The sum is computed in f32 (f64 for f64). The sum with quantised rows is a tensor in f32, which takes about four
    /// times the memory of Q8_0.
    ///
    /// # Errors
    ///
    /// If the device has no memory for the sum.
    pub fn merged(&self) -> Result<Self> {
        let Some(adapter) = &self.adapter else { return Ok(self.clone()) };
        Ok(Decoder { rows: WeightRows::Matrix(adapter.merge(&self.weight()?)?), adapter: None, ..self.clone() })
    }

    /// Returns the weight W, `[vocab, d]`, without the product of an adapter ([`Decoder::merged`] adds it). Each call
    /// dequantises quantised rows to f32, which takes about four times the memory of Q8_0.
    ///
    /// # Errors
    ///
    /// If the rows are computed or quantised, and the device has no memory or candle no kernels for them.
    pub fn weight(&self) -> Result<Tensor> {
        match &self.rows {
            WeightRows::Matrix(weight) => Ok(weight.clone()),
            WeightRows::Quantised(matrix) => matrix.dequantised(),
            WeightRows::Computed(cnn) => cnn.rows(),
        }
    }

    /// Returns the bias, `[vocab]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match &self.rows {
            WeightRows::Matrix(weight) => weight.dims()[0],
            WeightRows::Quantised(matrix) => matrix.dims()[0],
            WeightRows::Computed(cnn) => cnn.vocab_size(),
        }
    }

    /// Returns the size of a context, d.
    pub fn context_dim(&self) -> usize {
        match &self.rows {
            WeightRows::Matrix(weight) => weight.dims()[1],
            WeightRows::Quantised(matrix) => matrix.dims()[1],
            WeightRows::Computed(cnn) => cnn.context_dim(),
        }
    }

    /// Makes the mixture of these contexts and log-priors under this decoder.
    ///
    /// # Shapes
    ///
    /// - contexts: `[.., K, d]`
    /// - log_priors: `[.., K]`; `None` is accepted if K = 1
    ///
    /// # Errors
    ///
    /// The errors of [`Mixture::new`].
    pub fn mixture(&self, contexts: &Tensor, log_priors: Option<&Tensor>) -> Result<Mixture> {
        self.mixture_from(contexts, log_priors, None)
    }

    /// Makes the mixture of these contexts, which may have the elements of a `source` in another shape: it gets their
    /// gradient.
    pub(crate) fn mixture_from(
        &self,
        contexts: &Tensor,
        log_priors: Option<&Tensor>,
        source: Option<&Tensor>,
    ) -> Result<Mixture> {
        let bias = self.bias.as_ref();
        let mixture = match &self.rows {
            WeightRows::Quantised(matrix) => quantised::mixture(contexts, log_priors, matrix, bias)?,
            _ => Mixture::new(contexts, log_priors, &self.weight()?, bias)?,
        };
        let mixture = mixture.with_logits(self.logit_scale, self.logit_function)?;
        let mixture = match source {
            // Contexts that are widened are another tensor.
            Some(source) if source.dtype() == mixture.operands().contexts.dtype() => mixture.with_source(source),
            _ => mixture,
        };
        match &self.adapter {
            Some(adapter) => {
                let adapter = adapter.converted(mixture.operands().contexts.dtype())?;
                mixture.with_adapter(adapter.b(), |contexts| adapter.contexts(contexts))
            }
            None => Ok(mixture),
        }
    }

    /// Computes the loss of the mixture of these contexts, which are masked at ignored positions, and may have a
    /// `source` as in [`Decoder::mixture_from`]. If rows are computed from spellings, a sampled loss computes only the
    /// rows of its sample and of the targets.
    pub(crate) fn request_loss(
        &self,
        contexts: &Tensor,
        log_priors: Option<&Tensor>,
        source: Option<&Tensor>,
        request: &Request,
    ) -> Result<Loss> {
        if let (WeightRows::Computed(cnn), Some(loss)) = (&self.rows, request.options.sampled_step()) {
            if request.options.decoder_rows {
                let head = "a decoder whose rows are computed";
                return Err(Error::Unsupported { option: OptionName::DecoderRows, head });
            }
            if let Some(sample) = Sample::new(loss, contexts, self.vocab_size(), self.logit_function, request)? {
                let decoder = self.select_ids(cnn.rows_of(&sample.token_ids)?, &sample.token_ids)?;
                return decoder.mixture(contexts, log_priors)?.loss_over_sample(&sample, request);
            }
        }
        self.mixture_from(contexts, log_priors, source)?.loss_from_request(request)
    }

    /// Returns the decoder whose vocabulary is these ids `[n]`, to which these rows belong.
    fn select_ids(&self, rows: Tensor, ids: &Tensor) -> Result<Self> {
        let adapter = self.adapter.as_ref().map(|adapter| adapter.select_ids(ids)).transpose()?;
        let bias = self.bias.as_ref().map(|bias| bias.contiguous()?.index_select(ids, 0)).transpose()?;
        Ok(Decoder { rows: WeightRows::Matrix(rows), adapter, bias, ..self.clone() })
    }

    /// Returns the decoder with weight and bias as constants; rows from spellings are computed here. An adapter remains
    /// as it is.
    pub(crate) fn with_constant_rows(self) -> Result<Self> {
        let rows = match &self.rows {
            WeightRows::Matrix(weight) => WeightRows::Matrix(weight.detach()),
            WeightRows::Quantised(matrix) => WeightRows::Quantised(matrix.clone()),
            WeightRows::Computed(cnn) => WeightRows::Matrix(cnn.rows()?.detach()),
        };
        let bias = self.bias.as_ref().map(Tensor::detach);
        Ok(Decoder { rows, bias, ..self })
    }

    /// Returns the decoder and its adapter as constants.
    pub(crate) fn frozen(&self) -> Result<Self> {
        let adapter = self.adapter.as_ref().map(LowRankAdapter::frozen);
        Decoder { adapter, ..self.clone() }.with_constant_rows()
    }

    /// Checks that hidden states have this size, which a projection with parameters or else the decoder determines, and
    /// the dtype and the device of the decoder.
    pub(crate) fn check_hidden(&self, hidden: &Tensor, size: usize, has_projection: bool) -> Result<()> {
        let compared = || {
            if has_projection {
                "the hidden_size of the projection".into()
            } else {
                format!("the decoder's weight {:?}", [self.vocab_size(), self.context_dim()])
            }
        };
        check_hidden_size(hidden, size, compared)?;
        match self.parameter() {
            Some(parameter) => check_alike("hidden", hidden, "the head's parameters", parameter),
            None => quantised::check_operand("hidden", hidden, &quantised::HIDDEN),
        }
    }

    /// Checks that contexts have this shape, and the dtype and the device of the decoder.
    pub(crate) fn check_contexts(&self, contexts: &Tensor, shape: &[usize]) -> Result<()> {
        if contexts.dims() != shape {
            return Err(Error::shape("contexts", format!("{shape:?}"), contexts.dims()));
        }
        match self.parameter() {
            Some(parameter) => check_alike("contexts", contexts, "the head's parameters", parameter),
            None => Ok(()),
        }
    }

    /// Returns the dtype and the device of the parameters of a projection to the contexts.
    pub(crate) fn parameters_like(&self) -> (DType, Device) {
        self.parameter().map_or((DType::F32, Device::Cpu), |parameter| (parameter.dtype(), parameter.device().clone()))
    }

    /// Returns a parameter, which has the dtype and the device of all; `None` if the rows are quantised.
    fn parameter(&self) -> Option<&Tensor> {
        match &self.rows {
            WeightRows::Matrix(weight) => Some(weight),
            WeightRows::Quantised(_) => None,
            WeightRows::Computed(cnn) => Some(cnn.parameter()),
        }
    }
}
