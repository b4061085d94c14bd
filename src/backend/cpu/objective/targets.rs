//! The targets of a loss and their weights, read and checked before the first chunk.

use candle_core::Tensor;
use rayon::prelude::*;

use super::components::{ScoreUpstream, Soft, Target};
use super::listed_ids::{Candidates, ListedIds};
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::vector::math::weighted;
use crate::backend::cpu::vector::simd::{Float, ROW_ALIGN};
use crate::backend::objective::{GradScale, LossTerms, Objective, Scored, TargetLoss, OF_POSITION};
use crate::backend::operands::Sizes;
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// The targets of all positions, and their weights.
pub(crate) struct Targets<F> {
    /// `None` if the objective is an inner product with an upstream gradient
    ids: Option<Ids<F>>,
    /// If that is the gradient of scores
    scores: Option<ScoreMasses<F>>,
    /// `[stride]`, if `soft_step` is zero: the mass that label smoothing gives to each id; empty without smoothing.
    /// Otherwise `[positions, stride]`: the upstream gradient of the log-probabilities, whose masses have the other sign.
    soft: Vec<F>,
    soft_step: usize,
    /// The position that `soft` starts at.
    soft_first: usize,
    stride: usize,
    pub(crate) terms: LossTerms,
}

/// The upstream gradients of the scores of some positions.
struct ScoreMasses<F> {
    /// The first position
    first: usize,
    /// Where the ids of each position start, in `candidates`
    starts: Vec<usize>,
    /// Each id and its mass
    candidates: Vec<(usize, F)>,
    /// `[positions]`
    upstream: Vec<ScoreUpstream<F>>,
    power: F,
}

impl<F: Float> ScoreMasses<F> {
    fn target(&self, t: usize) -> Option<Target<'_, F>> {
        let i = t - self.first;
        let candidates = &self.candidates[self.starts[i]..self.starts[i + 1]];
        let (upstream, power, zero) = (self.upstream[i], self.power, F::zero());
        let is_plain = upstream.entropy == zero && upstream.outside == zero;
        if is_plain && candidates.iter().all(|&(_, mass)| mass == zero) {
            return None;
        }
        let soft = (!is_plain || power != F::one()).then_some(Soft::Scores { upstream, power });
        Some(Target { hard: None, candidates, outside: -power * upstream.outside, soft, terms: LossTerms::default() })
    }
}

struct Ids<F> {
    /// `None` where the target is ignored
    ids: Vec<Option<usize>>,
    /// The rows of the weight that the targets have; `ELSEWHERE` if another rank has it. `None` where it is ignored
    rows: Vec<Option<usize>>,
    position_weights: Option<Vec<F>>,
    class_weights: Option<Vec<F>>,
    smoothing: F,
    /// `[positions]`: the factor of the gradient of each position's objective
    scales: Vec<F>,
    /// `[positions]`: what is added to each target's logit, if it is an entry of its own
    own_shifts: Option<Vec<F>>,
}

impl<F: Float> Targets<F> {
    /// The inner product of the scores of some positions, from `first` on, and `upstream`, `[positions, n + 2]`. The
    /// `power` is the inverse of the temperature, or one if the logits are tempered already.
    pub(crate) fn of_scores(
        scored: &Scored,
        candidates: &Candidates,
        upstream: &[F],
        first: usize,
        power: F,
        sizes: Sizes,
    ) -> Self {
        let n = candidates.n;
        let (mut starts, mut masses, mut sums) = (vec![0], Vec::new(), Vec::new());
        let of_score = |is_needed: bool, g: F| if is_needed { g } else { F::zero() };
        for (t, row) in (first..).zip(upstream.chunks_exact(n + OF_POSITION)) {
            let start = masses.len();
            masses.extend(candidates.at(t).iter().map(|&id| (id, F::zero())));
            for (&place, &g) in candidates.places(t).iter().zip(row) {
                masses[start + place].1 += -power * g;
            }
            starts.push(masses.len());
            let (entropy, outside) = (of_score(scored.entropy, row[n]), of_score(scored.outside, row[n + 1]));
            let log_probs = row[..n].iter().copied().sum::<F>() + outside;
            sums.push(ScoreUpstream { log_probs, entropy, outside });
        }
        let scores = ScoreMasses { first, starts, candidates: masses, upstream: sums, power };
        Targets { scores: Some(scores), ..Self::none(sizes) }
    }

    /// The inner product of the log-probabilities of some positions, from `first` on, and `upstream`, `[positions, vocab]`.
    pub(crate) fn of_upstream(upstream: Vec<F>, first: usize, sizes: Sizes) -> Self {
        let stride = sizes.vocab.next_multiple_of(ROW_ALIGN);
        let soft = if stride == sizes.vocab {
            upstream
        } else {
            let mut soft = zeros(upstream.len() / sizes.vocab * stride);
            let rows = soft.par_chunks_exact_mut(stride).zip(upstream.par_chunks_exact(sizes.vocab));
            rows.for_each(|(row, upstream)| row[..upstream.len()].copy_from_slice(upstream));
            soft
        };
        Targets { soft, soft_step: stride, soft_first: first, ..Self::none(sizes) }
    }

    /// No targets: the objective is not known before the scores.
    pub(crate) fn none(sizes: Sizes) -> Self {
        let stride = sizes.vocab.next_multiple_of(ROW_ALIGN);
        let terms = LossTerms::default();
        Targets { ids: None, scores: None, soft: vec![], soft_step: 0, soft_first: 0, stride, terms }
    }

    /// Reads the targets, which must be among the `rows` of the weight, or in the vocabulary of all ranks.
    pub(crate) fn new(objective: &Objective, sizes: Sizes, rows: usize) -> Result<Self> {
        let stride = sizes.vocab.next_multiple_of(ROW_ALIGN);
        let loss = match objective {
            Objective::LogProbs { upstream } => {
                return Ok(Self::of_upstream(upstream.flatten_all()?.to_vec1()?, 0, sizes));
            }
            Objective::Targets(loss) => loss,
        };
        let TargetLoss { targets, position_weights, class_weights, terms, .. } = loss;
        let vocab = loss.shard.as_ref().map_or(rows, VocabShard::vocab_size);
        let ids = read_ids("targets", targets, loss.ignore_index, vocab)?;
        let rows = match &loss.shard {
            Some(shard) => ids.iter().map(|id| id.map(|id| shard.row(id))).collect(),
            None => ids.clone(),
        };
        let read = |numbers: &Option<Tensor>| numbers.as_ref().map(|numbers| numbers.to_vec1::<F>()).transpose();
        let (position_weights, class_weights) = (read(position_weights)?, read(class_weights)?);
        let smoothing = F::from_f64(terms.label_smoothing);
        let mut soft = Vec::new();
        if terms.label_smoothing > 0.0 {
            let whole = 0..sizes.vocab;
            let (vocab, own) =
                loss.shard.as_ref().map_or((sizes.vocab, whole), |shard| (shard.vocab_size(), shard.range()));
            let share = smoothing / F::from_f64(vocab as f64);
            soft = match &class_weights {
                Some(weights) => weights[own].iter().map(|&c| c * share).collect(),
                None => vec![share; sizes.vocab],
            };
            soft.resize(stride, F::zero());
        }
        let own_shifts = read(&loss.own_shifts)?;
        let mut ids = Ids { ids, rows, position_weights, class_weights, smoothing, scales: Vec::new(), own_shifts };
        ids.scales = ids.gradient_scales(&loss.scale, sizes.positions)?;
        Ok(Targets { ids: Some(ids), soft, terms: *terms, ..Self::none(sizes) })
    }

    /// Whether there are soft targets.
    pub(crate) fn are_soft(&self) -> bool {
        let scores = self.scores.as_ref();
        let are_tempered = |scores: &ScoreMasses<F>| {
            let is_soft = |of: &ScoreUpstream<F>| of.entropy != F::zero() || of.outside != F::zero();
            scores.power != F::one() || scores.upstream.iter().any(is_soft)
        };
        !self.soft.is_empty() || scores.is_some_and(are_tempered)
    }

    /// The row of the target of position `t`; `None` if it is ignored.
    pub(crate) fn row(&self, t: usize) -> Option<usize> {
        self.ids.as_ref()?.rows[t]
    }

    /// The target id of position `t`; `None` if it is ignored.
    pub(crate) fn id(&self, t: usize) -> Option<usize> {
        self.ids.as_ref()?.ids[t]
    }

    /// The row of each position's target.
    pub(crate) fn listed(&self) -> ListedIds<'_> {
        ListedIds::Targets(self.ids.as_ref().map_or(&[], |ids| &ids.rows))
    }

    /// What is added to the logit of position `t`'s target, if targets are entries of their own.
    pub(crate) fn own_shift(&self, t: usize) -> Option<F> {
        Some(self.ids.as_ref()?.own_shifts.as_ref()?[t])
    }

    /// Whether targets are entries of their own.
    pub(crate) fn are_own(&self) -> bool {
        self.ids.as_ref().is_some_and(|ids| ids.own_shifts.is_some())
    }

    /// The target of position `t` for the row kernels; `None` if it is ignored.
    pub(crate) fn position(&self, t: usize) -> Option<Target<'_, F>> {
        if let Some(scores) = &self.scores {
            return scores.target(t);
        }
        let soft = (!self.soft.is_empty())
            .then(|| Soft::Given(&self.soft[(t - self.soft_first) * self.soft_step..][..self.stride]));
        let Some(ids) = &self.ids else {
            return Some(Target { hard: None, candidates: &[], outside: F::zero(), soft, terms: self.terms });
        };
        let id = ids.ids[t]?;
        let class_weight = ids.class_weights.as_ref().map_or(F::one(), |weights| weights[id]);
        let hard = Some((ids.rows[t]?, class_weight * (F::one() - ids.smoothing)));
        Some(Target { hard, candidates: &[], outside: F::zero(), soft, terms: self.terms })
    }

    /// The factor of the gradient of position `t`'s objective.
    pub(crate) fn scale(&self, t: usize) -> F {
        let of_upstream = if self.soft_step > 0 { -F::one() } else { F::one() };
        self.ids.as_ref().map_or(of_upstream, |ids| ids.scales[t])
    }

    /// The weight of position `t`; zero if it is ignored.
    pub(crate) fn position_weight(&self, t: usize) -> f64 {
        self.ids.as_ref().map_or(1.0, |ids| ids.position_weight(t))
    }

    /// The contribution of position `t` to the denominator of the mean.
    pub(crate) fn count(&self, t: usize) -> f64 {
        self.ids.as_ref().map_or(1.0, |ids| ids.count(t))
    }
}

impl<F: Float> Ids<F> {
    /// The factor of each position's gradient: its weight times `scale`.
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

    fn position_weight(&self, t: usize) -> f64 {
        match (self.ids[t], &self.position_weights) {
            (None, _) => 0.0,
            (Some(_), Some(weights)) => weights[t].f64(),
            (Some(_), None) => 1.0,
        }
    }

    fn count(&self, t: usize) -> f64 {
        let class_weight = match &self.class_weights {
            Some(weights) => self.ids[t].map_or(0.0, |id| weights[id].f64()),
            None => 1.0,
        };
        self.position_weight(t) * class_weight
    }
}
