//! A mixture over the allowed ids.

use candle_core::{DType, Tensor};

use super::gathered_rows::{gathered, is_single};
use super::ids::AllowedIds;
use super::rows::{expanded, SetLogProbs};
use crate::backend::operands::Sizes;
use crate::error::{OptionName, Result};
use crate::loss::{Loss, LossOptions, Precision, Request};
use crate::mixture::Mixture;
use crate::scores::{are_argmax, candidates, ScoreOptions, Scores};
use crate::tensors::checks::read_ids;
use crate::tensors::id_lists::Restriction;
use crate::tensors::transfer;

/// A mixture whose distribution at each position is renormalised over the ids that are allowed there, from
/// [`Mixture::restricted`]:
///
/// ```text
/// P(v | S) = P(v) / P(S) for v in S, else 0
/// ```
///
/// A single softmax reads the decoder's rows of the sets alone, and its decoder's gradient is computed for these alone.
/// A mixture of several softmaxes needs all ids for its log-sum-exps; where it has more than 256 ids in a set, the
/// log-probabilities of all ids, `[positions, vocab]`, are held. A single softmax with long lists for each position
/// holds the log-probabilities of the ids that are in any list, `[positions, ids]`; with short lists, on a GPU, their
/// rows of the decoder, `[positions, ids, d]`. Sets and targets are read on the host, which waits for a GPU.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::{Sampler, Sampling};
/// use mos_head::sets::AllowedIds;
/// use mos_head::Mixture;
///
/// # fn main() -> mos_head::Result<()> {
/// let contexts = Tensor::randn(0f32, 1., (2, 1, 8), &Device::Cpu)?; // 2 positions, K = 1, d = 8
/// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?; // 100 token ids
/// let mixture = Mixture::new(&contexts, None, &weight, None)?.restricted(&AllowedIds::new(&[10, 20, 30]))?;
/// let log_probs = mixture.log_probs()?; // [2, 100], minus infinity but for three ids
/// let sum = log_probs.exp()?.sum(1)?.to_vec1::<f32>()?;
/// assert!(sum.iter().all(|sum| (sum - 1.0).abs() < 1e-5));
/// let drawn = mixture.sample(&mut Sampler::new(Sampling::new(), 42)?)?.to_vec1::<u32>()?;
/// assert!(drawn.iter().all(|id| [10, 20, 30].contains(id)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RestrictedMixture {
    pub(super) mixture: Mixture,
    allowed: AllowedIds,
}

impl Mixture {
    /// The mixture over the allowed ids of each position.
    ///
    /// # Errors
    ///
    /// If an allowed id is not in the vocabulary, or there is not a list for each position. Whether a set is empty is
    /// an error of the results.
    pub fn restricted(&self, allowed: &AllowedIds) -> Result<RestrictedMixture> {
        let Sizes { positions, vocab, .. } = self.operands().sizes;
        allowed.check_vocab(vocab)?;
        allowed.check_positions(positions)?;
        Ok(RestrictedMixture { mixture: self.clone(), allowed: allowed.clone() })
    }
}

impl RestrictedMixture {
    /// The loss of the targets under the renormalised distribution, as [`Mixture::loss`].
    ///
    /// Label smoothing spreads its mass over the set. It and the z-loss are supported for one set for all positions, if
    /// targets are not added to it and there is a single softmax without log-priors. Explicit log-priors, those of a mixture
    /// with K = 1 too, make it a mixture, for which the two are not supported. Whether a target is correct is told among the
    /// ids of its set. The budget of the workspace is for the passes over all ids; what is computed of the sets is held
    /// beside it.
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// As for [`Mixture::loss`]; [`Error::NotAllowed`](crate::Error::NotAllowed) if a target is not in its set,
    /// [`Error::EmptySet`](crate::Error::EmptySet) if a set is empty, unless the sets have the option, or the target is
    /// ignored. [`Error::Unsupported`](crate::Error::Unsupported) for sampled losses, and for the options above.
    ///
    /// # Numerics
    ///
    /// A target of probability zero has an infinite loss. If all ids of a set have, or one is NaN, the loss of the
    /// position is NaN, and of no other.
    pub fn loss(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let Sizes { vocab, positions, .. } = self.mixture.operands().sizes;
        let leading = self.mixture.leading();
        let contexts = &self.mixture.operands().contexts;
        let request = Request::new(leading, Some(vocab), contexts, targets, options)?;
        let with_kernels = [OptionName::LabelSmoothing, OptionName::ZLoss, OptionName::Correct];
        let is_small = is_single(&self.mixture) && self.allowed.are_shared();
        request.require("kept sets", if is_small { &with_kernels } else { &[OptionName::Correct] })?;
        let asked = request.read_ids(vocab)?;
        // Nothing is computed of an ignored position, whose set may be empty or without a probability.
        let counted: Vec<u32> = (0u32..).zip(&asked).filter(|(_, id)| id.is_some()).map(|(t, _)| t).collect();
        if counted.is_empty() {
            return self.mixture.loss(targets, options);
        }
        let ids: Vec<usize> = asked.iter().copied().flatten().collect();
        let kept = match self.allowed.kept(&ids, 1, counted.iter().map(|&t| t as usize), vocab)? {
            Restriction::All => return self.mixture.loss(targets, options),
            Restriction::Shared(ids) if is_single(&self.mixture) => return self.small_loss(&ids, &asked, options),
            kept => kept,
        };
        let are_all = counted.len() == positions;
        let mut mixture = self.mixture.select(&counted)?;
        if !options.train {
            mixture = mixture.detach();
        }
        if options.precision != Precision::Full {
            mixture = mixture.with_precision(options.precision);
        }
        let rows = SetLogProbs::new(&mixture, &kept, options.workspace_bytes)?;
        let places = rows.places(&ids, 1)?;
        // The numbers of all positions, with a zero where one is ignored.
        let at_all_positions = |numbers: Tensor| -> Result<Tensor> {
            let numbers = numbers.flatten_all()?;
            if are_all {
                return Ok(numbers.reshape(leading)?);
            }
            let mut place_of = vec![counted.len() as u32; positions];
            counted.iter().enumerate().for_each(|(place, &t)| place_of[t as usize] = place as u32);
            let zero = Tensor::zeros(1, numbers.dtype(), numbers.device())?;
            let with_zero = Tensor::cat(&[numbers, zero], 0)?;
            Ok(with_zero.index_select(&Tensor::new(place_of, with_zero.device())?, 0)?.reshape(leading)?)
        };
        // Not `neg`, which makes a minus zero.
        let nll = rows.log_probs.gather(&places, 1)?.affine(-1.0, 0.0)?;
        let loss = request.loss_of_nll(&at_all_positions(nll)?)?;
        let scored = ScoreOptions::new().with_is_argmax(options.correct).scored(places);
        let loss = match are_argmax(&rows.log_probs, &scored)? {
            Some(is_argmax) => loss.with_is_correct(at_all_positions(is_argmax)?)?,
            None => loss,
        };
        Ok(Loss { parts: rows.leaves, ..loss })
    }

    /// The loss of a single softmax over the same ids at all positions.
    fn small_loss(&self, ids: &[u32], asked: &[Option<usize>], options: &LossOptions) -> Result<Loss> {
        let device = self.mixture.operands().contexts.device();
        let (mixture, leaves) = gathered(&self.mixture, ids)?;
        let targets = places(ids, asked).collect::<Vec<i64>>();
        let targets = Tensor::from_vec(targets, self.mixture.leading(), device)?;
        let of_ids = |weights: &Tensor| weights.index_select(&Tensor::new(ids, device)?, 0);
        let class_weights = options.class_weights.as_ref().map(of_ids).transpose()?;
        let ignore_index = options.ignore_index.map(|_| IGNORED);
        let loss = mixture.loss(&targets, &LossOptions { class_weights, ignore_index, ..options.clone() })?;
        Ok(Loss { parts: leaves, ..loss })
    }

    /// Log-probabilities `[.., vocab]` in the dtype of the contexts, minus infinity outside a set. Differentiable.
    ///
    /// # Shapes
    ///
    /// - returns `[.., vocab]`
    ///
    /// # Errors
    ///
    /// As for [`Mixture::log_probs`]; [`Error::EmptySet`](crate::Error::EmptySet) if a set is empty and need not be.
    pub fn log_probs(&self) -> Result<Tensor> {
        self.log_probs_as(self.mixture.operands().contexts.dtype())
    }

    /// Log-probabilities `[.., vocab]` in another dtype, as [`Mixture::log_probs_as`].
    ///
    /// # Shapes
    ///
    /// - returns `[.., vocab]`
    ///
    /// # Errors
    ///
    /// As for [`RestrictedMixture::log_probs`] and [`Mixture::log_probs_as`].
    pub fn log_probs_as(&self, dtype: DType) -> Result<Tensor> {
        let Sizes { vocab, positions, .. } = self.mixture.operands().sizes;
        let shape = [self.mixture.leading(), &[vocab]].concat();
        match self.kept()? {
            Restriction::All => self.mixture.log_probs_as(dtype),
            _ if positions == 0 => self.mixture.log_probs_as(dtype),
            Restriction::Shared(ids) if is_single(&self.mixture) => {
                let log_probs = gathered(&self.mixture, &ids)?.0.log_probs_as(dtype)?;
                Ok(expanded(&log_probs.reshape((positions, ids.len()))?, &ids, vocab)?.reshape(shape)?)
            }
            kept => Ok(SetLogProbs::of_all(&self.mixture, &kept)?.expanded(vocab)?.reshape(shape)?.to_dtype(dtype)?),
        }
    }

    /// The log-probability of given token ids under the renormalised distribution, and its entropy, the mass outside
    /// these ids and whether an id is the most probable of its set if the options ask for them, as [`Mixture::score`].
    /// Differentiable.
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the contexts, or `[.., n]`; u8, u32 or i64
    /// - returns log-probabilities and `is_argmax` of the shape of `token_ids`, the entropy `[..]`, and the logarithm of
    ///   the mass outside `[..]`, in nats
    ///
    /// # Errors
    ///
    /// As for the targets of [`RestrictedMixture::loss`], or if an option is out of range.
    pub fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        options.validate()?;
        let Sizes { vocab, positions, .. } = self.mixture.operands().sizes;
        let leading = self.mixture.leading();
        let n = candidates("token_ids", token_ids, leading)?;
        let asked = read_ids("token_ids", token_ids, None, vocab)?;
        let device = self.mixture.operands().contexts.device();
        let ids: Vec<usize> = asked.iter().copied().flatten().collect();
        match self.allowed.kept(&ids, n, 0..positions, vocab)? {
            Restriction::All => self.mixture.score(token_ids, options),
            _ if positions == 0 => self.mixture.score(token_ids, options),
            Restriction::Shared(ids) if is_single(&self.mixture) => {
                let (mixture, leaves) = gathered(&self.mixture, &ids)?;
                let places = transfer::to_device::<i64>(places(&ids, &asked).collect(), token_ids.shape(), device)?;
                Ok(Scores { leaves, ..mixture.score(&places, options)? })
            }
            kept => {
                let rows = SetLogProbs::new(&self.mixture, &kept, options.workspace_bytes)?;
                let places = rows.places(&ids, n)?;
                let scores = Scores::of_rows(&rows.log_probs, places, token_ids.dims(), leading, options)?;
                Ok(Scores { leaves: rows.leaves, ..scores })
            }
        }
    }

    /// The log-probability of given token ids, see [`RestrictedMixture::score`].
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the contexts, or `[.., n]`; u8, u32 or i64
    /// - returns the shape of `token_ids`
    ///
    /// # Errors
    ///
    /// As for [`RestrictedMixture::score`].
    pub fn log_prob(&self, token_ids: &Tensor) -> Result<Tensor> {
        Ok(self.score(token_ids, &ScoreOptions::new())?.log_prob)
    }

    /// The entropy of each position's renormalised distribution in nats, see [`RestrictedMixture::score`].
    ///
    /// # Shapes
    ///
    /// - returns `[..]`
    ///
    /// # Errors
    ///
    /// As for [`RestrictedMixture::log_probs`].
    pub fn entropy(&self) -> Result<Tensor> {
        let shape = [self.mixture.leading(), &[0]].concat();
        let no_ids = Tensor::zeros(shape, DType::U32, self.mixture.operands().contexts.device())?;
        let scores = self.score(&no_ids, &ScoreOptions::new().with_entropy(true))?;
        match scores.entropy {
            Some(entropy) => Ok(entropy),
            // It was asked for.
            None => self.mixture.entropy(),
        }
    }

    /// The sets of all positions, none of which is ignored.
    pub(super) fn kept(&self) -> Result<Restriction> {
        let Sizes { positions, vocab, .. } = self.mixture.operands().sizes;
        self.allowed.kept(&[], 0, 0..positions, vocab)
    }
}

/// The target of an ignored position.
const IGNORED: i64 = -1;

/// The places of ids among `ids`.
fn places<'a>(ids: &'a [u32], asked: &'a [Option<usize>]) -> impl Iterator<Item = i64> + 'a {
    let place = |id: usize| ids.binary_search(&(id as u32)).map_or(IGNORED, |place| place as i64);
    asked.iter().map(move |id| id.map_or(IGNORED, place))
}
