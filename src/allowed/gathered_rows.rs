//! A single softmax over some of the token ids: the decoder's rows of these ids, and a gradient that is zero elsewhere.

use std::sync::Arc;

use candle_core::Tensor;

use crate::backend;
use crate::backend::operands::{Operands, Sizes};
use crate::error::Result;
use crate::mixture::Mixture;
use crate::tensors::autograd::{attach, Leaf};
use crate::tensors::id_lists::{self, IdLists};

/// Whether a mixture is a single softmax without a log-prior.
pub(super) fn is_single(mixture: &Mixture) -> bool {
    mixture.operands().is_single()
}

/// The softmax over `ids` alone, in ascending order without repeats: its id i is `ids[i]`. And the decoder's variables
/// whose gradients bypass candle's sum.
pub(super) fn gathered(mixture: &Mixture, ids: &[u32]) -> Result<(Mixture, Vec<Leaf>)> {
    let operands = mixture.operands();
    let mut leaves = Vec::new();
    let weight = rows(&operands.weight, ids, &mut leaves)?;
    let adapter = operands.adapter.as_ref().map(|adapter| rows(adapter, ids, &mut leaves)).transpose()?;
    let index = Tensor::new(ids, operands.weight.device())?;
    let bias = operands.bias.as_ref().map(|bias| bias.index_select(&index, 0)).transpose()?;
    let sizes = Sizes { vocab: ids.len(), ..operands.sizes };
    Ok((mixture.with_operands(Operands { sizes, weight, adapter, bias, ..operands.clone() }), leaves))
}

/// Some rows of a matrix.
fn rows(matrix: &Tensor, ids: &[u32], leaves: &mut Vec<Leaf>) -> Result<Tensor> {
    let rows = id_lists::matrix_rows(&matrix.detach(), &Tensor::new(ids, matrix.device())?)?;
    let (ids, all, none) = (ids.to_vec(), matrix.dim(0)?, nothing_like(matrix)?);
    let rows = attach("rows of the decoder", rows, [matrix, &none, &none], move |_, _, upstream| {
        Ok([Some(backend::scattered_rows(&upstream.contiguous()?, &ids, all)?), None, None])
    })?;
    leaves.extend(leaf(&rows, matrix));
    Ok(rows)
}

/// The logits of each position's list of ids, `[positions, longest]` in the accumulation dtype; of no meaning beyond a
/// list.
pub(super) fn logits_of_lists(mixture: &Mixture, lists: &Arc<IdLists>) -> Result<(Tensor, Vec<Leaf>)> {
    let operands = mixture.operands();
    let (Sizes { positions, context_dim, .. }, columns) = (operands.sizes, operands.adapter_columns()?);
    let mut leaves = Vec::new();
    let contexts = operands.contexts.reshape((positions, context_dim))?;
    let mut logits = match &operands.adapter {
        None => products(&contexts, &operands.weight, lists, &mut leaves)?,
        Some(adapter) => {
            let of = |from: usize, to: usize| contexts.narrow(1, from, to - from)?.contiguous();
            let of_weight = products(&of(0, columns.start)?, &operands.weight, lists, &mut leaves)?;
            (of_weight + products(&of(columns.start, columns.end)?, adapter, lists, &mut leaves)?)?
        }
    };
    if let Some(bias) = &operands.bias {
        let ids = Tensor::from_vec(lists.padded(), logits.elem_count(), bias.device())?;
        logits = (&logits + bias.index_select(&ids, 0)?.reshape(logits.shape())?)?;
    }
    if operands.logit_scale != 1.0 {
        logits = (logits * operands.logit_scale)?;
    }
    if let Some(cap) = operands.softcap {
        logits = ((logits / cap)?.tanh()? * cap)?;
    }
    Ok((logits, leaves))
}

/// The products of each context with the rows of its list.
fn products(contexts: &Tensor, matrix: &Tensor, lists: &Arc<IdLists>, leaves: &mut Vec<Leaf>) -> Result<Tensor> {
    let values = backend::list_products(&contexts.detach(), &matrix.detach(), lists)?;
    let (needed, lists) = ([contexts.track_op(), matrix.track_op()], lists.clone());
    let operands = [contexts, matrix, &nothing_like(matrix)?];
    let products = attach("products of lists", values, operands, move |[contexts, matrix, _], _, upstream| {
        let upstream = upstream.contiguous()?;
        let [of_contexts, of_matrix] =
            backend::list_product_gradients(&contexts.detach(), &matrix.detach(), &lists, &upstream, needed)?;
        Ok([of_contexts, of_matrix, None])
    })?;
    leaves.extend(leaf(&products, matrix));
    Ok(products)
}

/// A node takes three operands.
fn nothing_like(operand: &Tensor) -> Result<Tensor> {
    Ok(Tensor::zeros(1, operand.dtype(), operand.device())?)
}

fn leaf(node: &Tensor, matrix: &Tensor) -> Option<Leaf> {
    matrix.is_variable().then(|| Leaf { node: node.id(), variable: matrix.clone() })
}
