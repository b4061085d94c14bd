//! Products on a tile unit, of operands in bf16: the decoder's rows, rounded if they are f32, the contexts, and the
//! exponentials. Sums of exponentials, of products and of gradients are f32, as on vectors.

use std::ops::Range;

use candle_core::DType;
use half::bf16;

use super::format::{DecoderGradient, FirstOperands, Format, Tile, TileGradient};
use super::layout::{Blocks, Panel};
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;
use crate::backend::cpu::products::decoder_squares::DecoderSquares;
use crate::backend::cpu::products::multiplier::Tiles;
use crate::backend::cpu::tiles::product::{steps, Operand, TileProduct, PAIRS, SIDE, SQUARE};
use crate::backend::cpu::tiles::rounding::{self, Pair, RoundedRow};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};

/// Elements of the decoder in a tile. It is there twice: in rows, and in columns.
const TILE_ELEMENTS: usize = 384 << 10;
/// Ids whose gradients the third product computes at a time, and their columns: these stay in the second-level cache
/// while it sums over the rows.
const GROUP_IDS: usize = 512;
const GROUP_COLUMNS: usize = 256;
/// Rows whose contexts are scaled at a time for a tile with factors of its own.
const OWN_ROWS: usize = 768;
/// Panels that share a tile of the decoder, at most.
const MOST_PANELS: usize = 16;

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

impl<T: Element<Acc = f32>> Format<T> for Tiles {
    type Packed = Pair;
    type Exponential = bf16;
    type Decoder<'t>
        = &'t DecoderSquares
    where
        T: 't;
    type DecoderBuffers = DecoderSquares;
    type LogitBuffers = LogitTile;
    type Scaled = ScaledContexts;
    type GradientBuffers = GradientBuffers;

    fn rounds() -> bool {
        T::DTYPE == DType::BF16
    }

    fn blocks(self) -> Blocks {
        Blocks {
            ids: SIDE,
            panel_rows: SIDE,
            lanes: SIDE,
            padding: SIDE,
            pieces: 64,
            tiles: 32,
            tile_elements: TILE_ELEMENTS,
            group_ids: GROUP_IDS,
        }
    }

    fn packed_per_row(self, d: usize) -> usize {
        d.next_multiple_of(SIDE) / 2
    }

    fn thread_bytes(self, d: usize, ids: usize, keeps: bool) -> usize {
        let d_padded = d.next_multiple_of(SIDE);
        let decoder = 2 * ids * d_padded * size_of::<bf16>();
        let logits = ids * SIDE * size_of::<f32>() + ids / 2 * SIDE * size_of::<Pair>();
        let group = GROUP_COLUMNS.min(d_padded);
        let of_third_product = OWN_ROWS * group * size_of::<bf16>() + ids.max(GROUP_IDS) * group * size_of::<f32>();
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

    fn decoder<'t>(
        self,
        inputs: &'t Inputs<'_, T>,
        ids: Range<usize>,
        tile: &'t mut DecoderSquares,
    ) -> &'t DecoderSquares {
        tile.read(self.isa, &inputs.decoder, ids);
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
        self.unit.multiply_squares((&decoder.rows, packed), d / SIDE, logits, (n / SIDE, SIDE));
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
        self.unit.multiply(TileProduct {
            left: Operand { values: &decoder.columns, row: SIDE, step: SQUARE, square: n / SIDE * SQUARE },
            right: Operand { values: pairs, row: SIDE, step: PAIRS * SIDE, square: 0 },
            steps: n / SIDE,
            to: sums,
            to_row: SIDE,
            rows: d / SIDE,
            columns: 1,
            add: !is_first,
        });
    }

    fn scaled(self, gradient: &DecoderGradient<'_, T>, factors: &[f32]) -> ScaledContexts {
        let mut scaled = ScaledContexts::default();
        self.scale(gradient, 0..gradient.factors.rows.len(), 0..gradient.d, factors, &mut scaled);
        scaled
    }

    fn add_products(
        self,
        gradient: &DecoderGradient<'_, T>,
        tiles: &mut [Tile<'_, f32, bf16>],
        scaled: &[ScaledContexts],
        buffers: &mut GradientBuffers,
    ) {
        let is_shared = |tile: &Tile<'_, _, _>| tile.factors == gradient.factors.of_segments[tile.segment];
        for tiles in tiles.chunk_by_mut(|a, b| is_shared(a) && is_shared(b)) {
            let scaled = is_shared(&tiles[0]).then_some(scaled);
            let columns = tiles[0].parts.iter().map(|part| part.columns.end).max().unwrap_or(0);
            for first in (0..columns).step_by(GROUP_COLUMNS) {
                self.add_columns(gradient, tiles, first..columns.min(first + GROUP_COLUMNS), scaled, buffers);
            }
            for Tile { ids, exponentials, factors, bias, .. } in tiles {
                let Some(bias) = bias else { continue };
                let (ids, panels) = (ids.len().next_multiple_of(SIDE), gradient.factors.panels.len());
                f32::dispatch(self.isa, TileWeightedSums { exponentials, ids, panels, factors, to: bias });
            }
        }
    }
}

/// A thread's buffers of the third product.
#[derive(Default)]
pub(crate) struct GradientBuffers {
    /// The scaled contexts of a tile with factors of its own.
    own: ScaledContexts,
    /// `[tile][padded ids, padded columns]`
    sums: Aligned<f32>,
}

impl Tiles {
    /// Writes some columns of the contexts of some rows times their factors.
    fn scale<T: Element<Acc = f32>>(
        self,
        gradient: &DecoderGradient<'_, T>,
        rows: Range<usize>,
        columns: Range<usize>,
        factors: &[f32],
        to: &mut ScaledContexts,
    ) {
        let (d, pairs) = (gradient.d, rows.len().next_multiple_of(SIDE) / 2);
        let to = to.at_least(columns.len().next_multiple_of(SIDE) * pairs);
        let (contexts, factors) = (&gradient.contexts[rows.start * d..rows.end * d], &factors[rows]);
        f32::dispatch(self.isa, ScaledPairs { contexts, d, columns, factors, pairs, to });
    }

    /// Adds the products of some tiles, which share the scaled contexts of all segments, or of one tile that has its
    /// own, to the gradients of some columns. The first column is a multiple of a side.
    fn add_columns<T: Element<Acc = f32>>(
        self,
        gradient: &DecoderGradient<'_, T>,
        tiles: &mut [Tile<'_, f32, bf16>],
        columns: Range<usize>,
        scaled: Option<&[ScaledContexts]>,
        GradientBuffers { own, sums }: &mut GradientBuffers,
    ) {
        let rows = gradient.factors.rows.len();
        let width = columns.len().next_multiple_of(SIDE);
        let most = tiles.iter().map(|tile| tile.ids.len().next_multiple_of(SIDE) * width).max().unwrap_or(0);
        let sums = sums.at_least(tiles.len() * most);
        let at_a_time = if scaled.is_some() { rows } else { OWN_ROWS };
        for first in (0..rows).step_by(at_a_time) {
            let block = first..rows.min(first + at_a_time);
            if scaled.is_none() {
                self.scale(gradient, block.clone(), columns.clone(), &tiles[0].factors, own);
            }
            let pairs = block.len().next_multiple_of(SIDE) / 2;
            for panels in steps(first / SIDE..block.end.div_ceil(SIDE)) {
                for (tile, sums) in tiles.iter().zip(sums.chunks_exact_mut(most)) {
                    let n = tile.ids.len().next_multiple_of(SIDE);
                    let right = match scaled {
                        Some(scaled) => &scaled[tile.segment][columns.start * pairs..],
                        None => own,
                    };
                    let left = &tile.exponentials[panels.start * SIDE * n..];
                    let right = &right[(panels.start * SIDE - first) / 2 * SIDE..];
                    self.unit.multiply(TileProduct {
                        left: Operand { values: left, row: SIDE, step: SIDE * n, square: SQUARE },
                        right: Operand { values: right, row: SIDE, step: PAIRS * SIDE, square: pairs * SIDE },
                        steps: panels.len(),
                        to: sums,
                        to_row: width,
                        rows: n / SIDE,
                        columns: width / SIDE,
                        add: panels.start > 0,
                    });
                }
            }
        }
        for (tile, sums) in tiles.iter_mut().zip(sums.chunks_exact_mut(most)) {
            for part in &mut tile.parts {
                store(self.isa, gradient, &tile.ids, part, columns.clone(), sums, width);
            }
        }
    }
}

/// Stores a tile's sums `[ids, width]`, of these columns, in the gradient of a part of the decoder.
fn store<T: Element<Acc = f32>>(
    isa: Isa,
    gradient: &DecoderGradient<'_, T>,
    ids: &Range<usize>,
    TileGradient { columns: of_part, values, rounded, is_started }: &mut TileGradient<'_, f32>,
    columns: Range<usize>,
    sums: &mut [f32],
    width: usize,
) {
    let shared = columns.start.max(of_part.start)..columns.end.min(of_part.end);
    if shared.is_empty() {
        return;
    }
    let of_sums = shared.start - columns.start..shared.end - columns.start;
    let of_values = shared.start - of_part.start..shared.end - of_part.start;
    if !rounded.is_empty() {
        // What is rounded at once has its listed ids subtracted before.
        gradient.each_listed(ids, |id, mass, context| {
            let sums = sums[id * width..][of_sums.clone()].iter_mut();
            sums.zip(&context[shared.clone()]).for_each(|(sum, &c)| *sum -= mass * c);
        });
        for (sums, to) in sums.chunks_exact(width).zip(rounded.chunks_exact_mut(of_part.len())) {
            let (values, to) = (&sums[of_sums.clone()], &mut to[of_values.clone()]);
            f32::dispatch(isa, RoundedRow { values, to });
        }
        return;
    }
    for (sums, to) in sums.chunks_exact(width).zip(values.chunks_exact_mut(of_part.len())) {
        let (sums, to) = (&sums[of_sums.clone()], &mut to[of_values.clone()]);
        if *is_started {
            to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum)
        } else {
            to.copy_from_slice(sums)
        }
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
    columns: Range<usize>,
    factors: &'a [f32],
    pairs: usize,
    to: &'a mut [Pair],
}

impl Kernel<f32> for ScaledPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        let ScaledPairs { contexts, d, columns: all, factors, pairs, to } = self;
        for (first, of_columns) in all.clone().step_by(SIDE).zip(to.chunks_exact_mut(pairs * SIDE)) {
            let columns = first..all.end.min(first + SIDE);
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
struct TileWeightedSums<'a> {
    /// `[panel][ids, SIDE]`
    exponentials: &'a [bf16],
    ids: usize,
    panels: usize,
    factors: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel<f32> for TileWeightedSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        for (id, to) in self.to.iter_mut().enumerate() {
            let mut sums = [0.0; SIDE];
            for panel in 0..self.panels {
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
