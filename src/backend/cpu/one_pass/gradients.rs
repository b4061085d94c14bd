//! The gradients of contexts and decoder from exponentials and factors.

use std::ops::Range;

use rayon::prelude::*;

use super::factors::{Factors, Row};
use super::layout::{Layout, Panel};
use super::product::{Left, Product, Start};
use super::scaling::{AddScaled, Scaled, ScaledRows, WeightedSums};
use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::matrix::transpose;
use crate::backend::cpu::simd::{Float, Isa};

/// Rows that the third product sums over at a time: as many scaled contexts stay in the second-level cache.
pub(super) const BLOCK_ROWS: usize = 240;

/// Computes `dC = f O - m W[y]` for each row of contexts; `sums` are the products O.
pub(super) fn context_gradient<T: Element>(
    inputs: &Inputs<'_, T>,
    layout: &Layout,
    panels: &[Panel],
    rows: &[Row<T::Acc>],
    segment_factors: &[Vec<T::Acc>],
    sums: &mut [T::Acc],
    mut gradient: Vec<&mut [T::Acc]>,
) {
    let d = inputs.sizes.context_dim;
    // The sums of each panel, segment by segment.
    let mut of_panels: Vec<Vec<&mut [T::Acc]>> = Vec::new();
    of_panels.resize_with(panels.len(), Vec::new);
    let pieces = layout.pieces(rows.len());
    for (piece, sums) in sums.chunks_exact_mut(layout.panel_rows * d).take(pieces).enumerate() {
        of_panels[piece % panels.len()].push(sums);
    }
    gradient.par_chunks_mut(layout.panel_rows).zip(of_panels).zip(panels).for_each_init(
        || (Vec::new(), Vec::new()),
        |(transposed, decoder_row), ((gradient, sums), &Panel { first, width, .. })| {
            let factors = segment_factors.iter().map(|factors| &factors[first..][..width]);
            let mut segments = sums.into_iter().zip(factors);
            let Some((total, factors)) = segments.next() else { return };
            let total = &mut total[..width * d];
            T::Acc::dispatch(inputs.isa, Scaled { values: total, factors });
            for (sums, factors) in segments {
                T::Acc::dispatch(inputs.isa, AddScaled { to: total, values: &sums[..width * d], factors });
            }
            transposed.resize(width * d, num_traits::Zero::zero());
            transpose(total, width, 0..d, 0..width, transposed, d, |x| x);
            for ((row, gradient), values) in rows[first..].iter().zip(gradient).zip(transposed.chunks_exact(d)) {
                if !row.is_void {
                    gradient.copy_from_slice(values);
                }
                if !num_traits::Zero::is_zero(&row.mass) {
                    inputs.decoder.row(row.target, decoder_row);
                    gradient.iter_mut().zip(&*decoder_row).for_each(|(g, &w)| *g -= row.mass * w);
                }
            }
        },
    );
}

/// The gradients of the decoder, tile by tile.
pub(super) struct DecoderGradient<'a, F> {
    pub(super) isa: Isa,
    pub(super) factors: Factors<'a, F>,
    /// `[rows, d]`
    pub(super) contexts: &'a [F],
    pub(super) d: usize,
    /// Whether the weight's gradient already holds the contribution of earlier chunks.
    pub(super) add: bool,
}

impl<F: Float> DecoderGradient<'_, F> {
    /// The second pass over the vocabulary: `dW += E (f C) - m c [v = y]`, and the bias likewise, if they are needed.
    /// Targets outside the vocabulary have rows behind it.
    pub(super) fn run(&self, exponentials: &mut [F], weight: Option<&mut [F]>, bias: Option<&mut [F]>) {
        let Layout { tile_ids, vocab, .. } = *self.factors.layout;
        let tiles = self.factors.layout.tiles();
        let (weight, weight_behind) = weight.map(|weight| weight.split_at_mut(vocab * self.d)).unzip();
        let (bias, bias_behind) = bias.map(|bias| bias.split_at_mut(vocab)).unzip();
        let mut weights: Vec<Option<&mut [F]>> =
            weight.map_or(vec![], |weight| weight.chunks_mut(tile_ids * self.d).map(Some).collect());
        weights.resize_with(tiles, || None);
        let mut biases: Vec<Option<&mut [F]>> =
            bias.map_or(vec![], |bias| bias.chunks_mut(tile_ids).map(Some).collect());
        biases.resize_with(tiles, || None);
        let columns = self.factors.layout.columns(self.factors.rows.len());
        let exponentials = exponentials.par_chunks_mut(tile_ids * columns).take(tiles);
        exponentials
            .zip(weights)
            .zip(biases)
            .enumerate()
            .for_each_init(Vec::new, |buffer, (tile, ((exponentials, weight), bias))| {
                self.tile(tile, exponentials, weight, bias, buffer)
            });
        self.subtract_targets(vocab..usize::MAX, weight_behind, bias_behind);
    }

    /// Subtracts the targets among `ids`, to which these gradients belong: `dW -= m c`, `db -= m`.
    fn subtract_targets(&self, ids: Range<usize>, mut weight: Option<&mut [F]>, mut bias: Option<&mut [F]>) {
        for (row, context) in self.factors.rows.iter().zip(self.contexts.chunks_exact(self.d)) {
            if !ids.contains(&row.target) || row.mass.is_zero() {
                continue;
            }
            let id = row.target - ids.start;
            if let Some(bias) = &mut bias {
                bias[id] -= row.mass;
            }
            if let Some(weight) = &mut weight {
                let gradient = &mut weight[id * self.d..(id + 1) * self.d];
                gradient.iter_mut().zip(context).for_each(|(g, &c)| *g -= row.mass * c);
            }
        }
    }

    fn tile(
        &self,
        tile: usize,
        exponentials: &mut [F],
        mut weight: Option<&mut [F]>,
        mut bias: Option<&mut [F]>,
        scaled: &mut Vec<F>,
    ) {
        let (d, ids) = (self.d, self.factors.layout.ids(tile));
        self.clear_void_rows(ids.len(), exponentials);
        let factors = self.factors.of_tile(tile);
        let panels_at_a_time = BLOCK_ROWS.div_ceil(self.factors.layout.panel_rows);
        for (i, panels) in self.factors.panels.chunks(panels_at_a_time).enumerate() {
            let left = |panel: &Panel| Left {
                values: &exponentials[ids.len() * panel.first..][..ids.len() * panel.width],
                row: panel.width,
                step: 1,
                depth: panel.rows,
            };
            let left: Vec<_> = panels.iter().map(left).collect();
            let first = panels[0].first;
            let rows: usize = panels.iter().map(|panel| panel.rows).sum();
            if let Some(weight) = &mut weight {
                let start = if self.add || i > 0 { Start::Stored } else { Start::Zero };
                for column in (0..d).step_by(self.factors.layout.panel_rows) {
                    let columns = self.factors.layout.panel_rows.min(d - column);
                    let width = columns.next_multiple_of(self.factors.layout.lanes);
                    scaled.resize(rows * width, F::zero());
                    let contexts = &self.contexts[first * d + column..];
                    let factors = &factors[first..][..rows];
                    F::dispatch(self.isa, ScaledRows { contexts, d, columns, factors, to: scaled });
                    let (rows, left, right, to) = (ids.len(), &left[..], &scaled[..], &mut weight[column..]);
                    F::dispatch(self.isa, Product { start, rows, left, right, width, to, to_row: d, columns });
                }
            }
            if let Some(bias) = &mut bias {
                F::dispatch(self.isa, WeightedSums { left: &left, factors: &factors[first..], to: bias });
            }
        }
        self.subtract_targets(ids, weight, bias);
    }

    /// Sets the exponentials of void rows to zero.
    fn clear_void_rows(&self, ids: usize, exponentials: &mut [F]) {
        for (r, _) in self.factors.rows.iter().enumerate().filter(|(_, row)| row.is_void) {
            let panel = self.factors.panels[self.factors.layout.panel_of(r)];
            let tile = &mut exponentials[ids * panel.first..][..ids * panel.width];
            tile.iter_mut().skip(r - panel.first).step_by(panel.width).for_each(|e| *e = F::zero());
        }
    }
}
