//! The format of products on vectors, in the accumulation dtype. A decoder in half precision is widened once for a
//! group of panels.

use std::ops::Range;

use super::format::{FirstOperands, Format, GradientTile, PanelOperands, ThirdOperands, TileGradient};
use super::gradients::{AddWeightedSums, ScaleRows};
use super::layout::Blocks;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::decoder::Block;
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::operands::transpose::transpose;
use crate::backend::cpu::products::multiplier::Vectors;
use crate::backend::cpu::products::panel::{Left, Panel, PanelProduct, Registers, Start};
use crate::backend::parallel;

/// The maximum number of columns of the decoder that the first product sums over at a time, so that the packed contexts
/// stay in the cache.
const MOST_DEPTH: usize = 320;
/// The bytes of the decoder's rows of a tile.
const TILE_BYTES: usize = 320 << 10;
/// The number of rows that the third product sums over at a time: as many scaled contexts stay in the second-level
/// cache.
const BLOCK_ROWS: usize = 480;
/// The number of ids whose gradients the third product computes at a time: it scales the contexts for so many at once.
const GROUP_IDS: usize = 320;
/// The maximum number of panels that share a widened tile.
const MOST_PANELS: usize = 8;

impl<F: Accumulator> Format<F> for Vectors {
    type Packed = F;
    type Exponential = F;
    /// The weight and the adapter, each with its columns.
    type Decoder<'t>
        = Vec<(Range<usize>, Block<'t, F>)>
    where
        F: 't;
    /// Widened copies of the two, if they are in half precision.
    type DecoderBuffers = [Vec<F>; 2];
    /// The exponentials, if they are not kept.
    type LogitBuffers = Aligned<F>;
    /// `[panel of columns][row][panel width]`, of all panels but the last if that is narrower. Each thread multiplies
    /// them by the factors of some tiles.
    type ThirdContexts<'c>
        = &'c [F]
    where
        F: 'c;
    type GradientBuffers = GradientBuffers<F>;

    /// A tile of the decoder has a fixed number of bytes; a panel is as wide as the registers.
    fn blocks(self) -> Blocks {
        let Registers { rows, width, lanes } = Registers::for_isa::<F>(self.isa);
        Blocks {
            ids: rows,
            panel_rows: width,
            lanes,
            padding: 1,
            pieces: 64,
            tiles: 64,
            tile_elements: TILE_BYTES / size_of::<F>(),
            group_ids: GROUP_IDS,
        }
    }

    fn packed_per_row(self, d: usize) -> usize {
        d
    }

    fn thread_bytes(self, d: usize, ids: usize, keeps_exponentials: bool) -> usize {
        let panel_rows = Format::<F>::blocks(self).panel_rows;
        let widened = if self.copies_rows { ids * d } else { 0 };
        let scaled_or_exponentials =
            if keeps_exponentials { BLOCK_ROWS.next_multiple_of(panel_rows) * panel_rows } else { ids * panel_rows };
        let sums = if self.copies_rows && keeps_exponentials { ids.max(GROUP_IDS) * d } else { 0 };
        (widened + scaled_or_exponentials + sums) * size_of::<F>()
    }

    fn scaled_context_bytes(self, _: usize) -> usize {
        0
    }

    fn most_panels(self) -> usize {
        if self.copies_rows {
            MOST_PANELS
        } else {
            1
        }
    }

    /// Writes `[d, width]`, the contexts times the logit scale.
    fn pack(self, inputs: &Inputs<'_, F>, contexts: &[F], panel: Panel, to: &mut [F]) {
        let d = inputs.sizes.context_dim;
        let Panel { first, rows, width } = panel;
        if rows < width {
            to.fill(F::zero());
        }
        transpose(&contexts[first * d..], d, 0..rows, 0..d, to, width, |x| x);
        if inputs.logit_scale != num_traits::One::one() {
            to.iter_mut().for_each(|x| *x *= inputs.logit_scale);
        }
    }

    /// Reads rows in the accumulation dtype where they lie, and widens others.
    fn decoder_tile<'t>(
        self,
        inputs: &'t Inputs<'_, F>,
        ids: Range<usize>,
        _: bool,
        buffers: &'t mut [Vec<F>; 2],
    ) -> Self::Decoder<'t> {
        let matrices = inputs.decoder.matrices().zip(buffers);
        matrices.map(|((columns, matrix), buffer)| (columns, matrix.block(ids.clone(), buffer))).collect()
    }

    /// Writes the logits where the exponentials are kept, or in the buffer.
    fn multiply(
        self,
        operands: FirstOperands<'_, '_, F, Self>,
        buffer: &mut Aligned<F>,
        mut exponentiate: impl FnMut(usize, &mut [F], &mut [F]),
    ) {
        let FirstOperands { inputs, ids, decoder, panels, is_first_tile } = operands;
        let start = if is_first_tile { Start::Zero } else { Start::Stored };
        for (i, PanelOperands { panel: Panel { width, .. }, packed, exponentials, products }) in
            panels.into_iter().enumerate()
        {
            let exponentials = match exponentials {
                Some(exponentials) => exponentials,
                None => &mut buffer.at_least(ids.len() * width)[..ids.len() * width],
            };
            write_logits(inputs, decoder, ids.clone(), packed, width, exponentials);
            exponentiate(i, exponentials, products);
            if products.is_empty() {
                continue;
            }
            for (columns, block) in decoder {
                let left = Left { values: block.values, row: block.column, step: block.id, depth: ids.len() };
                let (rows, left, right) = (columns.len(), &[left][..], &exponentials[..]);
                let to = &mut products[columns.start * width..];
                let product = PanelProduct { start, rows, left, right, width, to, to_row: width, columns: width };
                F::dispatch(self.isa, product);
            }
        }
    }

    /// Copies the columns of each panel side by side: rows of the contexts may be pages apart.
    fn third_contexts<'c>(self, operands: &ThirdOperands<'_, F>, packed: &'c mut [F]) -> &'c [F]
    where
        F: 'c,
    {
        let width = operands.factors.first_product.layout.panel_rows;
        let panels = packed.chunks_exact_mut((operands.factors.rows.len() * width).max(1));
        parallel::for_each(panels.take(operands.d / width).enumerate(), |(panel, to)| {
            let rows = operands.contexts.chunks_exact(operands.d);
            for (to, row) in to.chunks_exact_mut(width).zip(rows) {
                to.copy_from_slice(&row[panel * width..][..width]);
            }
        });
        packed
    }

    /// Sums over a few panels at a time, whose scaled contexts stay in the cache. A gradient that is rounded at once is
    /// the sum over all of them first.
    fn add_products(
        self,
        operands: &ThirdOperands<'_, F>,
        tiles: &mut [GradientTile<'_, F, F>],
        contexts: &&[F],
        buffers: &mut GradientBuffers<F>,
    ) {
        let first_product = operands.factors.first_product;
        let panels_at_a_time = BLOCK_ROWS.div_ceil(first_product.layout.panel_rows);
        let is_rounded = |gradient: &TileGradient<'_, F>| !gradient.rounded.is_empty();
        let most_ids = tiles.iter().map(|tile| tile.ids.len()).max().unwrap_or(0);
        let rounded_columns = tiles[0].gradients.iter().filter(|gradient| is_rounded(gradient));
        let tile_sums = most_ids * rounded_columns.map(|gradient| gradient.columns.len()).max().unwrap_or(0);
        buffers.sums.resize(tiles.len() * tile_sums, F::zero());
        for panels in first_product.panels.chunks(panels_at_a_time) {
            for matrix in 0..tiles[0].gradients.len() {
                self.add_matrix_products(operands, tiles, matrix, panels, contexts, buffers);
            }
            for GradientTile { ids, exponentials, factors, bias, .. } in &mut *tiles {
                let Some(bias) = bias else { continue };
                let (left, factors) = (left_operand(exponentials, panels, ids.len()), &factors[panels[0].first..]);
                F::dispatch(self.isa, AddWeightedSums { left: &left, factors, to: bias });
            }
        }
        for (GradientTile { ids, gradients, .. }, sums) in
            tiles.iter_mut().zip(buffers.sums.chunks_mut(tile_sums.max(1)))
        {
            for gradient in gradients.iter_mut().filter(|gradient| is_rounded(gradient)) {
                let (columns, width) = (gradient.columns.clone(), gradient.columns.len());
                operands.round(self.isa, ids, columns, (&mut *sums, width), gradient);
            }
        }
    }
}

/// A thread's buffers of the third product.
#[derive(Default)]
pub(crate) struct GradientBuffers<F> {
    /// Some columns of the contexts of some panels, times the factors of their rows.
    scaled: Vec<F>,
    /// `[tile][ids, columns]`: a gradient that is rounded at once.
    sums: Vec<F>,
}

impl Vectors {
    /// Adds the products with the rows of some panels to the gradients that have index `matrix` in each tile. The tiles
    /// share the scaled contexts where their factors are equal.
    fn add_matrix_products<F: Accumulator>(
        self,
        operands: &ThirdOperands<'_, F>,
        tiles: &mut [GradientTile<'_, F, F>],
        matrix: usize,
        panels: &[Panel],
        by_panel: &[F],
        GradientBuffers { scaled, sums }: &mut GradientBuffers<F>,
    ) {
        let tile_sums = sums.len() / tiles.len();
        let (d, layout, first) = (operands.d, &operands.factors.first_product.layout, panels[0].first);
        let rows: usize = panels.iter().map(|panel| panel.rows).sum();
        let full = layout.panel_rows;
        let all_columns = tiles[0].gradients[matrix].columns.clone();
        let to_row = all_columns.len();
        for column in all_columns.clone().step_by(full) {
            let columns = full.min(all_columns.end - column);
            let width = columns.next_multiple_of(layout.lanes);
            scaled.resize(rows * width, F::zero());
            let mut scaled_by: &[F] = &[];
            for (i, tile) in tiles.iter_mut().enumerate() {
                let GradientTile { ids, exponentials, factors, gradients, .. } = tile;
                let factors = &factors[first..][..rows];
                if scaled_by != factors {
                    let (contexts, stride) = if columns == full && column.is_multiple_of(full) {
                        (&by_panel[column * operands.factors.rows.len() + first * full..], full)
                    } else {
                        (&operands.contexts[first * d + column..], d)
                    };
                    F::dispatch(self.isa, ScaleRows { contexts, stride, columns, factors, to: scaled });
                    scaled_by = factors;
                }
                let left = left_operand(exponentials, panels, ids.len());
                let TileGradient { values, rounded, is_started, .. } = &mut gradients[matrix];
                let values = if rounded.is_empty() { &mut **values } else { &mut sums[i * tile_sums..] };
                let start = if *is_started || first > 0 { Start::Stored } else { Start::Zero };
                let (rows, left, right) = (ids.len(), &left[..], &scaled[..]);
                let to = &mut values[column - all_columns.start..];
                F::dispatch(self.isa, PanelProduct { start, rows, left, right, width, to, to_row, columns });
            }
        }
    }
}

/// Writes the logits of a tile and a panel, `[ids, width]`, without the logit function.
fn write_logits<F: Accumulator>(
    inputs: &Inputs<'_, F>,
    decoder: &[(Range<usize>, Block<'_, F>)],
    ids: Range<usize>,
    packed: &[F],
    width: usize,
    to: &mut [F],
) {
    for (columns, block) in decoder {
        let d = columns.len();
        // All depths are nearly the same.
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
            F::dispatch(inputs.isa, product);
        }
    }
}

/// Returns the exponentials of some panels in a tile of `ids` ids as a left operand, a block for each panel.
fn left_operand<'e, F>(exponentials: &'e [F], panels: &[Panel], ids: usize) -> Vec<Left<'e, F>> {
    let block = |panel: &Panel| Left {
        values: &exponentials[ids * panel.first..][..ids * panel.width],
        row: panel.width,
        step: 1,
        depth: panel.rows,
    };
    panels.iter().map(block).collect()
}
