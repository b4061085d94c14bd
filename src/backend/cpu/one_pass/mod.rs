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
//! The target is left out of the products because `h` and its `f E` nearly cancel where it is predicted well.
//!
//! Logits are kept as `[id][row]`: maxima and sums over ids add up whole vectors, and each result is the right operand
//! of the next product. An offset stays until a logit is far above it, so that sums are hardly ever rescaled. The loss
//! alone ends after the rows. Exponentials are kept for the second pass alone: with a frozen decoder, for a tile.

mod exponentials;
mod factors;
mod first_pass;
mod format;
mod gradients;
mod layout;
mod part;
mod product;
mod scaling;
mod tiles;
mod vectors;

use std::ops::Range;

use super::components::PositionLoss;
use super::dtype::Element;
use super::inputs::Inputs;
use super::memory::{Aligned, Workspace};
use super::results::BufferedGradients;
use super::simd::ROW_ALIGN;
use super::targets::Targets;
use crate::backend::contract::{NeedsGrad, Sizes};
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::error::Result;
use factors::{own_logits, Factors, Passed, Row};
use first_pass::{first_pass, part_bytes, Buffers, RowTargets};
use format::DecoderGradient;
pub(crate) use format::Format;
use gradients::{context_gradient, SecondPass};
use layout::{Layout, Panel};
use part::Part;

/// Bytes of the decoder that a thread reads again for each panel of a loss without gradients.
const SEGMENT_BYTES: usize = 4 << 20;

/// How the chunks of a plan are cut.
fn cut<T: Element, X: Format<T>>(format: X, rows: usize, sizes: Sizes, needs_grad: NeedsGrad) -> Layout {
    let layout = Layout::new(format.blocks(), rows, sizes.context_dim, sizes.vocab);
    match needs_grad.contexts || needs_grad.decoder() {
        true => layout,
        false => layout.with_segments_of::<T::Acc>(SEGMENT_BYTES, sizes.context_dim),
    }
}

/// The decoder's gradient needs the exponentials of a chunk, the contexts' gradient a sum for each of its pieces.
pub(super) fn workspace<T: Element, X: Format<T>>(format: X, sizes: Sizes, needs_grad: NeedsGrad) -> Workspace {
    /// Elements that the numbers of a row take.
    const ROW_NUMBERS: usize = 32;
    let Sizes { context_dim: d, vocab, .. } = sizes;
    let element = size_of::<T::Acc>();
    let layout = cut(format, 1, sizes, needs_grad);
    let (panel, ids) = (layout.panel_rows, layout.padded(layout.tile_ids));
    // The exponentials, the offsets of each tile, the factors of each segment, and what its tiles share; or each
    // segment's part and factors.
    let kept = match needs_grad.decoder() {
        true => {
            let exponentials = layout.padded(vocab) * size_of::<X::Kept>();
            exponentials + 2 * layout.tiles() * element + format.scaled_bytes(d)
        }
        false => {
            let of_segment = part_bytes::<T::Acc>(panel) + usize::from(needs_grad.contexts) * element;
            of_segment * layout.segments()
        }
    };
    // All panels but the last are full.
    let of_sums = if needs_grad.contexts { layout.padded(d) * element } else { 0 };
    let of_scaled = if needs_grad.decoder() { format.scaled_bytes(d) } else { 0 };
    let of_pieces = (layout.more_pieces() + 1) * panel * (of_sums + of_scaled);
    // The contexts exist packed and gathered.
    let packed = format.packed_per_row(d) * size_of::<X::Packed>();
    let per_row = kept + of_sums + packed + (d + ROW_NUMBERS) * element;
    let per_thread = format.thread_bytes(d, ids, needs_grad.decoder()) + panel * of_sums;
    let fixed = layout.lanes * per_row + of_pieces + vocab.next_multiple_of(ROW_ALIGN) * element;
    Workspace { per_row, fixed, per_thread }
}

pub(super) struct OnePass<'a, T: Element, X: Format<T>> {
    format: X,
    inputs: Inputs<'a, T>,
    targets: &'a Targets<T::Acc>,
    with_entropy: bool,
    layout: Layout,
    /// `[positions]`
    pub(super) losses: Vec<PositionLoss>,
    pub(super) gradients: BufferedGradients<T>,

    /// `[tile][panel][padded id][row]`; empty if the decoder needs no gradient
    exponentials: Aligned<X::Kept>,
    /// `[segment][panel][padded d][row]`: O; empty if the contexts need no gradient
    sums: Aligned<T::Acc>,
    /// `[panel]`: the contexts as operands of the first product
    packed: Aligned<X::Packed>,
    /// `[rows, d]`: the contexts, if they are not stored in this form
    gathered: Vec<T::Acc>,
    chunk: Chunk<T::Acc>,
}

struct Chunk<F> {
    /// The positions that are not ignored.
    positions: Vec<usize>,
    panels: Vec<Panel>,
    parts: Vec<Part<F>>,
    rows: Vec<Row<F>>,
    /// `[segment][column]`
    segment_factors: Vec<Vec<F>>,
}

impl<'a, T: Element, X: Format<T>> OnePass<'a, T, X> {
    pub(super) fn new(
        format: X,
        inputs: Inputs<'a, T>,
        targets: &'a Targets<T::Acc>,
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
            with_entropy: false,
            layout,
            losses: vec![PositionLoss::default(); positions],
            gradients,
            exponentials: Aligned::zeros(kept),
            sums: Aligned::zeros(pieces * layout.panel_rows * layout.padded(d)),
            packed: Aligned::zeros(columns * format.packed_per_row(d)),
            gathered: Vec::new(),
            chunk: Chunk { positions: vec![], panels: vec![], parts: vec![], rows: vec![], segment_factors: vec![] },
        }
    }

    /// Computes the entropy of each position too, if there is a single component.
    pub(super) fn with_entropy(self, with_entropy: bool) -> Self {
        OnePass { with_entropy, ..self }
    }

    /// The loss of each of the chunk's positions, and its rows. `scales`, one for each position that is not ignored,
    /// replace the scales of the targets.
    pub(super) fn rows_scaled_by(&mut self, chunk: Range<usize>, scales: Option<&[T::Acc]>) {
        let components = self.inputs.sizes.components;
        if self.chunk.positions.is_empty() {
            return;
        }
        let Chunk { positions, panels, parts, .. } = &self.chunk;
        let own = own_logits(&self.inputs, self.targets, positions, self.contexts(chunk));
        let (losses, found) = factors::rows(
            &self.inputs,
            self.targets,
            positions,
            &self.layout,
            Passed { panels, parts, own: &own },
            scales,
        );
        let Chunk { positions, panels, parts, rows, segment_factors } = &mut self.chunk;
        *rows = found;
        if self.gradients.needed {
            *segment_factors = factors::of_segments(&self.layout, panels, parts, rows);
        }
        for ((&t, loss), rows) in positions.iter().zip(losses).zip(rows.chunks_exact(components)) {
            self.losses[t] = loss;
            if self.gradients.needed {
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
        let positions: Vec<usize> = positions.filter(|&t| self.targets.id(t).is_some()).collect();
        self.gathered.clear();
        if !T::IS_ACC || positions.len() < chunk.len() {
            for t in &positions {
                let rows = &self.inputs.contexts[t * components * d..(t + 1) * components * d];
                self.gathered.extend(rows.iter().map(|x| x.widen()));
            }
        }
        let panels = self.layout.panels(positions.len() * components);
        self.chunk = Chunk { positions, panels, parts: vec![], rows: vec![], segment_factors: vec![] };
        if self.chunk.positions.is_empty() {
            return Ok(());
        }
        let (mut exponentials, mut sums, mut packed) =
            (std::mem::take(&mut self.exponentials), std::mem::take(&mut self.sums), std::mem::take(&mut self.packed));
        let targets = RowTargets {
            id: |row: usize| self.targets.id(self.chunk.positions[row / components]),
            are_own: self.targets.are_own(),
            with_entropy: self.with_entropy,
        };
        let format = self.format;
        let buffers = Buffers { exponentials: &mut exponentials, sums: &mut sums, packed: &mut packed };
        let contexts = self.contexts(chunk);
        let parts = first_pass(format, &self.inputs, &self.layout, &self.chunk.panels, contexts, targets, buffers);
        self.chunk.parts = parts;
        (self.exponentials, self.sums, self.packed) = (exponentials, sums, packed);
        Ok(())
    }

    fn loss_rows(&mut self, chunk: Range<usize>) -> Result<()> {
        self.rows_scaled_by(chunk, None);
        Ok(())
    }

    fn context_gradient(&mut self, _: Range<usize>) -> Result<()> {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let Chunk { positions, panels, rows, segment_factors, .. } = &self.chunk;
        let Some(&first) = positions.first() else { return Ok(()) };
        let mut positions = positions.iter().copied().peekable();
        let of_positions = self.gradients.contexts[first * components * d..].chunks_exact_mut(components * d);
        let gradient = (first..).zip(of_positions).filter(|(t, _)| positions.next_if_eq(t).is_some());
        let gradient = gradient.flat_map(|(_, of_position)| of_position.chunks_exact_mut(d)).take(rows.len()).collect();
        context_gradient(&self.inputs, &self.layout, panels, rows, segment_factors, &mut self.sums, gradient);
        Ok(())
    }

    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let mut exponentials = std::mem::take(&mut self.exponentials);
        let mut gradients = std::mem::take(&mut self.gradients.decoder);
        let Chunk { panels, parts, rows, segment_factors, .. } = &self.chunk;
        if !rows.is_empty() {
            let operands = DecoderGradient {
                factors: Factors { layout: &self.layout, panels, parts, rows, of_segments: segment_factors },
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
