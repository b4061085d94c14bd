//! Products on vectors, in the accumulation dtype. A decoder in half precision is widened once for a group of panels.

use std::ops::Range;

use num_traits::Zero;

use super::format::{DecoderGradient, FirstOperands, Format, Tile, TileGradient};
use super::layout::{Blocks, Panel};
use super::scaling::{ScaledRows, WeightedSums};
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;
use crate::backend::cpu::operands::matrix::{transpose, Block};
use crate::backend::cpu::products::multiplier::Vectors;
use crate::backend::cpu::products::panel::{Left, PanelProduct, Registers, Start};
use crate::backend::cpu::vector::simd::Float;

/// Columns of the decoder that the first product sums over at a time, so that the packed contexts stay in the cache.
const MOST_DEPTH: usize = 320;
/// Bytes of the decoder's rows of a tile.
const TILE_BYTES: usize = 320 << 10;
/// Rows that the third product sums over at a time: as many scaled contexts stay in the second-level cache.
const BLOCK_ROWS: usize = 480;
/// Ids whose gradients the third product computes at a time: it scales the contexts for so many at once.
const GROUP_IDS: usize = 160;
/// Panels that share a widened tile, at most.
const MOST_PANELS: usize = 8;

impl<T: Element> Format<T> for Vectors {
    type Packed = T::Acc;
    type Exponential = T::Acc;
    /// The parts of the decoder, each with its columns.
    type Decoder<'t>
        = Vec<(Range<usize>, Block<'t, T::Acc>)>
    where
        T: 't;
    /// Copies of the parts in half precision, widened.
    type DecoderBuffers = [Vec<T::Acc>; 2];
    /// Exponentials that are not kept.
    type LogitBuffers = Aligned<T::Acc>;
    /// Tiles of a segment share nothing; each thread scales contexts for some tiles.
    type Scaled = ();
    type GradientBuffers = Vec<T::Acc>;

    fn blocks(self) -> Blocks {
        let Registers { rows, width, lanes } = Registers::of::<T::Acc>(self.0);
        Blocks {
            ids: rows,
            panel_rows: width,
            lanes,
            padding: 1,
            pieces: 64,
            tiles: 64,
            tile_elements: TILE_BYTES / size_of::<T::Acc>(),
            group_ids: GROUP_IDS,
        }
    }

    fn packed_per_row(self, d: usize) -> usize {
        d
    }

    fn thread_bytes(self, d: usize, ids: usize, keeps: bool) -> usize {
        let panel_rows = Format::<T>::blocks(self).panel_rows;
        let widened = if T::IS_ACC { 0 } else { ids * d };
        let of_products = if keeps { BLOCK_ROWS.next_multiple_of(panel_rows) * panel_rows } else { ids * panel_rows };
        (widened + of_products) * size_of::<T::Acc>()
    }

    fn scaled_bytes(self, _: usize) -> usize {
        0
    }

    fn most_panels(self) -> usize {
        if T::IS_ACC {
            1
        } else {
            MOST_PANELS
        }
    }

    /// `[d, width]`: contexts times the logit scale
    fn pack(self, inputs: &Inputs<'_, T>, contexts: &[T::Acc], panel: Panel, to: &mut [T::Acc]) {
        let d = inputs.sizes.context_dim;
        let Panel { first, rows, width } = panel;
        if rows < width {
            to.fill(T::Acc::zero());
        }
        transpose(&contexts[first * d..], d, 0..rows, 0..d, to, width, |x| x);
        if inputs.logit_scale != num_traits::One::one() {
            to.iter_mut().for_each(|x| *x *= inputs.logit_scale);
        }
    }

    fn decoder<'t>(
        self,
        inputs: &'t Inputs<'_, T>,
        ids: Range<usize>,
        buffers: &'t mut [Vec<T::Acc>; 2],
    ) -> Self::Decoder<'t> {
        let parts = inputs.decoder.parts().zip(buffers);
        parts.map(|((columns, matrix), buffer)| (columns, matrix.block(ids.clone(), buffer))).collect()
    }

    fn multiply(
        self,
        operands: FirstOperands<'_, '_, T, Self>,
        buffer: &mut Aligned<T::Acc>,
        exponentiate: impl FnOnce(&mut [T::Acc], &mut [T::Acc]),
    ) {
        let FirstOperands { inputs, ids, decoder, panel, packed, kept, sums, is_first } = operands;
        let width = panel.width;
        let exponentials = match kept {
            Some(kept) => kept,
            None => &mut buffer.at_least(ids.len() * width)[..ids.len() * width],
        };
        logits(inputs, decoder, ids.clone(), packed, width, exponentials);
        exponentiate(exponentials, sums);
        if sums.is_empty() {
            return;
        }
        let start = if is_first { Start::Zero } else { Start::Stored };
        for (columns, block) in decoder {
            let left = Left { values: block.values, row: block.column, step: block.id, depth: ids.len() };
            let (rows, left, right) = (columns.len(), &[left][..], &exponentials[..]);
            let to = &mut sums[columns.start * width..];
            T::Acc::dispatch(
                self.0,
                PanelProduct { start, rows, left, right, width, to, to_row: width, columns: width },
            );
        }
    }

    fn scaled(self, _: &DecoderGradient<'_, T>, _: &[T::Acc]) {}

    fn add_products(
        self,
        gradient: &DecoderGradient<'_, T>,
        tiles: &mut [Tile<'_, T::Acc, T::Acc>],
        _: &[()],
        scaled: &mut Vec<T::Acc>,
    ) {
        let panels_at_a_time = BLOCK_ROWS.div_ceil(gradient.factors.layout.panel_rows);
        for panels in gradient.factors.panels.chunks(panels_at_a_time) {
            for part in 0..tiles[0].parts.len() {
                self.add_part(gradient, tiles, part, panels, scaled);
            }
            for Tile { ids, exponentials, factors, bias, .. } in &mut *tiles {
                let Some(bias) = bias else { continue };
                let (left, factors) = (left(exponentials, panels, ids.len()), &factors[panels[0].first..]);
                T::Acc::dispatch(self.0, WeightedSums { left: &left, factors, to: bias });
            }
        }
    }
}

impl Vectors {
    /// Adds the products with the rows of some panels, for a part of the decoder. The tiles share the scaled contexts
    /// where their factors are equal.
    fn add_part<T: Element>(
        self,
        gradient: &DecoderGradient<'_, T>,
        tiles: &mut [Tile<'_, T::Acc, T::Acc>],
        part: usize,
        panels: &[Panel],
        scaled: &mut Vec<T::Acc>,
    ) {
        let (d, layout, first) = (gradient.d, gradient.factors.layout, panels[0].first);
        let rows: usize = panels.iter().map(|panel| panel.rows).sum();
        let of_part = tiles[0].parts[part].columns.clone();
        let to_row = of_part.len();
        for column in of_part.clone().step_by(layout.panel_rows) {
            let columns = layout.panel_rows.min(of_part.end - column);
            let width = columns.next_multiple_of(layout.lanes);
            scaled.resize(rows * width, T::Acc::zero());
            let mut scaled_by: &[T::Acc] = &[];
            for Tile { ids, exponentials, factors, parts, .. } in &mut *tiles {
                let factors = &factors[first..][..rows];
                if scaled_by != factors {
                    let contexts = &gradient.contexts[first * d + column..];
                    T::Acc::dispatch(self.0, ScaledRows { contexts, d, columns, factors, to: scaled });
                    scaled_by = factors;
                }
                let left = left(exponentials, panels, ids.len());
                let TileGradient { values, is_started, .. } = &mut parts[part];
                let start = if *is_started || first > 0 { Start::Stored } else { Start::Zero };
                let (rows, left, right) = (ids.len(), &left[..], &scaled[..]);
                let to = &mut values[column - of_part.start..];
                T::Acc::dispatch(self.0, PanelProduct { start, rows, left, right, width, to, to_row, columns });
            }
        }
    }
}

/// The logits of a tile and a panel, `[ids, width]`, without softcap.
fn logits<T: Element>(
    inputs: &Inputs<'_, T>,
    decoder: &[(Range<usize>, Block<'_, T::Acc>)],
    ids: Range<usize>,
    packed: &[T::Acc],
    width: usize,
    to: &mut [T::Acc],
) {
    for (columns, block) in decoder {
        let d = columns.len();
        // All pieces have nearly the same size.
        let depth = d.div_ceil(d.div_ceil(MOST_DEPTH));
        for first in (0..d).step_by(depth) {
            let left = Left {
                values: &block.values[first * block.column..],
                row: block.id,
                step: block.column,
                depth: depth.min(d - first),
            };
            let first = columns.start + first;
            let start = if first == 0 { Start::Rows(&inputs.bias[ids.clone()]) } else { Start::Stored };
            let (rows, left, right) = (ids.len(), &[left][..], &packed[first * width..]);
            let product = PanelProduct { start, rows, left, right, width, to, to_row: width, columns: width };
            T::Acc::dispatch(inputs.isa, product);
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
