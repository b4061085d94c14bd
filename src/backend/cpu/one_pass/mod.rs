//! A loss with its gradients from one exponential per logit.
//!
//! With `E = exp(z - offset)` for an offset of each row, the gradient of row r of the logits is `f_r E_r - h_r [v = y]`,
//! where the factor `f_r` and the target's mass `h_r` are numbers, known once the row's log-sum-exp is. So no gradient of
//! logits is ever written, and the second product does not wait for the log-sum-exp:
//!
//! ```text
//! first pass, tile by tile:  z = W c^T + b,   E = exp(z - offset),   O += W^T E
//! rows:                      lse, loss, f, h;   dC = f O - h W[y]
//! second pass, tile by tile: dW += E (f C),   db += E f,   less the targets' h c and h
//! ```
//!
//! Logits are kept as `[id][row]`: maxima and sums over ids add up whole vectors, and each result is the right operand
//! of the next product.

mod exponentials;
mod layout;
mod product;
mod scaling;

use std::ops::Range;

use num_traits::Zero;
use rayon::prelude::*;

use super::dtype::Element;
use super::inputs::Inputs;
use super::log_sum_exp::LogSumExp;
use super::matrix::{transpose, Block};
use super::memory::{Aligned, Workspace};
use super::results::BufferedGradients;
use super::rows::{flushed, weighted, PositionLoss, Scratch};
use super::simd::{Float, Isa, ROW_ALIGN};
use super::targets::Targets;
use crate::backend::contract::{NeedsGrad, Real, Sizes};
use crate::backend::plan::Plan;
use exponentials::{Exponentials, Running, Softcap};
use layout::{Layout, Panel};
use product::{Left, Product, Start};
use scaling::{AddScaled, Scaled, ScaledRows, WeightedSums};

/// Rows that the third product sums over at a time: as many scaled contexts stay in the second-level cache.
const BLOCK_ROWS: usize = 240;

/// The workspace.
pub(super) fn workspace<T: Element>(sizes: Sizes, isa: Isa, threads: usize) -> Workspace {
    let Sizes { context: d, vocab, .. } = sizes;
    // Of one row, whose panel is padded to a vector; more pieces than panels need sums of their own.
    let one = Layout::new::<T::Acc>(isa, 1, d, vocab);
    let (tiles, panel) = (one.tiles(), one.most_columns);
    // The exponentials, the offsets of each tile and factors of each segment, and three times contexts: packed, gathered
    // and the sums.
    let per_row = vocab + 2 * tiles + 3 * d + ROW_NUMBERS;
    let sums = (one.segments() - 1) * panel * d;
    let widened = if T::IS_ACC { 0 } else { one.tile_ids * d };
    let per_thread = BLOCK_ROWS.next_multiple_of(panel) * panel + panel * d + widened;
    Workspace { per_row, fixed: one.lanes * per_row + sums + vocab.next_multiple_of(ROW_ALIGN) + threads * per_thread }
}

/// Numbers of a row, in elements.
const ROW_NUMBERS: usize = 32;

/// The state of a computation.
pub(super) struct OnePass<'a, T: Element> {
    inputs: Inputs<'a, T>,
    targets: &'a Targets<T::Acc>,
    needs_grad: NeedsGrad,
    /// `[positions]`
    pub(super) losses: Vec<PositionLoss>,
    pub(super) gradients: BufferedGradients<T>,
    /// `[tile][panel][id][row]`
    exponentials: Aligned<T::Acc>,
    /// `[segment][panel][d][row]`: O
    sums: Aligned<T::Acc>,
    /// `[panel][d][row]`: contexts times the logit scale
    packed: Aligned<T::Acc>,
    /// `[rows, d]`: contexts that are not stored in this form
    gathered: Vec<T::Acc>,
}

/// What the first pass leaves of a panel and a segment.
struct Part<F> {
    running: Running<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials
    offsets: Vec<F>,
    /// The logits of the targets in this segment, with the rows that they belong to.
    targets: Vec<(usize, F)>,
}

/// A row once its log-sum-exp is known.
#[derive(Clone, Copy)]
struct Row<F> {
    target: usize,
    /// Factor of `exp(z - largest)` in the gradient, without `scale`.
    factor: f64,
    largest: F,
    /// Factor of the objective and of the logits.
    scale: f64,
    /// The target's mass h.
    mass: F,
    /// R_k, the mass of the component.
    prior_mass: F,
    /// Whether the exponentials have a NaN or infinity that must not spread, as the row has no gradient.
    is_void: bool,
}

impl<F: Float> Row<F> {
    /// The factor f of exponentials with this offset.
    fn factor(&self, offset: F) -> F {
        if self.is_void || offset == F::neg_infinity() {
            return F::zero();
        }
        let relative = self.factor * (offset - self.largest).f64().exp();
        match relative.abs() < F::NEGLIGIBLE.f64() {
            true => F::zero(),
            false => flushed(F::of(weighted(self.scale, relative))),
        }
    }
}

impl<'a, T: Element> OnePass<'a, T> {
    pub(super) fn new(
        inputs: Inputs<'a, T>,
        targets: &'a Targets<T::Acc>,
        gradients: BufferedGradients<T>,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Self {
        let Sizes { positions, context: d, vocab, .. } = inputs.sizes;
        let layout = Layout::new::<T::Acc>(inputs.isa, plan.rows_per_chunk, d, vocab);
        let sums = if needs_grad.contexts { layout.pieces() * layout.most_columns * d } else { 0 };
        OnePass {
            inputs,
            targets,
            needs_grad,
            losses: vec![PositionLoss::default(); positions],
            gradients,
            exponentials: Aligned::zeros(layout.columns * vocab),
            sums: Aligned::zeros(sums),
            packed: Aligned::zeros(layout.columns * d),
            gathered: Vec::new(),
        }
    }

    pub(super) fn run(&mut self, plan: &Plan) {
        for positions in plan.chunks() {
            self.chunk(positions);
        }
    }

    fn chunk(&mut self, positions: Range<usize>) {
        let Sizes { components, context: d, vocab, .. } = self.inputs.sizes;
        let all = positions.clone();
        // Ignored positions take no part.
        let positions: Vec<usize> = positions.filter(|&t| self.targets.id(t).is_some()).collect();
        if positions.is_empty() {
            return;
        }
        let mut gathered = std::mem::take(&mut self.gathered);
        let stored = &self.inputs.contexts[all.start * components * d..all.end * components * d];
        let contexts = match T::as_acc(stored).filter(|_| positions.len() == all.len()) {
            Some(stored) => stored,
            None => {
                gathered.clear();
                for t in &positions {
                    let rows = &self.inputs.contexts[t * components * d..(t + 1) * components * d];
                    gathered.extend(rows.iter().map(|x| x.widen()));
                }
                &gathered
            }
        };
        let layout = Layout::new::<T::Acc>(self.inputs.isa, positions.len() * components, d, vocab);
        let parts = self.first_pass(&layout, contexts, &positions);
        let rows = self.rows(&layout, &parts, &positions);
        let factors = segment_factors(&layout, &parts, &rows);
        if self.needs_grad.contexts {
            self.context_gradient(&layout, &rows, &factors, &positions);
        }
        if self.needs_grad.weight || self.needs_grad.bias {
            self.second_pass(&layout, &parts, &rows, &factors, contexts);
        }
        self.gathered = gathered;
    }

    /// Exponentials, their sums, and their products with the decoder.
    fn first_pass(&mut self, layout: &Layout, contexts: &[T::Acc], positions: &[usize]) -> Vec<Part<T::Acc>> {
        let Sizes { components, context: d, .. } = self.inputs.sizes;
        let (inputs, needs_sums) = (&self.inputs, self.needs_grad.contexts);
        let target = |row: usize| self.targets.id(positions[row / components]);
        let mut packed = Vec::with_capacity(layout.panels.len());
        let mut rest = &mut self.packed[..];
        for panel in &layout.panels {
            let (first, others) = rest.split_at_mut(panel.width * d);
            packed.push(first);
            rest = others;
        }
        packed.into_par_iter().zip(&layout.panels).for_each(|(to, panel)| pack(inputs, contexts, *panel, to));

        // For each segment and panel: a tile's exponentials, and O.
        let pieces = layout.segments() * layout.panels.len();
        let mut tiles: Vec<Vec<&mut [T::Acc]>> = Vec::new();
        tiles.resize_with(pieces, Vec::new);
        let of_tiles = self.exponentials.chunks_mut(layout.tile_ids * layout.columns).take(layout.tiles());
        for (tile, mut rest) in of_tiles.enumerate() {
            let first = layout.segment_of(tile) * layout.panels.len();
            for (panel, tiles) in layout.panels.iter().zip(&mut tiles[first..]) {
                let (first, others) = rest.split_at_mut(layout.ids(tile).len() * panel.width);
                tiles.push(first);
                rest = others;
            }
        }
        let mut sums: Vec<&mut [T::Acc]> = self.sums.chunks_exact_mut(layout.most_columns * d).take(pieces).collect();
        sums.resize_with(pieces, Default::default);
        let pieces = tiles.into_par_iter().zip(sums).enumerate();
        let packed = &self.packed;
        let part = |buffer: &mut Vec<T::Acc>, (piece, (tiles, sums)): (usize, (Vec<&mut [T::Acc]>, &mut [T::Acc]))| {
            let (segment, panel) = (piece / layout.panels.len(), layout.panels[piece % layout.panels.len()]);
            let Panel { first, rows, width } = panel;
            let packed = &packed[first * d..][..width * d];
            let mut part = Part {
                running: Running::new(width),
                offsets: Vec::with_capacity(tiles.len() * width),
                targets: vec![],
            };
            for (i, (tile, to)) in layout.segment(segment).zip(tiles).enumerate() {
                let ids = layout.ids(tile);
                let decoder = inputs.decoder.block(ids.clone(), buffer);
                logits(inputs, &decoder, ids.clone(), packed, width, to);
                for row in 0..rows {
                    if let Some(y) = target(first + row).filter(|y| ids.contains(y)) {
                        part.targets.push((first + row, to[(y - ids.start) * width + row]));
                    }
                }
                let kernel = Exponentials { tile: to, running: &mut part.running, softcap: inputs.softcap };
                let moved = T::Acc::dispatch(inputs.isa, kernel);
                part.offsets.extend_from_slice(&part.running.offset);
                if needs_sums {
                    let sums = &mut sums[..width * d];
                    if moved && i > 0 {
                        T::Acc::dispatch(inputs.isa, Scaled { values: sums, factors: &part.running.rescale });
                    }
                    let left = Left { values: decoder.values, row: decoder.column, step: decoder.id, depth: ids.len() };
                    let start = if i > 0 { Start::Stored } else { Start::Zero };
                    multiply(inputs.isa, start, d, &[left], to, width, sums, width, width);
                }
            }
            part
        };
        pieces.map_init(Vec::new, part).collect()
    }

    /// The loss of each position, and the factors of its rows.
    fn rows(&mut self, layout: &Layout, parts: &[Part<T::Acc>], positions: &[usize]) -> Vec<Row<T::Acc>> {
        let components = self.inputs.sizes.components;
        let (inputs, targets) = (&self.inputs, self.targets);
        let mut target_logits = vec![T::Acc::zero(); positions.len() * components];
        for &(row, z) in parts.iter().flat_map(|part| &part.targets) {
            target_logits[row] = z;
        }
        let panel_parts = |row: usize| {
            let panel = layout.panel_of(row);
            parts
                .iter()
                .skip(panel)
                .step_by(layout.panels.len())
                .map(move |part| (part, row - layout.panels[panel].first))
        };
        let log_sum_exp = |row: usize| {
            let largest = panel_parts(row).map(|(part, r)| part.running.largest[r]);
            let largest = largest.fold(num_traits::Float::neg_infinity(), num_traits::Float::max);
            let largest = if largest == num_traits::Float::neg_infinity() { T::Acc::zero() } else { largest };
            let sum = |(part, r): (&Part<T::Acc>, usize)| match part.running.sum[r] {
                0.0 => 0.0,
                sum => sum * (part.running.offset[r] - largest).f64().exp(),
            };
            let sum: f64 = panel_parts(row).map(sum).sum();
            LogSumExp { largest, log_sum: T::Acc::of(sum.ln()) }
        };
        let position = |scratch: &mut Scratch<T::Acc>, (i, &t): (usize, &usize)| {
            let rows = i * components..(i + 1) * components;
            let lse: Vec<_> = rows.clone().map(log_sum_exp).collect();
            let log_priors = &inputs.log_priors[t * components..][..components];
            scratch.set_components(&lse, log_priors);
            let Some(target) = targets.position(t) else { return (PositionLoss::default(), vec![]) };
            let loss = scratch.hard_loss(&target, |k, _| target_logits[rows.start + k]);
            let scale = targets.scale(t).f64() * inputs.logit_scale.f64();
            let z_loss = 2.0 * target.z_loss.f64() / components as f64;
            let rows = rows.zip(lse).enumerate().map(|(k, (row, lse))| {
                let factor = scratch.mass[k].f64() + weighted(z_loss, lse.value().f64());
                let slope = match inputs.softcap {
                    Some(cap) => T::Acc::of(1.0) - (target_logits[row] / cap) * (target_logits[row] / cap),
                    None => T::Acc::of(1.0),
                };
                let is_zero = scale == 0.0 || (factor == 0.0 && scratch.mass[k].is_zero());
                Row {
                    target: target.hard.map_or(0, |(y, _)| y),
                    factor: weighted(factor, (-lse.log_sum.f64()).exp()),
                    largest: lse.largest,
                    scale,
                    mass: flushed(weighted(T::Acc::of(scale), scratch.hard_mass[k] * slope)),
                    prior_mass: scratch.mass[k],
                    is_void: is_zero && panel_parts(row).any(|(part, r)| !part.running.sum[r].is_finite()),
                }
            });
            let rows: Vec<_> = rows.collect();
            (loss, rows)
        };
        let scratch = || Scratch::new(components, 0, false, false);
        let found: Vec<_> = positions.par_iter().enumerate().map_init(scratch, position).collect();
        let mut all = Vec::with_capacity(positions.len() * components);
        for (&t, (loss, rows)) in positions.iter().zip(found) {
            self.losses[t] = loss;
            if self.gradients.needed {
                let scale = targets.scale(t);
                let gradients = &mut self.gradients.log_priors[t * components..][..components];
                for (gradient, row) in gradients.iter_mut().zip(&rows) {
                    *gradient = flushed(weighted(scale, -row.prior_mass));
                }
            }
            all.extend(rows);
        }
        all
    }

    /// `dC = f O - h W[y]`
    fn context_gradient(
        &mut self,
        layout: &Layout,
        rows: &[Row<T::Acc>],
        factors: &[Vec<T::Acc>],
        positions: &[usize],
    ) {
        let Sizes { components, context: d, .. } = self.inputs.sizes;
        let (inputs, panels) = (&self.inputs, layout.panels.len());
        // The sums of each panel, segment by segment.
        let mut sums: Vec<Vec<&mut [T::Acc]>> = Vec::new();
        sums.resize_with(panels, Vec::new);
        for (piece, piece_sums) in self.sums.chunks_exact_mut(layout.most_columns * d).take(layout.pieces()).enumerate()
        {
            sums[piece % panels].push(piece_sums);
        }
        let mut gradients = Vec::with_capacity(rows.len());
        let size = components * d;
        let mut all = (positions[0]..).zip(self.gradients.contexts[positions[0] * size..].chunks_exact_mut(size));
        for &t in positions {
            // Positions are in ascending order.
            if let Some((_, position)) = all.find(|(i, _)| *i == t) {
                gradients.extend(position.chunks_exact_mut(d));
            }
        }
        let of_panel = gradients.par_chunks_mut(layout.panels[0].rows.max(1)).zip(sums).enumerate();
        of_panel.for_each_init(
            || (Vec::new(), Vec::new()),
            |(buffer, decoder_row), (p, (gradients, sums))| {
                let Panel { first, width, .. } = layout.panels[p];
                let mut sums = sums.into_iter().zip(factors).map(|(sums, factors)| (sums, &factors[first..][..width]));
                let Some((total, factors)) = sums.next() else { return };
                let total = &mut total[..width * d];
                T::Acc::dispatch(inputs.isa, Scaled { values: total, factors });
                for (sums, factors) in sums {
                    T::Acc::dispatch(inputs.isa, AddScaled { to: total, values: &sums[..width * d], factors });
                }
                buffer.resize(width * d, T::Acc::zero());
                transpose(total, width, 0..d, 0..width, buffer, d, |x| x);
                for ((row, gradient), values) in rows[first..].iter().zip(gradients).zip(buffer.chunks_exact(d)) {
                    match row.is_void {
                        true => gradient.fill(T::Acc::zero()),
                        false => gradient.copy_from_slice(values),
                    }
                    if !row.mass.is_zero() {
                        inputs.decoder.row(row.target, decoder_row);
                        for (g, &w) in gradient.iter_mut().zip(&*decoder_row) {
                            *g -= row.mass * w;
                        }
                    }
                }
            },
        );
    }

    /// `dW += E (f C) - h c [v = y]`, and the bias likewise.
    fn second_pass(
        &mut self,
        layout: &Layout,
        parts: &[Part<T::Acc>],
        rows: &[Row<T::Acc>],
        factors: &[Vec<T::Acc>],
        contexts: &[T::Acc],
    ) {
        let d = self.inputs.sizes.context;
        let isa = self.inputs.isa;
        let add = self.gradients.weight_started;
        let mut weights: Vec<Option<&mut [T::Acc]>> = match self.needs_grad.weight {
            true => self.gradients.weight.chunks_mut(layout.tile_ids * d).map(Some).collect(),
            false => vec![],
        };
        weights.resize_with(layout.tiles(), || None);
        let mut biases: Vec<Option<&mut [T::Acc]>> = match &mut self.gradients.bias {
            Some(bias) => bias.chunks_mut(layout.tile_ids).map(Some).collect(),
            None => vec![],
        };
        biases.resize_with(layout.tiles(), || None);
        let blocks = BLOCK_ROWS.div_ceil(layout.most_columns);
        self.exponentials
            .par_chunks_mut(layout.tile_ids * layout.columns)
            .take(layout.tiles())
            .zip(weights)
            .zip(biases)
            .enumerate()
            .for_each_init(Vec::new, |right, (tile, ((exponentials, mut weight), mut bias))| {
                let ids = layout.ids(tile);
                clear_void_rows(layout, ids.len(), rows, exponentials);
                let factors = tile_factors(layout, tile, parts, rows, factors);
                for (i, panels) in layout.panels.chunks(blocks).enumerate() {
                    let left = |panel: &Panel| Left {
                        values: &exponentials[ids.len() * panel.first..][..ids.len() * panel.width],
                        row: panel.width,
                        step: 1,
                        depth: panel.rows,
                    };
                    let left: Vec<_> = panels.iter().map(left).collect();
                    let block = panels[0].first..panels.last().map_or(0, |panel| panel.first + panel.rows);
                    if let Some(weight) = &mut weight {
                        let start = if add || i > 0 { Start::Stored } else { Start::Zero };
                        for column in (0..d).step_by(layout.most_columns) {
                            let columns = layout.most_columns.min(d - column);
                            let width = columns.next_multiple_of(layout.lanes);
                            right.resize(block.len() * width, T::Acc::zero());
                            let contexts = &contexts[block.start * d + column..];
                            let factors = &factors[block.clone()];
                            T::Acc::dispatch(isa, ScaledRows { contexts, d, columns, factors, to: right });
                            multiply(isa, start, ids.len(), &left, right, width, &mut weight[column..], d, columns);
                        }
                    }
                    if let Some(bias) = &mut bias {
                        T::Acc::dispatch(isa, WeightedSums { left: &left, factors: &factors[block.start..], to: bias });
                    }
                }
                for (row, context) in rows.iter().zip(contexts.chunks_exact(d)) {
                    if !ids.contains(&row.target) || row.mass.is_zero() {
                        continue;
                    }
                    let id = row.target - ids.start;
                    if let Some(bias) = &mut bias {
                        bias[id] -= row.mass;
                    }
                    if let Some(weight) = &mut weight {
                        for (g, &c) in weight[id * d..(id + 1) * d].iter_mut().zip(context) {
                            *g -= row.mass * c;
                        }
                    }
                }
            });
        self.gradients.weight_started = true;
    }
}

/// A panel's contexts times the logit scale, `[d, width]`.
fn pack<T: Element>(inputs: &Inputs<'_, T>, contexts: &[T::Acc], panel: Panel, to: &mut [T::Acc]) {
    let d = inputs.sizes.context;
    let Panel { first, rows, width } = panel;
    if rows < width {
        to.fill(T::Acc::zero());
    }
    transpose(&contexts[first * d..], d, 0..rows, 0..d, to, width, |x| x);
    if inputs.logit_scale != num_traits::One::one() {
        to.iter_mut().for_each(|x| *x *= inputs.logit_scale);
    }
}

/// The logits of a tile and a panel, `[ids, width]`.
fn logits<T: Element>(
    inputs: &Inputs<'_, T>,
    decoder: &Block<'_, T::Acc>,
    ids: Range<usize>,
    packed: &[T::Acc],
    width: usize,
    to: &mut [T::Acc],
) {
    let d = inputs.sizes.context;
    // Equal parts, in which the packed contexts stay in the cache.
    let depth = d.div_ceil(d.div_ceil(MOST_DEPTH));
    for first in (0..d).step_by(depth) {
        let left = Left {
            values: &decoder.values[first * decoder.column..],
            row: decoder.id,
            step: decoder.column,
            depth: depth.min(d - first),
        };
        let start = if first == 0 { Start::Rows(&inputs.bias[ids.clone()]) } else { Start::Stored };
        multiply(inputs.isa, start, ids.len(), &[left], &packed[first * width..], width, to, width, width);
    }
    if let Some(cap) = inputs.softcap {
        T::Acc::dispatch(inputs.isa, Softcap { tile: to, cap });
    }
}

/// Columns of the decoder that the first product sums over at a time.
const MOST_DEPTH: usize = 320;

#[allow(clippy::too_many_arguments)]
fn multiply<F: Float>(
    isa: Isa,
    start: Start<'_, F>,
    rows: usize,
    left: &[Left<'_, F>],
    right: &[F],
    width: usize,
    to: &mut [F],
    to_row: usize,
    columns: usize,
) {
    F::dispatch(isa, Product { start, rows, left, right, width, to, to_row, columns });
}

/// The rows' factors for the offset at the end of each segment, `[segment][column]`.
fn segment_factors<F: Float>(layout: &Layout, parts: &[Part<F>], rows: &[Row<F>]) -> Vec<Vec<F>> {
    let of_segment = |segment: usize| {
        let mut factors = vec![F::zero(); layout.columns];
        for (r, (factor, row)) in factors.iter_mut().zip(rows).enumerate() {
            let panel = layout.panel_of(r);
            let part = &parts[segment * layout.panels.len() + panel];
            *factor = row.factor(part.running.offset[r - layout.panels[panel].first]);
        }
        factors
    };
    (0..layout.segments()).into_par_iter().map(of_segment).collect()
}

/// The rows' factors for the exponentials of a tile, whose offset may be an earlier one.
fn tile_factors<F: Float>(
    layout: &Layout,
    tile: usize,
    parts: &[Part<F>],
    rows: &[Row<F>],
    segment_factors: &[Vec<F>],
) -> Vec<F> {
    let segment = layout.segment_of(tile);
    let in_segment = tile - layout.segment(segment).start;
    let mut factors = segment_factors[segment].clone();
    for (p, panel) in layout.panels.iter().enumerate() {
        let part = &parts[segment * layout.panels.len() + p];
        let offsets = &part.offsets[in_segment * panel.width..][..panel.rows];
        for (r, (&offset, last)) in offsets.iter().zip(&part.running.offset).enumerate() {
            if offset != *last {
                factors[panel.first + r] = rows[panel.first + r].factor(offset);
            }
        }
    }
    factors
}

/// Sets the exponentials of void rows to zero.
fn clear_void_rows<F: Float>(layout: &Layout, ids: usize, rows: &[Row<F>], exponentials: &mut [F]) {
    for (r, _) in rows.iter().enumerate().filter(|(_, row)| row.is_void) {
        let panel = layout.panels[layout.panel_of(r)];
        let tile = &mut exponentials[ids * panel.first..][..ids * panel.width];
        tile.iter_mut().skip(r - panel.first).step_by(panel.width).for_each(|e| *e = F::zero());
    }
}
