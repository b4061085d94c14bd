//! The loss of a factorised vocabulary: `-log P(y) = -log P_root(entry of y) - log P_c(y)`.
//!
//! Each cluster is applied only to the positions whose target is in it. The positions are sorted by cluster once; the
//! sorted hidden states are then split in halves, and the halves in halves, down to single clusters. The reason is that
//! the gradient of candle's `narrow` is as large as its argument: C cuts from the whole would cost C times the whole,
//! and halving costs log2 C times.

use std::fmt::Debug;

use candle_core::{DType, Device, Tensor, TensorId};

use super::{Cluster, Levels, Place, TwoLevel};
use crate::distributions::Distributions;
use crate::error::Result;
use crate::heads::{MixtureLayer, RequestLayer};
use crate::loss::{Loss, LossOptions, Reduction, Request, IGNORED};
use crate::tensors::autograd::variable_ids;
use crate::tensors::checks::{accumulation_dtype, check_hidden, leading};
use crate::tensors::transfer::{spread, to_device, to_device_as};

/// The positions whose targets are in one cluster, which are consecutive among the sorted positions.
struct ClusterGroup<'a> {
    cluster: &'a Cluster,
    /// The first of them among the sorted positions.
    start: usize,
    /// Their number.
    positions: usize,
}

/// The operands that the losses of all groups share; tensors are over the sorted positions.
struct ClusterGroups<'a> {
    /// The targets as indices in their clusters.
    targets: Tensor,
    weights: Option<Tensor>,
    options: &'a LossOptions,
}

/// The loss of the root, or of one or more groups.
struct LevelLoss {
    /// The differentiable value.
    value: Tensor,
    /// The negative log-likelihoods of the positions.
    nll: Tensor,
}

impl LevelLoss {
    fn from_loss(loss: Loss) -> Self {
        LevelLoss { value: loss.value, nll: loss.nll }
    }
}

/// The factors of positions in the losses of both levels, which contain the reduction.
struct PositionFactors {
    factors: Option<Vec<f64>>,
    dtype: DType,
    device: Device,
}

impl PositionFactors {
    /// Returns the factors of these positions as a tensor, or `None` if there are none.
    fn select(&self, positions: impl Iterator<Item = usize>, shape: &[usize]) -> Result<Option<Tensor>> {
        let Some(factors) = &self.factors else { return Ok(None) };
        let values = positions.map(|position| factors[position]).collect();
        Ok(Some(to_device_as(values, shape, self.dtype, &self.device)?))
    }
}

impl<S: Debug + Send + Sync, R: MixtureLayer> RequestLayer for TwoLevel<S, R> {
    fn check_hidden(&self, hidden: &Tensor) -> Result<()> {
        self.levels().check_hidden(hidden)
    }

    fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss> {
        self.levels().request_loss(hidden, request)
    }
}

impl Levels<'_> {
    /// Checks the hidden states of the first level.
    pub(super) fn check_hidden(&self, hidden: &Tensor) -> Result<()> {
        let Some(first) = self.clusters.first() else { return Ok(()) };
        let compared = || match &first.projection {
            Some(projection) => format!("the first cluster's projection {:?}", projection.dims()),
            None => format!("the first class's weight {:?}", first.weight.dims()),
        };
        check_hidden(hidden, self.root.hidden_size(), compared, &first.weight)
    }

    /// Computes the loss of a request: the root's at all positions, and each cluster's at the positions whose target is
    /// in it. It reads the targets on the host, to sort the positions by cluster.
    pub(super) fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss> {
        request.check_support(self.name, &[])?;
        let (leading, options) = (leading(hidden)?, request.options);
        let ids = request.positions.read_ids(self.vocab_size)?;
        let device = hidden.device();

        // The reduction is part of the factors, so that the value of each level has the upstream gradient one, which
        // needs no multiplication. If there is no reduction, or if there are no gradients, the values are reduced
        // afterwards.
        let is_reduced = options.train && options.positions.reduction != Reduction::None;
        let factors = PositionFactors {
            factors: if is_reduced { request.positions.read_factors(&ids)? } else { None },
            dtype: accumulation_dtype("hidden", hidden.dtype())?,
            device: device.clone(),
        };
        let mut level_options = options.clone();
        level_options.positions.reduction = if is_reduced { Reduction::Sum } else { Reduction::None };
        level_options.positions.ignore_index = None;
        (level_options.positions.position_weights, level_options.class_weights) = (None, None);
        level_options.positions.denominator = None;

        let places: Vec<_> = ids.iter().map(|id| id.map(|id| self.place(id))).collect();
        let entries = places.iter().map(|place| place.map_or(IGNORED, |place| place.entry as i64)).collect();
        let mut root_options = level_options.clone();
        root_options.positions.ignore_index = places.iter().any(Option::is_none).then_some(IGNORED);
        root_options.positions.position_weights = factors.select(0..ids.len(), leading)?;
        let root = self.root.loss(hidden, &to_device::<i64>(entries, leading, device)?, &root_options)?;

        let (groups, sorted) = self.groups(&places);
        let mut total = LevelLoss::from_loss(root);
        if !groups.is_empty() {
            let clusters = self.clusters_loss(hidden, &groups, &sorted, &factors, &level_options)?;
            total.nll = (total.nll + clusters.nll)?;
            total.value = (total.value + clusters.value)?;
        }
        if is_reduced {
            let loss = request.loss_from_nll(&total.nll)?;
            Ok(Loss { value: total.value, spared: self.spared(&groups), ..loss })
        } else {
            Ok(Loss { spared: self.spared(&groups), ..request.loss_from_nll(&total.value)? })
        }
    }

    /// Computes the loss of all groups. The negative log-likelihoods, and the values if they are not reduced, have the
    /// leading dimensions of the hidden states, and zeros at positions that are in no group.
    fn clusters_loss(
        &self,
        hidden: &Tensor,
        groups: &[ClusterGroup],
        sorted: &[(usize, u32)],
        factors: &PositionFactors,
        options: &LossOptions,
    ) -> Result<LevelLoss> {
        let (leading, device) = (leading(hidden)?, hidden.device());
        let order: Vec<u32> = sorted.iter().map(|&(position, _)| position as u32).collect();
        let shared = ClusterGroups {
            targets: Tensor::new(sorted.iter().map(|&(_, target)| target).collect::<Vec<_>>(), device)?,
            weights: factors.select(sorted.iter().map(|&(position, _)| position), &[sorted.len()])?,
            options,
        };
        let states = self.flat_states(hidden)?.index_select(&Tensor::new(&*order, device)?, 0)?;
        let clusters = shared.loss(&states, groups)?;
        let unsort = |sorted: &Tensor| -> Result<Tensor> {
            Ok(spread(sorted, &order, leading.iter().product())?.reshape(leading)?)
        };
        Ok(LevelLoss {
            nll: unsort(&clusters.nll)?,
            value: match options.positions.reduction {
                Reduction::None => unsort(&clusters.value)?,
                _ => clusters.value,
            },
        })
    }

    /// Returns the variables of the clusters that have no target, and therefore get no gradients.
    fn spared(&self, groups: &[ClusterGroup]) -> Vec<TensorId> {
        // The groups are in the order of the clusters.
        let has_target = |cluster: &Cluster| {
            groups.binary_search_by_key(&cluster.slots.start, |group| group.cluster.slots.start).is_ok()
        };
        let idle = self.clusters.iter().filter(|cluster| !has_target(cluster));
        let parameters = idle
            .flat_map(|Cluster { projection, weight, bias, .. }| [projection.as_ref(), Some(weight), bias.as_ref()]);
        parameters.flatten().flat_map(variable_ids).collect()
    }

    /// Returns the clusters that have a target, and the positions sorted by cluster, each with its target's index
    /// there.
    fn groups(&self, places: &[Option<Place>]) -> (Vec<ClusterGroup<'_>>, Vec<(usize, u32)>) {
        let mut members = vec![Vec::new(); self.clusters.len()];
        for (position, place) in places.iter().enumerate() {
            if let Some((cluster, target)) = place.and_then(|place| place.within) {
                members[cluster].push((position, target as u32));
            }
        }
        let (mut groups, mut sorted) = (Vec::new(), Vec::new());
        for (cluster, members) in self.clusters.iter().zip(members).filter(|(_, members)| !members.is_empty()) {
            groups.push(ClusterGroup { cluster, start: sorted.len(), positions: members.len() });
            sorted.extend(members);
        }
        (groups, sorted)
    }
}

impl ClusterGroups<'_> {
    /// Computes the loss of consecutive groups, whose positions are the rows of `hidden`, halves first.
    fn loss(&self, hidden: &Tensor, groups: &[ClusterGroup]) -> Result<LevelLoss> {
        if let [group] = groups {
            let mut options = self.options.clone();
            if let Some(weights) = &self.weights {
                options.positions.position_weights = Some(weights.narrow(0, group.start, group.positions)?);
            }
            let targets = self.targets.narrow(0, group.start, group.positions)?;
            return Ok(LevelLoss::from_loss(group.cluster.mixture(hidden)?.loss(&targets, &options)?));
        }
        let (left, right) = groups.split_at(groups.len() / 2);
        let cut: usize = left.iter().map(|group| group.positions).sum();
        let (left_hidden, right_hidden) = (hidden.narrow(0, 0, cut)?, hidden.narrow(0, cut, hidden.dim(0)? - cut)?);
        // The work of one cluster may be too small for all threads. If a budget is given, it is for one cluster at a
        // time.
        let (left, right) = if hidden.device().is_cpu() && self.options.workspace_bytes.is_none() {
            rayon::join(|| self.loss(&left_hidden, left), || self.loss(&right_hidden, right))
        } else {
            (self.loss(&left_hidden, left), self.loss(&right_hidden, right))
        };
        let (left, right) = (left?, right?);
        Ok(LevelLoss {
            value: match self.options.positions.reduction {
                Reduction::None => Tensor::cat(&[left.value, right.value], 0)?,
                _ => (left.value + right.value)?,
            },
            nll: Tensor::cat(&[left.nll, right.nll], 0)?,
        })
    }
}
