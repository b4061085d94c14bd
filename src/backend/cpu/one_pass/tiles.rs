//! The format of products on a tile unit, whose operands are bf16: the decoder's rows, the contexts, and the
//! exponentials. Numbers in f32 are rounded, or each is split into three. All sums are f32, as on vectors.

use std::ops::Range;

use half::bf16;

use super::format::{FirstOperands, Format, GradientTile, ThirdOperands, TileGradient};
use super::layout::Blocks;
use super::tile_operands::{AddTileWeightedSums, RoundExponentials, ScaleAndAddBias, ScaleInPairs};
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::products::decoder_squares::DecoderSquares;
use crate::backend::cpu::products::multiplier::Tiles;
use crate::backend::cpu::products::panel::Panel;
use crate::backend::cpu::tiles::product::{Operand, Parts, TileProduct, SIDE, SQUARE};
use crate::backend::cpu::tiles::rounding::Pair;
use crate::backend::cpu::tiles::split::write_parts;
use crate::backend::cpu::tiles::squares::{store_parts, Grid};
use crate::backend::cpu::tiles::transpose;
use crate::backend::cpu::vector::simd::{Float, Isa};
use crate::backend::parallel;
use crate::backend::plan::Kernels;

/// The number of elements of the decoder in a tile, with all parts. The tile is there twice: in rows, and in columns.
const TILE_ELEMENTS: usize = 384 << 10;
/// The number of elements of the decoder, each with all parts, in a tile on AMX, which is multiplied in blocks of
/// columns.
const BLOCKED_TILE_ELEMENTS: usize = 512 << 10;
/// The number of elements of a block, with all parts: the block, in rows or in columns, stays in the second-level
/// cache. The unit tests' operands are small, and are cut into several blocks too.
const BLOCK_ELEMENTS: usize = if cfg!(test) { 12 << 10 } else { 384 << 10 };
/// The number of ids whose gradients the third product computes at a time. With [`GROUP_COLUMNS`] of their columns,
/// these stay in the second-level cache while the product sums over the rows.
const GROUP_IDS: usize = 512;
/// As [`GROUP_IDS`], for exponentials of three parts, a tile of which stays in the cache.
const GROUP_SPLIT_IDS: usize = 256;
/// The number of columns whose gradients the third product computes at a time.
const GROUP_COLUMNS: usize = 256;
/// The number of rows whose contexts are scaled at a time for a tile with factors of its own.
const OWN_ROWS: usize = 768;
/// The maximum number of panels that share a tile of the decoder.
const MOST_PANELS: usize = 16;

/// The logits of a tile and the panels that pass through it together.
#[derive(Default)]
pub(crate) struct LogitTile {
    /// `[panel][padded ids, SIDE]`
    logits: Aligned<f32>,
    /// The exponentials of a panel, if they are not kept for the third product.
    exponentials: Aligned<bf16>,
    /// `[panel][square of ids][part][pair of ids][SIDE]`: the exponentials
    pairs: Aligned<Pair>,
}

impl Format<f32> for Tiles {
    type Packed = Pair;
    type Exponential = bf16;
    type Decoder<'t> = &'t DecoderSquares;
    type DecoderBuffers = DecoderSquares;
    type LogitBuffers = LogitTile;
    /// For each segment `[square of columns][square of rows][part][pair][SIDE]`: the contexts times its factors, in
    /// pairs of rows. A tile may have other factors.
    type ThirdContexts<'c> = Vec<Aligned<Pair>>;
    type GradientBuffers = GradientBuffers;

    /// Everything is a multiple of a square's side; a panel is as wide as a square.
    fn blocks(self) -> Blocks {
        Blocks {
            ids: SIDE,
            panel_rows: SIDE,
            lanes: SIDE,
            padding: SIDE,
            pieces: 64,
            tiles: 32,
            tile_elements: self.tile_elements(),
            group_ids: self.group_ids(),
        }
    }

    fn packed_per_row(self, d: usize) -> usize {
        self.parts.count() * d.next_multiple_of(SIDE) / 2
    }

    fn kept_per_exponential(self) -> usize {
        self.parts.count()
    }

    fn thread_bytes(self, d: usize, ids: usize, keeps_exponentials: bool) -> usize {
        let (d_padded, element) = (d.next_multiple_of(SIDE), self.parts.count() * size_of::<bf16>());
        let decoder = 2 * ids * d_padded * element;
        let packing = (SIDE + 1) * d_padded * element;
        let tile = TileSquares { down: ids.div_ceil(SIDE), across: d.div_ceil(SIDE) };
        let panels = if self.column_blocks(tile).len() == 1 { 1 } else { MOST_PANELS };
        let logits = panels * ids * SIDE * (size_of::<f32>() + element);
        let group = GROUP_COLUMNS.min(d_padded);
        let third_product = OWN_ROWS * group * element + ids.max(self.group_ids()) * group * size_of::<f32>();
        decoder + packing + logits + if keeps_exponentials { third_product } else { ids * SIDE * element }
    }

    fn scaled_context_bytes(self, d: usize) -> usize {
        self.parts.count() * d.next_multiple_of(SIDE) * size_of::<bf16>()
    }

    fn most_panels(self) -> usize {
        MOST_PANELS
    }

    /// Writes `[square of columns][part][pair of columns][SIDE]`.
    fn pack(self, inputs: &Inputs<'_, f32>, contexts: &[f32], panel: Panel, to: &mut [Pair]) {
        let d = inputs.sizes.context_dim;
        let grid = Grid { down: 1, across: d.div_ceil(SIDE), parts: self.parts };
        let mut squares = Aligned::zeros(grid.elements());
        let mut parts = vec![bf16::ZERO; self.parts.count() * d];
        for (r, context) in contexts[panel.first * d..].chunks_exact(d).take(panel.rows).enumerate() {
            write_parts(self.isa, context, self.parts, &mut parts, d);
            store_parts(&parts, r, grid, &mut squares);
        }
        transpose::pairs(self.isa, &squares, to);
    }

    /// Rounds or splits the rows, and transposes them for a second product.
    fn decoder_tile<'t>(
        self,
        inputs: &'t Inputs<'_, f32>,
        ids: Range<usize>,
        needs_columns: bool,
        tile: &'t mut DecoderSquares,
    ) -> &'t DecoderSquares {
        if needs_columns {
            tile.read(self.isa, &inputs.decoder, ids, self.parts);
        } else {
            tile.read_rows(self.isa, &inputs.decoder, ids, self.parts);
        }
        tile
    }

    /// Computes the logits in f32, and rounds or splits their exponentials for the second and the third product. A wide
    /// decoder is multiplied in blocks of columns: all panels pass through a block while it stays in the cache.
    fn multiply(
        self,
        operands: FirstOperands<'_, '_, f32, Self>,
        buffers: &mut LogitTile,
        mut exponentiate: impl FnMut(usize, &mut [f32], &mut [f32]),
    ) {
        let FirstOperands { inputs, ids, decoder, mut panels, is_first_tile } = operands;
        let tile = TileSquares { down: ids.len().div_ceil(SIDE), across: inputs.sizes.context_dim.div_ceil(SIDE) };
        let (parts, n, blocks) = (self.parts, tile.down * SIDE, self.column_blocks(tile));
        let together = if blocks.len() == 1 { 1 } else { panels.len() };
        let LogitTile { logits, exponentials: unkept, pairs } = buffers;
        for (group, panels) in panels.chunks_mut(together).enumerate() {
            let logits = logits.at_least(panels.len() * n * SIDE);
            for block in &blocks {
                for (panel, logits) in panels.iter().zip(logits.chunks_exact_mut(n * SIDE)) {
                    self.add_logits(tile, block, &decoder.rows, panel.packed, logits);
                }
            }
            let pairs = pairs.at_least(panels.len() * n / SIDE * parts.square_pairs());
            let results =
                logits.chunks_exact_mut(n * SIDE).zip(pairs.chunks_exact_mut(n / SIDE * parts.square_pairs()));
            for ((i, panel), (tile_logits, pairs)) in panels.iter_mut().enumerate().zip(results) {
                let (logits, padding) = tile_logits.split_at_mut(ids.len() * SIDE);
                let bias = &inputs.bias[ids.clone()];
                f32::dispatch(self.isa, ScaleAndAddBias { logits, bias, scale: inputs.logit_scale });
                exponentiate(group * together + i, logits, panel.products);
                padding.fill(0.0);
                let rounded = match &mut panel.exponentials {
                    Some(exponentials) => &mut **exponentials,
                    None if panel.products.is_empty() => continue,
                    None => unkept.at_least(n / SIDE * parts.square()),
                };
                let (exponentials, rows) = (&*tile_logits, panel.panel.rows);
                f32::dispatch(self.isa, RoundExponentials { exponentials, rows, parts, rounded, pairs });
            }
            for block in &blocks {
                let pairs = pairs.chunks_exact(n / SIDE * parts.square_pairs());
                for (panel, pairs) in panels.iter_mut().zip(pairs).filter(|(panel, _)| !panel.products.is_empty()) {
                    self.add_context_products(tile, block, &decoder.columns, pairs, panel.products, !is_first_tile);
                }
            }
        }
    }

    fn third_contexts<'c>(self, operands: &ThirdOperands<'_, f32>, _: &'c mut [Pair]) -> Vec<Aligned<Pair>>
    where
        f32: 'c,
    {
        parallel::map(operands.factors.by_segment, |factors| {
            let mut scaled = Aligned::default();
            self.scale(operands, 0..operands.factors.rows.len(), 0..operands.d, factors, &mut scaled);
            scaled
        })
    }

    /// Adds the products of all tiles whose factors are those of their segments at once, and of each other tile by
    /// itself, a group of columns at a time.
    fn add_products(
        self,
        operands: &ThirdOperands<'_, f32>,
        tiles: &mut [GradientTile<'_, f32, bf16>],
        scaled: &Vec<Aligned<Pair>>,
        buffers: &mut GradientBuffers,
    ) {
        let is_shared = |tile: &GradientTile<'_, _, _>| tile.factors == operands.factors.by_segment[tile.segment];
        for tiles in tiles.chunk_by_mut(|a, b| is_shared(a) && is_shared(b)) {
            let scaled = is_shared(&tiles[0]).then_some(&scaled[..]);
            let columns = tiles[0].gradients.iter().map(|gradient| gradient.columns.end).max().unwrap_or(0);
            for first in (0..columns).step_by(GROUP_COLUMNS) {
                self.add_columns(operands, tiles, first..columns.min(first + GROUP_COLUMNS), scaled, buffers);
            }
            for GradientTile { ids, exponentials, factors, bias, .. } in tiles {
                let Some(bias) = bias else { continue };
                let (ids, panels) = (ids.len().next_multiple_of(SIDE), operands.factors.first_product.panels.len());
                let parts = self.parts;
                f32::dispatch(self.isa, AddTileWeightedSums { exponentials, ids, panels, parts, factors, to: bias });
            }
        }
    }
}

/// A thread's buffers of the third product.
#[derive(Default)]
pub(crate) struct GradientBuffers {
    /// The scaled contexts of a tile with factors of its own.
    own: Aligned<Pair>,
    /// `[tile][padded ids, padded columns]`
    sums: Aligned<f32>,
}

/// The squares of a tile of ids, one below the other and side by side.
#[derive(Clone, Copy)]
struct TileSquares {
    down: usize,
    across: usize,
}

impl Tiles {
    /// Returns the number of elements of the decoder in a tile.
    fn tile_elements(self) -> usize {
        match self.unit.kernels() {
            Kernels::Amx => BLOCKED_TILE_ELEMENTS,
            _ => TILE_ELEMENTS / self.parts.count(),
        }
    }

    /// Cuts a tile into blocks of columns, in squares.
    fn column_blocks(self, TileSquares { down, across }: TileSquares) -> Vec<Range<usize>> {
        let most = match self.unit.kernels() {
            Kernels::Amx => (BLOCK_ELEMENTS / self.parts.count() / (down * SQUARE)).max(1),
            _ => across,
        };
        let size = across.div_ceil(across.div_ceil(most));
        (0..across).step_by(size).map(|first| first..across.min(first + size)).collect()
    }

    /// Adds the products of a block of columns to logits `[padded ids, SIDE]`, or replaces these by the first block's.
    fn add_logits(self, tile: TileSquares, block: &Range<usize>, rows: &[bf16], packed: &[Pair], logits: &mut [f32]) {
        let (square, pairs) = (self.parts.square(), self.parts.square_pairs());
        for steps in self.parts.steps(block.clone()) {
            self.unit.multiply(TileProduct {
                parts: self.parts,
                left: Operand { values: &rows[steps.start * square..], step: square, square: tile.across * square },
                right: Operand { values: &packed[steps.start * pairs..], step: pairs, square: 0 },
                steps: steps.len(),
                to: &mut *logits,
                to_row: SIDE,
                rows: tile.down,
                columns: 1,
                is_added: steps.start > 0,
            });
        }
    }

    /// Adds the products of a block of columns and the exponentials to the products `[padded d, SIDE]`, or replaces
    /// these.
    fn add_context_products(
        self,
        tile: TileSquares,
        block: &Range<usize>,
        columns: &[bf16],
        pairs: &[Pair],
        products: &mut [f32],
        is_added: bool,
    ) {
        let square = self.parts.square();
        self.unit.multiply(TileProduct {
            parts: self.parts,
            left: Operand {
                values: &columns[block.start * tile.down * square..],
                step: square,
                square: tile.down * square,
            },
            right: Operand { values: pairs, step: self.parts.square_pairs(), square: 0 },
            steps: tile.down,
            to: &mut products[block.start * SQUARE..],
            to_row: SIDE,
            rows: block.len(),
            columns: 1,
            is_added,
        });
    }

    /// Returns the number of ids whose gradients the third product computes at a time.
    fn group_ids(self) -> usize {
        match self.parts {
            Parts::One => GROUP_IDS,
            Parts::Three => GROUP_SPLIT_IDS,
        }
    }

    /// Writes some columns of the contexts of some rows, times the rows' factors.
    fn scale(
        self,
        operands: &ThirdOperands<'_, f32>,
        rows: Range<usize>,
        columns: Range<usize>,
        factors: &[f32],
        to: &mut Aligned<Pair>,
    ) {
        let (d, parts) = (operands.d, self.parts);
        let column_pairs = rows.len().div_ceil(SIDE) * parts.square_pairs();
        let to = to.at_least(columns.len().div_ceil(SIDE) * column_pairs);
        let (contexts, factors) = (&operands.contexts[rows.start * d..rows.end * d], &factors[rows]);
        f32::dispatch(self.isa, ScaleInPairs { contexts, d, columns, factors, parts, column_pairs, to });
    }

    /// Adds products to the gradients of some columns, the first of which is a multiple of a side. If `scaled` has the
    /// contexts times the factors of each segment, the tiles share these; otherwise there is one tile, with factors of
    /// its own.
    fn add_columns(
        self,
        operands: &ThirdOperands<'_, f32>,
        tiles: &mut [GradientTile<'_, f32, bf16>],
        columns: Range<usize>,
        scaled: Option<&[Aligned<Pair>]>,
        GradientBuffers { own, sums }: &mut GradientBuffers,
    ) {
        let rows = operands.factors.rows.len();
        let width = columns.len().next_multiple_of(SIDE);
        let most = tiles.iter().map(|tile| tile.ids.len().next_multiple_of(SIDE) * width).max().unwrap_or(0);
        let sums = sums.at_least(tiles.len() * most);
        let at_a_time = if scaled.is_some() { rows } else { OWN_ROWS };
        let (parts, square) = (self.parts, self.parts.square());
        for first in (0..rows).step_by(at_a_time) {
            let block = first..rows.min(first + at_a_time);
            if scaled.is_none() {
                self.scale(operands, block.clone(), columns.clone(), &tiles[0].factors, own);
            }
            let column_pairs = block.len().div_ceil(SIDE) * parts.square_pairs();
            for panels in parts.steps(first / SIDE..block.end.div_ceil(SIDE)) {
                for (tile, sums) in tiles.iter().zip(sums.chunks_exact_mut(most)) {
                    let n = tile.ids.len().next_multiple_of(SIDE);
                    let right = match scaled {
                        Some(scaled) => &scaled[tile.segment][columns.start / SIDE * column_pairs..],
                        None => own,
                    };
                    let left = &tile.exponentials[panels.start * (n / SIDE) * square..];
                    let right = &right[(panels.start - first / SIDE) * parts.square_pairs()..];
                    self.unit.multiply(TileProduct {
                        parts,
                        left: Operand { values: left, step: n / SIDE * square, square },
                        right: Operand { values: right, step: parts.square_pairs(), square: column_pairs },
                        steps: panels.len(),
                        to: sums,
                        to_row: width,
                        rows: n / SIDE,
                        columns: width / SIDE,
                        is_added: panels.start > 0,
                    });
                }
            }
        }
        for (tile, sums) in tiles.iter_mut().zip(sums.chunks_exact_mut(most)) {
            let mut sums = TileSums { columns: columns.clone(), sums, width };
            for gradient in &mut tile.gradients {
                sums.store(self.isa, operands, &tile.ids, gradient);
            }
        }
    }
}

/// The third product of a tile, for some columns of the decoder.
struct TileSums<'a> {
    columns: Range<usize>,
    /// `[ids, width]`
    sums: &'a mut [f32],
    width: usize,
}

impl TileSums<'_> {
    /// Stores the sums in the gradient of the weight or the adapter, as far as it has these columns.
    fn store(
        &mut self,
        isa: Isa,
        operands: &ThirdOperands<'_, f32>,
        ids: &Range<usize>,
        gradient: &mut TileGradient<'_, f32>,
    ) {
        let columns = gradient.columns.clone();
        let shared = self.columns.start.max(columns.start)..self.columns.end.min(columns.end);
        if shared.is_empty() {
            return;
        }
        let from = shared.start - self.columns.start..shared.end - self.columns.start;
        let to = shared.start - columns.start..shared.end - columns.start;
        if !gradient.rounded.is_empty() {
            return operands.round(isa, ids, shared, (&mut self.sums[from.start..], self.width), gradient);
        }
        let rows = gradient.values.chunks_exact_mut(columns.len());
        for (sums, row) in self.sums.chunks_exact(self.width).zip(rows) {
            let (sums, to) = (&sums[from.clone()], &mut row[to.clone()]);
            if gradient.is_started {
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum)
            } else {
                to.copy_from_slice(sums)
            }
        }
    }
}
