//! A loss, log-probabilities, or the distributions that decoding reads, in two passes over a chunk's logits.
//!
//! The first product writes the logits, and the log-sum-exps of a tile are taken while it is in the cache. For a loss,
//! a row kernel then replaces the logits by their gradient, which is an operand of the second and third product.

mod argmax;
mod distribution;
mod first_product;
mod gradients;
mod mix;
mod rank_sums;
mod rows;
mod score_rows;
mod single_softmax;
mod tile_log_sum_exp;
mod tiles;

use candle_core::WithDType;
use std::ops::Range;

use rayon::prelude::*;

use super::memory::{zeros, Workspace};
use super::objective::components::PositionLoss;
use super::objective::listed_ids::Candidates;
use super::objective::ranks::Ranks;
use super::objective::results::BufferedGradients;
use super::objective::targets::Targets;
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::vector::log_sum_exp::LogSumExp;
use super::vector::simd::{Float, ROW_ALIGN};
use crate::backend::collectives::Numbers;
use crate::backend::distribution::Visit;
use crate::backend::objective::{Scored, OF_POSITION};
use crate::backend::operands::Sizes;
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::backend::shard::{VocabShard, ELSEWHERE};
use crate::backend::shared_rows::{join, SharedRow};
use crate::backend::task::Task;
use crate::error::Result;
use distribution::PositionRows;
pub(crate) use first_product::FirstProduct;
use first_product::{logits, Positions};
use mix::{LogProbRows, PositionLogits, Scratch};
use rank_sums::{RankSums, RankTerms};
use rows::{LossRows, RowGradients};
use score_rows::ScoreRows;
use tile_log_sum_exp::TileLogSumExp;

/// Maximum number of parts into which a chunk's positions are split if the bias needs a gradient. Each part accumulates
/// its own gradient, and these are added in order, so that the sum does not depend on the number of threads.
const BIAS_PARTS: usize = 16;

pub(super) fn workspace<T: Element>(product: impl FirstProduct<T>, sizes: Sizes, task: Task) -> Workspace {
    let Sizes { context_dim, vocab, .. } = sizes;
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let tile = gradients::VOCAB_TILE.min(stride);
    // The log-sum-exp of each tile, in two parts.
    let summaries = 2 * vocab.div_ceil(tile);
    // Contexts and their gradient, if they are widened or only some rows are live.
    let contexts = 2 * context_dim;
    // The log-probabilities, a teacher's and the derivatives, of each position.
    let of_terms = if task.log_prob_terms { 3 * stride } else { 0 };
    let per_row = stride + summaries + contexts + of_terms.div_ceil(sizes.components);
    let bias_parts = if task.needs_grad.bias { BIAS_PARTS } else { 0 };
    let scratch_rows = usize::from(task.all_ids) + 2 * usize::from(task.soft_targets);
    let of_product = product.workspace(context_dim, vocab);
    let element = size_of::<T::Acc>();
    Workspace {
        per_row: per_row * element + of_product.per_row,
        // The bias and the soft targets.
        fixed: stride * (2 + bias_parts) * element + of_product.fixed,
        // The rows of the thread's `Scratch`.
        per_thread: scratch_rows * stride * element + of_product.per_thread,
    }
}

pub(super) struct TwoPasses<'a, T: Element, X> {
    product: X,
    inputs: Inputs<'a, T>,
    /// Distance between rows of the logits, in elements.
    stride: usize,

    /// Whether the results of a position are the same bits whatever the other positions are.
    positions_are_independent: bool,

    /// `[rows of a chunk, stride]`: logits, then their gradient
    logits: Vec<T::Acc>,
    /// `[rows of a chunk]`
    lse: Vec<LogSumExp<T::Acc>>,
    /// `[rows of a chunk, d]`: the contexts in the accumulation dtype, or the live rows' contexts; unused if the
    /// products read the stored contexts
    chunk_contexts: Vec<T::Acc>,
    /// `[rows of a chunk, d]`: the gradient of the live rows' contexts, unless all rows are live
    chunk_gradient: Vec<T::Acc>,
    /// The chunk's rows whose logits have a nonzero gradient; they come first in `logits` and in `chunk_contexts`.
    live_rows: LiveRows,

    /// The ranks that have the rest of the vocabulary, if there are any.
    pub(super) ranks: Option<Ranks<'a, T::Acc>>,
    /// `[rows of a chunk]`: the logits of the targets, if ranks share the vocabulary
    target_logits: Vec<T::Acc>,

    /// Present if a loss is computed.
    targets: Option<&'a Targets<T::Acc>>,
    /// `[positions]`
    pub(super) losses: Vec<PositionLoss>,
    pub(super) gradients: BufferedGradients<T>,
}

/// The rows of a chunk that take part in the second and third product: all whose logits have a gradient. Those of an ignored
/// position have none, whatever their contexts hold.
enum LiveRows {
    All(usize),
    /// Indices of rows of the chunk, in the order in which they now lie in front
    Some(Vec<usize>),
}

impl LiveRows {
    fn len(&self) -> usize {
        match self {
            LiveRows::All(rows) => *rows,
            LiveRows::Some(rows) => rows.len(),
        }
    }
}

impl<'a, T: Element, X: FirstProduct<T>> TwoPasses<'a, T, X> {
    pub(super) fn new(product: X, inputs: Inputs<'a, T>, plan: &Plan) -> Self {
        let sizes = inputs.sizes;
        let stride = inputs.bias.len();
        TwoPasses {
            product,
            inputs,
            stride,
            positions_are_independent: false,
            logits: zeros(plan.rows_per_chunk * stride),
            lse: Vec::new(),
            chunk_contexts: Vec::new(),
            chunk_gradient: Vec::new(),
            live_rows: LiveRows::All(0),
            ranks: None,
            target_logits: Vec::new(),
            targets: None,
            losses: vec![PositionLoss::default(); sizes.positions],
            gradients: BufferedGradients::none(sizes),
        }
    }

    /// Adds the targets of a loss, and its gradients.
    pub(super) fn with_targets(self, targets: &'a Targets<T::Acc>, gradients: BufferedGradients<T>) -> Self {
        TwoPasses { targets: Some(targets), gradients, ..self }
    }

    /// Computes the loss of the whole vocabulary, of which others have the rest.
    pub(super) fn with_shard(self, shard: Option<&'a VocabShard>) -> Self {
        TwoPasses { ranks: shard.map(Ranks::new), ..self }
    }

    /// Makes the results of a position the same bits whatever the other positions are, so that a sampler draws the same
    /// ids in every batch.
    pub(super) fn with_independent_positions(self) -> Self {
        TwoPasses { positions_are_independent: true, ..self }
    }

    /// Runs a query on the distribution of each of the chunk's positions.
    pub(super) fn visit_rows<V: Visit>(&self, positions: Range<usize>, visit: &V) -> Result<Vec<V::Output>> {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let first = positions.start;
        let visit_position = |position: usize| {
            let rows = (position - first) * components..(position - first + 1) * components;
            let log_priors = &self.inputs.log_priors[position * components..][..components];
            let logits = &self.logits[rows.start * self.stride..rows.end * self.stride];
            visit.visit(
                position,
                &PositionRows::new(logits, self.stride, vocab, &self.lse[rows], log_priors, self.inputs.isa),
            )
        };
        V::answers(positions.into_par_iter().map(visit_position))
    }

    /// Writes the log-probabilities of the chunk's positions, `[positions, vocab]`, to `to`.
    pub(super) fn log_prob_rows<O: Element<Acc = T::Acc>>(&mut self, positions: Range<usize>, to: &mut [O]) {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, softcap) = (self.inputs.isa, self.stride, self.inputs.softcap);
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        self.logits
            .par_chunks_exact_mut(components * stride)
            .zip(log_priors.par_chunks_exact(components))
            .zip(self.lse.par_chunks_exact(components))
            .zip(to.par_chunks_exact_mut(vocab))
            .for_each_init(
                || Scratch::new(components, stride, true, false),
                |scratch, (((rows, log_priors), lse), to)| {
                    let logits = PositionLogits { rows, stride, vocab, lse, log_priors, softcap };
                    T::Acc::dispatch(isa, LogProbRows { logits, scratch });
                    for (to, &from) in to.iter_mut().zip(&scratch.log_probs) {
                        *to = O::narrow(from);
                    }
                },
            );
    }

    /// The scores of the chunk's positions, `[positions, n + 2]`; and whether each candidate is the most probable id,
    /// `[positions, n]`, if that is asked for.
    pub(super) fn score_rows(
        &mut self,
        positions: Range<usize>,
        candidates: &Candidates,
        scored: &Scored,
    ) -> (Vec<T::Acc>, Vec<u8>) {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, softcap) = (self.inputs.isa, self.stride, self.inputs.softcap);
        let (n, &Scored { entropy, outside, .. }) = (candidates.n, scored);
        let power = T::Acc::from_f64(1.0 / scored.temperature);
        let mut scores = zeros(positions.len() * (n + OF_POSITION));
        let mut argmax = vec![None; positions.len()];
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        self.logits
            .par_chunks_exact_mut(components * stride)
            .zip(log_priors.par_chunks_exact(components))
            .zip(self.lse.par_chunks_exact(components))
            .zip(&mut argmax)
            .zip(scores.par_chunks_exact_mut(n + OF_POSITION))
            .enumerate()
            .for_each_init(
                || Scratch::new(components, stride, scored.is_tempered() || outside, false),
                |scratch, (i, ((((rows, log_priors), lse), argmax), to))| {
                    let logits = PositionLogits { rows, stride, vocab, lse, log_priors, softcap };
                    let ids = candidates.given(positions.start + i);
                    T::Acc::dispatch(
                        isa,
                        ScoreRows {
                            logits,
                            ids,
                            power,
                            entropy,
                            outside,
                            argmax: scored.is_argmax.then_some(argmax),
                            scratch,
                            to,
                        },
                    );
                },
            );
        let of_position = |(t, argmax): (usize, Option<usize>)| {
            candidates.given(t).iter().map(move |&id| u8::from(argmax == Some(id)))
        };
        let are_argmax = if scored.is_argmax { positions.zip(argmax).flat_map(of_position).collect() } else { vec![] };
        (scores, are_argmax)
    }

    /// Moves the live rows of the logits' gradient to the front, each dead row there being replaced by a live one from
    /// behind, and copies their contexts to `chunk_contexts`.
    fn gather_live_rows(&mut self, rows: Range<usize>, live: &[bool]) {
        let count = live.iter().filter(|&&live| live).count();
        if count == live.len() {
            self.live_rows = LiveRows::All(count);
            return;
        }
        let (d, stride) = (self.inputs.sizes.context_dim, self.stride);
        let mut behind = (count..live.len()).filter(|&row| live[row]);
        // In front, as many rows are dead as are live behind.
        let order: Vec<usize> =
            (0..count).filter_map(|row| if live[row] { Some(row) } else { behind.next() }).collect();
        self.chunk_contexts.clear();
        for (to, &from) in order.iter().enumerate() {
            if to != from {
                self.logits.copy_within(from * stride..(from + 1) * stride, to * stride);
            }
            let context = &self.inputs.contexts[(rows.start + from) * d..][..d];
            self.chunk_contexts.extend(context.iter().map(|x| x.widen()));
        }
        self.live_rows = LiveRows::Some(order);
    }

    /// The gradients of the logits, written over them, and the results of each position.
    pub(super) fn objective_rows(&mut self, targets: &Targets<T::Acc>, positions: Range<usize>) -> Result<()> {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let sums = self.sums_of_ranks(targets, positions.clone())?;
        let numbers = sums.len().checked_div(positions.len()).unwrap_or(0);
        let of_ranks = |i: usize| RankTerms {
            target_logits: &self.target_logits[i * components..][..components],
            sums: &sums[i * numbers..][..numbers],
        };
        let has_ranks = self.ranks.is_some();
        let (stride, isa, softcap, lse) = (self.stride, self.inputs.isa, self.inputs.softcap, &self.lse);
        let logit_scale = self.inputs.logit_scale;
        let rows = self.rows(positions.clone());
        let mut live = vec![false; rows.len()];
        let gradients = &mut self.gradients;

        let parts = if gradients.decoder.bias.is_some() { BIAS_PARTS } else { usize::MAX };
        let part = positions.len().div_ceil(parts.min(positions.len())).max(1);
        let mut bias_parts =
            zeros(if gradients.decoder.bias.is_some() { positions.len().div_ceil(part) * stride } else { 0 });
        let mut bias_slots: Vec<Option<&mut [T::Acc]>> = bias_parts.chunks_exact_mut(stride).map(Some).collect();
        bias_slots.resize_with(positions.len().div_ceil(part), || None);
        let mut unused = zeros(if gradients.needed { 0 } else { rows.len() });
        let log_priors = if gradients.needed { &mut gradients.log_priors[rows.clone()] } else { &mut unused[..] };

        self.logits[..rows.len() * stride]
            .par_chunks_mut(part * components * stride)
            .zip(self.losses[positions.clone()].par_chunks_mut(part))
            .zip(live.par_chunks_mut(part * components))
            .zip(log_priors.par_chunks_mut(part * components))
            .zip(bias_slots)
            .enumerate()
            .for_each_init(
                || Scratch::new(components, stride, targets.are_soft(), targets.are_soft()),
                |scratch, (i, ((((logits, losses), live), log_priors), mut bias_gradient))| {
                    let rows_of_positions = logits
                        .chunks_exact_mut(components * stride)
                        .zip(losses)
                        .zip(live.chunks_exact_mut(components))
                        .zip(log_priors.chunks_exact_mut(components));
                    for (j, (((logits, loss), live), log_prior_gradient)) in rows_of_positions.enumerate() {
                        let position = positions.start + i * part + j;
                        let Some(target) = targets.position(position) else { continue };
                        let kernel = LossRows {
                            logits: PositionLogits {
                                rows: logits,
                                stride,
                                vocab,
                                lse: &lse[(i * part + j) * components..][..components],
                                log_priors: &self.inputs.log_priors[position * components..][..components],
                                softcap,
                            },
                            target,
                            of_ranks: has_ranks.then(|| of_ranks(i * part + j)),
                            gradients: gradients.needed.then(|| RowGradients {
                                scale: targets.scale(position),
                                logit_scale,
                                log_priors: log_prior_gradient,
                                bias: bias_gradient.as_deref_mut(),
                                live,
                            }),
                            scratch,
                        };
                        *loss = T::Acc::dispatch(isa, kernel);
                    }
                },
            );

        if let Some(bias) = &mut gradients.decoder.bias {
            for part in bias_parts.chunks_exact(stride) {
                for (sum, &g) in bias.iter_mut().zip(part) {
                    *sum += g;
                }
            }
        }
        if gradients.needed {
            self.gather_live_rows(rows, &live);
        }
        Ok(())
    }

    /// What all ids of each position add up to, if ranks share them and the objective needs it: `[positions, K + 2]`.
    fn sums_of_ranks(&mut self, targets: &Targets<T::Acc>, positions: Range<usize>) -> Result<Vec<f64>> {
        let needed = |_: &&Ranks<T::Acc>| targets.are_soft() || targets.terms.correct;
        let Some(ranks) = self.ranks.as_ref().filter(needed) else { return Ok(vec![]) };
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, softcap) = (self.inputs.isa, self.stride, self.inputs.softcap);
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        let numbers = rank_sums::numbers(components);
        let mut sums = vec![0.0; positions.len() * numbers];
        let of_positions = self
            .logits
            .par_chunks_exact_mut(components * stride)
            .zip(self.lse.par_chunks_exact(components))
            .zip(log_priors.par_chunks_exact(components))
            .zip(self.target_logits.par_chunks_exact(components))
            .zip(sums.par_chunks_exact_mut(numbers));
        of_positions.enumerate().for_each_init(
            || Scratch::new(components, stride, targets.are_soft(), targets.are_soft()),
            |scratch, (i, ((((rows, lse), log_priors), target_logits), to))| {
                let position = positions.start + i;
                let (Some(target), Some(id)) = (targets.position(position), targets.id(position)) else { return };
                let logits = PositionLogits { rows, stride, vocab, lse, log_priors, softcap };
                let are_lower = ranks.shard.range().end <= id;
                T::Acc::dispatch(isa, RankSums { logits, target, target_logits, are_lower, scratch, to });
            },
        );
        ranks.shard.collectives().all_reduce_sum(Numbers::F64(&mut sums))?;
        Ok(sums)
    }

    /// Makes the chunk's log-sum-exps, and the logits of its targets, the whole vocabulary's.
    fn join_ranks(&mut self, positions: Range<usize>) -> Result<()> {
        let Some(ranks) = &mut self.ranks else { return Ok(()) };
        ranks.finish_sum(&mut self.gradients.contexts)?;
        let (components, targets) = (self.inputs.sizes.components, self.targets);
        let position = |i: usize| positions.start + i / components;
        self.target_logits.clear();
        self.target_logits.extend((0..self.lse.len()).map(|i| match targets.and_then(|of| of.row(position(i))) {
            None | Some(ELSEWHERE) => num_traits::Float::neg_infinity(),
            Some(id) => self.logits[i * self.stride + id],
        }));
        let owner = |t: usize| targets?.id(t).map(|id| ranks.shard.owner(id));
        let owners: Vec<_> = positions.map(owner).collect();
        let rows = self.lse.iter_mut().zip(&mut self.target_logits);
        let shared =
            rows.map(|(LogSumExp { largest, log_sum }, target_logit)| SharedRow { largest, log_sum, target_logit });
        join(ranks.shard, &owners, shared)
    }

    fn rows(&self, positions: Range<usize>) -> Range<usize> {
        positions.start * self.inputs.sizes.components..positions.end * self.inputs.sizes.components
    }
}

impl<T: Element, X: FirstProduct<T>> Steps for TwoPasses<'_, T, X> {
    fn first_product(&mut self, chunk: Range<usize>) -> Result<()> {
        let d = self.inputs.sizes.context_dim;
        let Inputs { logit_scale: scale, softcap, bias, decoder, .. } = &self.inputs;
        let (isa, scale, softcap) = (self.product.isa(), *scale, *softcap);
        let rows = self.rows(chunk.clone());
        let contexts = T::widen_slice(&self.inputs.contexts[rows.start * d..rows.end * d], &mut self.chunk_contexts);
        let to = &mut self.logits[..rows.len() * self.stride];
        let components = self.inputs.sizes.components;
        let positions = Positions { components, are_independent: self.positions_are_independent };
        // Each tile has the log-sum-exp of every row.
        let tiles = logits(self.product, to, self.stride, (contexts, positions), *decoder, |ids, tile| {
            let mut lse = Vec::with_capacity(tile.rows);
            for r in 0..tile.rows {
                let row = tile.row_mut(r);
                let bias = &bias[ids.start..][..row.len()];
                lse.push(T::Acc::dispatch(isa, TileLogSumExp { row, ids: ids.len(), scale, bias, softcap }));
            }
            lse
        });
        let of_row = |r: usize| LogSumExp::joined(tiles.iter().map(|tile| tile[r]));
        self.lse = (0..rows.len()).into_par_iter().map(of_row).collect();
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
        let stored = T::as_acc(&self.inputs.contexts[rows.start * d..rows.end * d]);
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
