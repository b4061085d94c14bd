//! A head whose distributions are restricted to the allowed ids.

use candle_core::Tensor;

use super::gathered_rows::FrozenRows;
use super::ids::AllowedIds;
use super::restricted_mixture::RestrictedMixture;
use crate::distributions::Distributions;
use crate::error::Result;
use crate::heads::{request_layer_methods, select_hidden, MixtureLayer, OutputLayer, RequestLayer};
use crate::loss::{Loss, Request};
use crate::tensors::checks::leading;
use crate::tensors::dropout::DropoutMasks;

/// A head whose distributions are renormalised over the allowed ids: losses, log-probabilities, entropies, the most
/// probable ids and samples are computed from `P(v) / P(S)`. With one set for all positions it goes wherever an
/// [`OutputLayer`] goes, such as [`BeamSearch`](crate::decode::BeamSearch); with a list for each position, the hidden
/// states of each call have as many positions as there are lists. See [`RestrictedMixture`] for what each result costs,
/// and which options of a loss are supported.
///
/// A single softmax copies the decoder's rows of the set at each call. For a set that stays, such as a draft
/// vocabulary, [`frozen`](OutputLayer::frozen) copies them once, at its first call, from parameters that must not
/// change afterwards.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::sets::{AllowedIds, Restricted};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::new(&[[0f32], [3.], [1.], [2.]], &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight, None)?;
/// let digits = Restricted::new(&head, AllowedIds::new(&[0, 2]))?;
/// let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
/// assert_eq!(digits.argmax(&hidden)?.to_vec1::<u32>()?, [2]);
/// assert_eq!(digits.top_k(&hidden, 3)?.token_ids.to_vec2::<u32>()?, [[2, 0]]); // there are two
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Restricted<H> {
    head: H,
    allowed: AllowedIds,
    /// The rows of the set, if there is one and the head is constant.
    frozen: Option<FrozenRows>,
}

impl<H: MixtureLayer> Restricted<H> {
    /// Restricts the distributions of a head to the allowed ids.
    ///
    /// # Errors
    ///
    /// If an allowed id is not in the vocabulary.
    pub fn new(head: H, allowed: AllowedIds) -> Result<Self> {
        allowed.check_vocab(head.vocab_size())?;
        Ok(Restricted { head, allowed, frozen: None })
    }

    /// The head whose distributions are restricted; its own are over all ids.
    pub fn head(&self) -> &H {
        &self.head
    }

    /// Returns the mixture of these hidden states over the allowed ids, without dropout.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    ///
    /// # Errors
    ///
    /// The errors are those of [`MixtureLayer::mixture`] and [`Mixture::restricted`](crate::Mixture::restricted).
    pub fn mixture(&self, hidden: &Tensor) -> Result<RestrictedMixture> {
        let mixture = self.head.mixture(hidden, DropoutMasks::Off)?.restricted(&self.allowed)?;
        Ok(mixture.with_frozen_rows(self.frozen.clone()))
    }
}

impl<H: MixtureLayer> OutputLayer for Restricted<H> {
    fn hidden_size(&self) -> usize {
        self.head.hidden_size()
    }

    fn vocab_size(&self) -> usize {
        self.head.vocab_size()
    }

    request_layer_methods!();

    fn distributions(&self, hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>> {
        let Some(positions) = positions else { return Ok(Box::new(self.mixture(hidden)?)) };
        self.allowed.check_positions(leading(hidden)?.iter().product())?;
        let mixture = self.head.mixture(&select_hidden(hidden, Some(positions))?, DropoutMasks::Off)?;
        let mixture = mixture.restricted(&self.allowed.select(positions))?;
        Ok(Box::new(mixture.with_frozen_rows(self.frozen.clone())))
    }

    fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
        let frozen = self.allowed.are_shared().then(FrozenRows::default);
        Ok(Box::new(Restricted { head: self.head.frozen_mixture()?, allowed: self.allowed.clone(), frozen }))
    }
}

impl<H: MixtureLayer> RequestLayer for Restricted<H> {
    fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss> {
        // A NaN at an ignored position must not reach the projection.
        let mixture = self.head.mixture(&request.positions.mask(hidden)?, request.options.dropout)?;
        mixture.restricted(&self.allowed)?.with_frozen_rows(self.frozen.clone()).request_loss(request)
    }
}
