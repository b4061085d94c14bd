//! First product: `logits[rows, vocab] = contexts[rows, d] decoder[vocab, d]^T`, cut into tiles that stay in the cache of
//! one core and are computed in parallel.
//!
//! Each tile is computed on one thread, so that the results do not depend on the number of threads.
//!
//! On vectors, few rows are inner products with the decoder's rows (`gemv`). For more, the contexts are packed into panels
//! whose rows are lanes of registers (`rows_in_lanes`): no sum over lanes ends a product, and the decoder is read from
//! where it lies. The two forms add in another order. In decoding the number of components chooses between them, so that
//! a position has the same bits, and a sampler draws the same ids, whatever else is in the batch.

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use super::gradients::VOCAB_TILE;
use crate::backend::cpu::memory::{Aligned, Workspace, CACHE_LINE};
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::matrix::{transpose, DecoderMatrix, DecoderView, ViewMut};
use crate::backend::cpu::products::gemv::DecoderDots;
use crate::backend::cpu::products::multiplier::Vectors;
use crate::backend::cpu::products::panel::{Left, Registers};
use crate::backend::cpu::products::rows_in_lanes::{ContextPanel, RowsInLanes, WidenRow};
use crate::backend::cpu::vector::simd::{Float, Isa};

/// Maximum rows of other results that have the bits of decoding.
const LIKE_DECODING: usize = 64;

/// The positions of a chunk, whose products have several forms, with sums that are rounded differently.
#[derive(Clone, Copy)]
pub(crate) struct Positions {
    pub(crate) components: usize,
    /// Whether the bits of a position may not depend on the others: then the components alone choose the form.
    pub(crate) are_independent: bool,
}

impl Positions {
    /// The number that chooses the form: of all rows, or of a position's.
    pub(super) fn rows_of_form(self, rows: usize) -> usize {
        if self.are_independent {
            self.components
        } else {
            rows
        }
    }
}

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

    /// The contexts as an operand, for the form of the product that serves these positions.
    fn contexts<'c>(
        self,
        contexts: &'c [T::Acc],
        decoder: &DecoderView<'_, T>,
        positions: Positions,
    ) -> Self::Contexts<'c>;

    /// Writes the products of all rows and some ids to the columns of a tile, from the first on.
    fn multiply(
        self,
        contexts: &Self::Contexts<'_>,
        decoder: &DecoderView<'_, T>,
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
    (contexts, positions): (&[T::Acc], Positions),
    decoder: DecoderView<'_, T>,
    summary: impl Fn(Range<usize>, &mut ViewMut<'_, T::Acc>) -> O + Sync,
) -> Vec<O> {
    let (vocab, rows) = (decoder.weight.vocab, contexts.len() / decoder.width());
    let contexts = product.contexts(contexts, &decoder, positions);
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

/// The contexts of a chunk, for the form of the product that serves it.
pub(crate) enum PackedContexts<'c, F: Copy> {
    /// For inner products: the columns of each part of the decoder, `[rows, columns]`.
    Rows(Vec<Cow<'c, [F]>>),
    Panels(Panels<F>),
}

/// Contexts whose rows are lanes of registers.
pub(crate) struct Panels<F> {
    d: usize,
    panels: Vec<ContextPanel>,
    /// The panels one after the other, each `[d, width]`.
    packed: Aligned<F>,
}

/// The buffers of a thread.
#[derive(Default)]
pub(crate) struct VectorBuffers<F> {
    /// Rows of a decoder in half precision, widened: one buffer for each part.
    widened: [Aligned<F>; 2],
    /// `[ids, width]`
    products: Aligned<F>,
}

impl<T: Element> FirstProduct<T> for Vectors {
    type Contexts<'c>
        = PackedContexts<'c, T::Acc>
    where
        T: 'c;
    type Buffers = VectorBuffers<T::Acc>;

    fn isa(self) -> Isa {
        self.0
    }

    fn workspace(self, d: usize, vocab: usize) -> Workspace {
        let Registers { width, lanes, .. } = Registers::for_isa::<T::Acc>(self.0);
        let ids = ids_at_a_time::<T::Acc>(d).min(vocab);
        let (widened, element) = (if T::IS_ACC { 0 } else { d }, size_of::<T::Acc>());
        let per_thread = (ids * (widened + width) + 3 * CACHE_LINE) * element;
        // The last panel is padded.
        Workspace { per_row: d * element, fixed: lanes * d * element, per_thread }
    }

    fn contexts<'c>(
        self,
        contexts: &'c [T::Acc],
        decoder: &DecoderView<'_, T>,
        positions: Positions,
    ) -> PackedContexts<'c, T::Acc> {
        let Registers { lanes, .. } = Registers::for_isa::<T::Acc>(self.0);
        let d = decoder.width();
        let rows = contexts.len() / d;
        let rows = if rows <= LIKE_DECODING { positions.components } else { positions.rows_of_form(rows) };
        // Lanes without a row cost as much as others, and panels need widened numbers.
        let most = if T::IS_ACC { (lanes / 2).max(1) } else { lanes };
        if decoder.weight.is_transposed || rows > most {
            return PackedContexts::Panels(Panels::new(self.0, contexts, d));
        }
        let of_part = |columns: Range<usize>| {
            if columns.len() < d {
                Cow::Owned(gathered(contexts, d, columns))
            } else {
                Cow::Borrowed(contexts)
            }
        };
        PackedContexts::Rows(decoder.matrices().map(|(columns, _)| of_part(columns)).collect())
    }

    fn multiply(
        self,
        contexts: &PackedContexts<'_, T::Acc>,
        decoder: &DecoderView<'_, T>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, T::Acc>,
        buffers: &mut VectorBuffers<T::Acc>,
    ) {
        match contexts {
            PackedContexts::Rows(parts) => {
                for (contexts, (columns, matrix)) in parts.iter().zip(decoder.matrices()) {
                    let d = columns.len();
                    let decoder = &matrix.values[ids.start * d..ids.end * d];
                    let (is_added, to) = (columns.start > 0, &mut *tile);
                    T::Acc::dispatch(self.0, DecoderDots { contexts, decoder, d, is_added, to });
                }
            }
            PackedContexts::Panels(panels) => self.multiply_panels(panels, decoder, ids, tile, buffers),
        }
    }
}

impl<F: Float> Panels<F> {
    fn new(isa: Isa, contexts: &[F], d: usize) -> Self {
        let Registers { width, lanes, .. } = Registers::for_isa::<F>(isa);
        let rows = contexts.len() / d;
        let vectors = rows.div_ceil(lanes);
        // All panels have nearly the same width.
        let count = vectors.div_ceil(width / lanes);
        let start = |panel: usize| panel * vectors / count * lanes;
        let panel = |i: usize| {
            let (first, end) = (start(i), start(i + 1));
            ContextPanel { first, rows: end.min(rows) - first, width: end - first }
        };
        let panels: Vec<ContextPanel> = (0..count).map(panel).collect();
        let mut packed: Aligned<F> = Aligned::zeros(vectors * lanes * d);
        let mut rest = &mut packed[..];
        let mut pack = Vec::with_capacity(count);
        for panel in &panels {
            let (of_panel, behind) = rest.split_at_mut(panel.width * d);
            pack.push((panel, of_panel));
            rest = behind;
        }
        pack.into_par_iter().for_each(|(panel, to)| {
            transpose(&contexts[panel.first * d..], d, 0..panel.rows, 0..d, to, panel.width, |x| x);
        });
        Panels { d, panels, packed }
    }
}

impl Vectors {
    fn multiply_panels<T: Element>(
        self,
        &Panels { d, ref panels, ref packed }: &Panels<T::Acc>,
        decoder: &DecoderView<'_, T>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, T::Acc>,
        VectorBuffers { widened, products }: &mut VectorBuffers<T::Acc>,
    ) {
        let widest = panels.iter().map(|panel| panel.width).max().unwrap_or(0);
        for first in ids.clone().step_by(ids_at_a_time::<T::Acc>(d)) {
            let block = first..ids.end.min(first + ids_at_a_time::<T::Acc>(d));
            let parts = decoder.matrices().zip(&mut *widened);
            let left: Vec<_> = parts.map(|((_, matrix), buffer)| self.left(matrix, block.clone(), buffer)).collect();
            let products = products.at_least(block.len() * widest);
            let mut packed = &packed[..];
            for &panel in panels {
                let (contexts, rest) = packed.split_at(panel.width * d);
                packed = rest;
                let (decoder, first_id, to) = (&left[..], first - ids.start, &mut *tile);
                let products = &mut *products;
                RowsInLanes { panel, contexts, decoder, ids: block.len(), first_id, to, products }.multiply(self.0);
            }
        }
    }

    /// Some rows of a part of the decoder as a left operand: from where they lie, or widened.
    fn left<'b, T: Element>(
        self,
        matrix: DecoderMatrix<'b, T>,
        ids: Range<usize>,
        buffer: &'b mut Aligned<T::Acc>,
    ) -> Left<'b, T::Acc> {
        let DecoderMatrix { values, vocab, width, is_transposed } = matrix;
        let depth = width;
        if let Some(values) = T::as_acc(values) {
            return if is_transposed {
                Left { values: &values[ids.start..], row: 1, step: vocab, depth }
            } else {
                Left { values: &values[ids.start * width..ids.end * width], row: width, step: 1, depth }
            };
        }
        let to = buffer.at_least(ids.len() * width);
        if is_transposed {
            for (to, values) in to.chunks_exact_mut(ids.len()).zip(values.chunks_exact(vocab)) {
                T::Acc::dispatch(self.0, WidenRow { values: &values[ids.clone()], to });
            }
            return Left { values: to, row: 1, step: ids.len(), depth };
        }
        T::Acc::dispatch(self.0, WidenRow { values: &values[ids.start * width..ids.end * width], to: &mut *to });
        Left { values: to, row: width, step: 1, depth }
    }
}

/// So many ids pass through all panels together: their rows of the decoder stay in the second-level cache, and their
/// products with a panel in the first-level cache. Both 6 and 8, of which the kernel computes as many at a time, and 16,
/// the most lanes, divide the number.
fn ids_at_a_time<F>(d: usize) -> usize {
    const STEP: usize = 48;
    const BYTES: usize = 256 << 10;
    (BYTES / (d * size_of::<F>()).max(1) / STEP).clamp(1, 2) * STEP
}

/// Some columns of `[rows, d]`.
fn gathered<F: Copy>(contexts: &[F], d: usize, columns: Range<usize>) -> Vec<F> {
    contexts.chunks_exact(d).flat_map(|row| &row[columns.clone()]).copied().collect()
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use candle_core::WithDType;

    use crate::backend::distribution::Real;

    const MARK: f64 = 77.0;

    /// Numbers that every type represents.
    fn values<T: Element>(n: usize, seed: usize) -> Vec<T> {
        (0..n).map(|i| T::narrow(T::Acc::from_f64(((i * 7 + i / 11 + seed * 13) % 31) as f64 / 8.0 - 2.0))).collect()
    }

    fn f64_of<T: Element>(x: T) -> f64 {
        Real::f64(x.widen())
    }

    /// Compares the products with sums in f64; nothing beyond them is written.
    fn check<T: Element>((rows, components): (usize, usize), ids: usize, widths: [usize; 2], is_transposed: bool) {
        let d = widths[0] + widths[1];
        let contexts: Vec<T::Acc> = values::<T>(rows * d, 1).into_iter().map(Element::widen).collect();
        // The product is of some ids within a larger vocabulary.
        let (vocab, first) = (ids + 5, 3);
        let (weight, adapter) = (values::<T>(vocab * widths[0], 2), values::<T>(vocab * widths[1], 3));
        let matrix = |values, width, is_transposed| DecoderMatrix { values, vocab, width, is_transposed };
        let adapter_matrix = matrix(&adapter[..], widths[1], false);
        let decoder = DecoderView {
            weight: matrix(&weight[..], widths[0], is_transposed),
            adapter: (widths[1] > 0).then_some(adapter_matrix),
        };
        let element = |id: usize, column: usize| match column.checked_sub(widths[0]) {
            Some(column) => f64_of(adapter[id * widths[1] + column]),
            None if is_transposed => f64_of(weight[column * vocab + id]),
            None => f64_of(weight[id * widths[0] + column]),
        };
        for isa in Isa::available() {
            let stride = ids + 3;
            let mut to = vec![T::Acc::from_f64(MARK); rows * stride];
            let (product, positions) = (Vectors(isa), Positions { components, are_independent: true });
            let contexts_of_product = FirstProduct::<T>::contexts(product, &contexts, &decoder, positions);
            let mut tile = ViewMut::new(&mut to, rows, ids, stride);
            let buffers = &mut VectorBuffers::default();
            product.multiply(&contexts_of_product, &decoder, first..first + ids, &mut tile, buffers);
            for (i, &found) in to.iter().enumerate() {
                let (row, id) = (i / stride, i % stride);
                let product = |j: usize| Real::f64(contexts[row * d + j]) * element(first + id, j);
                let expected = if id < ids { (0..d).map(product).sum() } else { MARK };
                let what =
                    format!("{} {:?} {rows} {components} {ids} {widths:?} {is_transposed}", isa.kernels(), T::DTYPE);
                let found = Real::f64(found);
                assert!((found - expected).abs() < 1e-4, "{what}: {found} {expected} at {row}, {id}");
            }
        }
    }

    #[test]
    fn products_equal_sums_in_f64() {
        for (rows, components) in [(1, 1), (6, 3), (13, 1), (15, 15), (17, 17), (70, 10), (0, 15)] {
            for (ids, widths) in [(1, [1, 0]), (7, [5, 0]), (50, [37, 0]), (97, [16, 3]), (33, [600, 9])] {
                for is_transposed in [false, true] {
                    check::<f32>((rows, components), ids, widths, is_transposed);
                    check::<f64>((rows, components), ids, widths, is_transposed);
                    check::<bf16>((rows, components), ids, widths, is_transposed);
                    check::<f16>((rows, components), ids, widths, is_transposed);
                }
            }
        }
    }
}
