//! The loss of a factorised vocabulary: `-log P(y) = -log P_root(entry of y) - log P_c(y)`.
//!
//! Each cluster is applied only to the positions whose target is in it. These are sorted by cluster once; the sorted
//! hidden states are then split in halves, and the halves in halves, down to single clusters: the gradient of candle's
//! `narrow` is as large as its argument, so that C cuts from the whole would cost C times the whole, and halving costs
//! log2 C times.

use std::fmt::Debug;

use candle_core::{Device, Tensor, TensorId};

use super::{Cluster, Place, TwoLevel};
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::heads::MixtureLayer;
use crate::loss::{Loss, LossOptions, Reduction, Request};
use crate::tensors::autograd::{variables, Leaf};
use crate::tensors::checks::leading;
use crate::tensors::transfer::to_device;

/// The index that the root ignores.
const IGNORED: i64 = -1;

/// The positions whose targets are in one cluster: consecutive rows of the sorted positions.
struct ClusterGroup<'a> {
    cluster: &'a Cluster,
    start: usize,
    positions: usize,
}

/// What the groups share; tensors are over the sorted positions.
struct ClusterGroups<'a> {
    /// Targets as indices of their cluster.
    targets: Tensor,
    weights: Option<Tensor>,
    options: &'a LossOptions,
}

/// The differentiable value of one or more groups, and the negative log-likelihoods of their positions.
struct ClusterLoss {
    value: Tensor,
    nll: Tensor,
    leaves: Vec<Leaf>,
}

impl ClusterLoss {
    fn from_loss(loss: Loss) -> Self {
        ClusterLoss { leaves: loss.leaves().collect(), value: loss.value, nll: loss.nll }
    }
}

impl<S: Debug + Send + Sync, R: MixtureLayer> TwoLevel<S, R> {
    /// Reads the targets, to sort the positions.
    pub(super) fn loss_of(&self, hidden: &Tensor, request: &Request) -> Result<Loss> {
        request.check_support(self.name, &[])?;
        let (leading, options) = (leading(hidden)?, request.options);
        let ids = request.read_ids(self.vocab_size)?;
        let device = hidden.device();

        // The reduction is part of the weights, so that every part of the value has the upstream gradient one, by which
        // nothing is multiplied. Without a reduction, or without gradients, it follows the parts.
        let is_reduced = options.train && options.reduction != Reduction::None;
        let weights = if is_reduced { request.read_factors(&ids)? } else { None };
        let mut parts = options.clone();
        parts.reduction = if is_reduced { Reduction::Sum } else { Reduction::None };
        (parts.ignore_index, parts.position_weights, parts.class_weights) = (None, None, None);
        parts.denominator = None;
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        let weights_of = |positions: &mut dyn Iterator<Item = usize>, shape: &[usize]| match &weights {
            None => Ok(None),
            Some(weights) => {
                let values = to_device(positions.map(|position| weights[position]).collect(), shape, &Device::Cpu)?;
                Ok::<_, Error>(Some(values.to_dtype(accumulation)?.to_device(device)?))
            }
        };

        let places: Vec<_> = ids.iter().map(|id| id.map(|id| self.place(id))).collect();
        let entries = places.iter().map(|place| place.map_or(IGNORED, |place| place.entry as i64)).collect();
        let mut of_root = parts.clone();
        of_root.ignore_index = places.iter().any(Option::is_none).then_some(IGNORED);
        of_root.position_weights = weights_of(&mut (0..ids.len()), leading)?;
        let root = self.root.loss(hidden, &to_device::<i64>(entries, leading, device)?, &of_root)?;

        let (groups, sorted) = self.groups(&places);
        let mut part = ClusterLoss::from_loss(root);
        if !groups.is_empty() {
            let order: Vec<u32> = sorted.iter().map(|&(position, _)| position as u32).collect();
            let shared = ClusterGroups {
                targets: Tensor::new(sorted.iter().map(|&(_, target)| target).collect::<Vec<_>>(), device)?,
                weights: weights_of(&mut sorted.iter().map(|&(position, _)| position), &[sorted.len()])?,
                options: &parts,
            };
            let rows = self.rows(hidden)?.index_select(&Tensor::new(&*order, device)?, 0)?;
            let clusters = shared.part(&rows, &groups)?;
            // Where each position is among the sorted ones; behind them, zero.
            let mut places = vec![order.len() as u32; ids.len()];
            order.iter().zip(0..).for_each(|(&position, place)| places[position as usize] = place);
            let places = Tensor::new(places, device)?;
            let unsorted = |sorted: &Tensor| {
                let zero = Tensor::zeros(1, sorted.dtype(), device)?;
                Tensor::cat(&[sorted, &zero], 0)?.index_select(&places, 0)?.reshape(leading)
            };
            part.leaves.extend(clusters.leaves);
            part.nll = (part.nll + unsorted(&clusters.nll)?)?;
            part.value =
                if is_reduced { (part.value + clusters.value)? } else { (part.value + unsorted(&clusters.value)?)? };
        }
        if is_reduced {
            let loss = request.loss_from_nll(&part.nll)?;
            Ok(Loss { value: part.value, other_decoders: part.leaves, spared: self.spared(&groups), ..loss })
        } else {
            Ok(Loss { spared: self.spared(&groups), ..request.loss_from_nll(&part.value)? })
        }
    }

    /// The variables of the clusters that have no target.
    fn spared(&self, groups: &[ClusterGroup]) -> Vec<TensorId> {
        // The groups are in the order of the clusters.
        let has_target = |cluster: &Cluster| {
            groups.binary_search_by_key(&cluster.ranks.start, |group| group.cluster.ranks.start).is_ok()
        };
        let idle = self.clusters.iter().filter(|cluster| !has_target(cluster));
        let parameters = idle
            .flat_map(|Cluster { projection, weight, bias, .. }| [projection.as_ref(), Some(weight), bias.as_ref()]);
        parameters.flatten().flat_map(variables).collect()
    }

    /// The clusters that have a target, and the positions sorted by cluster, each with its target there.
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
    /// The loss of some groups, whose positions are the rows of `hidden`.
    fn part(&self, hidden: &Tensor, groups: &[ClusterGroup]) -> Result<ClusterLoss> {
        if let [group] = groups {
            let mut options = self.options.clone();
            if let Some(weights) = &self.weights {
                options.position_weights = Some(weights.narrow(0, group.start, group.positions)?);
            }
            let targets = self.targets.narrow(0, group.start, group.positions)?;
            return Ok(ClusterLoss::from_loss(group.cluster.mixture(hidden)?.loss(&targets, &options)?));
        }
        let (left, right) = groups.split_at(groups.len() / 2);
        let cut: usize = left.iter().map(|group| group.positions).sum();
        let (of_left, of_right) = (hidden.narrow(0, 0, cut)?, hidden.narrow(0, cut, hidden.dim(0)? - cut)?);
        // The work of one cluster may be too small for all threads. A given budget is for one cluster at a time.
        let (left, right) = if hidden.device().is_cpu() && self.options.workspace_bytes.is_none() {
            rayon::join(|| self.part(&of_left, left), || self.part(&of_right, right))
        } else {
            (self.part(&of_left, left), self.part(&of_right, right))
        };
        let (left, right) = (left?, right?);
        Ok(ClusterLoss {
            value: match self.options.reduction {
                Reduction::None => Tensor::cat(&[left.value, right.value], 0)?,
                _ => (left.value + right.value)?,
            },
            nll: Tensor::cat(&[left.nll, right.nll], 0)?,
            leaves: [left.leaves, right.leaves].concat(),
        })
    }
}
