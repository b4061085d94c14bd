//! The targets of an objective, from which each position's masses follow: target ids and their weights, which are read
//! and checked before the first chunk, or the upstream gradients of scores or log-probabilities. A position's listed
//! ids are its target or its candidates.

use candle_core::Tensor;

use super::components::{ScoreUpstream, SoftMasses, Target};
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::vector::math::weighted;
use crate::backend::cpu::vector::simd::{Float, ROW_ALIGN};
use crate::backend::objective::{GradScale, LossTerms, Scored, TargetLoss, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::backend::parallel;
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// The targets of all positions, or of a chunk's.
pub(crate) enum Targets<F> {
    /// A loss over target ids.
    Ids(TargetIds<F>),
    /// The inner product of scores and their upstream gradients.
    Scores(ScoreTargets<F>),
    /// The inner product of log-probabilities and their upstream gradients.
    LogProbs(LogProbTargets<F>),
}

/// The target ids of all positions, and their weights.
pub(crate) struct TargetIds<F> {
    /// `[positions]`: the target ids; `None` for an ignored position.
    ids: Vec<Option<usize>>,
    /// `[positions]`: the targets' rows of the weight, or `ELSEWHERE` if another rank has the row; `None` for an
    /// ignored position.
    rows: Vec<Option<usize>>,
    position_weights: Option<Vec<F>>,
    class_weights: Option<Vec<F>>,
    smoothing: F,
    /// `[vocab]`, padded with zeros: the mass that label smoothing gives to each id; empty without smoothing.
    smoothed: Vec<F>,
    /// `[positions]`: the factor of the gradient of each position's objective.
    scales: Vec<F>,
    /// `[positions]`: what is added to each target's logit, if targets are entries of their own.
    own_shifts: Option<Vec<F>>,
    terms: LossTerms,
}

/// The upstream gradients of the scores of some positions.
pub(crate) struct ScoreTargets<F> {
    /// The first of these positions.
    first: usize,
    /// `[positions + 1]`: where each position's ids start in `candidates`.
    starts: Vec<usize>,
    /// The ids of each position, each once, and their masses.
    candidates: Vec<(usize, F)>,
    /// `[positions]`.
    upstream: Vec<ScoreUpstream<F>>,
    /// The inverse of the temperature, or one if the logits are tempered already.
    power: F,
}

/// The upstream gradients of the log-probabilities of some positions.
pub(crate) struct LogProbTargets<F> {
    /// The first of these positions.
    first: usize,
    /// `[positions, stride]`, padded with zeros. The masses have the other sign.
    upstream: Vec<F>,
    stride: usize,
}

impl<F: Float> Targets<F> {
    /// Reads the targets of a loss, which must be among the `rows` of the weight, or in the vocabulary of all ranks.
    pub(crate) fn from_ids(loss: &TargetLoss, sizes: Sizes, rows: usize) -> Result<Self> {
        Ok(Targets::Ids(TargetIds::new(loss, sizes, rows)?))
    }

    /// Makes the targets of positions from `first` on whose scores have the gradients `upstream`, `[positions, n + 3]`.
    /// The `power` is the inverse of the temperature, or one if the logits are tempered already.
    pub(crate) fn from_score_upstream(
        scored: &Scored,
        candidates: &Candidates,
        upstream: &[F],
        first: usize,
        power: F,
    ) -> Self {
        Targets::Scores(ScoreTargets::new(scored, candidates, upstream, first, power))
    }

    /// Makes the targets of positions from `first` on whose log-probabilities have the gradients `upstream`,
    /// `[positions, vocab]`.
    pub(crate) fn from_log_prob_upstream(upstream: Vec<F>, first: usize, vocab: usize) -> Self {
        let stride = vocab.next_multiple_of(ROW_ALIGN);
        let upstream = if stride == vocab {
            upstream
        } else {
            let mut padded = zeros(upstream.len() / vocab * stride);
            let rows = padded.chunks_exact_mut(stride).zip(upstream.chunks_exact(vocab));
            parallel::for_each(rows, |(row, upstream)| row[..upstream.len()].copy_from_slice(upstream));
            padded
        };
        Targets::LogProbs(LogProbTargets { first, upstream, stride })
    }

    /// Returns the target ids, if the objective has any.
    fn ids(&self) -> Option<&TargetIds<F>> {
        match self {
            Targets::Ids(ids) => Some(ids),
            Targets::Scores(_) | Targets::LogProbs(_) => None,
        }
    }

    /// Returns whether the masses are those of all ids.
    pub(crate) fn are_soft(&self) -> bool {
        match self {
            Targets::Ids(ids) => !ids.smoothed.is_empty(),
            Targets::Scores(scores) => scores.are_soft(),
            Targets::LogProbs(log_probs) => !log_probs.upstream.is_empty(),
        }
    }

    /// Returns whether the caller needs to know which targets are the most probable ids.
    pub(crate) fn needs_correct(&self) -> bool {
        self.ids().is_some_and(|ids| ids.terms.needs_correct)
    }

    /// Returns the row of the target of position `t`; `None` if the position is ignored.
    pub(crate) fn row(&self, t: usize) -> Option<usize> {
        self.ids()?.rows[t]
    }

    /// Returns the target id of position `t`; `None` if the position is ignored.
    pub(crate) fn id(&self, t: usize) -> Option<usize> {
        self.ids()?.ids[t]
    }

    /// Lists the row of each position's target.
    pub(crate) fn listed(&self) -> ListedIds<'_> {
        self.ids().map_or(ListedIds::Nothing, |ids| ListedIds::Targets(&ids.rows))
    }

    /// Returns what is added to the logit of position `t`'s target, if targets are entries of their own.
    pub(crate) fn own_shift(&self, t: usize) -> Option<F> {
        Some(self.ids()?.own_shifts.as_ref()?[t])
    }

    /// Returns whether targets are entries of their own.
    pub(crate) fn are_own(&self) -> bool {
        self.ids().is_some_and(|ids| ids.own_shifts.is_some())
    }

    /// Returns the target of position `t` for the row kernels; `None` if the position has no gradient.
    pub(crate) fn position(&self, t: usize) -> Option<Target<'_, F>> {
        match self {
            Targets::Ids(ids) => ids.target(t),
            Targets::Scores(scores) => scores.target(t),
            Targets::LogProbs(log_probs) => Some(log_probs.target(t)),
        }
    }

    /// Returns the factor of the gradient of position `t`'s objective.
    pub(crate) fn scale(&self, t: usize) -> F {
        match self {
            Targets::Ids(ids) => ids.scales[t],
            Targets::Scores(_) => F::one(),
            Targets::LogProbs(_) => -F::one(),
        }
    }

    /// Returns the weight of position `t`; zero if the position is ignored.
    pub(crate) fn position_weight(&self, t: usize) -> f64 {
        self.ids().map_or(1.0, |ids| ids.position_weight(t))
    }

    /// Returns the contribution of position `t` to the denominator of the mean.
    pub(crate) fn count(&self, t: usize) -> f64 {
        self.ids().map_or(1.0, |ids| ids.count(t))
    }
}

impl<F: Float> TargetIds<F> {
    /// Reads the targets of a loss, which must be among the `rows` of the weight, or in the vocabulary of all ranks.
    fn new(loss: &TargetLoss, sizes: Sizes, rows: usize) -> Result<Self> {
        let vocab = loss.shard.as_ref().map_or(rows, VocabShard::vocab_size);
        let ids = read_ids("targets", &loss.targets, loss.ignore_index, vocab)?;
        let rows = match &loss.shard {
            Some(shard) => ids.iter().map(|id| id.map(|id| shard.row(id))).collect(),
            None => ids.clone(),
        };
        let read = |numbers: &Option<Tensor>| numbers.as_ref().map(|numbers| numbers.to_vec1::<F>()).transpose();
        let class_weights = read(&loss.class_weights)?;
        let mut targets = TargetIds {
            ids,
            rows,
            position_weights: read(&loss.position_weights)?,
            smoothing: F::from_f64(loss.terms.label_smoothing),
            smoothed: smoothed_masses(loss, class_weights.as_deref(), sizes),
            class_weights,
            scales: Vec::new(),
            own_shifts: read(&loss.own_shifts)?,
            terms: loss.terms,
        };
        targets.scales = targets.gradient_scales(&loss.scale, sizes.positions)?;
        Ok(targets)
    }

    /// Returns the target of position `t`; `None` if the position is ignored.
    fn target(&self, t: usize) -> Option<Target<'_, F>> {
        let id = self.ids[t]?;
        let class_weight = self.class_weights.as_ref().map_or(F::one(), |weights| weights[id]);
        let hard = Some((self.rows[t]?, class_weight * (F::one() - self.smoothing)));
        let soft = (!self.smoothed.is_empty()).then_some(SoftMasses::Given(&self.smoothed));
        Some(Target { hard, candidates: &[], outside: F::zero(), soft, terms: self.terms })
    }

    /// Computes the factor of each position's gradient: its weight times `scale`.
    fn gradient_scales(&self, scale: &GradScale, positions: usize) -> Result<Vec<F>> {
        let factors = match scale {
            GradScale::Constant(factor) => vec![*factor; positions],
            GradScale::OneOverCount => {
                let count: f64 = (0..positions).map(|t| self.count(t)).sum();
                vec![if count == 0.0 { 0.0 } else { 1.0 / count }; positions]
            }
            GradScale::Upstream(upstream) => upstream.to_vec1::<F>()?.into_iter().map(|x| x.f64()).collect(),
        };
        let scale = |(t, factor)| F::from_f64(weighted(self.position_weight(t), factor));
        Ok(factors.into_iter().enumerate().map(scale).collect())
    }

    /// Returns the weight of position `t`; zero if the position is ignored.
    fn position_weight(&self, t: usize) -> f64 {
        match (self.ids[t], &self.position_weights) {
            (None, _) => 0.0,
            (Some(_), Some(weights)) => weights[t].f64(),
            (Some(_), None) => 1.0,
        }
    }

    /// Returns the contribution of position `t` to the denominator of the mean.
    fn count(&self, t: usize) -> f64 {
        let class_weight = match &self.class_weights {
            Some(weights) => self.ids[t].map_or(0.0, |id| weights[id].f64()),
            None => 1.0,
        };
        self.position_weight(t) * class_weight
    }
}

/// Computes the mass that label smoothing gives to each id, `[vocab]`, padded with zeros; empty without smoothing. Each
/// id of the whole vocabulary gets an equal share, times its class weight.
fn smoothed_masses<F: Float>(loss: &TargetLoss, class_weights: Option<&[F]>, sizes: Sizes) -> Vec<F> {
    if loss.terms.label_smoothing <= 0.0 {
        return Vec::new();
    }
    let (vocab, own) = match &loss.shard {
        Some(shard) => (shard.vocab_size(), shard.range()),
        None => (sizes.vocab, 0..sizes.vocab),
    };
    let share = F::from_f64(loss.terms.label_smoothing) / F::from_f64(vocab as f64);
    let mut masses: Vec<F> = match class_weights {
        Some(weights) => weights[own].iter().map(|&weight| weight * share).collect(),
        None => vec![share; sizes.vocab],
    };
    masses.resize(sizes.vocab.next_multiple_of(ROW_ALIGN), F::zero());
    masses
}

impl<F: Float> ScoreTargets<F> {
    /// Adds up the masses of each position's ids, some of which are candidates several times.
    fn new(scored: &Scored, candidates: &Candidates, upstream: &[F], first: usize, power: F) -> Self {
        let n = candidates.n;
        let (mut starts, mut masses, mut sums) = (vec![0], Vec::new(), Vec::new());
        let if_needed = |is_needed: bool, g: F| if is_needed { g } else { F::zero() };
        for (t, row) in (first..).zip(upstream.chunks_exact(n + POSITION_SCORES)) {
            let start = masses.len();
            masses.extend(candidates.at(t).iter().map(|&id| (id, F::zero())));
            for (&place, &g) in candidates.places(t).iter().zip(row) {
                masses[start + place].1 += -power * g;
            }
            starts.push(masses.len());
            let entropy = if_needed(scored.needs_entropy, row[n]);
            let outside = if_needed(scored.needs_outside, row[n + 1]);
            let collision = if_needed(scored.needs_collision, row[n + 2]);
            // The derivatives of log sum_v Q(v)^2 by all log Q(v) add up to two.
            let log_probs = row[..n].iter().copied().sum::<F>() + outside + (collision + collision);
            sums.push(ScoreUpstream { log_probs, entropy, outside, collision });
        }
        ScoreTargets { first, starts, candidates: masses, upstream: sums, power }
    }

    /// Returns whether the masses are those of all ids.
    fn are_soft(&self) -> bool {
        self.power != F::one() || !self.upstream.iter().all(ScoreUpstream::is_plain)
    }

    /// Returns the target of position `t`; `None` if its scores have no gradient.
    fn target(&self, t: usize) -> Option<Target<'_, F>> {
        let i = t - self.first;
        let candidates = &self.candidates[self.starts[i]..self.starts[i + 1]];
        let (upstream, power) = (self.upstream[i], self.power);
        let is_plain = upstream.is_plain();
        if is_plain && candidates.iter().all(|&(_, mass)| mass == F::zero()) {
            return None;
        }
        let soft = (!is_plain || power != F::one()).then_some(SoftMasses::Scores { upstream, power });
        Some(Target { hard: None, candidates, outside: -power * upstream.outside, soft, terms: LossTerms::default() })
    }
}

impl<F: Float> LogProbTargets<F> {
    /// Returns the target of position `t`, which counts from the first position of the call: the upstream gradients of
    /// its log-probabilities, as soft masses of all ids.
    fn target(&self, t: usize) -> Target<'_, F> {
        let soft = Some(SoftMasses::Given(&self.upstream[(t - self.first) * self.stride..][..self.stride]));
        Target { hard: None, candidates: &[], outside: F::zero(), soft, terms: LossTerms::default() }
    }
}

/// The ids of each position whose logits are needed one by one: each once, in ascending order.
#[derive(Clone, Copy)]
pub(crate) enum ListedIds<'a> {
    /// No position lists an id.
    Nothing,
    /// Each position that is not ignored lists its target.
    Targets(&'a [Option<usize>]),
    /// Each position lists its candidates.
    Candidates(&'a Candidates),
}

impl<'a> ListedIds<'a> {
    /// Returns the ids of position `t`; `None` if it is ignored.
    pub(crate) fn at(self, t: usize) -> Option<&'a [usize]> {
        match self {
            ListedIds::Nothing => Some(&[]),
            ListedIds::Targets(ids) => ids[t].as_ref().map(std::slice::from_ref),
            ListedIds::Candidates(candidates) => Some(candidates.at(t)),
        }
    }
}

/// The candidates of scores, some of which may be equal.
pub(crate) struct Candidates {
    /// The number of candidates of each position.
    pub(crate) n: usize,
    /// `[positions, n]`: the candidates as the caller gives them.
    given: Vec<usize>,
    /// `[positions + 1]`: where each position's ids start in `ids`.
    starts: Vec<usize>,
    /// The ids of each position, each once, in ascending order.
    ids: Vec<usize>,
    /// `[positions, n]`: the place of each candidate among its position's ids.
    places: Vec<usize>,
}

impl Candidates {
    /// Reads the ids, which must be in the vocabulary.
    pub(crate) fn new(scored: &Scored, vocab: usize) -> Result<Self> {
        let (positions, n) = scored.token_ids.dims2()?;
        let given: Vec<usize> = read_ids("token_ids", &scored.token_ids, None, vocab)?.into_iter().flatten().collect();
        let (mut starts, mut ids, mut places) = (vec![0], Vec::new(), Vec::with_capacity(given.len()));
        for t in 0..positions {
            let given = &given[t * n..(t + 1) * n];
            let mut distinct = given.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            places.extend(given.iter().map(|id| distinct.partition_point(|other| other < id)));
            ids.extend(distinct);
            starts.push(ids.len());
        }
        Ok(Candidates { n, given, starts, ids, places })
    }

    /// Returns the ids of position `t`, each once, in ascending order.
    pub(crate) fn at(&self, t: usize) -> &[usize] {
        &self.ids[self.starts[t]..self.starts[t + 1]]
    }

    /// Returns position `t`'s candidates, `[n]`, as the caller gives them.
    pub(crate) fn given(&self, t: usize) -> &[usize] {
        &self.given[t * self.n..(t + 1) * self.n]
    }

    /// Returns the place of each of position `t`'s candidates among its ids, `[n]`.
    pub(crate) fn places(&self, t: usize) -> &[usize] {
        &self.places[t * self.n..(t + 1) * self.n]
    }
}
