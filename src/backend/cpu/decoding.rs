//! Queries of each position's distribution, in two passes. If there are many positions of a single component, one pass
//! finds their most probable ids instead: it ranks logits while they are computed.

use candle_core::{Device, Tensor};

use super::inputs::Inputs;
use super::objective::results::BufferedGradients;
use super::one_pass::OnePassRequest;
use super::plan::{logit_tiles, one_pass, Served};
use super::products::multiplier::Multiplier;
use super::two_pass::TwoPasses;
use crate::backend::distribution::{answers, Reader};
use crate::backend::plan::{Computation, Planned, Steps};
use crate::backend::ranking::{tensors, TopKQuery};
use crate::backend::shard::VocabShard;
use crate::error::Result;

/// Finds the `k` most probable ids and their log-probabilities, each `[positions, k]`.
pub(super) fn top_k<F: Served>(multiplier: Multiplier, planned: &Planned, k: usize) -> Result<(Tensor, Tensor)> {
    let Planned { operands, plan, .. } = planned;
    let ranked = match plan.computation {
        Computation::OnePass => Inputs::with(operands, |inputs: Inputs<'_, F>| {
            let (request, none) = (OnePassRequest::TopK { k }, BufferedGradients::none());
            let mut pass = one_pass(multiplier, inputs, request, none, planned);
            let mut ranked = Vec::with_capacity(operands.sizes.positions);
            for positions in plan.chunks() {
                pass.first_product(positions)?;
                ranked.extend(pass.most_probable(k)?);
            }
            Ok(ranked)
        }),
        Computation::TwoPasses => {
            answers(&TopKQuery { k }, operands.sizes.positions, |reader| visit::<F>(multiplier, planned, None, reader))
        }
    }?;
    tensors(&ranked, &[ranked.len(), k], F::DTYPE, &Device::Cpu)
}

/// Lets a query read each position's distribution, or a shard's part of it.
pub(super) fn visit<F: Served>(
    multiplier: Multiplier,
    Planned { operands, plan, .. }: &Planned,
    shard: Option<&VocabShard>,
    reader: &dyn Reader,
) -> Result<()> {
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let mut passes = TwoPasses::for_decoding(logit_tiles(multiplier), inputs, shard, plan);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            passes.visit_rows(positions, reader)?;
        }
        Ok(())
    })
}
