//! The targets of a loss on a GPU if ranks share the vocabulary.

use crate::backend::objective::{Gradients, TargetLoss};
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// Targets that may be ids of any rank ([`TargetLoss::shard`]).
pub(super) struct SharedTargets<'a> {
    pub(super) shard: &'a VocabShard,
    /// `[positions]`: the rank that has the target; `None` where the target is ignored.
    pub(super) owners: Vec<Option<usize>>,
}

impl<'a> SharedTargets<'a> {
    /// The targets of a loss whose vocabulary ranks share; `None` for others. Waits for the device.
    pub(super) fn new(loss: &'a TargetLoss) -> Result<Option<Self>> {
        let Some(shard) = &loss.shard else { return Ok(None) };
        let ids = read_ids("targets", &loss.targets, loss.ignore_index, shard.vocab_size())?;
        Ok(Some(SharedTargets { shard, owners: ids.into_iter().map(|id| id.map(|id| shard.owner(id))).collect() }))
    }
}

/// Adds up the gradient of the contexts over the ranks, each of which has what follows from its own ids.
pub(super) fn sum_context_gradients(shard: &VocabShard, gradients: Gradients) -> Result<Gradients> {
    let contexts = match gradients.contexts {
        Some(contexts) if contexts.elem_count() > 0 => Some(shard.collectives().all_reduce_sum_tensor(&contexts)?),
        contexts => contexts,
    };
    Ok(Gradients { contexts, ..gradients })
}
