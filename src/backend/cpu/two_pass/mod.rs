//! A loss, log-probabilities, or the distributions that decoding reads, in two passes over a chunk's logits.
//!
//! The first product writes the logits, and the log-sum-exps of a tile are taken while it is in the cache. For a loss,
//! a row kernel then replaces the logits by their gradient, which is an operand of the second and third product:
//!
//! ```text
//! first pass, tile by tile:      z = c W^T + b (first_product, tiles);  lse (tile_log_sum_exp)
//! second pass, by position:      log p (mix);  the loss, and dz in place of z (rows);  or a query, or scores
//! products, tile by tile:        dC = dz W,  dW += dz^T C (gradients)
//! ```

mod argmax;
mod distribution;
mod first_product;
pub(crate) mod frozen_linear;
mod gradients;
mod log_probs;
mod mix;
mod objective_rows;
mod passes;
mod rank_sums;
mod rows;
mod single_softmax;
mod tile_log_sum_exp;
mod tiles;

use std::ops::Range;

use super::inputs::Inputs;
use super::memory::Workspace;
use super::operands::dtype::Accumulator;
use super::vector::math::LogSumExp;
use super::vector::simd::ROW_ALIGN;
use crate::backend::objective::Task;
use crate::backend::operands::Sizes;
use crate::backend::parallel;
use crate::backend::plan::Steps;
use crate::backend::shard::ELSEWHERE;
use crate::backend::shared_rows::{join, SharedRow};
use crate::error::Result;
pub(crate) use first_product::{FirstProduct, LogitTiles};
use first_product::{FormChoice, LogitRows};
use objective_rows::BIAS_PARTS;
use passes::LiveRows;
pub(crate) use passes::TwoPasses;
use tile_log_sum_exp::TileLogSumExp;

/// Computes the workspace that a task needs.
pub(super) fn workspace<F: Accumulator>(product: impl FirstProduct<F>, sizes: Sizes, task: &Task) -> Workspace {
    let Sizes { context_dim, vocab, .. } = sizes;
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let tile = gradients::VOCAB_TILE.min(stride);
    // The log-sum-exp of each tile, in two parts.
    let summaries = 2 * vocab.div_ceil(tile);
    // The contexts and their gradient, if they are widened or only some rows are live.
    let contexts = 2 * context_dim;
    // The log-probabilities, a teacher's and the derivatives, of each position.
    let terms = if let Task::LogProbTerms { .. } = task { 3 * stride } else { 0 };
    let per_row = stride + summaries + contexts + terms.div_ceil(sizes.components);
    let bias_parts = if task.needs_grad().bias { BIAS_PARTS } else { 0 };
    let scratch_rows = usize::from(task.needs_all_ids()) + 2 * usize::from(task.has_soft_targets());
    let product = product.workspace(context_dim, vocab);
    let element = size_of::<F>();
    Workspace {
        per_row: per_row * element + product.per_row,
        // The bias and the soft targets.
        fixed: stride * (2 + bias_parts) * element + product.fixed,
        // The rows of the thread's `Scratch`.
        per_thread: scratch_rows * stride * element + product.per_thread,
    }
}

impl<F: Accumulator> TwoPasses<'_, F> {
    /// Replaces the chunk's log-sum-exps, and the logits of its targets, by those of the whole vocabulary, if ranks
    /// share it.
    fn join_ranks(&mut self, positions: Range<usize>) -> Result<()> {
        let Some(ranks) = &mut self.ranks else { return Ok(()) };
        ranks.finish_sum(&mut self.gradients.contexts)?;
        let (components, targets) = (self.inputs.sizes.components, self.targets);
        let target_row = |i: usize| targets?.row(positions.start + i / components);
        self.target_logits.clear();
        self.target_logits.extend((0..self.lse.len()).map(|i| match target_row(i) {
            None | Some(ELSEWHERE) => num_traits::Float::neg_infinity(),
            Some(id) => self.logits[i * self.stride + id],
        }));
        let owner = |t: usize| targets?.id(t).map(|id| ranks.shard.owner(id));
        let owners: Vec<_> = positions.clone().map(owner).collect();
        let rows = self.lse.iter_mut().zip(&mut self.target_logits);
        let shared =
            rows.map(|(LogSumExp { largest, log_sum }, target_logit)| SharedRow { largest, log_sum, target_logit });
        join(ranks.shard, &owners, shared.collect())
    }
}

impl<F: Accumulator> Steps for TwoPasses<'_, F> {
    fn first_product(&mut self, chunk: Range<usize>) -> Result<()> {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let Inputs { logit_scale: scale, logit_map, bias, decoder, .. } = &self.inputs;
        let (isa, scale, logit_map) = (self.product.isa(), *scale, *logit_map);
        let rows = self.rows(chunk.clone());
        let contexts = self.inputs.contexts.slice(rows.start * d..rows.end * d).widened(&mut self.chunk_contexts);
        let form = FormChoice { components, are_independent: self.are_independent };
        let to = LogitRows { values: &mut self.logits[..rows.len() * self.stride], stride: self.stride };
        // Each tile has the log-sum-exp of every row.
        let tiles = self.product.multiply_tiles(contexts, *decoder, form, to, &|ids, tile| {
            let mut lse = Vec::with_capacity(tile.rows);
            for r in 0..tile.rows {
                let row = tile.row_mut(r);
                let bias = &bias[ids.start..][..row.len()];
                lse.push(F::dispatch(isa, TileLogSumExp { row, ids: ids.len(), scale, bias, logit_map }));
            }
            lse
        });
        let joined = |r: usize| LogSumExp::joined(tiles.iter().map(|tile| tile[r]));
        self.lse = parallel::map(0..rows.len(), joined);
        self.join_ranks(chunk)
    }

    fn objective(&mut self, positions: Range<usize>) -> Result<()> {
        if let Some(targets) = self.targets {
            self.objective_rows(targets, positions)?;
        }
        Ok(())
    }

    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let (rows, d) = (self.rows(positions), self.inputs.sizes.context_dim);
        let gradient = &mut self.gradients.contexts[rows.start * d..rows.end * d];
        match &self.live_rows {
            LiveRows::All(_) => {
                gradients::context_gradient(gradient, d, &self.logits, self.stride, self.inputs.decoder)
            }
            LiveRows::Some(rows) => {
                self.chunk_gradient.resize(rows.len() * d, num_traits::Zero::zero());
                gradients::context_gradient(
                    &mut self.chunk_gradient,
                    d,
                    &self.logits,
                    self.stride,
                    self.inputs.decoder,
                );
                for (&row, values) in rows.iter().zip(self.chunk_gradient.chunks_exact(d)) {
                    gradient[row * d..(row + 1) * d].copy_from_slice(values);
                }
            }
        }
        if let Some(ranks) = &mut self.ranks {
            ranks.start_sum(&self.gradients.contexts, rows.start * d..rows.end * d);
        }
        Ok(())
    }

    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let (rows, d) = (self.rows(positions), self.inputs.sizes.context_dim);
        let live = self.live_rows.len();
        let stored = self.inputs.contexts.slice(rows.start * d..rows.end * d).wide();
        let contexts = match (&self.live_rows, stored) {
            (LiveRows::All(_), Some(stored)) => stored,
            _ => &self.chunk_contexts[..live * d],
        };
        if live > 0 {
            for gradient in self.gradients.decoder.parts().0 {
                gradients::decoder_gradient(gradient, &self.logits, self.stride, contexts, d);
            }
        }
        Ok(())
    }
}
