//! Products on a tile unit, of operands in bf16: the decoder's rows, rounded if they are f32, the contexts, and the
//! exponentials. Sums of exponentials, of products and of gradients are f32, as on vectors.

use std::ops::Range;

use half::bf16;

use super::format::{Blocks, FirstOperands, Format};
use super::gradients::{DecoderGradient, Part, Tile};
use super::layout::Panel;
use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::{Aligned, CACHE_LINE};
use crate::backend::cpu::simd::{Float, Isa, Kernel, Vector};
use crate::backend::cpu::tiles::rounding::{self, Pair};
use crate::backend::cpu::tiles::transpose::transpose;
use crate::backend::cpu::tiles::{Operand, Product, TileUnit, PAIRS, SIDE};

/// Elements of the decoder in a tile. It is there twice: in rows, and in columns.
const TILE_ELEMENTS: usize = 256 << 10;
/// Rows that the third product sums over at a time.
const BLOCK_ROWS: usize = 768;
/// Panels that share a tile of the decoder, at most.
const MOST_PANELS: usize = 12;

#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    pub(crate) unit: TileUnit,
    pub(crate) isa: Isa,
}

/// A tile of the decoder: `[padded ids, d]` and `[padded d, ids]`, with distances between rows that do not lie on the
/// same lines of a cache.
#[derive(Default)]
pub(crate) struct DecoderTile {
    rows: Aligned<bf16>,
    columns: Aligned<bf16>,
}

/// The logits of a tile and a panel `[padded ids, SIDE]`, and its exponentials in pairs of ids.
#[derive(Default)]
pub(crate) struct LogitTile {
    logits: Aligned<f32>,
    /// If the exponentials are not kept: in bf16 where they would be.
    exponentials: Aligned<bf16>,
    pairs: Aligned<Pair>,
}

/// Contexts times factors, in pairs of rows: `[square of columns][pair][SIDE]`.
pub(crate) type ScaledContexts = Aligned<Pair>;

/// The distance between rows of so many numbers in bf16: an odd number of cache lines.
fn distance(columns: usize) -> usize {
    const LINE: usize = CACHE_LINE / size_of::<bf16>();
    (columns.div_ceil(LINE) | 1) * LINE
}

impl<T: Element<Acc = f32>> Format<T> for Tiles {
    type Packed = Pair;
    type Kept = bf16;
    type Decoder<'t>
        = &'t DecoderTile
    where
        T: 't;
    type DecoderBuffers = DecoderTile;
    type LogitBuffers = LogitTile;
    type Scaled = ScaledContexts;

    fn blocks(self) -> Blocks {
        Blocks {
            ids: SIDE,
            panel_rows: SIDE,
            lanes: SIDE,
            padding: SIDE,
            pieces: 64,
            tiles: 32,
            tile_elements: TILE_ELEMENTS,
            rows_at_a_time: BLOCK_ROWS,
        }
    }

    fn packed_per_row(self, d: usize) -> usize {
        d.next_multiple_of(SIDE) / 2
    }

    fn thread_bytes(self, d: usize, ids: usize, keeps: bool) -> usize {
        let d_padded = d.next_multiple_of(SIDE);
        let decoder = (ids * distance(d_padded) + d_padded * distance(ids)) * size_of::<bf16>();
        let logits = ids * SIDE * size_of::<f32>() + ids / 2 * SIDE * size_of::<Pair>();
        let of_third_product = BLOCK_ROWS * d_padded * size_of::<bf16>();
        decoder + logits + if keeps { of_third_product } else { ids * SIDE * size_of::<bf16>() }
    }

    fn scaled_bytes(self, d: usize) -> usize {
        d.next_multiple_of(SIDE) * size_of::<bf16>()
    }

    fn most_panels(self) -> usize {
        MOST_PANELS
    }

    /// `[d / 2, SIDE]`: pairs of columns
    fn pack(self, inputs: &Inputs<'_, T>, contexts: &[f32], panel: Panel, to: &mut [Pair]) {
        let d = inputs.sizes.context_dim;
        to.fill(0);
        for (r, context) in contexts[panel.first * d..].chunks_exact(d).take(panel.rows).enumerate() {
            for (to, pair) in to.chunks_exact_mut(SIDE).zip(context.chunks(2)) {
                let second = pair.get(1).map_or(0, |&x| rounding::bits(x));
                to[r] = rounding::pair(rounding::bits(pair[0]), second);
            }
        }
    }

    fn decoder<'t>(self, inputs: &'t Inputs<'_, T>, ids: Range<usize>, tile: &'t mut DecoderTile) -> &'t DecoderTile {
        tile.read(self.isa, inputs, ids);
        tile
    }

    fn multiply(
        self,
        operands: FirstOperands<'_, '_, T, Self>,
        buffers: &mut LogitTile,
        exponentiate: impl FnOnce(&mut [f32], &mut [f32]),
    ) {
        let FirstOperands { inputs, ids, decoder, panel, packed, kept, sums, is_first } = operands;
        let (d, n) = (inputs.sizes.context_dim.next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        let logits = &mut buffers.logits.at_least(n * SIDE)[..n * SIDE];
        Product {
            left: Operand { values: &decoder.rows, row: distance(d), step: SIDE, square: SIDE * distance(d) },
            right: Operand { values: packed, row: SIDE, step: PAIRS * SIDE, square: 0 },
            steps: d / SIDE,
            to: logits,
            to_row: SIDE,
            rows: n / SIDE,
            columns: 1,
            add: false,
        }
        .run(self.unit);
        let (logits, padding) = logits.split_at_mut(ids.len() * SIDE);
        let bias = &inputs.bias[ids];
        f32::dispatch(self.isa, Biased { logits, bias, scale: inputs.logit_scale });
        exponentiate(logits, sums);
        padding.fill(0.0);
        let kept = match kept {
            Some(kept) => kept,
            None if sums.is_empty() => return,
            None => buffers.exponentials.at_least(n * SIDE),
        };
        let exponentials = &buffers.logits[..n * SIDE];
        let pairs = &mut buffers.pairs.at_least(n / 2 * SIDE)[..n / 2 * SIDE];
        f32::dispatch(self.isa, Rounded { exponentials, rows: panel.rows, kept, pairs });
        if sums.is_empty() {
            return;
        }
        Product {
            left: Operand { values: &decoder.columns, row: distance(n), step: SIDE, square: SIDE * distance(n) },
            right: Operand { values: pairs, row: SIDE, step: PAIRS * SIDE, square: 0 },
            steps: n / SIDE,
            to: sums,
            to_row: SIDE,
            rows: d / SIDE,
            columns: 1,
            add: !is_first,
        }
        .run(self.unit);
    }

    fn scaled(self, gradient: &DecoderGradient<'_, T, Self>, factors: &[f32]) -> ScaledContexts {
        let mut scaled = ScaledContexts::default();
        self.scale(gradient, 0..gradient.factors.rows.len(), factors, &mut scaled);
        scaled
    }

    fn add_products(
        self,
        gradient: &DecoderGradient<'_, T, Self>,
        tiles: &mut [Tile<'_, f32, bf16>],
        scaled: &[ScaledContexts],
        own: &mut ScaledContexts,
    ) {
        let rows = gradient.factors.rows.len();
        for tile in tiles {
            let is_shared = tile.factors == gradient.factors.of_segments[tile.segment];
            for first in (0..rows).step_by(BLOCK_ROWS) {
                let block = first..rows.min(first + BLOCK_ROWS);
                let right = match is_shared {
                    true => Scaled { values: &scaled[tile.segment], pairs: pairs(rows), first: first / 2 },
                    false => {
                        self.scale(gradient, block.clone(), &tile.factors, own);
                        Scaled { values: own, pairs: pairs(block.len()), first: 0 }
                    }
                };
                let panels = first / SIDE..block.end.div_ceil(SIDE);
                self.add_tile(tile, panels.clone(), right);
                if let Some(bias) = &mut tile.bias {
                    let (exponentials, ids) = (&*tile.exponentials, tile.ids.len().next_multiple_of(SIDE));
                    f32::dispatch(
                        self.isa,
                        WeightedSums { exponentials, ids, panels, factors: &tile.factors, to: bias },
                    );
                }
            }
        }
    }
}

/// Scaled contexts of some rows.
#[derive(Clone, Copy)]
struct Scaled<'a> {
    values: &'a [Pair],
    /// Pairs of rows in each square of columns.
    pairs: usize,
    /// The first pair that is an operand.
    first: usize,
}

/// The pairs of so many rows, with padding.
fn pairs(rows: usize) -> usize {
    rows.next_multiple_of(SIDE) / 2
}

impl Tiles {
    /// Writes the contexts of some rows times their factors.
    fn scale<T: Element<Acc = f32>>(
        self,
        gradient: &DecoderGradient<'_, T, Self>,
        rows: Range<usize>,
        factors: &[f32],
        to: &mut ScaledContexts,
    ) {
        let (d, pairs) = (gradient.d, pairs(rows.len()));
        let to = to.at_least(d.next_multiple_of(SIDE) * pairs);
        let (contexts, factors) = (&gradient.contexts[rows.start * d..rows.end * d], &factors[rows]);
        f32::dispatch(self.isa, ScaledPairs { contexts, d, factors, pairs, to });
    }

    /// Adds the products of a tile's exponentials and scaled contexts, for the rows of some panels.
    fn add_tile(self, tile: &mut Tile<'_, f32, bf16>, panels: Range<usize>, scaled: Scaled<'_>) {
        let (ids, n) = (tile.ids.len(), tile.ids.len().next_multiple_of(SIDE));
        let exponentials = &tile.exponentials[panels.start * SIDE * n..];
        // Of some squares of ids and of columns; the first id and the first column are multiples of a side.
        let product = |(id, rows): (usize, usize), (column, columns): (usize, usize), to: &mut [f32], to_row, add| {
            let right = &scaled.values[column * scaled.pairs + scaled.first * SIDE..];
            Product {
                left: Operand { values: &exponentials[id * SIDE..], row: SIDE, step: SIDE * n, square: SIDE * SIDE },
                right: Operand { values: right, row: SIDE, step: PAIRS * SIDE, square: scaled.pairs * SIDE },
                steps: panels.len(),
                to,
                to_row,
                rows,
                columns,
                add,
            }
            .run(self.unit);
        };
        for Part { columns, values, is_started } in &mut tile.parts {
            let (add, to_row) = (*is_started || panels.start > 0, columns.len());
            // Whole squares are computed in place, others in a buffer.
            let whole_ids = 0..ids / SIDE * SIDE;
            let whole = columns.start.next_multiple_of(SIDE)..columns.end / SIDE * SIDE;
            if !whole_ids.is_empty() && !whole.is_empty() {
                let to = &mut values[whole.start - columns.start..];
                product((0, whole_ids.len() / SIDE), (whole.start, whole.len() / SIDE), to, to_row, add);
            }
            let of_ids = |id: usize| {
                let first = columns.start / SIDE * SIDE;
                (first..columns.end).step_by(SIDE).map(move |column| (id, column))
            };
            for (id, column) in (0..n).step_by(SIDE).flat_map(of_ids) {
                if whole_ids.contains(&id) && whole.contains(&column) {
                    continue;
                }
                let mut square = [0.0; SIDE * SIDE];
                product((id, 1), (column, 1), &mut square, SIDE, false);
                let across = column.max(columns.start)..columns.end.min(column + SIDE);
                for (id, square) in (id..ids.min(id + SIDE)).zip(square.chunks_exact(SIDE)) {
                    let to = &mut values[id * to_row + across.start - columns.start..][..across.len()];
                    let square = &square[across.start - column..][..across.len()];
                    match add {
                        true => to.iter_mut().zip(square).for_each(|(to, x)| *to += x),
                        false => to.copy_from_slice(square),
                    }
                }
            }
        }
    }
}

impl DecoderTile {
    /// Copies the decoder's rows of some ids, padded with zeros.
    fn read<T: Element<Acc = f32>>(&mut self, isa: Isa, inputs: &Inputs<'_, T>, ids: Range<usize>) {
        let d = inputs.sizes.context_dim;
        let (d_padded, n) = (d.next_multiple_of(SIDE), ids.len().next_multiple_of(SIDE));
        let (row, column) = (distance(d_padded), distance(n));
        let rows = self.rows.at_least(n * row);
        let columns = self.columns.at_least(d_padded * column);
        // The form in which the weight is stored is copied, the other one is its transpose.
        let is_transposed = inputs.decoder.weight.transposed;
        for (of_part, matrix) in inputs.decoder.parts() {
            let width = of_part.len();
            if matrix.transposed {
                for (c, values) in matrix.values.chunks_exact(matrix.vocab).enumerate() {
                    let to = &mut columns[(of_part.start + c) * column..][..n];
                    f32::dispatch(isa, RoundedRow { values: &values[ids.clone()], to });
                }
                continue;
            }
            for (r, values) in matrix.values[ids.start * width..ids.end * width].chunks_exact(width).enumerate() {
                match is_transposed {
                    false => {
                        let to = &mut rows[r * row + of_part.start..(r + 1) * row];
                        f32::dispatch(isa, RoundedRow { values, to });
                    }
                    true => {
                        let to = columns[of_part.start * column + r..].iter_mut().step_by(column);
                        to.zip(values).for_each(|(to, x)| *to = x.to_bf16());
                    }
                }
            }
        }
        match is_transposed {
            false => {
                rows[ids.len() * row..n * row].fill(bf16::ZERO);
                transpose(isa, rows, row, (n / SIDE, d_padded / SIDE), columns, column);
            }
            true => {
                columns[d * column..d_padded * column].fill(bf16::ZERO);
                // An adapter's columns are not padded yet.
                columns.chunks_exact_mut(column).take(d).for_each(|column| column[ids.len()..n].fill(bf16::ZERO));
                transpose(isa, columns, column, (d_padded / SIDE, n / SIDE), rows, row);
            }
        }
    }
}

/// `to[..] = values[..]` in bf16, and zeros behind.
struct RoundedRow<'a, T> {
    values: &'a [T],
    to: &'a mut [bf16],
}

impl<T: Element> Kernel<f32> for RoundedRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        let (to, padding) = self.to.split_at_mut(self.values.len());
        for (to, x) in to.iter_mut().zip(self.values) {
            *to = x.to_bf16();
        }
        padding.fill(bf16::ZERO);
    }
}

/// `z := scale z + bias[id]` for logits `[ids, SIDE]`
struct Biased<'a> {
    logits: &'a mut [f32],
    bias: &'a [f32],
    scale: f32,
}

impl Kernel<f32> for Biased<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, v: V) {
        let scale = v.splat(self.scale);
        for (row, &bias) in self.logits.chunks_exact_mut(SIDE).zip(self.bias) {
            let bias = v.splat(bias);
            for z in V::registers_mut(row) {
                *z = v.mul_add(*z, scale, bias);
            }
        }
    }
}

/// Exponentials `[ids, SIDE]` in bf16: as they lie, and in pairs of ids. Lanes without a row become zero.
struct Rounded<'a> {
    exponentials: &'a [f32],
    rows: usize,
    kept: &'a mut [bf16],
    /// `[ids / 2, SIDE]`
    pairs: &'a mut [Pair],
}

impl Kernel<f32> for Rounded<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        let mut mask = [0; SIDE];
        mask[..self.rows].fill(u32::MAX);
        let of_ids = self.exponentials.chunks_exact(2 * SIDE).zip(self.kept.chunks_exact_mut(2 * SIDE));
        for ((exponentials, kept), pairs) in of_ids.zip(self.pairs.chunks_exact_mut(SIDE)) {
            let (first, second) = exponentials.split_at(SIDE);
            let (kept_first, kept_second) = kept.split_at_mut(SIDE);
            for r in 0..SIDE {
                let (first, second) = (rounding::bits(first[r]) & mask[r], rounding::bits(second[r]) & mask[r]);
                kept_first[r] = rounding::bf16_of(first);
                kept_second[r] = rounding::bf16_of(second);
                pairs[r] = rounding::pair(first, second);
            }
        }
    }
}

/// Contexts times factors, in pairs of rows: `[square of columns][pair][SIDE]`, with zeros for rows and columns that
/// are missing.
struct ScaledPairs<'a> {
    /// `[rows, d]`
    contexts: &'a [f32],
    d: usize,
    factors: &'a [f32],
    pairs: usize,
    to: &'a mut [Pair],
}

impl Kernel<f32> for ScaledPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        let ScaledPairs { contexts, d, factors, pairs, to } = self;
        for (i, of_columns) in to.chunks_exact_mut(pairs * SIDE).enumerate().take(d.div_ceil(SIDE)) {
            let columns = SIDE * i..d.min(SIDE * (i + 1));
            let of_rows = contexts.chunks(2 * d).zip(factors.chunks(2));
            for (to, (rows, factors)) in of_columns.chunks_exact_mut(SIDE).zip(of_rows) {
                let (first, second) = rows.split_at(d);
                let first = &first[columns.clone()];
                let (to, padding) = to.split_at_mut(columns.len());
                padding.fill(0);
                if second.is_empty() {
                    for (to, x) in to.iter_mut().zip(first) {
                        *to = rounding::bits(factors[0] * x);
                    }
                    continue;
                }
                for ((to, x), y) in to.iter_mut().zip(first).zip(&second[columns.clone()]) {
                    *to = rounding::pair(rounding::bits(factors[0] * x), rounding::bits(factors[1] * y));
                }
            }
            of_columns[contexts.len().div_ceil(2 * d) * SIDE..].fill(0);
        }
    }
}

/// `to[id] += sum_r E[id, r] factors[r]` over the rows of some panels.
struct WeightedSums<'a> {
    /// `[panel][ids, SIDE]`
    exponentials: &'a [bf16],
    ids: usize,
    panels: Range<usize>,
    factors: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel<f32> for WeightedSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        for (id, to) in self.to.iter_mut().enumerate() {
            let mut sums = [0.0; SIDE];
            for panel in self.panels.clone() {
                let exponentials = &self.exponentials[(panel * self.ids + id) * SIDE..][..SIDE];
                let factors = &self.factors[panel * SIDE..][..SIDE];
                for r in 0..SIDE {
                    sums[r] += rounding::widened(exponentials[r]) * factors[r];
                }
            }
            *to += sums.iter().sum::<f32>();
        }
    }
}
