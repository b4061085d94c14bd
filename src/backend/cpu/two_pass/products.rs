//! The three matrix products of a chunk, cut into tiles that stay in the cache of one core and are computed in
//! parallel.
//!
//! Each tile is computed on one thread, by the `gemm` crate or by `gemv`, so that the results do not depend on the
//! number of threads.

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::gemv::{self, Dots};
use crate::backend::cpu::matrix::{Decoder, DecoderMatrix, View, ViewMut};
use crate::backend::cpu::results::ColumnGradient;
use crate::backend::cpu::simd::{Float, Isa, ROW_ALIGN};

/// Ids per tile of the first and third product: a tile of the decoder stays in the second-level cache. The AVX-512
/// kernel computes 48 at a time, which divides this number.
pub(super) const VOCAB_TILE: usize = 384;
/// Maximum rows per tile of the second product.
const ROW_TILE: usize = 256;
/// Maximum columns of the decoder per tile of the first and second product. Narrower tiles read rows in short pieces.
const CONTEXT_TILE: usize = 512;
/// Minimum rows and columns of a tile of the second product, which is not cut further.
const LEAST_PART: usize = 64;

/// `dst = lhs rhs`, or `dst += lhs rhs`, on the calling thread.
fn multiply<F: Float>(dst: &mut ViewMut<'_, F>, accumulate: bool, lhs: View<'_, F>, rhs: View<'_, F>) {
    assert!(dst.rows == lhs.rows && dst.cols == rhs.cols && lhs.cols == rhs.rows);
    // SAFETY: the views' constructors check that all elements lie in borrowed slices, `dst` is a unique borrow, and the
    // assertion above checks that the sizes agree. `F` is f32 or f64, both of which `gemm` supports.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            lhs.cols,
            dst.data,
            1,
            dst.row_stride,
            accumulate,
            lhs.data,
            lhs.col_stride,
            lhs.row_stride,
            rhs.data,
            rhs.col_stride,
            rhs.row_stride,
            if accumulate { F::one() } else { F::zero() },
            F::one(),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// First product: `logits[rows, vocab] = contexts[rows, d] decoder[vocab, d]^T`, tile by tile. Calls `summary` on each
/// tile while it is in the cache, with its range of ids; the tile is padded to whole registers. Returns the summaries
/// in order.
pub(super) fn logits<T: Element, O: Send>(
    to: &mut [T::Acc],
    stride: usize,
    contexts: &[T::Acc],
    d: usize,
    decoder: Decoder<'_, T>,
    isa: Isa,
    summary: impl Fn(Range<usize>, &mut ViewMut<'_, T::Acc>) -> O + Sync,
) -> Vec<O> {
    let vocab = decoder.weight.vocab;
    let rows = contexts.len() / d;
    let few = rows <= gemv::MOST_ROWS && !decoder.weight.transposed;
    let all_contexts = View::new(contexts, rows, d, d);
    // The contexts of each part, one after the other.
    let of_part = |(columns, matrix): (Range<usize>, _)| match few && columns.len() < d {
        true => (Cow::Owned(gathered(contexts, d, columns.clone())), columns, matrix),
        false => (Cow::Borrowed(contexts), columns, matrix),
    };
    let parts: Vec<(Cow<'_, [T::Acc]>, _, _)> = decoder.parts().map(of_part).collect();
    let fill = |ids: Range<usize>, tile: &mut ViewMut<'_, T::Acc>, buffer: &mut Vec<T::Acc>| {
        for (contexts, columns, matrix) in &parts {
            let (d, depth) = (columns.len(), context_tile(columns.len(), 1));
            if few {
                // The planned buffer holds so many ids.
                let step = (depth * VOCAB_TILE / d).max(1);
                for first in ids.clone().step_by(step) {
                    let part = first..ids.end.min(first + step);
                    let (first_column, ids) = (part.start - ids.start, part.len());
                    let (decoder, stride) = matrix.rows(part, 0..d, buffer);
                    let (add, to) = (columns.start > 0, &mut *tile);
                    T::Acc::dispatch(isa, Dots { contexts, decoder, stride, d, ids, first_column, add, to });
                }
                continue;
            }
            for first in (0..d).step_by(depth) {
                let of_block = first..d.min(first + depth);
                let (block, stride) = matrix.columns(ids.clone(), of_block.clone(), buffer);
                let block = View::new(block, of_block.len(), ids.len(), stride);
                let first = columns.start + first;
                let contexts = all_contexts.columns(first..first + of_block.len());
                multiply(&mut tile.first_columns(ids.len()), first > 0, contexts, block);
            }
        }
        summary(ids, tile)
    };
    ViewMut::new(to, rows, stride, stride)
        .tiles(rows.max(1), VOCAB_TILE)
        .into_par_iter()
        .map_init(Vec::new, |buffer, (_, columns, mut tile)| {
            fill(columns.start..columns.end.min(vocab), &mut tile, buffer)
        })
        .collect()
}

/// Second product: `gradient[rows, d] = logit_gradient[rows, vocab] decoder[vocab, d]`.
pub(super) fn context_gradient<T: Element>(
    gradient: &mut [T::Acc],
    d: usize,
    logit_gradient: &[T::Acc],
    stride: usize,
    decoder: Decoder<'_, T>,
) {
    let rows = gradient.len() / d;
    for (columns, matrix) in decoder.parts() {
        let gradient = &mut gradient[columns.start.min(rows * d)..];
        of_columns(ViewMut::new(gradient, rows, columns.len(), d), logit_gradient, stride, matrix);
    }
}

/// The second product for a part of the decoder.
fn of_columns<T: Element>(
    gradient: ViewMut<'_, T::Acc>,
    logit_gradient: &[T::Acc],
    stride: usize,
    decoder: DecoderMatrix<'_, T>,
) {
    let DecoderMatrix { vocab, width: d, .. } = decoder;
    let rows = gradient.rows;
    // The parts are equal, and enough for all threads. Each tile copies its part of a decoder that is not read in
    // place; then the rows are cut no further than the threads need.
    let context_tile = context_tile(d, 2);
    let context_parts = d.div_ceil(context_tile);
    let least_parts = rayon::current_num_threads().div_ceil(context_parts);
    let row_parts = if decoder.is_read_in_place() { rows.div_ceil(ROW_TILE).max(least_parts) } else { least_parts };
    let row_tile = rows.div_ceil(row_parts).max(LEAST_PART);
    gradient.tiles(row_tile, context_tile).into_par_iter().for_each_init(
        Vec::new,
        |buffer, (tile_rows, columns, mut tile)| {
            for first in (0..vocab).step_by(VOCAB_TILE) {
                let ids = first..vocab.min(first + VOCAB_TILE);
                let (block, block_stride) = decoder.rows(ids.clone(), columns.clone(), buffer);
                let from = &logit_gradient[tile_rows.start * stride + first..];
                multiply(
                    &mut tile,
                    first > 0,
                    View::new(from, tile_rows.len(), ids.len(), stride),
                    View::new(block, ids.len(), columns.len(), block_stride),
                );
            }
        },
    );
}

/// Third product: `gradient[vocab, d] (+)= logit_gradient[rows, vocab]^T contexts[rows, d]`.
pub(super) fn decoder_gradient<F: Float>(
    gradient: &mut ColumnGradient<F>,
    logit_gradient: &[F],
    stride: usize,
    contexts: &[F],
    d: usize,
) {
    let ColumnGradient { columns, values, is_started, .. } = gradient;
    let (rows, width) = (contexts.len() / d, columns.len());
    let contexts = View::new(contexts, rows, d, d).columns(columns.clone());
    let vocab = values.len() / width;
    let all = ViewMut::new(values, vocab, width, width);
    all.tiles(VOCAB_TILE, width).into_par_iter().for_each(|(ids, _, mut tile)| {
        let logits = View::new(&logit_gradient[ids.start..], rows, ids.len(), stride);
        multiply(&mut tile, *is_started, logits.transposed(), contexts);
    });
    *is_started = true;
}

/// Some columns of `[rows, d]`.
fn gathered<F: Float>(contexts: &[F], d: usize, columns: Range<usize>) -> Vec<F> {
    contexts.chunks_exact(d).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// Columns of the decoder per tile. Tiles have equal width, at most [`CONTEXT_TILE`]; there are at least `least_parts`
/// of them unless they would be narrower than [`LEAST_PART`].
fn context_tile(d: usize, least_parts: usize) -> usize {
    let parts = d.div_ceil(CONTEXT_TILE).max(d.div_ceil(LEAST_PART).min(least_parts));
    d.div_ceil(parts).next_multiple_of(ROW_ALIGN)
}

/// Elements of the buffer in which each thread transposes or widens a tile of the decoder.
pub(super) fn buffered_tile(d: usize, vocab: usize) -> usize {
    context_tile(d, 1) * VOCAB_TILE.min(vocab.next_multiple_of(ROW_ALIGN))
}
