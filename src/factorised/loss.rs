//! The loss of a factorised vocabulary: `-log P(y) = -log P_root(entry of y) - log P_c(y)`.
//!
//! Each cluster is applied only to the positions whose target is in it. These are sorted by cluster once; the sorted
//! hidden states are then split in halves, and the halves in halves, down to single clusters: the gradient of candle's
//! `narrow` is as large as its argument, so that C cuts from the whole would cost C times the whole, and halving costs
//! log2 C times.

use candle_core::{Device, Tensor, TensorId};

use super::{Cluster, Factorised, Place};
use crate::autograd::{variables, Leaf};
use crate::backend::contract::accumulation_dtype;
use crate::decoding::transfer::to_device;
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions, Reduction};
use crate::validate::{check_device, check_targets, check_weights, leading, read_ids};

/// The index that the root ignores.
const IGNORED: i64 = -1;

/// The positions whose targets are in one cluster: consecutive rows of the sorted positions.
struct Group<'a> {
    cluster: &'a Cluster,
    start: usize,
    positions: usize,
}

/// What the groups share; tensors are over the sorted positions.
struct Groups<'a> {
    /// Targets as indices of their cluster.
    targets: Tensor,
    weights: Option<Tensor>,
    options: &'a LossOptions,
}

/// The differentiable value of one or more groups, and the negative log-likelihoods of their positions.
struct Part {
    value: Tensor,
    nll: Tensor,
    leaves: Vec<Leaf>,
}

impl Part {
    fn of(loss: Loss) -> Self {
        Part { leaves: loss.leaves().collect(), value: loss.value, nll: loss.nll }
    }
}

impl Factorised {
    /// Reads the targets, to sort the positions.
    pub(crate) fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        options.validate()?;
        options.require_nll_only(self.name)?;
        let leading = leading(hidden)?;
        check_targets("targets", targets, leading)?;
        self.check(hidden)?;
        check_device("targets", targets, hidden)?;
        if let Some(weights) = &options.position_weights {
            check_weights("position_weights", weights, leading, hidden)?;
        }
        if let Some(weights) = &options.class_weights {
            check_weights("class_weights", weights, &[self.vocab], hidden)?;
        }
        let ids = read_ids(targets, options.ignore_index, self.vocab)?;
        let device = hidden.device();

        // The reduction is part of the weights, so that every part of the value has the upstream gradient one, by which
        // nothing is multiplied. Without a reduction, or without gradients, it follows the parts.
        let is_reduced = options.train && options.reduction != Reduction::None;
        let weights = if is_reduced { weights(&ids, options)? } else { None };
        let mut parts = options.clone();
        parts.reduction = if is_reduced { Reduction::Sum } else { Reduction::None };
        (parts.ignore_index, parts.position_weights, parts.class_weights) = (None, None, None);
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
        let mut part = Part::of(root);
        if !groups.is_empty() {
            let order: Vec<u32> = sorted.iter().map(|&(position, _)| position as u32).collect();
            let shared = Groups {
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
            part.value = match is_reduced {
                true => (part.value + clusters.value)?,
                false => (part.value + unsorted(&clusters.value)?)?,
            };
        }
        match is_reduced {
            true => {
                let loss = Loss::from_nll(self.name, &part.nll, targets, options)?;
                Ok(Loss { value: part.value, parts: part.leaves, spared: self.spared(&groups), ..loss })
            }
            false => {
                let loss = Loss::from_nll(self.name, &part.value, targets, options)?;
                Ok(Loss { spared: self.spared(&groups), ..loss })
            }
        }
    }

    /// The variables of the clusters that have no target.
    fn spared(&self, groups: &[Group]) -> Vec<TensorId> {
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
    fn groups(&self, places: &[Option<Place>]) -> (Vec<Group<'_>>, Vec<(usize, u32)>) {
        let mut members = vec![Vec::new(); self.clusters.len()];
        for (position, place) in places.iter().enumerate() {
            if let Some((cluster, target)) = place.and_then(|place| place.within) {
                members[cluster].push((position, target as u32));
            }
        }
        let (mut groups, mut sorted) = (Vec::new(), Vec::new());
        for (cluster, members) in self.clusters.iter().zip(members).filter(|(_, members)| !members.is_empty()) {
            groups.push(Group { cluster, start: sorted.len(), positions: members.len() });
            sorted.extend(members);
        }
        (groups, sorted)
    }
}

impl Groups<'_> {
    /// The loss of some groups, whose positions are the rows of `hidden`.
    fn part(&self, hidden: &Tensor, groups: &[Group]) -> Result<Part> {
        if let [group] = groups {
            let mut options = self.options.clone();
            if let Some(weights) = &self.weights {
                options.position_weights = Some(weights.narrow(0, group.start, group.positions)?);
            }
            let targets = self.targets.narrow(0, group.start, group.positions)?;
            return Ok(Part::of(group.cluster.mixture(hidden)?.loss_of_masked(&targets, &options)?));
        }
        let (left, right) = groups.split_at(groups.len() / 2);
        let cut: usize = left.iter().map(|group| group.positions).sum();
        let (of_left, of_right) = (hidden.narrow(0, 0, cut)?, hidden.narrow(0, cut, hidden.dim(0)? - cut)?);
        // The work of one cluster may be too small for all threads. A given budget is for one cluster at a time.
        let (left, right) = match hidden.device().is_cpu() && self.options.workspace_bytes.is_none() {
            true => rayon::join(|| self.part(&of_left, left), || self.part(&of_right, right)),
            false => (self.part(&of_left, left), self.part(&of_right, right)),
        };
        let (left, right) = (left?, right?);
        Ok(Part {
            value: match self.options.reduction {
                Reduction::None => Tensor::cat(&[left.value, right.value], 0)?,
                _ => (left.value + right.value)?,
            },
            nll: Tensor::cat(&[left.nll, right.nll], 0)?,
            leaves: [left.leaves, right.leaves].concat(),
        })
    }
}

/// The factor of each position's negative log-likelihood in the value: the weights, and for the mean the reciprocal of
/// their sum. `None` if all are one.
fn weights(ids: &[Option<usize>], options: &LossOptions) -> Result<Option<Vec<f64>>> {
    let LossOptions { position_weights, class_weights, reduction, .. } = options;
    if position_weights.is_none() && class_weights.is_none() && *reduction != Reduction::Mean {
        return Ok(None);
    }
    let mut weights = options.weights_of(ids)?;
    if *reduction == Reduction::Mean {
        let count: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight = if count == 0.0 { 0.0 } else { *weight / count });
    }
    Ok(Some(weights))
}
