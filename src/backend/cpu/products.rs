//! The three matrix products, cut into tiles that stay in the cache of one core and are worked on in parallel.
//!
//! A tile is computed by one call of the `gemm` crate on one thread, whatever the number of threads: the results do not
//! depend on it.

use std::marker::PhantomData;
use std::ops::Range;

use num_traits::Zero;
use rayon::prelude::*;

use super::dots::{self, Dots};
use super::element::Element;
use super::simd::{Float, Isa, ROW_ALIGN};

/// Token ids of the vocabulary per tile of the first and third product: a tile of the decoder stays in the second-level cache.
/// A multiple of 48, which is what the AVX-512 kernel computes at a time.
pub(super) const VOCAB_TILE: usize = 384;
/// Rows per tile of the second product, at most.
const ROW_TILE: usize = 256;
/// Columns of the decoder per tile of the first and second product, at most: with fewer, its rows are read in slivers.
const CONTEXT_TILE: usize = 512;
/// Rows and columns below which a tile of the second product is not cut further.
const LEAST_PART: usize = 64;

/// A matrix to read: `rows x cols` elements at `data[row * row_stride + col * col_stride]`.
#[derive(Clone, Copy)]
struct View<'a, F> {
    data: *const F,
    rows: usize,
    cols: usize,
    row_stride: isize,
    col_stride: isize,
    lifetime: PhantomData<&'a [F]>,
}

/// A matrix to write, whose rows are contiguous.
pub(super) struct ViewMut<'a, F> {
    data: *mut F,
    rows: usize,
    cols: usize,
    row_stride: isize,
    lifetime: PhantomData<&'a mut [F]>,
}

// SAFETY: a `ViewMut` is a unique borrow of its elements, as `&mut [F]` is, and `F` may be sent.
unsafe impl<F: Send> Send for ViewMut<'_, F> {}

impl<'a, F> View<'a, F> {
    /// `rows x cols` out of a row-major slice whose rows start `stride` elements apart.
    fn new(data: &'a [F], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride && (rows - 1) * stride + cols <= data.len()));
        View { data: data.as_ptr(), rows, cols, row_stride: stride as isize, col_stride: 1, lifetime: PhantomData }
    }

    fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols);
        View { data: self.data.wrapping_offset(columns.start as isize * self.col_stride), cols: columns.len(), ..self }
    }

    fn transposed(self) -> Self {
        View { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

impl<'a, F> ViewMut<'a, F> {
    fn new(data: &'a mut [F], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride && (rows - 1) * stride + cols <= data.len()));
        ViewMut { data: data.as_mut_ptr(), rows, cols, row_stride: stride as isize, lifetime: PhantomData }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [F] {
        assert!(row < self.rows);
        // SAFETY: the row lies in the matrix, which is a unique borrow, and its elements are contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.data.offset(row as isize * self.row_stride), self.cols) }
    }

    fn first_columns(&mut self, cols: usize) -> ViewMut<'_, F> {
        assert!(cols <= self.cols);
        ViewMut { cols, ..*self }
    }

    /// Cuts the matrix into tiles of at most `rows x cols`: each with its range of rows and of columns.
    fn tiles(self, rows: usize, cols: usize) -> Vec<(Range<usize>, Range<usize>, ViewMut<'a, F>)> {
        let mut tiles = Vec::new();
        for r in (0..self.rows).step_by(rows) {
            for c in (0..self.cols).step_by(cols) {
                let row_range = r..self.rows.min(r + rows);
                let col_range = c..self.cols.min(c + cols);
                let tile = ViewMut {
                    // SAFETY: r < self.rows and c < self.cols, so this is an element of the matrix.
                    data: unsafe { self.data.offset(r as isize * self.row_stride + c as isize) },
                    rows: row_range.len(),
                    cols: col_range.len(),
                    row_stride: self.row_stride,
                    // Unique: `self` is consumed, and no element is in two tiles.
                    lifetime: PhantomData,
                };
                tiles.push((row_range, col_range, tile));
            }
        }
        tiles
    }
}

/// `dst = lhs rhs`, or `dst += lhs rhs`, on this thread.
fn multiply<F: Float>(dst: &mut ViewMut<'_, F>, accumulate: bool, lhs: View<'_, F>, rhs: View<'_, F>) {
    assert!(dst.rows == lhs.rows && dst.cols == rhs.cols && lhs.cols == rhs.rows);
    // SAFETY: the views' constructors checked that all elements lie in borrowed slices, `dst` is a unique borrow, and the
    // assertion above checked that the sizes agree. `F` is f32 or f64, which `gemm` supports.
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

/// Where the logits of the first product go.
pub(super) enum LogitsTo<'a, F> {
    /// `[rows, stride]`
    Kept(&'a mut [F], usize),
    /// Nowhere: each tile is overwritten once it is summarised.
    Nowhere,
}

/// First product: `logits[rows, vocab] = contexts[rows, d] decoder[vocab, d]^T`, tile by tile. Each tile is given to
/// `summary` while it is in the cache, with its range of token ids and padded to whole registers; the summaries come in order.
pub(super) fn logits<T: Element, O: Send>(
    to: LogitsTo<'_, T::Acc>,
    contexts: &[T::Acc],
    decoder: &[T],
    d: usize,
    isa: Isa,
    summary: impl Fn(Range<usize>, &mut ViewMut<'_, T::Acc>) -> O + Sync,
) -> Vec<O> {
    let (rows, vocab) = (contexts.len() / d, decoder.len() / d);
    let depth = context_tile(d, 1);
    let few = rows <= dots::MOST_ROWS;
    let all_contexts = contexts;
    let contexts = Shared(View::new(contexts, rows, d, d));
    let fill = |ids: Range<usize>, tile: &mut ViewMut<'_, T::Acc>, buffer: &mut Vec<T::Acc>| {
        if few {
            // As many token ids at a time as the buffer has been planned for.
            let step = (depth * VOCAB_TILE / d).max(1);
            for first in ids.clone().step_by(step) {
                let some = first..ids.end.min(first + step);
                let (first_id, ids) = (some.start - ids.start, some.len());
                let (decoder, stride) = T::widen_block(decoder, d, some, 0..d, buffer);
                let to = &mut *tile;
                T::Acc::dispatch(isa, Dots { contexts: all_contexts, decoder, stride, d, ids, first_id, to });
            }
            return summary(ids, tile);
        }
        for first in (0..d).step_by(depth) {
            let columns = first..d.min(first + depth);
            let stride = transpose(decoder, d, ids.clone(), columns.clone(), buffer);
            let block = View::new(buffer, columns.len(), ids.len(), stride);
            let contexts = contexts.get().columns(columns);
            multiply(&mut tile.first_columns(ids.len()), first > 0, contexts, block);
        }
        summary(ids, tile)
    };
    match to {
        LogitsTo::Kept(logits, stride) => ViewMut::new(logits, rows, stride, stride)
            .tiles(rows.max(1), VOCAB_TILE)
            .into_par_iter()
            .map_init(Vec::new, |buffer, (_, columns, mut tile)| {
                fill(columns.start..columns.end.min(vocab), &mut tile, buffer)
            })
            .collect(),
        LogitsTo::Nowhere => {
            let columns = VOCAB_TILE.min(vocab).next_multiple_of(ROW_ALIGN);
            // Not a power of two, which would put the same column of all rows into the same few cache lines.
            let stride = columns + ROW_ALIGN;
            let buffers = || (Vec::new(), vec![T::Acc::zero(); rows * stride]);
            (0..vocab.div_ceil(VOCAB_TILE))
                .into_par_iter()
                .map_init(buffers, |(buffer, tile), i| {
                    let ids = i * VOCAB_TILE..vocab.min((i + 1) * VOCAB_TILE);
                    let columns = ids.len().next_multiple_of(ROW_ALIGN);
                    fill(ids, &mut ViewMut::new(tile, rows, columns, stride), buffer)
                })
                .collect()
        }
    }
}

/// Second product: `gradient[rows, d] = logit_gradient[rows, vocab] decoder[vocab, d]`.
pub(super) fn context_gradient<T: Element>(
    gradient: &mut [T::Acc],
    logit_gradient: &[T::Acc],
    stride: usize,
    decoder: &[T],
    d: usize,
) {
    let (rows, vocab) = (gradient.len() / d, decoder.len() / d);
    // Equal parts, and enough of them for all threads. A decoder that must be widened is widened once per tile.
    let context_tile = context_tile(d, 2);
    let context_parts = d.div_ceil(context_tile);
    let row_parts = rows.div_ceil(ROW_TILE).max(rayon::current_num_threads().div_ceil(context_parts));
    let row_tile = if T::IS_ACC { rows.div_ceil(row_parts).max(LEAST_PART) } else { rows.max(1) };
    ViewMut::new(gradient, rows, d, d).tiles(row_tile, context_tile).into_par_iter().for_each_init(
        Vec::new,
        |buffer, (tile_rows, columns, mut tile)| {
            for first in (0..vocab).step_by(VOCAB_TILE) {
                let ids = first..vocab.min(first + VOCAB_TILE);
                let block = T::widen_block(decoder, d, ids.clone(), columns.clone(), buffer);
                let (block, block_stride) = block;
                multiply(
                    &mut tile,
                    first > 0,
                    View::new(&logit_gradient[tile_rows.start * stride + first..], tile_rows.len(), ids.len(), stride),
                    View::new(block, ids.len(), columns.len(), block_stride),
                );
            }
        },
    );
}

/// Third product: `gradient[vocab, d] (+)= logit_gradient[rows, vocab]^T contexts[rows, d]`.
pub(super) fn decoder_gradient<F: Float>(
    gradient: &mut [F],
    accumulate: bool,
    logit_gradient: &[F],
    stride: usize,
    contexts: &[F],
    d: usize,
) {
    let (rows, vocab) = (contexts.len() / d, gradient.len() / d);
    ViewMut::new(gradient, vocab, d, d).tiles(VOCAB_TILE, d).into_par_iter().for_each(|(ids, _, mut tile)| {
        let columns = View::new(&logit_gradient[ids.start..], rows, ids.len(), stride);
        let contexts = View::new(contexts, rows, d, d);
        multiply(&mut tile, accumulate, columns.transposed(), contexts);
    });
}

/// A view that several threads read.
struct Shared<'a, F>(View<'a, F>);

// SAFETY: a `View` is a shared borrow of its elements, as `&[F]` is, and `F` may be shared.
unsafe impl<F: Sync> Sync for Shared<'_, F> {}

impl<'a, F: Copy> Shared<'a, F> {
    fn get(&self) -> View<'a, F> {
        self.0
    }
}

/// Columns of the decoder per tile: equal tiles of at most [`CONTEXT_TILE`], and, unless they become too small, at least
/// `least_parts` of them.
fn context_tile(d: usize, least_parts: usize) -> usize {
    let parts = d.div_ceil(CONTEXT_TILE).max(d.div_ceil(LEAST_PART).min(least_parts));
    d.div_ceil(parts).next_multiple_of(ROW_ALIGN)
}

/// Elements of the buffer in which each thread transposes, or widens, a tile of the decoder.
pub(super) fn buffered_tile(d: usize, vocab: usize) -> usize {
    context_tile(d, 1) * VOCAB_TILE.min(vocab.next_multiple_of(ROW_ALIGN))
}

/// Writes `rows` and `columns` of a matrix with rows of `d` elements to `buffer`, transposed and widened, and gives the
/// distance from row to row there. The `gemm` crate can read a transposed operand, but it does so element by element,
/// which costs as much as the product itself when there are few rows of contexts.
fn transpose<T: Element>(
    matrix: &[T],
    d: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    buffer: &mut Vec<T::Acc>,
) -> usize {
    let stride = rows.len().next_multiple_of(ROW_ALIGN);
    buffer.resize(columns.len() * stride, T::Acc::zero());
    for (i, row) in rows.clone().step_by(TRANSPOSED_BLOCK).enumerate() {
        let block = &matrix[row * d..rows.end.min(row + TRANSPOSED_BLOCK) * d];
        for (j, column) in columns.clone().step_by(TRANSPOSED_BLOCK).enumerate() {
            let to = &mut buffer[j * TRANSPOSED_BLOCK * stride + i * TRANSPOSED_BLOCK..];
            transpose_block(block, d, column..columns.end.min(column + TRANSPOSED_BLOCK), to, stride);
        }
    }
    stride
}

/// Rows and columns that are transposed in registers.
const TRANSPOSED_BLOCK: usize = 8;

/// `columns` of the rows of `block`, written as rows of `to`.
#[inline]
fn transpose_block<T: Element>(block: &[T], d: usize, columns: Range<usize>, to: &mut [T::Acc], stride: usize) {
    if block.len() < TRANSPOSED_BLOCK * d || columns.len() < TRANSPOSED_BLOCK {
        for (r, row) in block.chunks_exact(d).enumerate() {
            for (c, x) in row[columns.clone()].iter().enumerate() {
                to[c * stride + r] = x.widen();
            }
        }
        return;
    }
    // In this form the compiler makes shuffles of it.
    let rows: [&[T]; TRANSPOSED_BLOCK] = std::array::from_fn(|r| &block[r * d..][columns.clone()][..TRANSPOSED_BLOCK]);
    for c in 0..TRANSPOSED_BLOCK {
        let column: [T::Acc; TRANSPOSED_BLOCK] = std::array::from_fn(|r| rows[r][c].widen());
        to[c * stride..][..TRANSPOSED_BLOCK].copy_from_slice(&column);
    }
}
