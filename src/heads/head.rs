//! The head, a projection and a decoder: it computes each result from the mixture of the projection's contexts under
//! the decoder. All heads of the crate share how a loss begins ([`RequestLayer`]).

use candle_core::Tensor;
use candle_nn::{Embedding, VarBuilder};

use super::mixture_layer::MixtureLayer;
use super::output_layer::{select_hidden, OutputLayer};
use super::projection::{Configured, Projection};
use crate::backend::logit_function::LogitFunction;
use crate::decoder::{CharCnn, Decoder, LowRankAdapter};
use crate::decoding::Sampler;
use crate::distributions::Distributions;
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions, OutputShape, Request};
use crate::mixture::Mixture;
use crate::tensors::checks::leading;
use crate::tensors::dropout::DropoutMasks;

/// The output layer of a projection and a decoder:
///
/// ```text
/// contexts c_k, log-priors log pi_k = projection(h),    P(v) = sum_k pi_k softmax(W c_k + b)_v
/// ```
///
/// [`SoftmaxHead`](crate::SoftmaxHead), [`MixtureOfContexts`](crate::MixtureOfContexts) and
/// [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes) are heads; a [`Projection`] of your own makes another.
///
/// # Examples
///
/// The parts of a head, and another head with the same parameters:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::parts::{MixedContexts, Projection};
/// use mos_head::{Head, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let softmaxes = MixtureOfSoftmaxes::new(&MixtureConfig::new(64, 1000, 5).with_context_dim(32), vb)?;
/// let (projection, decoder) = (softmaxes.projection(), softmaxes.decoder());
/// assert_eq!((projection.context_dim(), decoder.vocab_size()), (32, 1000));
///
/// // A single softmax, whose context is the mean of the five.
/// let contexts = Head::from_parts(MixedContexts(projection), decoder.clone())?;
/// assert_eq!((softmaxes.components(), contexts.components()), (5, 1));
/// let hidden = Tensor::randn(0f32, 1., (2, 7, 64), &Device::Cpu)?; // [batch, seq, hidden]
/// assert_eq!(contexts.log_probs(&hidden)?.dims(), [2, 7, 1000]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Head<P> {
    projection: P,
    decoder: Decoder,
}

impl<P: Configured> Head<P> {
    /// Makes a head with new variables. The projection names its own; the decoder has `decoder.weight` `[vocab, d]`,
    /// uniform within 0.1, and `decoder.bias` `[vocab]`, zero.
    ///
    /// # Errors
    ///
    /// If a size is zero, a variable would have more than 2^40 elements, there are more than 2^32 - 1 token ids, an
    /// option is out of range, or a variable is missing or of another shape.
    pub fn new(config: &P::Config, vb: VarBuilder) -> Result<Self> {
        Ok(Head { projection: P::new(config, &vb)?, decoder: Decoder::new(&P::decoder(config), vb)? })
    }

    /// Makes a head whose decoder is tied to the matrix of an embedding, `[vocab, d]`; the gradients of both uses are
    /// summed.
    ///
    /// A decoder has a bias by default. The checkpoints of most language models have none: ask for none by
    /// `with_decoder_bias(false)` of the configuration, or `decoder.bias` is a missing variable.
    ///
    /// # Shapes
    ///
    /// - embedding: `[vocab, d]`
    ///
    /// # Errors
    ///
    /// If the embedding is of another shape, and the errors of [`Head::new`].
    ///
    /// # Examples
    ///
    /// A checkpoint whose only matrix is the embedding:
    ///
    /// ```
    /// use std::collections::HashMap;
    ///
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// use mos_head::{SoftmaxConfig, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Tensor::randn(0f32, 1., (1000, 64), &Device::Cpu)?;
    /// let checkpoint = HashMap::from([("model.embed_tokens.weight".to_string(), weight)]);
    /// let vb = VarBuilder::from_tensors(checkpoint, DType::F32, &Device::Cpu);
    /// let embedding = candle_nn::embedding(1000, 64, vb.pp("model.embed_tokens"))?;
    /// let config = SoftmaxConfig::new(64, 1000).with_decoder_bias(false);
    /// let head = SoftmaxHead::tied(&config, &embedding, vb.pp("lm_head"))?;
    /// assert!(head.bias().is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn tied(config: &P::Config, embedding: &Embedding, vb: VarBuilder) -> Result<Self> {
        Ok(Head { projection: P::new(config, &vb)?, decoder: Decoder::tied(&P::decoder(config), embedding, vb)? })
    }

    /// Makes a head whose decoder's rows `[vocab, d]` are computed from spellings. They are computed anew for each
    /// call; for evaluation and decoding, [`OutputLayer::frozen`] computes them once.
    ///
    /// # Errors
    ///
    /// If the rows are of another shape, and the errors of [`Head::new`].
    pub fn with_char_cnn(config: &P::Config, cnn: CharCnn, vb: VarBuilder) -> Result<Self> {
        Ok(Head { projection: P::new(config, &vb)?, decoder: Decoder::with_char_cnn(&P::decoder(config), cnn, vb)? })
    }
}

impl<P: Projection> Head<P> {
    /// Makes the head of this projection and this decoder.
    ///
    /// # Errors
    ///
    /// If their contexts are not of the same size.
    pub fn from_parts(projection: P, decoder: Decoder) -> Result<Self> {
        if projection.context_dim() == decoder.context_dim() {
            Ok(Head { projection, decoder })
        } else {
            let expected = format!("context_dim {}, as the decoder", decoder.context_dim());
            Err(Error::config("projection", expected, projection.context_dim()))
        }
    }

    /// Returns the projection.
    pub fn projection(&self) -> &P {
        &self.projection
    }

    /// Returns the decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns the decoder's weight, `[vocab, d]`, without the product of an adapter. Each call dequantises quantised
    /// rows to f32, which takes about four times the memory of Q8_0.
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::weight`].
    pub fn weight(&self) -> Result<Tensor> {
        self.decoder.weight()
    }

    /// Returns the decoder's bias, `[vocab]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.decoder.bias()
    }

    /// Returns the head with a low-rank adapter (Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models. ICLR
    /// 2022, arXiv 2106.09685), in place of another one: the decoder's weight acts as `W + s B A`, a sum that is never
    /// formed. A and B get their gradients; the weight gets one only if it is a variable.
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::with_adapter`].
    pub fn with_adapter(self, adapter: LowRankAdapter) -> Result<Self> {
        Ok(Head { projection: self.projection, decoder: self.decoder.with_adapter(adapter)? })
    }

    /// Returns the head with the decoder's weight and bias as constants, which get no gradient and cost no product for
    /// one: to train the projection, an adapter or earlier layers on a frozen decoder. The projection and an adapter
    /// still get their gradients, even if the adapter is added afterwards ([`OutputLayer::frozen`] freezes them too). A
    /// weight is shared with its variable and not copied; an embedding that is tied to it gets only the gradient of its
    /// other use. Rows from spellings are computed once, here.
    ///
    /// # Errors
    ///
    /// If the device has no memory for the computed rows.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let config = MixtureConfig::new(64, 1000, 5).with_context_dim(32);
    /// let head = MixtureOfSoftmaxes::new(&config, vb)?.with_frozen_decoder()?;
    /// let hidden = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
    /// let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
    /// let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
    /// let vars = vars.data().lock().expect("the variables");
    /// let missing = loss.missing_gradients(&loss.backward()?, &*vars);
    /// assert_eq!(missing, ["decoder.bias", "decoder.weight"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_frozen_decoder(self) -> Result<Self> {
        Ok(Head { projection: self.projection, decoder: self.decoder.with_constant_rows()? })
    }

    /// Returns the head whose decoder's weight is the constant `W + s B A`, without an adapter: to export it, or to
    /// serve it. A head that has no adapter is returned as it is. The sum with quantised rows is a tensor in f32, which takes about four times the memory of Q8_0.
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::merged`].
    pub fn merged(&self) -> Result<Self>
    where
        P: Clone,
    {
        Ok(Head { projection: self.projection.clone(), decoder: self.decoder.merged()? })
    }

    /// Returns the head with another scale of the logits, bias included, before their function.
    ///
    /// # Errors
    ///
    /// If the scale is not from 1e-30 to 1e30.
    pub fn with_logit_scale(self, logit_scale: f64) -> Result<Self> {
        Ok(Head { projection: self.projection, decoder: self.decoder.with_logit_scale(logit_scale)? })
    }

    /// Returns the head with softly bounded logits: `z = cap tanh(z / cap)` (Gemma Team: Gemma 2: Improving Open
    /// Language Models at a Practical Size. 2024, arXiv 2408.00118).
    ///
    /// # Errors
    ///
    /// If the cap is not from 1e-30 to 1e30.
    pub fn with_softcap(self, cap: f64) -> Result<Self> {
        self.with_logit_function(LogitFunction::Softcap(cap))
    }

    /// Returns the head with another function of the logits.
    ///
    /// # Errors
    ///
    /// If the cap of a softcap is not from 1e-30 to 1e30.
    pub fn with_logit_function(self, function: LogitFunction) -> Result<Self> {
        Ok(Head { projection: self.projection, decoder: self.decoder.with_logit_function(function)? })
    }
}

impl<P: Projection> Head<P> {
    /// Computes contexts and log-priors, and checks the contexts, with which the log-priors are compared later.
    fn project(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        let (contexts, log_priors) = self.projection.forward(hidden, dropout)?;
        self.check_contexts(&contexts, hidden, self.projection.components())?;
        Ok((contexts, log_priors))
    }

    /// Checks the contexts of so many components of these hidden states.
    fn check_contexts(&self, contexts: &Tensor, hidden: &Tensor, components: usize) -> Result<()> {
        let shape = [leading(hidden)?, &[components, self.decoder.context_dim()]].concat();
        self.decoder.check_contexts(contexts, &shape)
    }
}

/// Defines the loss and the log-probabilities of a [`RequestLayer`].
macro_rules! request_layer_methods {
    () => {
        fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &$crate::loss::LossOptions) -> Result<Loss> {
            self.target_loss(hidden, targets, options)
        }

        fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
            self.distributions(hidden, None)?.log_probs()
        }

        fn log_probs_as(&self, hidden: &Tensor, dtype: candle_core::DType) -> Result<Tensor> {
            self.distributions(hidden, None)?.log_probs_as(dtype)
        }
    };
}
pub(crate) use request_layer_methods;

impl<P: Projection> OutputLayer for Head<P> {
    fn hidden_size(&self) -> usize {
        self.projection.hidden_size()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    request_layer_methods!();

    fn distributions(&self, hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>> {
        Ok(Box::new(self.mixture(&select_hidden(hidden, positions)?, DropoutMasks::Off)?))
    }

    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        if sampler.sampling().ancestral {
            self.check_hidden(hidden)?;
            if let Some(contexts) = self.projection.draw(hidden, sampler)? {
                self.check_contexts(&contexts, hidden, 1)?;
                return self.decoder.mixture(&contexts, None)?.sample(sampler);
            }
        }
        self.mixture(hidden, DropoutMasks::Off)?.sample(sampler)
    }

    fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
        Ok(self.frozen_mixture()?)
    }
}

impl<P: Projection> RequestLayer for Head<P> {
    fn check_hidden(&self, hidden: &Tensor) -> Result<()> {
        self.decoder.check_hidden(hidden, self.hidden_size(), self.projection.has_parameters())
    }

    fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss> {
        // A hidden state that is NaN would be a factor of the gradients of a projection's and an adapter's matrices.
        let has_parameters = self.projection.has_parameters() || self.decoder.adapter().is_some();
        let is_masked = has_parameters || request.needs_mask();
        let hidden = if is_masked { request.positions.mask(hidden)? } else { hidden.clone() };
        let (contexts, log_priors) = self.project(&hidden, request.options.dropout)?;
        let source = Some(&hidden).filter(|_| self.projection.is_identity());
        self.decoder.request_loss(&contexts, log_priors.as_ref(), source, request)
    }
}

impl<P: Projection> MixtureLayer for Head<P> {
    fn components(&self) -> usize {
        self.projection.components()
    }

    fn mixture(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<Mixture> {
        self.check_hidden(hidden)?;
        let (contexts, log_priors) = self.project(hidden, dropout)?;
        let source = Some(hidden).filter(|_| self.projection.is_identity());
        self.decoder.mixture_from(&contexts, log_priors.as_ref(), source)
    }

    fn frozen_mixture(&self) -> Result<Box<dyn MixtureLayer + '_>> {
        // The projection is boxed, since a frozen head can be frozen again: otherwise each would have another type.
        Ok(Box::new(Head { projection: self.projection.frozen()?, decoder: self.decoder.frozen()? }))
    }
}

/// A head of this crate: its loss is that of a request, and its log-probabilities are those of its distributions.
pub(crate) trait RequestLayer: OutputLayer {
    /// Computes the loss of a request at the positions of these hidden states. What is at ignored positions must not
    /// reach a gradient.
    fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss>;

    /// Checks that hidden states match the head, as far as it knows before a projection.
    fn check_hidden(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Makes the request for a loss, once, and computes the loss.
    fn target_loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let request = self.check_hidden(hidden).and_then(|()| leading(hidden)).and_then(|leading| {
            Request::new(OutputShape { leading, vocab: self.vocab_size(), like: hidden }, targets, options)
        });
        self.request_loss(hidden, &request.map_err(|error| self.announce(error))?)
    }
}
