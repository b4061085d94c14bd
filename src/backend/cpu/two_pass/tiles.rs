//! The first product on a tile unit. The contexts are packed in squares, and the decoder's rows in pairs of columns.

use std::ops::Range;

use candle_core::DType;
use half::bf16;

use super::first_product::{FirstProduct, FormChoice, PackedContexts};
use crate::backend::cpu::memory::{Aligned, Workspace};
use crate::backend::cpu::operands::decoder::DecoderView;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::products::decoder_squares::DecoderSquares;
use crate::backend::cpu::products::multiplier::Tiles;
use crate::backend::cpu::tiles::product::{Parts, SquareProduct, PAIRS, SIDE, SQUARE};
use crate::backend::cpu::tiles::rounding::{Pair, RoundedRow};
use crate::backend::cpu::tiles::squares::{store_lines, Grid};
use crate::backend::cpu::tiles::transpose;
use crate::backend::cpu::vector::simd::{Float, Isa};
use crate::backend::parallel;

/// The most rows of operands in bf16 for which vectors, which round nothing, are faster.
const FEW_BF16_ROWS: usize = 8;
/// The most rows of other operands for which vectors are faster: the tile unit would round these.
const FEW_WIDE_ROWS: usize = 24;
/// The number of ids that are multiplied at a time.
const IDS: usize = 2 * SIDE;
/// The number of rows whose sums stay in the cache.
const ROWS: usize = SIDE;

/// The contexts of a chunk as an operand.
pub(crate) enum TileContexts {
    /// A few rows, which vectors multiply.
    Few(PackedContexts<f32>),
    /// Squares in bf16, which the tile unit multiplies.
    Squares(Aligned<bf16>),
}

/// The buffers of a thread.
#[derive(Default)]
pub(crate) struct Buffers {
    decoder: DecoderSquares,
    /// `[square of ids][pair of columns][SIDE]`.
    pairs: Aligned<Pair>,
    /// `[rows, ids]`.
    sums: Aligned<f32>,
}

impl FirstProduct<f32> for Tiles {
    type Contexts = TileContexts;
    type Buffers = Buffers;

    fn isa(self) -> Isa {
        self.isa
    }

    fn workspace(self, d: usize, vocab: usize) -> Workspace {
        let ids = IDS.min(vocab.next_multiple_of(SIDE));
        let decoder_size = ids * d.next_multiple_of(SIDE);
        Workspace {
            per_row: d.next_multiple_of(SIDE) * size_of::<bf16>(),
            fixed: SIDE * d.next_multiple_of(SIDE) * size_of::<bf16>(),
            // The decoder's rows, their transpose, the pairs of its columns, and the sums.
            per_thread: 3 * decoder_size * size_of::<bf16>() + ROWS * ids * size_of::<f32>(),
        }
    }

    fn contexts(self, contexts: &[f32], decoder: &DecoderView<'_, f32>, form: FormChoice) -> TileContexts {
        let d = decoder.width();
        let most = if self.dtype == DType::BF16 { FEW_BF16_ROWS } else { FEW_WIDE_ROWS };
        if form.choosing_rows(contexts.len() / d) <= most && !decoder.weight.is_transposed() {
            return TileContexts::Few(self.vectors().contexts(contexts, decoder, form));
        }
        let across = d.div_ceil(SIDE);
        let mut squares = Aligned::zeros(contexts.len().div_ceil(SIDE * d) * across * SQUARE);
        let rows = squares.chunks_exact_mut(across * SQUARE).zip(contexts.chunks(SIDE * d));
        parallel::for_each_with(
            rows,
            || vec![bf16::ZERO; SIDE * d],
            |rounded, (squares, values)| {
                let rounded = &mut rounded[..values.len()];
                f32::dispatch(self.isa, RoundedRow { values, to: rounded });
                store_lines(rounded.chunks_exact(d), Grid { down: 1, across, parts: Parts::One }, squares);
            },
        );
        TileContexts::Squares(squares)
    }

    fn multiply(
        self,
        contexts: &TileContexts,
        decoder: &DecoderView<'_, f32>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, f32>,
        Buffers { decoder: squares, pairs, sums }: &mut Buffers,
    ) {
        let contexts = match contexts {
            TileContexts::Few(contexts) => {
                return self.vectors().multiply(contexts, decoder, ids, tile, &mut Default::default());
            }
            TileContexts::Squares(contexts) => contexts,
        };
        let depth = decoder.width().div_ceil(SIDE);
        for first in ids.clone().step_by(IDS) {
            let block = first..ids.end.min(first + IDS);
            let width = block.len().next_multiple_of(SIDE);
            squares.read_rows(self.isa, decoder, block.clone(), Parts::One);
            let pairs = pairs.at_least(width * depth * PAIRS);
            transpose::pairs(self.isa, &squares.rows, pairs);
            for top in (0..tile.rows).step_by(ROWS) {
                let rows = top..tile.rows.min(top + ROWS);
                let down = rows.len().div_ceil(SIDE);
                let sums = sums.at_least(down * SIDE * width);
                self.unit.multiply_squares(SquareProduct {
                    left: &contexts[top * depth * SIDE..],
                    right: pairs,
                    depth,
                    to: sums,
                    rows: down,
                    width,
                });
                for (row, sums) in rows.zip(sums.chunks_exact(width)) {
                    let columns = block.start - ids.start..block.end - ids.start;
                    tile.row_mut(row)[columns].copy_from_slice(&sums[..block.len()]);
                }
            }
        }
    }
}
