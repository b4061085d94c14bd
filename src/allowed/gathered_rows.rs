//! A single softmax over some of the token ids: it reads the decoder's rows of these ids alone, and its gradient is
//! zero in all other rows.

use std::sync::{Arc, OnceLock};

use candle_core::Tensor;

use crate::backend;
use crate::backend::operands::{Operands, Sizes};
use crate::backend::weight::Weight;
use crate::error::Result;
use crate::mixture::Mixture;
use crate::tensors::autograd::attach;
use crate::tensors::id_lists::{self, IdLists};

/// Whether a mixture is a single softmax without a log-prior.
pub(super) fn is_single(mixture: &Mixture) -> bool {
    mixture.operands().is_single()
}

/// The decoder of a single softmax over some ids: its rows, those of an adapter, and its bias.
#[derive(Debug)]
struct GatheredRows {
    /// The weight that the rows belong to.
    whole: Weight,
    ids: usize,
    weight: Weight,
    adapter: Option<Tensor>,
    bias: Option<Tensor>,
}

impl GatheredRows {
    /// Gathers the rows of `ids`, which are in ascending order without repeats: row i is that of `ids[i]`.
    fn new(mixture: &Mixture, ids: &[u32]) -> Result<Self> {
        let operands = mixture.operands();
        let index = Tensor::new(ids, operands.device())?;
        let weight = match &operands.weight {
            Weight::Dense(weight) => Weight::Dense(gather_rows(weight, ids)?),
            Weight::Quantised(matrix) => Weight::Quantised(matrix.select(ids)?),
        };
        let adapter = operands.adapter.as_ref().map(|adapter| gather_rows(adapter, ids)).transpose()?;
        let bias = operands.bias.as_ref().map(|bias| bias.index_select(&index, 0)).transpose()?;
        Ok(GatheredRows { whole: operands.weight.clone(), ids: ids.len(), weight, adapter, bias })
    }

    /// Makes the softmax over the ids of the mixture's contexts.
    fn softmax(&self, mixture: &Mixture) -> Mixture {
        let operands = mixture.operands();
        let sizes = Sizes { vocab: self.ids, ..operands.sizes };
        let (weight, adapter, bias) = (self.weight.clone(), self.adapter.clone(), self.bias.clone());
        mixture.with_operands(Operands { sizes, weight, adapter, bias, ..operands.clone() })
    }
}

/// The rows that a constant decoder has for the one set of a head, gathered at the first use.
#[derive(Clone, Debug, Default)]
pub(super) struct FrozenRows(Arc<OnceLock<GatheredRows>>);

/// Makes the softmax over `ids`, which are in ascending order without repeats: its id i is `ids[i]`. If there are
/// frozen rows, they belong to these ids.
pub(super) fn gathered_softmax(mixture: &Mixture, ids: &[u32], frozen: Option<&FrozenRows>) -> Result<Mixture> {
    let weight = &mixture.operands().weight;
    // A layer may have another weight at each call, or a variable.
    if let Some(FrozenRows(rows)) = frozen.filter(|_| !weight.track_op()) {
        if rows.get().is_none() {
            // Another thread may have gathered the same rows meanwhile.
            let _ = rows.set(GatheredRows::new(&mixture.detach(), ids)?);
        }
        if let Some(rows) = rows.get().filter(|rows| rows.whole.is_same(weight)) {
            return Ok(rows.softmax(mixture));
        }
    }
    Ok(GatheredRows::new(mixture, ids)?.softmax(mixture))
}

/// Gathers the rows of a matrix that belong to `ids`, as a node whose backward pass scatters their gradients into
/// zeros.
fn gather_rows(matrix: &Tensor, ids: &[u32]) -> Result<Tensor> {
    let rows = id_lists::matrix_rows(&matrix.detach(), &Tensor::new(ids, matrix.device())?)?;
    let (ids, vocab) = (ids.to_vec(), matrix.dim(0)?);
    attach("rows of the decoder", rows, [Some(matrix), None, None], move |_, _, upstream| {
        Ok([Some(backend::scattered_rows(&upstream.contiguous()?, &ids, vocab)?), None, None])
    })
}

/// Computes the logits of each position's list of ids, `[positions, longest]` in the accumulation dtype. Entries beyond
/// the end of a list are unspecified.
pub(super) fn list_logits(mixture: &Mixture, lists: &Arc<IdLists>) -> Result<Tensor> {
    let operands = mixture.operands();
    let (Sizes { positions, context_dim, .. }, columns) = (operands.sizes, operands.adapter_columns()?);
    let contexts = operands.contexts.reshape((positions, context_dim))?;
    let products = match &operands.adapter {
        None => list_products(&contexts, &operands.weight, lists)?,
        Some(adapter) => {
            let context_columns = |from: usize, to: usize| contexts.narrow(1, from, to - from)?.contiguous();
            let (contexts, adapter_contexts) =
                (context_columns(0, columns.start)?, context_columns(columns.start, columns.end)?);
            let weight_products = list_products(&contexts, &operands.weight, lists)?;
            let adapter = Weight::Dense(adapter.clone());
            (weight_products + list_products(&adapter_contexts, &adapter, lists)?)?
        }
    };
    let list_bias = |bias: &Tensor| {
        let ids = Tensor::from_vec(lists.padded(), products.elem_count(), bias.device())?;
        bias.index_select(&ids, 0)?.reshape(products.shape())
    };
    let bias = operands.bias.as_ref().map(list_bias).transpose()?;
    operands.finish_logits(products, bias)
}

/// Computes the products of each position's context with the rows of its list, `[positions, longest]`, as a node of the
/// graph.
fn list_products(contexts: &Tensor, matrix: &Weight, lists: &Arc<IdLists>) -> Result<Tensor> {
    let constant = matrix.detach();
    let values = backend::list_products(&contexts.detach(), &constant, lists)?;
    let (needs_grad, lists) = ([contexts.track_op(), matrix.track_op()], lists.clone());
    attach("products of lists", values, [Some(contexts), matrix.dense(), None], move |[contexts, _, _], _, upstream| {
        let upstream = upstream.contiguous()?;
        let [context_gradient, matrix_gradient] =
            backend::list_product_gradients(&contexts.detach(), &constant, &lists, &upstream, needs_grad)?;
        Ok([context_gradient, matrix_gradient, None])
    })
}
