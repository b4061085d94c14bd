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
use crate::backend::cpu::results::{ColumnGradient, DecoderGradients};
use crate::backend::cpu::simd::{Float, Isa};

/// Rows that the third product sums over at a time: as many scaled contexts stay in the second-level cache.
pub(super) const BLOCK_ROWS: usize = 480;

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
}

/// What the third product needs of a tile of ids.
struct Tile<'b, F> {
    ids: Range<usize>,
    /// `[panel][id][row]`
    exponentials: &'b mut [F],
    /// `[column]`: the rows' factors
    factors: Vec<F>,
    /// The gradients of the parts of the decoder that need one
    parts: Vec<Part<'b, F>>,
    /// `[ids]`, if it is needed
    bias: Option<&'b mut [F]>,
}

/// The gradient of some columns of a tile's ids.
struct Part<'b, F> {
    columns: Range<usize>,
    /// `[ids, columns]`
    values: &'b mut [F],
    /// Whether `values` already holds the contribution of earlier chunks.
    is_started: bool,
}

impl<F: Float> DecoderGradient<'_, F> {
    /// The second pass over the vocabulary: `dW += E (f C) - m c [v = y]`, the adapter and the bias likewise, as far as
    /// they are needed. Targets outside the vocabulary have rows behind it.
    pub(super) fn add_to(&self, gradients: &mut DecoderGradients<F>, exponentials: &mut [F]) {
        let layout = self.factors.layout;
        let Layout { tile_ids, vocab, .. } = *layout;
        let columns = layout.columns(self.factors.rows.len());
        let tiles = exponentials.chunks_mut(tile_ids * columns).take(layout.tiles()).enumerate();
        let tile = |(tile, exponentials)| Tile {
            ids: layout.ids(tile),
            exponentials,
            factors: vec![],
            parts: vec![],
            bias: None,
        };
        let mut tiles: Vec<Tile<'_, F>> = tiles.map(tile).collect();
        let mut behind = Vec::new();
        let (parts, bias) = gradients.parts();
        for ColumnGradient { columns, values, is_started } in parts {
            let (of_vocab, others) = values.split_at_mut(vocab * columns.len());
            let part = |values| Part { columns: columns.clone(), values, is_started: *is_started };
            let of_tiles = of_vocab.chunks_mut(tile_ids * columns.len()).map(part);
            tiles.iter_mut().zip(of_tiles).for_each(|(tile, part)| tile.parts.push(part));
            behind.push(part(others));
            *is_started = true;
        }
        let mut bias_behind = None;
        if let Some(bias) = bias {
            let (of_vocab, others) = bias.split_at_mut(vocab);
            tiles.iter_mut().zip(of_vocab.chunks_mut(tile_ids)).for_each(|(tile, bias)| tile.bias = Some(bias));
            bias_behind = Some(others);
        }
        let groups = tiles.par_chunks_mut(layout.tiles_at_a_time()).enumerate();
        groups.for_each_init(Vec::new, |scaled, (group, tiles)| {
            for (tile, number) in tiles.iter_mut().zip(group * layout.tiles_at_a_time()..) {
                self.clear_void_rows(tile.ids.len(), tile.exponentials);
                tile.factors = self.factors.of_tile(number);
            }
            self.add(tiles, scaled);
            for Tile { ids, parts, bias, .. } in tiles {
                self.subtract_targets(ids.clone(), parts, bias.as_deref_mut());
            }
        });
        self.subtract_targets(vocab..usize::MAX, &mut behind, bias_behind);
    }

    /// Subtracts the targets among `ids`, to which these gradients belong: `dW -= m c`, `db -= m`.
    fn subtract_targets(&self, ids: Range<usize>, parts: &mut [Part<'_, F>], mut bias: Option<&mut [F]>) {
        for (row, context) in self.factors.rows.iter().zip(self.contexts.chunks_exact(self.d)) {
            if !ids.contains(&row.target) || row.mass.is_zero() {
                continue;
            }
            let id = row.target - ids.start;
            if let Some(bias) = &mut bias {
                bias[id] -= row.mass;
            }
            for Part { columns, values, .. } in &mut *parts {
                let gradient = &mut values[id * columns.len()..(id + 1) * columns.len()];
                gradient.iter_mut().zip(&context[columns.clone()]).for_each(|(g, &c)| *g -= row.mass * c);
            }
        }
    }

    /// Adds the products of some tiles.
    fn add(&self, tiles: &mut [Tile<'_, F>], scaled: &mut Vec<F>) {
        let panels_at_a_time = BLOCK_ROWS.div_ceil(self.factors.layout.panel_rows);
        for panels in self.factors.panels.chunks(panels_at_a_time) {
            for part in 0..tiles[0].parts.len() {
                self.add_part(tiles, part, panels, scaled);
            }
            for Tile { ids, exponentials, factors, bias, .. } in &mut *tiles {
                let Some(bias) = bias else { continue };
                let (left, factors) = (left(exponentials, panels, ids.len()), &factors[panels[0].first..]);
                F::dispatch(self.isa, WeightedSums { left: &left, factors, to: bias });
            }
        }
    }

    /// Adds the products with the rows of some panels, for a part of the decoder. The tiles share the scaled contexts
    /// where their factors are equal.
    fn add_part(&self, tiles: &mut [Tile<'_, F>], part: usize, panels: &[Panel], scaled: &mut Vec<F>) {
        let (d, layout, first) = (self.d, self.factors.layout, panels[0].first);
        let rows: usize = panels.iter().map(|panel| panel.rows).sum();
        let of_part = tiles[0].parts[part].columns.clone();
        let to_row = of_part.len();
        for column in of_part.clone().step_by(layout.panel_rows) {
            let columns = layout.panel_rows.min(of_part.end - column);
            let width = columns.next_multiple_of(layout.lanes);
            scaled.resize(rows * width, F::zero());
            let mut scaled_by: &[F] = &[];
            for Tile { ids, exponentials, factors, parts, .. } in &mut *tiles {
                let factors = &factors[first..][..rows];
                if scaled_by != factors {
                    let contexts = &self.contexts[first * d + column..];
                    F::dispatch(self.isa, ScaledRows { contexts, d, columns, factors, to: scaled });
                    scaled_by = factors;
                }
                let left = left(exponentials, panels, ids.len());
                let Part { values, is_started, .. } = &mut parts[part];
                let start = if *is_started || first > 0 { Start::Stored } else { Start::Zero };
                let (rows, left, right) = (ids.len(), &left[..], &scaled[..]);
                let to = &mut values[column - of_part.start..];
                F::dispatch(self.isa, Product { start, rows, left, right, width, to, to_row, columns });
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
