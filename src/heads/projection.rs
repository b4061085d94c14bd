//! The projection of a head: from hidden states to contexts and log-priors.

use std::fmt::Debug;

use candle_core::Tensor;
use candle_nn::VarBuilder;

use crate::decoder::DecoderConfig;
use crate::decoding::Sampler;
use crate::error::Result;
use crate::tensors::dropout::DropoutMasks;

/// A map from a hidden state to the contexts and log-priors of K components: the part in which [`Head`](crate::Head)s
/// differ. With a [`Decoder`](crate::parts::Decoder) it is a head, which has every loss, option and way of decoding of
/// this crate.
///
/// # Examples
///
/// Contexts from a network of two layers, with uniform priors:
///
/// ```
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_nn::{linear, Linear, Module, VarBuilder, VarMap};
/// use mos_head::decode::{Sampler, Sampling};
/// use mos_head::parts::{Decoder, DecoderConfig, Projection};
/// use mos_head::{DropoutMasks, Head, LossOptions, MixtureLayer, OutputLayer};
///
/// #[derive(Debug)]
/// struct TwoLayers(Linear, Linear); // hidden -> 32 -> 3 contexts of width 16
///
/// impl Projection for TwoLayers {
///     fn hidden_size(&self) -> usize { 64 }
///     fn context_dim(&self) -> usize { 16 }
///     fn components(&self) -> usize { 3 }
///     fn forward(&self, hidden: &Tensor, _: DropoutMasks) -> mos_head::Result<(Tensor, Option<Tensor>)> {
///         let leading = &hidden.dims()[..hidden.rank() - 1];
///         let contexts = self.1.forward(&self.0.forward(hidden)?.relu()?)?;
///         let priors = Tensor::full(-3f32.ln(), [leading, &[3]].concat(), hidden.device())?;
///         Ok((contexts.reshape([leading, &[3, 16]].concat())?, Some(priors)))
///     }
/// }
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layers = TwoLayers(linear(64, 32, vb.pp("first"))?, linear(32, 3 * 16, vb.pp("second"))?);
/// let head = Head::from_parts(layers, Decoder::new(&DecoderConfig::new(1000, 16), vb)?)?;
///
/// let hidden = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 5), DType::U32, &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::new().with_label_smoothing(0.1))?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// let best = head.top_k(&hidden, 3)?;
/// let drawn = head.sample(&hidden, &mut Sampler::new(Sampling::new().with_top_p(0.9), 42)?)?;
/// let pruned = head.prune(&hidden, 0.4)?.mixture;
/// vars.save(std::env::temp_dir().join("two_layers.safetensors"))?;
/// # assert_eq!((best.token_ids.dims(), drawn.dims()), (&[2, 5, 3][..], &[2, 5][..]));
/// # assert_eq!(pruned.contexts()?.dims(), [2, 5, 2, 16]);
/// # Ok(())
/// # }
/// ```
pub trait Projection: Debug + Send + Sync {
    /// Returns the size of the hidden states.
    fn hidden_size(&self) -> usize;

    /// Returns the size of a context, d.
    fn context_dim(&self) -> usize;

    /// Returns the number of components, K.
    fn components(&self) -> usize;

    /// Computes the contexts and log-priors of hidden states, whose size, dtype and device have been checked. If the
    /// projection drops elements of contexts, `dropout` is the source of the masks.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`, with any leading dimensions
    /// - returns contexts `[.., K, d]`, of the decoder's dtype, and log-priors `[.., K]`, in nats, whose exponentials
    ///   sum to one over K; `None` is accepted if K = 1
    ///
    /// # Errors
    ///
    /// The errors are your own; the head checks shapes, dtype and device of the results.
    fn forward(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<(Tensor, Option<Tensor>)>;

    /// Returns whether the projection has parameters, as it does by default. If it has, a loss replaces the hidden
    /// states of ignored positions by zeros, so that a NaN there reaches no gradient.
    fn has_parameters(&self) -> bool {
        true
    }

    /// Returns whether the one context is the hidden state itself, which then gets the context's gradient directly.
    #[doc(hidden)]
    fn is_identity(&self) -> bool {
        false
    }

    /// Computes, for ancestral sampling, the contexts `[.., 1, d]` of one component at each position, which `sampler`
    /// draws from the priors. It returns `None`, the default, if drawing first saves nothing; then all contexts are
    /// computed.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - returns `[.., 1, d]`
    ///
    /// # Errors
    ///
    /// The errors are your own, and [`Error::Distribution`](crate::Error::Distribution) if the priors of a position are
    /// NaN or infinite.
    fn draw(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Option<Tensor>> {
        let _ = (hidden, sampler);
        Ok(None)
    }

    /// Returns the projection with its parameters as constants: hidden states still get their gradient through it. By
    /// default it is the projection itself, whose parameters still get gradients: a projection with parameters should
    /// return a copy in which each is [detached](Tensor::detach).
    ///
    /// # Errors
    ///
    /// The errors are your own.
    fn frozen(&self) -> Result<Box<dyn Projection + '_>> {
        Ok(Box::new(self))
    }
}

/// A projection that is made from a configuration: what [`Head::new`](crate::Head::new) needs.
///
/// # Examples
///
/// A single context that is narrower than the hidden state:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{linear_no_bias, Linear, Module, VarBuilder, VarMap};
/// use mos_head::parts::{Configured, DecoderConfig, Projection};
/// use mos_head::{DropoutMasks, Head, OutputLayer, Result};
///
/// struct Sizes {
///     hidden: usize,
///     context: usize,
///     vocab: usize,
/// }
///
/// #[derive(Debug)]
/// struct Narrow(Linear); // hidden -> context
///
/// impl Projection for Narrow {
///     fn hidden_size(&self) -> usize {
///         self.0.weight().dims()[1]
///     }
///
///     fn context_dim(&self) -> usize {
///         self.0.weight().dims()[0]
///     }
///
///     fn components(&self) -> usize {
///         1
///     }
///
///     fn forward(&self, hidden: &Tensor, _: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
///         Ok((self.0.forward(hidden)?.unsqueeze(hidden.rank() - 1)?, None)) // [.., 1, d]
///     }
/// }
///
/// impl Configured for Narrow {
///     type Config = Sizes;
///
///     fn new(config: &Sizes, vb: &VarBuilder) -> Result<Self> {
///         Ok(Narrow(linear_no_bias(config.hidden, config.context, vb.pp("narrow"))?))
///     }
///
///     fn decoder(config: &Sizes) -> DecoderConfig {
///         DecoderConfig::new(config.vocab, config.context)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = Head::<Narrow>::new(&Sizes { hidden: 64, context: 16, vocab: 1000 }, vb)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 7, 64), &Device::Cpu)?; // [batch, seq, hidden]
/// assert_eq!(head.log_probs(&hidden)?.dims(), [2, 7, 1000]);
/// # Ok(())
/// # }
/// ```
pub trait Configured: Projection + Sized {
    /// The sizes and options of a head with this projection.
    type Config;

    /// Makes the projection with new variables. It checks the whole configuration, the decoder's sizes and options
    /// included.
    ///
    /// # Errors
    ///
    /// If a size or an option is out of range, or a variable is missing or of another shape.
    fn new(config: &Self::Config, vb: &VarBuilder) -> Result<Self>;

    /// Returns the configuration of the decoder.
    fn decoder(config: &Self::Config) -> DecoderConfig;
}
