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

/// The gradients of the decoder, some tiles at a time.
pub(super) struct DecoderGradient<'a, F> {
    pub(super) isa: Isa,
    pub(super) factors: Factors<'a, F>,
    /// `[rows, d]`
    pub(super) contexts: &'a [F],
    pub(super) d: usize,
    /// Whether the weight's gradient already holds the contribution of earlier chunks.
    pub(super) add: bool,
}

/// What the third product needs of a tile of ids.
struct Tile<'b, F> {
    ids: Range<usize>,
    /// `[panel][id][row]`
    exponentials: &'b mut [F],
    /// `[column]`: the rows' factors
    factors: Vec<F>,
    /// `[ids, d]`, if it is needed
    weight: Option<&'b mut [F]>,
    /// `[ids]`, if it is needed
    bias: Option<&'b mut [F]>,
}

impl<F: Float> DecoderGradient<'_, F> {
    /// The second pass over the vocabulary: `dW += E (f C) - m c [v = y]`, and the bias likewise, if they are needed.
    /// Targets outside the vocabulary have rows behind it.
    pub(super) fn run(&self, exponentials: &mut [F], weight: Option<&mut [F]>, bias: Option<&mut [F]>) {
        let layout = self.factors.layout;
        let Layout { tile_ids, vocab, .. } = *layout;
        let (weight, weight_behind) = weight.map(|weight| weight.split_at_mut(vocab * self.d)).unzip();
        let (bias, bias_behind) = bias.map(|bias| bias.split_at_mut(vocab)).unzip();
        let mut weights = weight.map(|weight| weight.chunks_mut(tile_ids * self.d));
        let mut biases = bias.map(|bias| bias.chunks_mut(tile_ids));
        let columns = layout.columns(self.factors.rows.len());
        let tile = |(tile, exponentials)| Tile {
            ids: layout.ids(tile),
            exponentials,
            factors: Vec::new(),
            weight: weights.as_mut().and_then(Iterator::next),
            bias: biases.as_mut().and_then(Iterator::next),
        };
        let tiles = exponentials.chunks_mut(tile_ids * columns).take(layout.tiles());
        let mut tiles: Vec<Tile<'_, F>> = tiles.enumerate().map(tile).collect();
        let groups = tiles.par_chunks_mut(layout.tiles_at_a_time()).enumerate();
        groups.for_each_init(Vec::new, |scaled, (group, tiles)| {
            for (tile, number) in tiles.iter_mut().zip(group * layout.tiles_at_a_time()..) {
                self.clear_void_rows(tile.ids.len(), tile.exponentials);
                tile.factors = self.factors.of_tile(number);
            }
            self.add(tiles, scaled);
            for Tile { ids, weight, bias, .. } in tiles {
                self.subtract_targets(ids.clone(), weight.as_deref_mut(), bias.as_deref_mut());
            }
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

    /// Adds the products of some tiles, which share the scaled contexts where their factors are equal.
    fn add(&self, tiles: &mut [Tile<'_, F>], scaled: &mut Vec<F>) {
        let (d, layout) = (self.d, self.factors.layout);
        let panels_at_a_time = BLOCK_ROWS.div_ceil(layout.panel_rows);
        for (i, panels) in self.factors.panels.chunks(panels_at_a_time).enumerate() {
            let start = if self.add || i > 0 { Start::Stored } else { Start::Zero };
            let first = panels[0].first;
            let rows: usize = panels.iter().map(|panel| panel.rows).sum();
            for column in (0..d).step_by(layout.panel_rows) {
                let columns = layout.panel_rows.min(d - column);
                let width = columns.next_multiple_of(layout.lanes);
                scaled.resize(rows * width, F::zero());
                let mut scaled_by: &[F] = &[];
                for Tile { ids, exponentials, factors, weight, .. } in &mut *tiles {
                    let Some(weight) = weight else { continue };
                    let factors = &factors[first..][..rows];
                    if scaled_by != factors {
                        let contexts = &self.contexts[first * d + column..];
                        F::dispatch(self.isa, ScaledRows { contexts, d, columns, factors, to: scaled });
                        scaled_by = factors;
                    }
                    let left = left(exponentials, panels, ids.len());
                    let (rows, left, right, to) = (ids.len(), &left[..], &scaled[..], &mut weight[column..]);
                    F::dispatch(self.isa, Product { start, rows, left, right, width, to, to_row: d, columns });
                }
            }
            for Tile { ids, exponentials, factors, bias, .. } in &mut *tiles {
                let Some(bias) = bias else { continue };
                let left = left(exponentials, panels, ids.len());
                F::dispatch(self.isa, WeightedSums { left: &left, factors: &factors[first..], to: bias });
            }
        }
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

/// The exponentials of some panels in a tile of so many ids, as a left operand.
fn left<'e, F>(exponentials: &'e [F], panels: &[Panel], ids: usize) -> Vec<Left<'e, F>> {
    let left = |panel: &Panel| Left {
        values: &exponentials[ids * panel.first..][..ids * panel.width],
        row: panel.width,
        step: 1,
        depth: panel.rows,
    };
    panels.iter().map(left).collect()
}
