//! A loss, alone or with its gradients, from one exponential per logit.
//!
//! With `E = exp(z - offset)` for an offset of each row, the gradient of row r of the logits is
//! `f_r E_r - h_r [v = y]`, where the factor `f_r` and the target's mass `h_r` are numbers, known once the row's
//! log-sum-exp is. So no gradient of logits is ever written, and the second product does not wait for the log-sum-exp:
//!
//! ```text
//! first pass, tile by tile:  z = W c^T + b,   E = exp(z - offset) (0 for the target),   O += W^T E
//! rows:                      lse, loss, f, m = h - f E of the target;   dC = f O - m W[y]
//! second pass, tile by tile: dW += E (f C),   db += E f,   less the targets' m c and m
//! ```
//!
//! The target is left out of the products because `h` and its `f E` nearly cancel where it is predicted well. A position
//! may have several such *listed* ids, whose scores the objective depends on, besides the mass of all others.
//!
//! Logits are kept as `[id][row]`: maxima and sums over ids add up whole vectors, and each result is the right operand
//! of the next product. An offset stays until a logit is far above it, so that sums are hardly ever rescaled. The loss
//! alone ends after the rows. Exponentials are kept for the second pass alone: with a frozen decoder, for a tile.

mod argmax;
mod chunk_ids;
mod exponentials;
mod first_product;
mod format;
mod gradients;
mod layout;
mod rows;
mod scaling;
mod segment_part;
mod tiles;
mod top_logits;
mod vectors;

use std::ops::Range;

use super::memory::{Aligned, Workspace};
use super::objective::components::PositionLoss;
use super::objective::listed_ids::{Candidates, ListedIds};
use super::objective::ranks::Ranks;
use super::objective::results::BufferedGradients;
use super::objective::targets::Targets;
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::vector::log_sum_exp::defect_of;
use super::vector::simd::ROW_ALIGN;
use crate::backend::distribution::Real;
use crate::backend::objective::Scored;
use crate::backend::operands::{NeedsGrad, Sizes};
use crate::backend::plan::Plan;
use crate::backend::ranking::order;
use crate::backend::schedule::Steps;
use crate::backend::shard::VocabShard;
use crate::backend::shared_rows::join;
use crate::backend::task::Task;
use crate::error::Result;
use argmax::ArgmaxSearch;
use chunk_ids::ChunkIds;
use first_product::{first_pass, part_bytes, FirstProductBuffers, LeftOut};
use format::DecoderGradient;
pub(crate) use format::Format;
use gradients::{context_gradient, SecondPass};
use layout::{Layout, Panel};
use rows::{own_logits, ChunkRows, Factors, Passed};
use top_logits::Floors;

/// Bytes of the decoder that a thread reads again for each panel of a loss without gradients.
const SEGMENT_BYTES: usize = 4 << 20;

/// How the chunks of a plan are cut.
fn cut<T: Element, X: Format<T>>(format: X, rows: usize, sizes: Sizes, needs_grad: NeedsGrad) -> Layout {
    let layout = Layout::new(format.blocks(), rows, sizes.context_dim, sizes.vocab);
    if needs_grad.contexts || needs_grad.decoder() {
        layout
    } else {
        layout.with_segments_of::<T::Acc>(SEGMENT_BYTES, sizes.context_dim)
    }
}

/// The decoder's gradient needs the exponentials of a chunk, the contexts' gradient a sum for each of its pieces.
pub(super) fn workspace<T: Element, X: Format<T>>(format: X, sizes: Sizes, task: &Task) -> Workspace {
    /// Elements that the numbers of a row take.
    const ROW_NUMBERS: usize = 32;
    /// Elements that the numbers of a listed id take, besides the first.
    const LISTED_NUMBERS: usize = 16;
    let needs_grad = task.needs_grad;
    let listed = LISTED_NUMBERS * task.scores.map_or(0, |scores| scores.candidates.saturating_sub(1));
    let Sizes { context_dim: d, vocab, .. } = sizes;
    let element = size_of::<T::Acc>();
    let layout = cut(format, 1, sizes, needs_grad);
    let (panel, ids) = (layout.panel_rows, layout.padded(layout.tile_ids));
    // The exponentials, the offsets of each tile, the factors of each segment, and what its tiles share; or each
    // segment's part and factors.
    let kept = if needs_grad.decoder() {
        let exponentials = layout.padded(vocab) * size_of::<X::Exponential>();
        exponentials + 2 * layout.tiles() * element + format.scaled_bytes(d)
    } else {
        let of_segment = part_bytes::<T::Acc>(panel) + usize::from(needs_grad.contexts) * element;
        of_segment * layout.segments()
    };
    // All panels but the last are full.
    let of_sums = if needs_grad.contexts { layout.padded(d) * element } else { 0 };
    let of_scaled = if needs_grad.decoder() { format.scaled_bytes(d) } else { 0 };
    // The largest logit of each tile, and what a search computes of a position and a tile.
    let (of_tiles, of_search) = if task.needs_argmax {
        let of_position = layout.columns(sizes.components) * format.packed_per_row(d) * size_of::<X::Packed>();
        (layout.tiles() * element, of_position + (panel + 1) * ids * element + layout.tiles() * size_of::<f64>())
    } else {
        (0, 0)
    };
    let top_k_numbers = task.top_k.map_or(0, |k| layout.segments() * top_logits::bytes::<T::Acc>(k));
    let of_pieces = (layout.more_pieces() + 1) * panel * (of_sums + of_scaled);
    // The contexts exist packed and gathered.
    let packed = format.packed_per_row(d) * size_of::<X::Packed>();
    let per_row = kept + of_tiles + top_k_numbers + of_sums + packed + (d + ROW_NUMBERS + listed) * element;
    let per_thread = format.thread_bytes(d, ids, needs_grad.decoder()) + panel * of_sums + of_search;
    let fixed = layout.lanes * per_row + of_pieces + vocab.next_multiple_of(ROW_ALIGN) * element;
    Workspace { per_row, fixed, per_thread }
}

pub(super) struct OnePass<'a, T: Element, X: Format<T>> {
    format: X,
    inputs: Inputs<'a, T>,
    /// The targets of a loss that are known before the first chunk.
    targets: Option<&'a Targets<T::Acc>>,
    listed: ListedIds<'a>,
    with_entropy: bool,
    /// Whether each position's most probable id is needed, if it is listed.
    with_argmax: bool,
    /// How many of each position's most probable ids are needed.
    top_k: Option<usize>,
    /// The ranks that have the rest of the vocabulary, if there are any.
    pub(super) ranks: Option<Ranks<'a, T::Acc>>,
    layout: Layout,
    /// `[positions]`
    pub(super) losses: Vec<PositionLoss>,
    pub(super) gradients: BufferedGradients<T>,

    /// `[tile][panel][padded id][row]`; empty if the decoder needs no gradient
    exponentials: Aligned<X::Exponential>,
    /// `[segment][panel][padded d][row]`: O; empty if the contexts need no gradient
    sums: Aligned<T::Acc>,
    /// `[panel]`: the contexts as operands of the first product
    packed: Aligned<X::Packed>,
    /// `[rows, d]`: the contexts, if they are not stored in this form
    gathered: Vec<T::Acc>,
    chunk: Chunk<'a, T::Acc>,
}

struct Chunk<'a, F> {
    /// The positions that are not ignored.
    positions: Vec<usize>,
    panels: Vec<Panel>,
    /// `None` without positions
    passed: Option<Passed<'a, F>>,
    rows: ChunkRows<F>,
    /// `[positions]`: the place of the most probable id among the listed ones; `None` if another is more probable. Empty
    /// unless it is needed
    argmax: Vec<Option<usize>>,
    /// `[segment][column]`
    segment_factors: Vec<Vec<F>>,
}

impl<F: Default> Chunk<'_, F> {
    fn new(positions: Vec<usize>, panels: Vec<Panel>) -> Self {
        Chunk { positions, panels, passed: None, rows: ChunkRows::default(), argmax: vec![], segment_factors: vec![] }
    }
}

impl<'a, T: Element, X: Format<T>> OnePass<'a, T, X> {
    pub(super) fn new(
        format: X,
        inputs: Inputs<'a, T>,
        targets: Option<&'a Targets<T::Acc>>,
        gradients: BufferedGradients<T>,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Self {
        let Sizes { positions, context_dim: d, vocab, .. } = inputs.sizes;
        let rows = plan.rows_per_chunk;
        let layout = cut(format, rows, inputs.sizes, needs_grad);
        let pieces = if needs_grad.contexts { layout.pieces(rows) } else { 0 };
        let columns = layout.columns(rows);
        let kept = if needs_grad.decoder() { columns * layout.padded(vocab) } else { 0 };
        OnePass {
            format,
            inputs,
            targets,
            listed: targets.map_or(ListedIds::Nothing, Targets::listed),
            with_entropy: false,
            with_argmax: targets.is_some_and(Targets::needs_correct),
            top_k: None,
            ranks: None,
            layout,
            losses: vec![PositionLoss::default(); positions],
            gradients,
            exponentials: Aligned::zeros(kept),
            sums: Aligned::zeros(pieces * layout.panel_rows * layout.padded(d)),
            packed: Aligned::zeros(columns * format.packed_per_row(d)),
            gathered: Vec::new(),
            chunk: Chunk::new(vec![], vec![]),
        }
    }

    /// Computes the scores of candidates, the entropy if it is asked for and there is a single component, and whether
    /// each candidate is the most probable id if that is asked for.
    pub(super) fn with_candidates(self, candidates: &'a Candidates, scored: &Scored) -> Self {
        let &Scored { needs_entropy, needs_argmax, .. } = scored;
        OnePass {
            listed: ListedIds::Candidates(candidates),
            with_entropy: needs_entropy,
            with_argmax: needs_argmax,
            ..self
        }
    }

    /// Computes the loss of the whole vocabulary, of which others have the rest.
    pub(super) fn with_shard(self, shard: Option<&'a VocabShard>) -> Self {
        OnePass { ranks: shard.map(Ranks::new), ..self }
    }

    /// Computes the `k` most probable ids of each position, whose single component ranks them.
    pub(super) fn with_top_k(self, k: usize) -> Self {
        OnePass { listed: ListedIds::Nothing, top_k: Some(k), ..self }
    }

    /// The `k` most probable ids of the chunk's positions and their log-probabilities, in descending order.
    pub(super) fn most_probable(&self, k: usize) -> Result<Vec<Vec<(f64, u32)>>> {
        let Chunk { positions, panels, passed, .. } = &self.chunk;
        let Some(passed) = passed else { return Ok(vec![]) };
        let of_position = |(row, &position): (usize, &usize)| {
            let (lse, log_prior) = (passed.lse(row), self.inputs.log_priors[position]);
            if let Some(defect) = defect_of(std::iter::once((lse, log_prior))) {
                return Err(defect.at(position));
            }
            let log_scale = log_prior - lse.log_sum;
            let parts = rows::parts_of(&self.layout, panels, &passed.parts, row);
            let of_parts = parts.filter_map(|(part, r)| part.top_k.as_ref().map(|top_k| top_k.of_row(r)));
            let mut ranked: Vec<_> = of_parts.flatten().copied().collect();
            ranked.sort_unstable_by(order);
            ranked.truncate(k);
            Ok(ranked.into_iter().map(|(z, id)| ((z - lse.largest + log_scale).f64(), id)).collect())
        };
        positions.iter().enumerate().map(of_position).collect()
    }

    /// Whether each candidate of the chunk's positions is the most probable id, `[positions, n]`, if it is needed.
    pub(super) fn are_argmax(&self, candidates: &Candidates) -> Vec<u8> {
        let of_position = |(argmax, &t): (&Option<usize>, &usize)| {
            let argmax = *argmax;
            candidates.places(t).iter().map(move |&place| u8::from(argmax == Some(place)))
        };
        self.chunk.argmax.iter().zip(&self.chunk.positions).flat_map(of_position).collect()
    }

    /// The scores of the chunk's positions, `[positions, n + 2]`.
    pub(super) fn scores(&self, candidates: &Candidates, scored: &Scored) -> Vec<T::Acc> {
        let Chunk { positions, panels, passed, .. } = &self.chunk;
        let Some(passed) = passed else { return vec![] };
        rows::scores(&self.inputs, (candidates, scored), positions, &self.layout, panels, passed)
    }

    /// The loss of each of the chunk's positions, and its rows.
    pub(super) fn objective_rows(&mut self, targets: &Targets<T::Acc>) {
        let components = self.inputs.sizes.components;
        let Chunk { positions, panels, passed, rows, argmax, segment_factors } = &mut self.chunk;
        let Some(passed) = passed else { return };
        let losses;
        (losses, *rows) = rows::rows(&self.inputs, targets, positions, &self.layout, panels, passed);
        if self.gradients.are_needed {
            *segment_factors = rows::of_segments(&self.layout, panels, &passed.parts, &rows.rows);
        }
        let of_positions = positions.iter().zip(losses).zip(rows.rows.chunks_exact(components));
        for (i, ((&t, loss), rows)) in of_positions.enumerate() {
            let is_correct = argmax.get(i) == Some(&Some(0));
            self.losses[t] = PositionLoss { is_correct, ..loss };
            if self.gradients.are_needed {
                let gradients = &mut self.gradients.log_priors[t * components..][..components];
                gradients.iter_mut().zip(rows).for_each(|(gradient, row)| *gradient = row.log_prior);
            }
        }
    }

    /// Bytes of the large buffers.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        size_of_val(&*self.exponentials) + size_of_val(&*self.sums) + size_of_val(&*self.packed)
    }

    /// `[rows, d]`: the contexts of the chunk's rows.
    fn contexts(&self, chunk: Range<usize>) -> &[T::Acc] {
        let size = self.inputs.sizes.components * self.inputs.sizes.context_dim;
        let is_whole = self.chunk.positions.len() == chunk.len();
        let stored = T::as_acc(&self.inputs.contexts[chunk.start * size..chunk.end * size]);
        stored.filter(|_| is_whole).unwrap_or(&self.gathered)
    }
}

impl<T: Element, X: Format<T>> Steps for OnePass<'_, T, X> {
    fn logits(&mut self, positions: Range<usize>) -> Result<()> {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let chunk = positions.clone();
        let positions: Vec<usize> = positions.filter(|&t| self.listed.at(t).is_some()).collect();
        self.gathered.clear();
        if !T::IS_ACC || positions.len() < chunk.len() {
            for t in &positions {
                let rows = &self.inputs.contexts[t * components * d..(t + 1) * components * d];
                self.gathered.extend(rows.iter().map(|x| x.widen()));
            }
        }
        let panels = self.layout.panels(positions.len() * components);
        let ids = ChunkIds::new(self.listed, &positions, components);
        self.chunk = Chunk::new(positions, panels);
        if self.chunk.positions.is_empty() {
            return Ok(());
        }
        let (mut exponentials, mut sums, mut packed) =
            (std::mem::take(&mut self.exponentials), std::mem::take(&mut self.sums), std::mem::take(&mut self.packed));
        let floors = Floors::new(self.top_k.map_or(0, |_| self.chunk.positions.len()));
        let left_out = LeftOut {
            ids: &ids,
            are_own: self.targets.is_some_and(Targets::are_own),
            with_entropy: self.with_entropy,
            with_tiles: self.with_argmax,
            top_k: self.top_k.map(|k| (k, &floors)),
        };
        let format = self.format;
        let buffers = FirstProductBuffers { exponentials: &mut exponentials, sums: &mut sums, packed: &mut packed };
        let (contexts, panels) = (self.contexts(chunk.clone()), &self.chunk.panels);
        let parts = first_pass(format, &self.inputs, &self.layout, panels, contexts, left_out, buffers);
        let own = match self.targets {
            Some(targets) => own_logits(&self.inputs, targets, &self.chunk.positions, contexts),
            None => vec![],
        };
        let mut passed = Passed::new(&self.layout, panels, ids, parts, own);
        if let Some(ranks) = &mut self.ranks {
            ranks.finish_sum(&mut self.gradients.contexts)?;
            let owner = |&t: &usize| self.targets?.id(t).map(|id| ranks.shard.owner(id));
            let owners: Vec<_> = self.chunk.positions.iter().map(owner).collect();
            join(ranks.shard, &owners, passed.shared_rows())?;
        }
        let argmax = if self.with_argmax {
            let (inputs, layout, passed) = (&self.inputs, &self.layout, &passed);
            let (contexts, panels) = (self.contexts(chunk), &self.chunk.panels);
            ArgmaxSearch { format, inputs, layout, panels, contexts, passed }.run(&self.chunk.positions)
        } else {
            vec![]
        };
        (self.chunk.passed, self.chunk.argmax) = (Some(passed), argmax);
        (self.exponentials, self.sums, self.packed) = (exponentials, sums, packed);
        Ok(())
    }

    fn loss_rows(&mut self, _: Range<usize>) -> Result<()> {
        if let Some(targets) = self.targets {
            self.objective_rows(targets);
        }
        Ok(())
    }

    fn context_gradient(&mut self, chunk: Range<usize>) -> Result<()> {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let Chunk { positions, panels, rows, segment_factors, .. } = &self.chunk;
        let Some(&first) = positions.first() else { return Ok(()) };
        let mut positions = positions.iter().copied().peekable();
        let of_positions = self.gradients.contexts[first * components * d..].chunks_exact_mut(components * d);
        let gradient = (first..).zip(of_positions).filter(|(t, _)| positions.next_if_eq(t).is_some());
        let gradient =
            gradient.flat_map(|(_, of_position)| of_position.chunks_exact_mut(d)).take(rows.rows.len()).collect();
        context_gradient(&self.inputs, &self.layout, panels, rows, segment_factors, &mut self.sums, gradient);
        if let Some(ranks) = &mut self.ranks {
            ranks.start_sum(&self.gradients.contexts, chunk.start * components * d..chunk.end * components * d);
        }
        Ok(())
    }

    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let mut exponentials = std::mem::take(&mut self.exponentials);
        let mut gradients = std::mem::take(&mut self.gradients.decoder);
        let Chunk { panels, passed, rows, segment_factors, .. } = &self.chunk;
        if let Some(Passed { parts, .. }) = passed {
            let operands = DecoderGradient {
                factors: Factors {
                    layout: &self.layout,
                    panels,
                    parts,
                    rows: &rows.rows,
                    entries: &rows.entries,
                    of_segments: segment_factors,
                },
                contexts: self.contexts(positions),
                d: self.inputs.sizes.context_dim,
            };
            let gradient = SecondPass { format: self.format, operands };
            gradient.add_to(&mut gradients, &mut exponentials);
        }
        (self.exponentials, self.gradients.decoder) = (exponentials, gradients);
        Ok(())
    }
}
