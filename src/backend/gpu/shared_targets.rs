//! The targets of a loss on a GPU whose vocabulary ranks share.

use crate::backend::contract::Gradients;
use crate::backend::objective::TargetLoss;
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// Targets that are ids of all ranks ([`TargetLoss::shard`]).
pub(super) struct SharedTargets<'a> {
    pub(super) shard: &'a VocabShard,
    /// `[positions]`: the rank that has the target; `None` where it is ignored
    pub(super) owners: Vec<Option<usize>>,
}

impl<'a> SharedTargets<'a> {
    /// Waits for the device.
    pub(super) fn new(loss: &'a TargetLoss) -> Result<Option<Self>> {
        let Some(shard) = &loss.shard else { return Ok(None) };
        let ids = read_ids("targets", &loss.targets, loss.ignore_index, shard.vocab_size())?;
        Ok(Some(SharedTargets { shard, owners: ids.into_iter().map(|id| id.map(|id| shard.owner(id))).collect() }))
    }
}

/// Adds up the contexts' gradient over the ranks: each has the part of its ids.
pub(super) fn of_all_ranks(shard: &VocabShard, gradients: Gradients) -> Result<Gradients> {
    let contexts = match gradients.contexts {
        Some(of_rank) if of_rank.elem_count() > 0 => Some(shard.collectives().all_reduce_sum_tensor(&of_rank)?),
        contexts => contexts,
    };
    Ok(Gradients { contexts, ..gradients })
}
