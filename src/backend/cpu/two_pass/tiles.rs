//! The first product on a tile unit: contexts in squares, and the decoder's rows in pairs of columns.

use std::ops::Range;

use candle_core::DType;
use half::bf16;
use rayon::prelude::*;

use super::first_product::{FirstProduct, PackedContexts, Positions};
use crate::backend::cpu::memory::{Aligned, Workspace};
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::matrix::{DecoderView, ViewMut};
use crate::backend::cpu::products::decoder_squares::DecoderSquares;
use crate::backend::cpu::products::multiplier::{Tiles, Vectors};
use crate::backend::cpu::tiles::product::{SquareProduct, PAIRS, SIDE, SQUARE};
use crate::backend::cpu::tiles::rounding::{Pair, RoundedRow};
use crate::backend::cpu::tiles::squares::{store_lines, Grid};
use crate::backend::cpu::tiles::transpose;
use crate::backend::cpu::vector::simd::{Float, Isa};

/// Maximum rows for which vectors, which round nothing, are faster: for operands in bf16, and for those that would be
/// rounded.
const MOST_FEW: usize = 8;
const MOST_FEW_OF_WIDE: usize = 24;
/// Ids that are multiplied at a time.
const IDS: usize = 2 * SIDE;
/// Rows whose sums stay in the cache.
const ROWS: usize = SIDE;

/// The contexts of a few rows as they are, or in bf16, in squares.
pub(crate) enum TileContexts<'c> {
    Few(PackedContexts<'c, f32>),
    Squares(Aligned<bf16>),
}

#[derive(Default)]
pub(crate) struct Buffers {
    decoder: DecoderSquares,
    /// `[square of ids][pair of columns][SIDE]`
    pairs: Aligned<Pair>,
    /// `[rows, ids]`
    sums: Aligned<f32>,
}

impl<T: Element<Acc = f32>> FirstProduct<T> for Tiles {
    type Contexts<'c>
        = TileContexts<'c>
    where
        T: 'c;
    type Buffers = Buffers;

    fn isa(self) -> Isa {
        self.isa
    }

    fn workspace(self, d: usize, vocab: usize) -> Workspace {
        let ids = IDS.min(vocab.next_multiple_of(SIDE));
        let of_ids = ids * d.next_multiple_of(SIDE);
        Workspace {
            per_row: d.next_multiple_of(SIDE) * size_of::<bf16>(),
            fixed: SIDE * d.next_multiple_of(SIDE) * size_of::<bf16>(),
            // The decoder's rows, their transpose, the pairs of its columns, and the sums.
            per_thread: 3 * of_ids * size_of::<bf16>() + ROWS * ids * size_of::<f32>(),
        }
    }

    fn contexts<'c>(self, contexts: &'c [f32], decoder: &DecoderView<'_, T>, positions: Positions) -> TileContexts<'c> {
        let d = decoder.width();
        let most = if T::DTYPE == DType::BF16 { MOST_FEW } else { MOST_FEW_OF_WIDE };
        if positions.rows_of_form(contexts.len() / d) <= most && !decoder.weight.is_transposed {
            return TileContexts::Few(Vectors(self.isa).contexts(contexts, decoder, positions));
        }
        let across = d.div_ceil(SIDE);
        let mut squares = Aligned::zeros(contexts.len().div_ceil(SIDE * d) * across * SQUARE);
        let of_rows = squares.par_chunks_exact_mut(across * SQUARE).zip(contexts.par_chunks(SIDE * d));
        of_rows.for_each_init(
            || vec![bf16::ZERO; SIDE * d],
            |rounded, (squares, values)| {
                let rounded = &mut rounded[..values.len()];
                f32::dispatch(self.isa, RoundedRow { values, to: rounded });
                store_lines(rounded.chunks_exact(d), Grid { down: 1, across }, squares);
            },
        );
        TileContexts::Squares(squares)
    }

    fn multiply(
        self,
        contexts: &TileContexts<'_>,
        decoder: &DecoderView<'_, T>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, f32>,
        Buffers { decoder: squares, pairs, sums }: &mut Buffers,
    ) {
        let contexts = match contexts {
            TileContexts::Few(contexts) => {
                return Vectors(self.isa).multiply(contexts, decoder, ids, tile, &mut Default::default());
            }
            TileContexts::Squares(contexts) => contexts,
        };
        let depth = decoder.width().div_ceil(SIDE);
        for first in ids.clone().step_by(IDS) {
            let block = first..ids.end.min(first + IDS);
            let width = block.len().next_multiple_of(SIDE);
            squares.read_rows(self.isa, decoder, block.clone());
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
                    let of_block = block.start - ids.start..block.end - ids.start;
                    tile.row_mut(row)[of_block].copy_from_slice(&sums[..block.len()]);
                }
            }
        }
    }
}
