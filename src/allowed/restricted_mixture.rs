//! A mixture whose distributions are restricted to the allowed ids, and its results.

use candle_core::{DType, Tensor};

use super::choice::Choices;
use super::gathered_rows::{gathered_softmax, is_single, FrozenRows};
use super::ids::AllowedIds;
use super::set_log_probs::{expand_columns, SetLogProbs};
use crate::backend::operands::Sizes;
use crate::decoding::{NextToken, Sampler, TokenRequest, TopK};
use crate::distributions::{Distributions, Sealed};
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, LossOptions, OutputShape, PositionOptions, Precision, Request, IGNORED};
use crate::mixture::{Distillation, Mixture};
use crate::scores::{are_argmax, candidate_count, ScoreOptions, Scores};
use crate::tensors::checks::read_ids;
use crate::tensors::id_lists::Restriction;
use crate::tensors::linear::with_shape;
use crate::tensors::transfer;

/// A mixture whose distribution at each position is renormalised over the ids that are allowed there, from
/// [`Mixture::restricted`]:
///
/// ```text
/// P(v | S) = P(v) / P(S) for v in S, else 0
/// ```
///
/// A single softmax reads the decoder's rows of the allowed ids alone, and computes the decoder's gradient for these
/// rows alone. With long lists for each position it holds the log-probabilities of the ids that are in any list,
/// `[positions, ids]`; with short lists, on a GPU, it holds their rows of the decoder, `[positions, ids, d]`. A mixture
/// of several softmaxes needs all ids for its log-sum-exps; if a set has more than 256 ids, it holds the
/// log-probabilities of all ids, `[positions, vocab]`. Sets and targets are read on the host, which waits for a GPU.
///
/// # Results
///
/// - A loss supports label smoothing, which spreads its mass over the set, and the z-loss for one set for all
///   positions, if targets are not added to it and there is a single softmax without log-priors. (With explicit
///   log-priors a mixture with K = 1 supports neither.) A target is correct if it is the argmax among the ids of its
///   set. The budget of the workspace is for the passes over all ids; the log-probabilities of the sets are held beside
///   it.
/// - Log-probabilities are minus infinity outside the sets.
/// - No id outside its set is among the most probable ones: if all sets have fewer than `k` ids, there are as many as
///   the largest has, and a position with fewer repeats its last id with a log-probability of minus infinity, which
///   [`BeamSearch`](crate::decode::BeamSearch) never chooses.
/// - A sample's temperature and truncation apply to the renormalised distribution, which has no priors: ancestral
///   sampling of several softmaxes is [`Error::Unsupported`].
///
/// # Errors
///
/// Beside those of [`Distributions`]: [`Error::NotAllowed`] if a target is not in its set; [`Error::EmptySet`] if a set
/// is empty, unless an empty set allows all ids ([`AllowedIds::with_empty_as_full`]) or the target is ignored;
/// [`Error::Impossible`] if all ids of a set have probability zero and an id is chosen. [`Error::Unsupported`] for
/// sampled losses, and for label smoothing and the z-loss except as above.
///
/// # Numerics
///
/// A target of probability zero has an infinite loss. If all ids of a set have probability zero, or a logit of the set
/// is NaN, the loss of this position is NaN; those of other positions are not affected.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::{Sampler, Sampling};
/// use mos_head::sets::AllowedIds;
/// use mos_head::{Distributions, Mixture};
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
    mixture: Mixture,
    allowed: AllowedIds,
    /// The rows of the set, if there is one and the decoder is constant.
    frozen: Option<FrozenRows>,
}

impl Mixture {
    /// Restricts each position's distribution to its allowed ids.
    ///
    /// # Errors
    ///
    /// If an allowed id is not in the vocabulary, or the sets are lists and their number is not that of the positions.
    /// A set that is empty is an error of the results.
    pub fn restricted(&self, allowed: &AllowedIds) -> Result<RestrictedMixture> {
        let Sizes { positions, vocab, .. } = self.operands().sizes;
        allowed.check_vocab(vocab)?;
        allowed.check_positions(positions)?;
        Ok(RestrictedMixture { mixture: self.clone(), allowed: allowed.clone(), frozen: None })
    }
}

impl RestrictedMixture {
    /// Sets the rows of a constant decoder that belong to the one set.
    pub(super) fn with_frozen_rows(self, frozen: Option<FrozenRows>) -> Self {
        RestrictedMixture { frozen, ..self }
    }

    /// Makes the softmax over the ids of the one set.
    fn gathered(&self, ids: &[u32]) -> Result<Mixture> {
        gathered_softmax(&self.mixture, ids, self.frozen.as_ref())
    }

    /// Computes the loss of a single softmax over the same ids at all positions: the loss of a mixture whose decoder
    /// has the rows of these ids alone.
    fn gathered_loss(&self, ids: &[u32], target_ids: &[Option<usize>], options: &LossOptions) -> Result<Loss> {
        let device = self.mixture.operands().contexts.device();
        let mixture = self.gathered(ids)?;
        let targets = places(ids, target_ids).collect::<Vec<i64>>();
        let targets = transfer::to_device(targets, self.mixture.leading(), device)?;
        let gather = |weights: &Tensor| transfer::select_rows(weights, &Tensor::new(ids, device)?);
        let class_weights = options.class_weights.as_ref().map(gather).transpose()?;
        let ignore_index = options.positions.ignore_index.map(|_| IGNORED);
        let positions = PositionOptions { ignore_index, ..options.positions.clone() };
        mixture.loss(&targets, &LossOptions { class_weights, positions, ..options.clone() })
    }

    /// Returns the restriction at all positions, none of which is ignored.
    fn restriction(&self) -> Result<Restriction> {
        let Sizes { positions, vocab, .. } = self.mixture.operands().sizes;
        self.allowed.restriction(&[], 0, 0..positions, vocab)
    }
}

impl Sealed for RestrictedMixture {
    fn shape(&self) -> OutputShape<'_> {
        self.mixture.shape()
    }

    fn select(&self, positions: &[u32]) -> Result<Box<dyn Distributions + '_>> {
        let restricted = self.mixture.with_positions(positions)?.restricted(&self.allowed.select(positions))?;
        Ok(Box::new(restricted.with_frozen_rows(self.frozen.clone())))
    }

    /// Checks that the targets are in their sets, to which a teacher of all ids adds none.
    fn check_hard_targets(&self, distillation: &Distillation) -> Result<()> {
        let Some(targets) = distillation.hard_targets()? else { return Ok(()) };
        let Sizes { positions, vocab, .. } = self.mixture.operands().sizes;
        let allowed = self.allowed.clone().with_targets_added(false);
        let checked = read_ids("targets", &targets, None, vocab).and_then(|ids| {
            let ids: Vec<usize> = ids.into_iter().flatten().collect();
            allowed.restriction(&ids, 1, 0..positions, vocab)
        });
        checked.map(drop).map_err(|error| error.with_position_from(distillation.positions()))
    }
}

impl Distributions for RestrictedMixture {
    fn request_loss(&self, request: &Request) -> Result<Loss> {
        let Sizes { vocab, positions, .. } = self.mixture.operands().sizes;
        let leading = self.mixture.leading();
        let options = request.options;
        let options_of_kernels = [OptionName::LabelSmoothing, OptionName::ZLoss, OptionName::Correct];
        let is_fused = is_single(&self.mixture) && self.allowed.are_shared();
        request.check_support("allowed ids", if is_fused { &options_of_kernels } else { &[OptionName::Correct] })?;
        let target_ids = request.positions.read_ids(vocab)?;
        // An ignored position takes no part in the computation: its set may be empty, or all ids of it impossible.
        let counted: Vec<u32> = (0u32..).zip(&target_ids).filter(|(_, id)| id.is_some()).map(|(t, _)| t).collect();
        if counted.is_empty() {
            return self.mixture.request_loss(request);
        }
        let ids: Vec<usize> = target_ids.iter().copied().flatten().collect();
        let restriction = match self.allowed.restriction(&ids, 1, counted.iter().map(|&t| t as usize), vocab)? {
            Restriction::All => return self.mixture.request_loss(request),
            Restriction::Shared(ids) if is_single(&self.mixture) => {
                return self.gathered_loss(&ids, &target_ids, options);
            }
            restriction => restriction,
        };
        let mut mixture = self.mixture.with_positions(&counted)?;
        if !options.train {
            mixture = mixture.detach();
        }
        if options.precision != Precision::Full {
            mixture = mixture.with_precision(options.precision);
        }
        let set_log_probs = SetLogProbs::new(&mixture, &restriction, options.workspace_bytes)?;
        let columns = set_log_probs.columns(&ids, 1)?;
        // `neg` would make a minus zero.
        let nll = set_log_probs.log_probs.gather(&columns, 1)?.affine(-1.0, 0.0)?;
        let nll = zeros_at_ignored(nll.flatten_all()?, &counted, positions)?;
        let loss = request.loss_from_nll(&nll.reshape(leading)?)?;
        let scored = ScoreOptions::new().with_is_argmax(options.correct).scored(columns);
        match are_argmax(&set_log_probs.log_probs, &scored)? {
            Some(is_argmax) => {
                let is_correct = zeros_at_ignored(is_argmax.flatten_all()?, &counted, positions)?;
                loss.with_is_correct(is_correct.reshape(leading)?)
            }
            None => Ok(loss),
        }
    }

    fn log_probs_as(&self, dtype: DType) -> Result<Tensor> {
        let Sizes { vocab, positions, .. } = self.mixture.operands().sizes;
        let shape = [self.mixture.leading(), &[vocab]].concat();
        match self.restriction()? {
            Restriction::All => self.mixture.log_probs_as(dtype),
            _ if positions == 0 => self.mixture.log_probs_as(dtype),
            Restriction::Shared(ids) if is_single(&self.mixture) => {
                let log_probs = self.gathered(&ids)?.log_probs_as(dtype)?;
                let log_probs = with_shape(&log_probs, &[positions, ids.len()])?;
                with_shape(&expand_columns(&log_probs, &ids, vocab)?, &shape)
            }
            restriction => {
                let set_log_probs = SetLogProbs::from_all_ids(&self.mixture, &restriction)?;
                Ok(with_shape(&set_log_probs.all_log_probs(vocab)?, &shape)?.to_dtype(dtype)?)
            }
        }
    }

    fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        options.validate()?;
        options.refuse_mean_logit("allowed ids")?;
        let Sizes { vocab, positions, .. } = self.mixture.operands().sizes;
        let leading = self.mixture.leading();
        let n = candidate_count("token_ids", token_ids, leading)?;
        let candidates = read_ids("token_ids", token_ids, None, vocab)?;
        let device = self.mixture.operands().contexts.device();
        let ids: Vec<usize> = candidates.iter().copied().flatten().collect();
        match self.allowed.restriction(&ids, n, 0..positions, vocab)? {
            Restriction::All => self.mixture.score(token_ids, options),
            _ if positions == 0 => self.mixture.score(token_ids, options),
            Restriction::Shared(ids) if is_single(&self.mixture) => {
                let mixture = self.gathered(&ids)?;
                let places =
                    transfer::to_device::<i64>(places(&ids, &candidates).collect(), token_ids.shape(), device)?;
                mixture.score(&places, options)
            }
            restriction => {
                let set_log_probs = SetLogProbs::new(&self.mixture, &restriction, options.workspace_bytes)?;
                let columns = set_log_probs.columns(&ids, n)?;
                let shape = token_ids.dims();
                Scores::from_rows(&set_log_probs.log_probs, columns, shape, leading, options)
            }
        }
    }

    fn top_k(&self, k: usize) -> Result<TopK> {
        TopK::check_k(k, self.mixture.operands().sizes.vocab)?;
        let choices = Choices::new(&self.mixture, self.restriction()?, self.frozen.as_ref())?;
        let mixture = &choices.mixture;
        let top = match &choices.restriction {
            Restriction::All => mixture.top_k(k.min(mixture.operands().sizes.vocab))?,
            restriction => mixture.top_k_within(restriction, k)?,
        };
        Ok(TopK { token_ids: choices.token_ids(&top.token_ids)?, ..top })
    }

    fn sample(&self, sampler: &mut Sampler) -> Result<Tensor> {
        if sampler.sampling().ancestral && self.mixture.operands().sizes.components > 1 {
            return Err(Error::Unsupported { option: OptionName::Ancestral, head: "allowed ids of several softmaxes" });
        }
        let choices = Choices::new(&self.mixture, self.restriction()?, self.frozen.as_ref())?;
        let drawn = match &choices.restriction {
            Restriction::All => choices.mixture.sample(sampler)?,
            restriction => choices.mixture.sample_within(restriction, sampler)?,
        };
        choices.token_ids(&drawn)
    }

    fn next_tokens_per_position(&self, requests: &[&[&TokenRequest]]) -> Result<Vec<Vec<NextToken>>> {
        let choices = Choices::new(&self.mixture, self.restriction()?, self.frozen.as_ref())?;
        let (ids, vocab) = (choices.gathered_ids.as_deref(), self.mixture.operands().sizes.vocab);
        choices.mixture.next_tokens_within(&choices.restriction, ids, vocab, requests)
    }
}

/// Returns the place of each target or candidate among the allowed `ids`.
fn places<'a>(ids: &'a [u32], required: &'a [Option<usize>]) -> impl Iterator<Item = i64> + 'a {
    let place = |id: usize| ids.binary_search(&(id as u32)).map_or(IGNORED, |place| place as i64);
    required.iter().map(move |id| id.map_or(IGNORED, place))
}

/// Returns the numbers of all `positions`, from those of the `counted` ones, `[counted]`: an ignored position has a
/// zero.
fn zeros_at_ignored(numbers: Tensor, counted: &[u32], positions: usize) -> Result<Tensor> {
    if counted.len() == positions {
        Ok(numbers)
    } else {
        transfer::spread(&numbers, counted, positions)
    }
}
