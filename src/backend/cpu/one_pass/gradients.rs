//! The gradients of contexts and decoder from exponentials and factors.

use std::ops::Range;

use num_traits::Zero;
use rayon::prelude::*;

use super::chunk_ids::ListedId;
use super::format::{DecoderGradient, Format, Tile, TileGradient};
use super::layout::{Layout, Panel};
use super::rows::ChunkRows;
use super::scaling::{AddScaled, Scaled};
use crate::backend::cpu::objective::results::{ColumnGradient, DecoderGradients};
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;
use crate::backend::cpu::operands::matrix::transpose;
use crate::backend::cpu::vector::simd::Float;

/// Computes `dC = f O - sum_y m W[y]` for each row of contexts, over its listed ids; `sums` are the products O.
pub(super) fn context_gradient<T: Element>(
    inputs: &Inputs<'_, T>,
    layout: &Layout,
    panels: &[Panel],
    ChunkRows { rows, entries }: &ChunkRows<T::Acc>,
    segment_factors: &[Vec<T::Acc>],
    sums: &mut [T::Acc],
    mut gradient: Vec<&mut [T::Acc]>,
) {
    let d = inputs.sizes.context_dim;
    // The sums of each panel, segment by segment.
    let mut of_panels: Vec<Vec<&mut [T::Acc]>> = Vec::new();
    of_panels.resize_with(panels.len(), Vec::new);
    let pieces = layout.pieces(rows.len());
    for (piece, sums) in sums.chunks_exact_mut(layout.panel_rows * layout.padded(d)).take(pieces).enumerate() {
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
            transposed.resize(width * d, T::Acc::zero());
            transpose(total, width, 0..d, 0..width, transposed, d, |x| x);
            for ((row, gradient), values) in rows[first..].iter().zip(gradient).zip(transposed.chunks_exact(d)) {
                if !row.is_void {
                    gradient.copy_from_slice(values);
                }
                for &ListedId { id, mass } in row.entries(entries).iter().filter(|entry| !entry.mass.is_zero()) {
                    inputs.decoder.row(id, decoder_row);
                    gradient.iter_mut().zip(&*decoder_row).for_each(|(g, &w)| *g -= mass * w);
                }
            }
        },
    );
}

/// The second pass over the vocabulary, in a format.
pub(super) struct SecondPass<'a, T: Element, X> {
    pub(super) format: X,
    pub(super) operands: DecoderGradient<'a, T>,
}

impl<T: Element, X: Format<T>> SecondPass<'_, T, X> {
    /// The second pass over the vocabulary: `dW += E (f C) - m c` for the listed ids, the adapter and the bias likewise,
    /// as far as they are needed. Targets outside the vocabulary have rows behind it.
    pub(super) fn add_to(&self, gradients: &mut DecoderGradients<T::Acc>, exponentials: &mut [X::Exponential]) {
        let layout = self.operands.factors.layout;
        let Layout { tile_ids, vocab, .. } = *layout;
        let columns = layout.columns(self.operands.factors.rows.len());
        let of_tiles = exponentials.chunks_mut(layout.padded(tile_ids) * columns).take(layout.tiles());
        let tile = |(tile, exponentials)| Tile {
            ids: layout.ids(tile),
            segment: layout.segment_of(tile),
            exponentials,
            factors: vec![],
            parts: vec![],
            bias: None,
        };
        let mut tiles: Vec<Tile<'_, T::Acc, X::Exponential>> = of_tiles.enumerate().map(tile).collect();
        let mut behind = Vec::new();
        let (parts, bias) = gradients.parts();
        for ColumnGradient { columns, values, rounded, is_started } in parts {
            let of_vocab = values.len().min(vocab * columns.len());
            let (of_vocab, others) = values.split_at_mut(of_vocab);
            let part =
                |values, rounded| TileGradient { columns: columns.clone(), values, rounded, is_started: *is_started };
            let mut values = of_vocab.chunks_mut(tile_ids * columns.len());
            let mut rounded = rounded.chunks_mut(tile_ids * columns.len());
            for tile in &mut tiles {
                tile.parts.push(part(values.next().unwrap_or_default(), rounded.next().unwrap_or_default()));
            }
            behind.push(part(others, &mut []));
            *is_started = true;
        }
        let mut bias_behind = None;
        if let Some(bias) = bias {
            let (of_vocab, others) = bias.split_at_mut(vocab);
            tiles.iter_mut().zip(of_vocab.chunks_mut(tile_ids)).for_each(|(tile, bias)| tile.bias = Some(bias));
            bias_behind = Some(others);
        }
        let segments = self.operands.factors.of_segments.par_iter();
        let scaled: Vec<X::Scaled> = segments.map(|factors| self.format.scaled(&self.operands, factors)).collect();
        let groups = tiles.par_chunks_mut(layout.tiles_at_a_time()).enumerate();
        groups.for_each_init(X::GradientBuffers::default, |buffers, (group, tiles)| {
            for (tile, number) in tiles.iter_mut().zip(group * layout.tiles_at_a_time()..) {
                self.clear_void_rows(layout.padded(tile.ids.len()), tile.exponentials);
                tile.factors = self.operands.factors.of_tile(number);
            }
            self.format.add_products(&self.operands, tiles, &scaled, buffers);
            for Tile { ids, parts, bias, .. } in tiles {
                self.subtract_listed(ids.clone(), parts, bias.as_deref_mut());
            }
        });
        self.subtract_listed(vocab..usize::MAX, &mut behind, bias_behind);
    }

    /// Subtracts the listed ids among `ids`, to which these gradients belong: `dW -= m c`, `db -= m`.
    fn subtract_listed(
        &self,
        ids: Range<usize>,
        parts: &mut [TileGradient<'_, T::Acc>],
        mut bias: Option<&mut [T::Acc]>,
    ) {
        self.operands.each_listed(&ids, |id, mass, context| {
            if let Some(bias) = &mut bias {
                bias[id] -= mass;
            }
            for TileGradient { columns, values, .. } in parts.iter_mut().filter(|part| part.rounded.is_empty()) {
                let gradient = &mut values[id * columns.len()..(id + 1) * columns.len()];
                gradient.iter_mut().zip(&context[columns.clone()]).for_each(|(g, &c)| *g -= mass * c);
            }
        });
    }

    /// Sets the exponentials of void rows to zero.
    fn clear_void_rows(&self, ids: usize, exponentials: &mut [X::Exponential]) {
        for (r, _) in self.operands.factors.rows.iter().enumerate().filter(|(_, row)| row.is_void) {
            let panel = self.operands.factors.panels[self.operands.factors.layout.panel_of(r)];
            let tile = &mut exponentials[ids * panel.first..][..ids * panel.width];
            tile.iter_mut().skip(r - panel.first).step_by(panel.width).for_each(|e| *e = X::Exponential::default());
        }
    }
}
