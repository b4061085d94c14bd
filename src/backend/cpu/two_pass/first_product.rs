//! First product: `logits[rows, vocab] = contexts[rows, d] decoder[vocab, d]^T`, cut into tiles that stay in the cache of
//! one core and are computed in parallel.
//!
//! Each tile is computed on one thread, so that the results do not depend on the number of threads.

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use super::products::{context_tile, multiply, VOCAB_TILE};
use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::gemv::{self, Dots};
use crate::backend::cpu::matrix::{Decoder, View, ViewMut};
use crate::backend::cpu::memory::Workspace;
use crate::backend::cpu::multiplier::Vectors;
use crate::backend::cpu::simd::{Float, Isa, ROW_ALIGN};

/// The product of a multiplier.
pub(crate) trait FirstProduct<T: Element>: Copy + Send + Sync {
    /// The contexts as an operand.
    type Contexts<'c>: Sync
    where
        T: 'c;
    /// The buffers of a thread.
    type Buffers: Default + Send;

    fn isa(self) -> Isa;

    /// Bytes of the contexts of a row, where these are a copy, and of a thread's buffers.
    fn workspace(self, d: usize, vocab: usize) -> Workspace;

    fn contexts<'c>(self, contexts: &'c [T::Acc], decoder: &Decoder<'_, T>) -> Self::Contexts<'c>;

    /// Writes the products of all rows and some ids to the columns of a tile, from the first on.
    fn multiply(
        self,
        contexts: &Self::Contexts<'_>,
        decoder: &Decoder<'_, T>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, T::Acc>,
        buffers: &mut Self::Buffers,
    );
}

/// Computes the product tile by tile. Calls `summary` on each tile while it is in the cache, with its range of ids; the
/// tile is padded to whole registers. Returns the summaries in order.
pub(super) fn logits<T: Element, X: FirstProduct<T>, O: Send>(
    product: X,
    to: &mut [T::Acc],
    stride: usize,
    contexts: &[T::Acc],
    decoder: Decoder<'_, T>,
    summary: impl Fn(Range<usize>, &mut ViewMut<'_, T::Acc>) -> O + Sync,
) -> Vec<O> {
    let (vocab, rows) = (decoder.weight.vocab, contexts.len() / decoder.width());
    let contexts = product.contexts(contexts, &decoder);
    ViewMut::new(to, rows, stride, stride)
        .tiles(rows.max(1), VOCAB_TILE)
        .into_par_iter()
        .map_init(X::Buffers::default, |buffers, (_, columns, mut tile)| {
            let ids = columns.start..columns.end.min(vocab);
            product.multiply(&contexts, &decoder, ids.clone(), &mut tile, buffers);
            summary(ids, &mut tile)
        })
        .collect()
}

/// The contexts `[rows, d]`.
pub(crate) struct Contexts<'c, F: Copy> {
    all: &'c [F],
    d: usize,
    /// For inner products: the columns of each part of the decoder, one part after the other.
    parts: Option<Vec<Cow<'c, [F]>>>,
}

impl<T: Element> FirstProduct<T> for Vectors {
    type Contexts<'c>
        = Contexts<'c, T::Acc>
    where
        T: 'c;
    /// A tile of a decoder that is transposed or widened.
    type Buffers = Vec<T::Acc>;

    fn isa(self) -> Isa {
        self.0
    }

    fn workspace(self, d: usize, vocab: usize) -> Workspace {
        let ids = VOCAB_TILE.min(vocab.next_multiple_of(ROW_ALIGN));
        let per_thread = context_tile(d, 1) * ids * size_of::<T::Acc>();
        Workspace { per_row: 0, fixed: 0, per_thread }
    }

    fn contexts<'c>(self, contexts: &'c [T::Acc], decoder: &Decoder<'_, T>) -> Contexts<'c, T::Acc> {
        let d = decoder.width();
        let of_part = |columns: Range<usize>| match columns.len() < d {
            true => Cow::Owned(gathered(contexts, d, columns)),
            false => Cow::Borrowed(contexts),
        };
        let are_few = contexts.len() <= gemv::MOST_ROWS * d && !decoder.weight.transposed;
        let parts = are_few.then(|| decoder.parts().map(|(columns, _)| of_part(columns)).collect());
        Contexts { all: contexts, d, parts }
    }

    fn multiply(
        self,
        contexts: &Contexts<'_, T::Acc>,
        decoder: &Decoder<'_, T>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, T::Acc>,
        buffer: &mut Vec<T::Acc>,
    ) {
        if let Some(parts) = &contexts.parts {
            for (contexts, (columns, matrix)) in parts.iter().zip(decoder.parts()) {
                let (d, ids) = (columns.len(), ids.clone());
                let decoder = &matrix.values[ids.start * d..ids.end * d];
                T::Acc::dispatch(self.0, Dots { contexts, decoder, d, add: columns.start > 0, to: tile });
            }
            return;
        }
        let contexts = View::new(contexts.all, tile.rows, contexts.d, contexts.d);
        for (columns, matrix) in decoder.parts() {
            let depth = context_tile(columns.len(), 1);
            for first in (0..columns.len()).step_by(depth) {
                let of_block = first..columns.len().min(first + depth);
                let (block, stride) = matrix.columns(ids.clone(), of_block.clone(), buffer);
                let block = View::new(block, of_block.len(), ids.len(), stride);
                let first = columns.start + first;
                let contexts = contexts.columns(first..first + of_block.len());
                multiply(&mut tile.first_columns(ids.len()), first > 0, contexts, block);
            }
        }
    }
}

/// Some columns of `[rows, d]`.
fn gathered<F: Copy>(contexts: &[F], d: usize, columns: Range<usize>) -> Vec<F> {
    contexts.chunks_exact(d).flat_map(|row| &row[columns.clone()]).copied().collect()
}
