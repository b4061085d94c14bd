//! The configuration of the two heads with K contexts, and their parameters as tensors.

use candle_core::Tensor;

use crate::backend::logit_function::{check_logits, LogitFunction};
use crate::error::{Error, Result};
use crate::tensors::checks::{check_dropout, check_number, check_product, check_sizes, check_vocab};

/// The activation of the contexts.
///
/// The rank of a mixture of softmaxes does not need one: the logarithm of the sum is the nonlinearity. Which activation
/// learns faster depends on the recipe. With Adam and hidden states near the limits of a tanh, the K tanh layers
/// saturate before they align with the one decoder that they share; linear contexts, and components that start alike
/// ([`MixtureConfig::similar_components`]), do not. After one epoch of the lab's `translation` (German to English, Adam
/// at learning rate 0.002, K = 5) independent tanh contexts are far behind a softmax of as many parameters, and linear
/// contexts that start alike are ahead of it, with less than half the perplexity of the former
/// (`docs/measurements.md`). With SGD at learning rate 20 and small initial values (the lab's `language_model`, Penn
/// Treebank), as in the paper, tanh and independent components learn faster.
///
/// # Examples
///
/// ```
/// use mos_head::{ContextActivation, MixtureConfig};
///
/// let config = MixtureConfig::new(64, 1000, 5).with_activation(ContextActivation::Identity);
/// assert_ne!(config.activation, ContextActivation::default());
/// ```
///
/// # References
///
/// "The paper" is Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model.
/// ICLR 2018, arXiv 1711.03953.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ContextActivation {
    /// The hyperbolic tangent, as in the paper. It suits SGD with small initial values.
    #[default]
    Tanh,
    /// No activation: the contexts are linear. Try it first with Adam.
    Identity,
}

/// The sizes and options of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes) or a
/// [`MixtureOfContexts`](crate::MixtureOfContexts).
///
/// # Examples
///
/// ```
/// use mos_head::{ContextActivation, MixtureConfig};
///
/// // The paper's Penn Treebank model: hidden size 620, d = 280, 10,000 token ids, 15 components.
/// let config = MixtureConfig::new(620, 10_000, 15).with_context_dim(280).with_dropout(0.29);
/// assert_eq!(config.activation, ContextActivation::Tanh);
/// ```
///
/// # References
///
/// - "The paper" is Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model.
///   ICLR 2018, arXiv 1711.03953.
/// - Variational dropout, here locked dropout: Gal, Ghahramani: A Theoretically Grounded Application of Dropout in
///   Recurrent Neural Networks. NeurIPS 2016, arXiv 1512.05287.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "MixtureFields"))]
#[non_exhaustive]
pub struct MixtureConfig {
    /// The size of a hidden state.
    pub hidden_size: usize,
    /// The number of token ids.
    pub vocab_size: usize,
    /// The number of components of the mixture, K.
    pub components: usize,
    /// The size of a context, d. The default is the size of a hidden state.
    pub context_dim: usize,
    /// Whether the decoder has a bias. The default is true.
    pub decoder_bias: bool,
    /// Whether the priors have a bias. The default is false, as in the paper.
    pub prior_bias: bool,
    /// The activation of the contexts. The default is tanh, as in the paper; [`ContextActivation`] says when another
    /// one is better.
    pub activation: ContextActivation,
    /// Locked dropout on the contexts while training: hidden states `[batch, seq, hidden]` share one mask per sequence
    /// (the paper's variational dropout on context vectors); hidden states `[positions, hidden]` get one mask per
    /// position. The default is 0.
    pub dropout: f64,
    /// The scale of the logits, bias included, before their function. The default is 1.
    pub logit_scale: f64,
    /// The function of the logits. The default is the identity.
    pub logit_function: LogitFunction,
}

impl MixtureConfig {
    /// Makes the configuration of the paper with these sizes, without dropout. Contexts have the size of hidden states.
    pub fn new(hidden_size: usize, vocab_size: usize, components: usize) -> Self {
        MixtureConfig {
            hidden_size,
            vocab_size,
            components,
            context_dim: hidden_size,
            decoder_bias: true,
            prior_bias: false,
            activation: ContextActivation::Tanh,
            dropout: 0.0,
            logit_scale: 1.0,
            logit_function: LogitFunction::Identity,
        }
    }

    /// Sets the size of a context, d.
    pub fn with_context_dim(self, context_dim: usize) -> Self {
        MixtureConfig { context_dim, ..self }
    }

    /// Sets whether the decoder has a bias.
    pub fn with_decoder_bias(self, decoder_bias: bool) -> Self {
        MixtureConfig { decoder_bias, ..self }
    }

    /// Sets whether the priors have a bias.
    pub fn with_prior_bias(self, prior_bias: bool) -> Self {
        MixtureConfig { prior_bias, ..self }
    }

    /// Sets the activation of the contexts.
    pub fn with_activation(self, activation: ContextActivation) -> Self {
        MixtureConfig { activation, ..self }
    }

    /// Sets the probability with which locked dropout zeroes an element of the contexts.
    pub fn with_dropout(self, dropout: f64) -> Self {
        MixtureConfig { dropout, ..self }
    }

    /// Sets the scale of the logits, bias included, before their function.
    pub fn with_logit_scale(self, logit_scale: f64) -> Self {
        MixtureConfig { logit_scale, ..self }
    }

    /// Bounds the logits softly: `z = cap tanh(z / cap)` (Gemma Team: Gemma 2: Improving Open Language Models at a
    /// Practical Size. 2024, arXiv 2408.00118).
    pub fn with_softcap(self, cap: f64) -> Self {
        self.with_logit_function(LogitFunction::Softcap(cap))
    }

    /// Sets the function of the logits.
    pub fn with_logit_function(self, logit_function: LogitFunction) -> Self {
        MixtureConfig { logit_function, ..self }
    }

    /// Computes initial values of `latent.weight` with components that start alike: `W_k` becomes `sqrt(1 - spread^2)
    /// W_1 + spread W_k` for k > 1. The scale of the values is kept; spread 1 changes nothing, and with spread 0 all
    /// components have the weights of the first.
    ///
    /// All components share the decoder. If their projections start as K independent ones, the decoder serves K
    /// unrelated contexts at once, and a deep model with saturated hidden states learns slowly. Components that start
    /// alike begin as one softmax, and separate as their responsibilities do. [`ContextActivation`] says what that has
    /// gained.
    ///
    /// # Shapes
    ///
    /// - latent_weight: `[K * d, hidden]`
    /// - returns `[K * d, hidden]`
    ///
    /// # Errors
    ///
    /// If the configuration is not valid, the shape does not match it, or the spread is not from 0 to 1.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mos_head::{MixtureConfig, MixtureOfSoftmaxes};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let mut vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let config = MixtureConfig::new(64, 1000, 5).with_context_dim(32);
    /// let head = MixtureOfSoftmaxes::new(&config, vb.pp("head"))?;
    /// let alike = config.similar_components(&head.tensors()?.latent_weight, 0.3)?;
    /// vars.set_one("head.latent.weight", alike)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn similar_components(&self, latent_weight: &Tensor, spread: f64) -> Result<Tensor> {
        self.validate()?;
        check_number((0.0..=1.0).contains(&spread), "spread", "from 0 to 1", spread)?;
        let &MixtureConfig { hidden_size, context_dim, components, .. } = self;
        let expected = [components * context_dim, hidden_size];
        if latent_weight.dims() != expected {
            let expected = format!("{expected:?}");
            return Err(Error::shape("latent_weight", expected, latent_weight.dims()));
        }
        let weight = latent_weight.detach();
        let first = weight.narrow(0, 0, context_dim)?;
        let shared = (&first * (1.0 - spread * spread).sqrt())?;
        let component = |k| match k {
            // It is copied, because the concatenation of one tensor shares its storage, to which a variable cannot be
            // set.
            0 => first.copy(),
            k => &shared + (weight.narrow(0, k * context_dim, context_dim)? * spread)?,
        };
        Ok(Tensor::cat(&(0..components).map(component).collect::<candle_core::Result<Vec<_>>>()?, 0)?)
    }

    /// Checks the sizes and options.
    pub(super) fn validate(&self) -> Result<()> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("context_dim", self.context_dim),
            ("vocab_size", self.vocab_size),
            ("components", self.components),
        ];
        check_sizes(&sizes)?;
        check_vocab(self.vocab_size)?;
        check_product("vocab_size * context_dim", &[self.vocab_size, self.context_dim])?;
        let latent = [self.components, self.context_dim, self.hidden_size];
        check_product("components * context_dim * hidden_size", &latent)?;
        check_dropout(self.dropout)?;
        check_logits(self.logit_scale, self.logit_function)
    }
}

/// The parameters of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes) or a
/// [`MixtureOfContexts`](crate::MixtureOfContexts) as tensors: the argument of `from_tensors` and the result of
/// `tensors`. The activation is not among them: save it beside the weights, as part of a
/// [`HeadConfig`](crate::HeadConfig).
///
/// Equal components with priors of weight zero, such as K copies of one softmax, get equal gradients without dropout:
/// they remain one softmax, at K times the price. [`MixtureConfig::similar_components`] makes components that start
/// alike and then separate.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::{ContextActivation, MixtureOfSoftmaxes, MixtureTensors, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let (hidden, d, vocab, components) = (16, 8, 100, 3);
/// let random = |shape: (usize, usize)| Tensor::randn(0f32, 0.1, shape, &Device::Cpu);
/// let tensors = MixtureTensors {
///     prior_weight: random((components, hidden))?,
///     prior_bias: None,
///     latent_weight: random((components * d, hidden))?,
///     latent_bias: random((1, components * d))?.squeeze(0)?,
///     decoder_weight: random((vocab, d))?,
///     decoder_bias: None,
/// };
/// let head = MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Tanh)?;
/// assert_eq!((head.hidden_size(), head.vocab_size()), (16, 100));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MixtureTensors {
    /// `[K, hidden]`
    pub prior_weight: Tensor,
    /// `[K]`
    pub prior_bias: Option<Tensor>,
    /// `[K * d, hidden]`: rows `k d .. (k + 1) d` project to the context of component k
    pub latent_weight: Tensor,
    /// `[K * d]`
    pub latent_bias: Tensor,
    /// `[vocab, d]`
    pub decoder_weight: Tensor,
    /// `[vocab]`
    pub decoder_bias: Option<Tensor>,
}

/// The fields of a configuration that is deserialized: sizes are required, options have the defaults of `new`.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct MixtureFields {
    hidden_size: usize,
    vocab_size: usize,
    components: usize,
    context_dim: Option<usize>,
    decoder_bias: Option<bool>,
    prior_bias: Option<bool>,
    activation: Option<ContextActivation>,
    dropout: Option<f64>,
    logit_scale: Option<f64>,
    #[serde(default, alias = "softcap", deserialize_with = "function_or_cap")]
    logit_function: LogitFunction,
}

#[cfg(feature = "serde")]
impl From<MixtureFields> for MixtureConfig {
    fn from(read: MixtureFields) -> Self {
        let default = MixtureConfig::new(read.hidden_size, read.vocab_size, read.components);
        MixtureConfig {
            context_dim: read.context_dim.unwrap_or(default.context_dim),
            decoder_bias: read.decoder_bias.unwrap_or(default.decoder_bias),
            prior_bias: read.prior_bias.unwrap_or(default.prior_bias),
            activation: read.activation.unwrap_or(default.activation),
            dropout: read.dropout.unwrap_or(default.dropout),
            logit_scale: read.logit_scale.unwrap_or(default.logit_scale),
            logit_function: read.logit_function,
            ..default
        }
    }
}

/// Returns the default of an option that is on unless a file says otherwise.
#[cfg(feature = "serde")]
pub(super) fn default_true() -> bool {
    true
}

/// Returns the logit scale of a configuration that has none: 1, which leaves the logits as they are.
#[cfg(feature = "serde")]
pub(super) fn default_scale() -> f64 {
    1.0
}

/// Reads the function of the logits, which is a number or null where a file says `softcap`.
#[cfg(feature = "serde")]
pub(super) fn function_or_cap<'de, D: serde::Deserializer<'de>>(
    from: D,
) -> std::result::Result<LogitFunction, D::Error> {
    use serde::Deserialize;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Read {
        Cap(Option<f64>),
        Function(LogitFunction),
    }
    Ok(match Read::deserialize(from)? {
        Read::Cap(cap) => cap.map_or(LogitFunction::Identity, LogitFunction::Softcap),
        Read::Function(function) => function,
    })
}
