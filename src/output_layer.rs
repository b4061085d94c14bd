//! The contract that all heads keep: hidden states in, losses and log-probabilities out.

use std::fmt::Debug;

use candle_core::Tensor;

use crate::backend::plan::Plan;
use crate::decoding::{Sampler, TopK};
use crate::loss::{mask_ignored, Loss, LossOptions};
use crate::mixture::Mixture;
use crate::{Error, Result};

/// The output layer of a language model: from a hidden state to a distribution over the vocabulary.
///
/// A head says how hidden states become a [`Mixture`]; the rest follows. The trait is object safe: a model can hold a
/// `Box<dyn OutputLayer>` and leave the choice of head to its configuration.
///
/// # Shapes
///
/// `hidden` is `[.., hidden]`, with any leading dimensions, such as `[batch, seq, hidden]`; targets have these leading
/// dimensions, `[batch, seq]`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let heads: [Box<dyn OutputLayer>; 2] = [
///     Box::new(SoftmaxHead::new(&SoftmaxConfig::new(32, 500), vb.pp("softmax"))?),
///     Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(32, 16, 500, 4), vb.pp("mos"))?),
/// ];
/// let hidden = Tensor::randn(0f32, 1., (2, 7, 32), &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 7), DType::U32, &Device::Cpu)?; // [batch, seq]
/// for head in heads {
///     let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
///     let gradients = loss.backward()?;
///     let perplexity = loss.value.to_scalar::<f32>()?.exp();
///     # assert!(perplexity > 1.0);
///     # let _ = gradients;
/// }
/// # Ok(())
/// # }
/// ```
pub trait OutputLayer: Debug + Send + Sync {
    /// The size of the hidden states.
    fn hidden_size(&self) -> usize;

    /// The number of token ids.
    fn vocab_size(&self) -> usize;

    /// The components whose softmaxes are mixed: 1, if there is but one softmax.
    fn components(&self) -> usize;

    /// The mixture that these hidden states (`[.., hidden]`) stand for. `train` turns dropout on.
    ///
    /// # Errors
    ///
    /// If the hidden states' last dimension, dtype or device does not fit the head.
    fn mixture(&self, hidden: &Tensor, train: bool) -> Result<Mixture>;

    /// The loss of targets `[..]` (u8, u32 or i64) after hidden states `[.., hidden]`, with the gradients of the hidden states
    /// and of every parameter that is a variable. Never holds `[.., K, vocab]`; see [`Mixture::loss`].
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not fit, a target is not in the vocabulary (on a GPU its loss is NaN instead), or an
    /// option is out of its range.
    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        check_targets("targets", hidden, targets)?;
        let hidden = mask_ignored(hidden, targets, options.ignore_index)?;
        self.mixture(&hidden, options.train)?.loss_of_masked(targets, options)
    }

    /// Log-probabilities `[.., vocab]` after hidden states `[.., hidden]`, without dropout. Differentiable.
    ///
    /// They are logits too, for samplers of other crates, such as that of candle-transformers (of a model's last state, `[1, hidden]`):
    ///
    /// ```ignore
    /// use candle_transformers::generation::{LogitsProcessor, Sampling};
    ///
    /// let mut processor = LogitsProcessor::from_sampling(42, Sampling::TopP { p: 0.9, temperature: 0.8 });
    /// let next = processor.sample(&head.log_probs(&hidden)?.squeeze(0)?)?;
    /// ```
    ///
    /// # Errors
    ///
    /// If the hidden states' last dimension, dtype or device does not fit the head.
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        self.mixture(hidden, false)?.log_probs()
    }

    /// The most probable token id, `[..]` (u32), after hidden states `[.., hidden]`; of equals the one with the lowest id.
    ///
    /// # Errors
    ///
    /// If the hidden states' last dimension, dtype or device does not fit the head.
    fn argmax(&self, hidden: &Tensor) -> Result<Tensor> {
        self.mixture(hidden, false)?.argmax()
    }

    /// The log-probability `[..]` of given token ids `[..]` (u8, u32 or i64) after hidden states `[.., hidden]`. Not differentiable.
    ///
    /// # Errors
    ///
    /// As for the targets of [`OutputLayer::loss`].
    fn log_prob(&self, hidden: &Tensor, ids: &Tensor) -> Result<Tensor> {
        check_targets("ids", hidden, ids)?;
        self.mixture(hidden, false)?.log_prob(ids)
    }

    /// The `k` most probable token ids after hidden states `[.., hidden]`, ids and log-probabilities `[.., k]`.
    ///
    /// # Errors
    ///
    /// If the hidden states do not fit the head, `k` is not between 1 and the number of token ids, or a distribution is NaN.
    fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        self.mixture(hidden, false)?.top_k(k)
    }

    /// One token id drawn for each of the hidden states `[.., hidden]`: `[..]`, u32.
    ///
    /// # Errors
    ///
    /// If the hidden states do not fit the head, or a distribution is NaN.
    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        self.mixture(hidden, false)?.sample(sampler)
    }

    /// How [`OutputLayer::loss`] would cut the work into chunks.
    ///
    /// # Errors
    ///
    /// As for [`OutputLayer::loss`], or if the budget cannot hold one position.
    fn plan(&self, hidden: &Tensor, options: &LossOptions) -> Result<Plan> {
        self.mixture(hidden, options.train)?.plan(options)
    }
}

/// Checks the targets' shape before the projection is computed.
fn check_targets(argument: &'static str, hidden: &Tensor, targets: &Tensor) -> Result<()> {
    match hidden.dims() {
        [leading @ .., _] if targets.dims() == leading => Ok(()),
        [leading @ .., _] => Err(Error::shape(argument, format!("{leading:?}"), targets.dims())),
        [] => Err(Error::shape("hidden", "[.., hidden]", &[])),
    }
}
