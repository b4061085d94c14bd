//! The second and the third matrix product of a chunk, cut into tiles that stay in the cache of one core and are
//! computed in parallel.
//!
//! Each tile is computed on one thread, by the `gemm` crate, whose sums have the same order in tiles of any size but one
//! row or one column. So the results do not depend on the number of threads.

use crate::backend::cpu::objective::results::ColumnGradient;
use crate::backend::cpu::operands::decoder::{DecoderMatrix, DecoderView};
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::operands::matrix::{View, ViewMut};
use crate::backend::cpu::vector::simd::{Float, ROW_ALIGN};
use crate::backend::parallel;

/// The number of ids per tile of the first and third product: a tile of the decoder stays in the second-level cache.
/// The number is a multiple of 48, as the AVX-512 kernel computes 48 ids at a time.
pub(super) const VOCAB_TILE: usize = 384;
/// The most rows per tile of the second product.
const ROW_TILE: usize = 256;
/// The most columns of the decoder per tile of the second product. Narrower tiles read rows in short pieces.
const CONTEXT_TILE: usize = 512;
/// The least rows of a tile of the second product, which is not cut further.
const LEAST_ROWS: usize = 16;
/// The least columns of a tile of the second product, likewise.
const LEAST_COLUMNS: usize = 64;

/// Computes `dst = lhs rhs`, or, if it is to `accumulate`, `dst += lhs rhs`, on the calling thread.
pub(super) fn multiply<F: Float>(dst: &mut ViewMut<'_, F>, accumulate: bool, lhs: View<'_, F>, rhs: View<'_, F>) {
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

/// Computes the second product, `gradient[rows, d] = logit_gradient[rows, vocab] decoder[vocab, d]`.
pub(super) fn context_gradient<F: Accumulator>(
    gradient: &mut [F],
    d: usize,
    logit_gradient: &[F],
    stride: usize,
    decoder: DecoderView<'_, F>,
) {
    let rows = gradient.len() / d;
    for (columns, matrix) in decoder.matrices() {
        let gradient = &mut gradient[columns.start.min(rows * d)..];
        part_gradient(ViewMut::new(gradient, rows, columns.len(), d), logit_gradient, stride, matrix);
    }
}

/// Computes the second product for a part of the decoder, the weight or the adapter.
fn part_gradient<F: Accumulator>(
    gradient: ViewMut<'_, F>,
    logit_gradient: &[F],
    stride: usize,
    decoder: DecoderMatrix<'_, F>,
) {
    let DecoderMatrix { vocab, width: d, .. } = decoder;
    let rows = gradient.rows;
    // The parts are equal, and enough for all threads. Each tile copies its part of a decoder that is not read in
    // place; then the rows are cut no further than the threads need.
    let context_tile = if decoder.has_whole_rows() { d } else { context_tile(d, 2) };
    let context_parts = d.div_ceil(context_tile);
    let least_parts = rayon::current_num_threads().div_ceil(context_parts);
    let row_parts = if decoder.is_read_in_place() { rows.div_ceil(ROW_TILE).max(least_parts) } else { least_parts };
    let row_tile = if d == 1 { ROW_TILE } else { row_tile(rows, row_parts) };
    let tiles = gradient.tiles(row_tile, context_tile);
    let vocab_tile = if decoder.has_whole_rows() { whole_rows::<F>(d) } else { VOCAB_TILE };
    parallel::for_each_with(tiles, Vec::new, |buffer, (tile_rows, columns, mut tile)| {
        for first in (0..vocab).step_by(vocab_tile) {
            let ids = first..vocab.min(first + vocab_tile);
            let (block, block_stride) = decoder.rows(ids.clone(), columns.clone(), buffer);
            let from = &logit_gradient[tile_rows.start * stride + first..];
            multiply(
                &mut tile,
                first > 0,
                View::new(from, tile_rows.len(), ids.len(), stride),
                View::new(block, ids.len(), columns.len(), block_stride),
            );
        }
    });
}

/// Computes the third product, `gradient[vocab, d] (+)= logit_gradient[rows, vocab]^T contexts[rows, d]`. It adds to
/// the gradient if this is started.
pub(super) fn decoder_gradient<F: Accumulator>(
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
    parallel::for_each(all.tiles(VOCAB_TILE, width), |(ids, _, mut tile)| {
        let logits = View::new(&logit_gradient[ids.start..], rows, ids.len(), stride);
        multiply(&mut tile, *is_started, logits.transposed(), contexts);
    });
    *is_started = true;
}

/// Returns the number of rows per tile, so that there are about `parts` tiles. No tile has a single row of several:
/// the `gemm` crate adds up the products of a row, as of a column, in another order than those of more.
fn row_tile(rows: usize, parts: usize) -> usize {
    let least = rows.div_ceil(parts).max(LEAST_ROWS);
    (least..rows).find(|tile| rows % tile != 1).unwrap_or(rows.max(1))
}

/// Returns the number of ids whose whole rows are copied at a time: they stay in the second-level cache.
fn whole_rows<F>(d: usize) -> usize {
    const STEP: usize = 48;
    const BYTES: usize = 512 << 10;
    (BYTES / (d * size_of::<F>()) / STEP * STEP).clamp(STEP, VOCAB_TILE)
}

/// Returns the number of columns of the decoder per tile. Tiles have equal width, at most [`CONTEXT_TILE`]; there are
/// at least `least_parts` of them, unless they would be narrower than [`LEAST_COLUMNS`].
fn context_tile(d: usize, least_parts: usize) -> usize {
    let parts = d.div_ceil(CONTEXT_TILE).max(d.div_ceil(LEAST_COLUMNS).min(least_parts));
    d.div_ceil(parts).next_multiple_of(ROW_ALIGN)
}
