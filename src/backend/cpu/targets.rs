//! The targets of a loss and their weights, read and checked before the first chunk.

use super::rows::{weighted, Target};
use super::simd::{Float, ROW_ALIGN};
use crate::backend::contract::{GradScale, Objective, Sizes, TargetLoss};
use crate::error::Result;
use crate::validate::read_ids;

/// The targets of all positions, and their weights.
pub(super) struct Targets<F> {
    kind: Kind<F>,
    filter: F,
    pub(super) hits: bool,
}

enum Kind<F> {
    /// An id per position, `None` where the target is ignored.
    Ids {
        ids: Vec<Option<usize>>,
        position_weights: Option<Vec<F>>,
        class_weights: Option<Vec<F>>,
        smoothing: F,
        /// `[stride]`: the mass that label smoothing gives to each id; empty without smoothing
        soft: Vec<F>,
        z_loss: F,
        /// `[positions]`: the factor of the gradient of each position's objective
        scales: Vec<F>,
        /// `[positions]`: what is added to each target's logit, if it is an entry of its own
        own_shifts: Option<Vec<F>>,
    },
    /// `[positions, stride]`: minus the upstream gradient of the log-probabilities
    LogProbs { soft: Vec<F>, stride: usize },
}

impl<F: Float> Targets<F> {
    /// `rows` are those of the weight.
    pub(super) fn new(objective: &Objective, sizes: Sizes, rows: usize) -> Result<Self> {
        let stride = sizes.vocab.next_multiple_of(ROW_ALIGN);
        let loss = match objective {
            Objective::LogProbs { upstream } => {
                let mut soft = vec![F::zero(); sizes.positions * stride];
                let upstream = upstream.flatten_all()?.to_vec1::<F>()?;
                for (row, upstream) in soft.chunks_exact_mut(stride).zip(upstream.chunks_exact(sizes.vocab)) {
                    for (soft, &g) in row.iter_mut().zip(upstream) {
                        *soft = -g;
                    }
                }
                return Ok(Targets { kind: Kind::LogProbs { soft, stride }, filter: F::zero(), hits: false });
            }
            Objective::Targets(loss) => loss,
        };
        let TargetLoss { targets, position_weights, class_weights, terms, .. } = loss;
        let ids = read_ids(targets, loss.ignore_index, rows)?;
        let position_weights = position_weights.as_ref().map(|w| w.to_vec1::<F>()).transpose()?;
        let class_weights = class_weights.as_ref().map(|w| w.to_vec1::<F>()).transpose()?;
        let smoothing = F::of(terms.label_smoothing);
        let mut soft = Vec::new();
        if terms.label_smoothing > 0.0 {
            let share = smoothing / F::of(sizes.vocab as f64);
            soft = match &class_weights {
                Some(weights) => weights.iter().map(|&c| c * share).collect(),
                None => vec![share; sizes.vocab],
            };
            soft.resize(stride, F::zero());
        }
        let mut targets = Targets {
            kind: Kind::Ids {
                ids,
                position_weights,
                class_weights,
                smoothing,
                soft,
                z_loss: F::of(terms.z_loss),
                scales: Vec::new(),
                own_shifts: loss.own_shifts.as_ref().map(|shifts| shifts.to_vec1::<F>()).transpose()?,
            },
            filter: F::of(terms.responsibility_filter),
            hits: terms.hits,
        };
        let computed = targets.gradient_scales(&loss.scale, sizes.positions)?;
        if let Kind::Ids { scales, .. } = &mut targets.kind {
            *scales = computed;
        }
        Ok(targets)
    }

    /// The factor of each position's gradient: its weight times `scale`.
    fn gradient_scales(&self, scale: &GradScale, positions: usize) -> Result<Vec<F>> {
        let factors = match scale {
            GradScale::One => vec![1.0; positions],
            GradScale::OneOverCount => {
                let count: f64 = (0..positions).map(|t| self.count(t)).sum();
                vec![if count == 0.0 { 0.0 } else { 1.0 / count }; positions]
            }
            GradScale::Upstream(upstream) => upstream.to_vec1::<F>()?.into_iter().map(|x| x.f64()).collect(),
        };
        Ok(factors
            .into_iter()
            .enumerate()
            .map(|(t, factor)| F::of(weighted(self.position_weight(t), factor)))
            .collect())
    }

    /// Whether there are soft targets.
    pub(super) fn soft(&self) -> bool {
        match &self.kind {
            Kind::Ids { soft, .. } => !soft.is_empty(),
            Kind::LogProbs { .. } => true,
        }
    }

    /// Whether the log-probability of every id is needed.
    pub(super) fn all_ids(&self) -> bool {
        self.soft() || self.hits
    }

    pub(super) fn has_filter(&self) -> bool {
        self.filter > F::zero()
    }

    /// The target id of position `t`; `None` if it is ignored.
    pub(super) fn id(&self, t: usize) -> Option<usize> {
        match &self.kind {
            Kind::Ids { ids, .. } => ids[t],
            Kind::LogProbs { .. } => None,
        }
    }

    /// What is added to the logit of position `t`'s target, if targets are entries of their own.
    pub(super) fn own_shift(&self, t: usize) -> Option<F> {
        match &self.kind {
            Kind::Ids { own_shifts, .. } => own_shifts.as_ref().map(|shifts| shifts[t]),
            Kind::LogProbs { .. } => None,
        }
    }

    /// Whether targets are entries of their own.
    pub(super) fn are_own(&self) -> bool {
        matches!(&self.kind, Kind::Ids { own_shifts: Some(_), .. })
    }

    /// The target of position `t` for the row kernels; `None` if it is ignored.
    pub(super) fn position(&self, t: usize) -> Option<Target<'_, F>> {
        match &self.kind {
            Kind::Ids { ids, class_weights, smoothing, soft, z_loss, .. } => ids[t].map(|id| {
                let class_weight = class_weights.as_ref().map_or(F::one(), |weights| weights[id]);
                Target {
                    hard: Some((id, class_weight * (F::one() - *smoothing))),
                    soft: (!soft.is_empty()).then_some(&soft[..]),
                    z_loss: *z_loss,
                    filter: self.filter,
                    hits: self.hits,
                }
            }),
            Kind::LogProbs { soft, stride } => Some(Target {
                hard: None,
                soft: Some(&soft[t * stride..(t + 1) * stride]),
                z_loss: F::zero(),
                filter: F::zero(),
                hits: false,
            }),
        }
    }

    /// The factor of the gradient of position `t`'s objective.
    pub(super) fn scale(&self, t: usize) -> F {
        match &self.kind {
            Kind::Ids { scales, .. } => scales[t],
            Kind::LogProbs { .. } => F::one(),
        }
    }

    /// The weight of position `t`; zero if it is ignored.
    pub(super) fn position_weight(&self, t: usize) -> f64 {
        match &self.kind {
            Kind::Ids { ids, position_weights, .. } => match (ids[t], position_weights) {
                (None, _) => 0.0,
                (Some(_), Some(weights)) => weights[t].f64(),
                (Some(_), None) => 1.0,
            },
            Kind::LogProbs { .. } => 1.0,
        }
    }

    /// The contribution of position `t` to the denominator of the mean.
    pub(super) fn count(&self, t: usize) -> f64 {
        let class_weight = match &self.kind {
            Kind::Ids { ids, class_weights: Some(weights), .. } => ids[t].map_or(0.0, |id| weights[id].f64()),
            _ => 1.0,
        };
        self.position_weight(t) * class_weight
    }
}
