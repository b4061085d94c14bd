//! Queries of each position's distribution, in two passes. If there are many positions of a single component, one pass
//! finds their most probable ids instead: it ranks logits while they are computed.

use candle_core::{Device, Tensor};

use super::inputs::Inputs;
use super::objective::results::BufferedGradients;
use super::one_pass::{OnePass, OnePassRequest};
use super::operands::dtype::Accumulator;
use super::plan::Products;
use super::two_pass::TwoPasses;
use crate::backend::distribution::Visit;
use crate::backend::plan::{Computation, Planned, Steps};
use crate::backend::ranking::{tensors, TopKQuery};
use crate::backend::shard::VocabShard;
use crate::error::Result;

/// Finds the `k` most probable ids and their log-probabilities, each `[positions, k]`.
pub(super) fn top_k<F: Accumulator, X: Products<F>>(
    products: X,
    planned: &Planned,
    k: usize,
) -> Result<(Tensor, Tensor)> {
    let Planned { operands, plan, .. } = planned;
    let ranked = match plan.computation {
        Computation::OnePass => Inputs::with(operands, |inputs: Inputs<'_, F>| {
            let (request, none) = (OnePassRequest::TopK { k }, BufferedGradients::none());
            let mut pass = OnePass::new(products, inputs, request, none, planned);
            let mut ranked = Vec::with_capacity(operands.sizes.positions);
            for positions in plan.chunks() {
                pass.first_product(positions)?;
                ranked.extend(pass.most_probable(k)?);
            }
            Ok(ranked)
        }),
        Computation::TwoPasses => visit::<F, _, _>(products, planned, None, &TopKQuery { k }),
    }?;
    tensors(&ranked, k, F::DTYPE, &Device::Cpu)
}

/// Runs a query on each position's distribution, or on a shard's part of it.
pub(super) fn visit<F: Accumulator, X: Products<F>, V: Visit>(
    products: X,
    Planned { operands, plan, .. }: &Planned,
    shard: Option<&VocabShard>,
    visit: &V,
) -> Result<Vec<V::Output>> {
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let mut passes = TwoPasses::for_decoding(products, inputs, shard, plan);
        let mut outputs = Vec::with_capacity(operands.sizes.positions);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            outputs.extend(passes.visit_rows(positions, visit)?);
        }
        Ok(outputs)
    })
}
