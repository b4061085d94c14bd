//! First product: `logits[rows, vocab] = contexts[rows, d] decoder[vocab, d]^T`, cut into tiles that stay in the cache
//! of one core and are computed in parallel.
//!
//! Each tile is computed on one thread, so that the results do not depend on the number of threads.
//!
//! On vectors, few rows are inner products with the decoder's rows (`gemv`). For more rows, the contexts are packed
//! into panels whose rows are lanes of registers (`rows_in_lanes`): no sum over lanes ends a product, and the decoder
//! is read from where it lies. The two forms add in another order. In decoding the number of components chooses between
//! them, so that a position has the same bits, and a sampler draws the same ids, whatever else is in the batch.

use std::ops::Range;

use super::gradients::VOCAB_TILE;
use crate::backend::cpu::memory::{Aligned, Workspace, CACHE_LINE};
use crate::backend::cpu::operands::context_rows::{padded_stride, PaddedRows};
use crate::backend::cpu::operands::decoder::{DecoderMatrix, DecoderView, MatrixValues};
use crate::backend::cpu::operands::dtype::{with_values, Accumulator, Stored};
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::operands::transpose::transpose;
use crate::backend::cpu::products::gemv::DecoderDots;
use crate::backend::cpu::products::multiplier::Vectors;
use crate::backend::cpu::products::panel::Panel;
use crate::backend::cpu::products::panel::{Left, Registers};
use crate::backend::cpu::products::rows_in_lanes::{RowsInLanes, WidenRow};
use crate::backend::cpu::vector::math::LogSumExp;
use crate::backend::cpu::vector::simd::{Float, Isa};
use crate::backend::parallel;

/// The most rows for which results other than decoding's have the bits of decoding.
const LIKE_DECODING: usize = 64;

/// The choice of the product's form, by the number of rows. The forms round sums differently.
#[derive(Clone, Copy)]
pub(crate) struct FormChoice {
    pub(crate) components: usize,
    /// Whether the bits of a position may not depend on the other positions: then its own rows choose the form.
    pub(crate) are_independent: bool,
}

impl FormChoice {
    /// Returns the number of rows that chooses the form for a chunk of so many `rows`.
    pub(super) fn choosing_rows(self, rows: usize) -> usize {
        if self.are_independent {
            self.components
        } else {
            rows
        }
    }
}

/// The first product of a multiplier.
pub(crate) trait FirstProduct<F: Accumulator>: Copy + Send + Sync {
    /// The contexts as an operand.
    type Contexts: Sync;
    /// The buffers of a thread.
    type Buffers: Default + Send;

    /// Returns the instruction set of the row kernels beside the product.
    fn isa(self) -> Isa;

    /// Computes the bytes of a row's contexts as an operand, and of a thread's buffers.
    fn workspace(self, d: usize, vocab: usize) -> Workspace;

    /// Makes the contexts an operand of the form that `form` chooses.
    fn contexts(self, contexts: &[F], decoder: &DecoderView<'_, F>, form: FormChoice) -> Self::Contexts;

    /// Writes the products of all rows and of these ids to the columns of a tile, from the first on.
    fn multiply(
        self,
        contexts: &Self::Contexts,
        decoder: &DecoderView<'_, F>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, F>,
        buffers: &mut Self::Buffers,
    );
}

/// The rows of logits that the product writes.
pub(crate) struct LogitRows<'a, F> {
    /// `[rows, stride]`.
    pub(super) values: &'a mut [F],
    pub(super) stride: usize,
}

/// Computes the log-sum-exps of the rows of a tile, which has these ids and is padded to whole registers.
pub(crate) type SumTile<'s, F> = dyn Fn(Range<usize>, &mut ViewMut<'_, F>) -> Vec<LogSumExp<F>> + Sync + 's;

/// The first product of any multiplier, tile by tile. What uses it is compiled once for all of them.
pub(crate) trait LogitTiles<F: Accumulator>: Sync {
    /// Returns the instruction set of the row kernels beside the product.
    fn isa(&self) -> Isa;

    /// Computes the product tile by tile. Calls `sum` on each tile while it is in the cache, and returns its results in
    /// order.
    fn multiply_tiles(
        &self,
        contexts: &[F],
        decoder: DecoderView<'_, F>,
        form: FormChoice,
        to: LogitRows<'_, F>,
        sum: &SumTile<'_, F>,
    ) -> Vec<Vec<LogSumExp<F>>>;
}

impl<F: Accumulator, X: FirstProduct<F>> LogitTiles<F> for X {
    fn isa(&self) -> Isa {
        FirstProduct::isa(*self)
    }

    fn multiply_tiles(
        &self,
        contexts: &[F],
        decoder: DecoderView<'_, F>,
        form: FormChoice,
        to: LogitRows<'_, F>,
        sum: &SumTile<'_, F>,
    ) -> Vec<Vec<LogSumExp<F>>> {
        let (vocab, rows, stride) = (decoder.weight.vocab, contexts.len() / decoder.width(), to.stride);
        let contexts = self.contexts(contexts, &decoder, form);
        let tiles = ViewMut::new(to.values, rows, stride, stride).tiles(rows.max(1), VOCAB_TILE);
        parallel::map_with(tiles, X::Buffers::default, |buffers, (_, columns, mut tile)| {
            let ids = columns.start..columns.end.min(vocab);
            self.multiply(&contexts, &decoder, ids.clone(), &mut tile, buffers);
            sum(ids, &mut tile)
        })
    }
}

/// The contexts of a chunk as an operand, in one of two forms.
pub(crate) enum PackedContexts<F> {
    /// The rows of inner products: for each part of the decoder the contexts' columns, padded.
    Rows(Vec<PaddedRows<F>>),
    /// Panels whose rows are lanes of registers.
    Panels(Panels<F>),
}

/// Contexts whose rows are lanes of registers.
pub(crate) struct Panels<F> {
    d: usize,
    panels: Vec<Panel>,
    /// The panels one after the other, each `[d, width]`.
    packed: Aligned<F>,
}

/// The buffers of a thread.
#[derive(Default)]
pub(crate) struct VectorBuffers<F> {
    /// The copied rows of a decoder in half precision or in blocks, with one buffer for each part.
    widened: [Aligned<F>; 2],
    /// `[ids, width]`.
    products: Aligned<F>,
}

impl<F: Accumulator> FirstProduct<F> for Vectors {
    type Contexts = PackedContexts<F>;
    type Buffers = VectorBuffers<F>;

    fn isa(self) -> Isa {
        self.isa
    }

    fn workspace(self, d: usize, vocab: usize) -> Workspace {
        let Registers { width, lanes, .. } = Registers::for_isa::<F>(self.isa);
        let ids = ids_at_a_time::<F>(d).min(vocab);
        let (widened, element) = (if self.copies_rows { d } else { 0 }, size_of::<F>());
        let per_thread = (ids * (widened + width) + 3 * CACHE_LINE) * element;
        // The last panel is padded, and so are the columns of weight and adapter as rows of inner products.
        let per_row = (padded_stride::<F>(d) + padded_stride::<F>(1)) * element;
        Workspace { per_row, fixed: lanes * d * element, per_thread }
    }

    fn contexts(self, contexts: &[F], decoder: &DecoderView<'_, F>, form: FormChoice) -> PackedContexts<F> {
        let Registers { lanes, .. } = Registers::for_isa::<F>(self.isa);
        let d = decoder.width();
        let rows = contexts.len() / d;
        let rows = if rows <= LIKE_DECODING { form.components } else { form.choosing_rows(rows) };
        // Lanes without a row cost as much as others, and panels need widened numbers.
        let most = if self.copies_rows { lanes } else { (lanes / 2).max(1) };
        if decoder.weight.is_transposed() || rows > most {
            return PackedContexts::Panels(Panels::new(self.isa, contexts, d));
        }
        PackedContexts::Rows(decoder.matrices().map(|(columns, _)| PaddedRows::new(contexts, d, columns)).collect())
    }

    fn multiply(
        self,
        contexts: &PackedContexts<F>,
        decoder: &DecoderView<'_, F>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, F>,
        buffers: &mut VectorBuffers<F>,
    ) {
        match contexts {
            PackedContexts::Rows(parts) => {
                for (contexts, (columns, matrix)) in parts.iter().zip(decoder.matrices()) {
                    let contexts = contexts.view();
                    let (d, is_added, to) = (columns.len(), columns.start > 0, &mut *tile);
                    match matrix.values {
                        MatrixValues::Rows(values) => {
                            with_values!(values.slice(ids.start * d..ids.end * d), decoder => {
                                F::dispatch(self.isa, DecoderDots { contexts, decoder, d, is_added, to });
                            });
                        }
                        MatrixValues::Blocks(blocks) => blocks.multiply(contexts, ids.clone(), is_added, to),
                        MatrixValues::Columns(_) => {
                            let mut rows = Vec::with_capacity(ids.len() * d);
                            ids.clone().for_each(|id| matrix.push_row(id, &mut rows));
                            let decoder = &rows[..];
                            F::dispatch(self.isa, DecoderDots::<F> { contexts, decoder, d, is_added, to });
                        }
                    }
                }
            }
            PackedContexts::Panels(panels) => self.multiply_panels(panels, decoder, ids, tile, buffers),
        }
    }
}

impl<F: Float> Panels<F> {
    /// Packs contexts `[rows, d]` into panels of nearly the same width.
    fn new(isa: Isa, contexts: &[F], d: usize) -> Self {
        let Registers { width, lanes, .. } = Registers::for_isa::<F>(isa);
        let rows = contexts.len() / d;
        let vectors = rows.div_ceil(lanes);
        let count = vectors.div_ceil(width / lanes);
        let start = |panel: usize| panel * vectors / count * lanes;
        let panel = |i: usize| {
            let (first, end) = (start(i), start(i + 1));
            Panel { first, rows: end.min(rows) - first, width: end - first }
        };
        let panels: Vec<Panel> = (0..count).map(panel).collect();
        let mut packed: Aligned<F> = Aligned::zeros(vectors * lanes * d);
        let mut rest = &mut packed[..];
        let mut pack = Vec::with_capacity(count);
        for panel in &panels {
            let (to, behind) = rest.split_at_mut(panel.width * d);
            pack.push((panel, to));
            rest = behind;
        }
        parallel::for_each(pack, |(panel, to)| {
            transpose(&contexts[panel.first * d..], d, 0..panel.rows, 0..d, to, panel.width, |x| x);
        });
        Panels { d, panels, packed }
    }
}

impl Vectors {
    /// Writes the products of panels and these ids to the columns of a tile, from the first on.
    fn multiply_panels<F: Accumulator>(
        self,
        &Panels { d, ref panels, ref packed }: &Panels<F>,
        decoder: &DecoderView<'_, F>,
        ids: Range<usize>,
        tile: &mut ViewMut<'_, F>,
        VectorBuffers { widened, products }: &mut VectorBuffers<F>,
    ) {
        let widest = panels.iter().map(|panel| panel.width).max().unwrap_or(0);
        for first in ids.clone().step_by(ids_at_a_time::<F>(d)) {
            let block = first..ids.end.min(first + ids_at_a_time::<F>(d));
            let parts = decoder.matrices().zip(&mut *widened);
            let read = |((_, matrix), buffer)| self.read_rows(matrix, block.clone(), buffer);
            let left: Vec<_> = parts.map(read).collect();
            let products = products.at_least(block.len() * widest);
            let mut packed = &packed[..];
            for &panel in panels {
                let (contexts, rest) = packed.split_at(panel.width * d);
                packed = rest;
                let (decoder, first_id, to) = (&left[..], first - ids.start, &mut *tile);
                let products = &mut *products;
                RowsInLanes { panel, contexts, decoder, ids: block.len(), first_id, to, products }.multiply(self.isa);
            }
        }
    }

    /// Makes these rows of a part of the decoder a left operand, from where they lie, or copied to `buffer`.
    fn read_rows<'b, F: Accumulator>(
        self,
        matrix: DecoderMatrix<'b, F>,
        ids: Range<usize>,
        buffer: &'b mut Aligned<F>,
    ) -> Left<'b, F> {
        let DecoderMatrix { values, vocab, width, .. } = matrix;
        let depth = width;
        match values {
            MatrixValues::Rows(Stored::Wide(values)) => {
                return Left { values: &values[ids.start * width..ids.end * width], row: width, step: 1, depth };
            }
            MatrixValues::Columns(Stored::Wide(values)) => {
                return Left { values: &values[ids.start..], row: 1, step: vocab, depth };
            }
            _ => {}
        }
        let copied = &mut buffer.at_least(ids.len() * width)[..ids.len() * width];
        match values {
            MatrixValues::Rows(values) => {
                self.widen(values.slice(ids.start * width..ids.end * width), copied);
                Left { values: copied, row: width, step: 1, depth }
            }
            MatrixValues::Columns(values) => {
                for (column, to) in copied.chunks_exact_mut(ids.len()).enumerate() {
                    self.widen(values.slice(column * vocab + ids.start..column * vocab + ids.end), to);
                }
                Left { values: copied, row: 1, step: ids.len(), depth }
            }
            MatrixValues::Blocks(blocks) => {
                blocks.dequantise(ids, width, copied);
                Left { values: copied, row: width, step: 1, depth }
            }
        }
    }

    /// Copies numbers in half precision, widened.
    fn widen<F: Accumulator>(self, values: Stored<'_, F>, to: &mut [F]) {
        with_values!(values, values => F::dispatch(self.isa, WidenRow { values, to }))
    }
}

/// Returns how many ids pass through all panels together. Their rows of the decoder stay in the second-level cache, and
/// their products with a panel in the first-level cache. The number is a multiple of 6 and of 8, as the kernel computes
/// 6 or 8 ids at a time, and of 16, the largest number of lanes.
fn ids_at_a_time<F>(d: usize) -> usize {
    const STEP: usize = 48;
    const BYTES: usize = 256 << 10;
    (BYTES / (d * size_of::<F>()).max(1) / STEP).clamp(1, 2) * STEP
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, WithDType};
    use half::{bf16, f16};

    use super::*;

    use crate::backend::cpu::operands::dtype::{locked, Element};
    use crate::backend::operands::Real;

    const MARK: f64 = 77.0;

    /// Makes numbers that every type represents.
    fn values<T: Element>(n: usize, seed: usize) -> Vec<T> {
        (0..n).map(|i| T::narrow(T::Acc::from_f64(((i * 7 + i / 11 + seed * 13) % 31) as f64 / 8.0 - 2.0))).collect()
    }

    fn to_f64<T: Element>(x: T) -> f64 {
        Real::f64(x.widen())
    }

    /// The sizes of a product: the widths are those of weight and adapter.
    #[derive(Clone, Copy, Debug)]
    struct Shape {
        rows: usize,
        components: usize,
        ids: usize,
        widths: [usize; 2],
    }

    /// Compares the products with sums in f64, and checks that nothing beyond them is written.
    fn check<T: Element>(shape: Shape, transposed: bool) {
        let Shape { rows, components, ids, widths } = shape;
        let d = widths[0] + widths[1];
        let contexts: Vec<T::Acc> = values::<T>(rows * d, 1).into_iter().map(Element::widen).collect();
        // The ids lie within a larger vocabulary.
        let (vocab, first) = (ids + 5, 3);
        let (weight, adapter) = (values::<T>(vocab * widths[0], 2), values::<T>(vocab * widths[1], 3));
        let tensor = |values: &[T]| Tensor::from_slice(values, values.len(), &Device::Cpu).expect("a vector");
        let (weight_tensor, adapter_tensor) = (tensor(&weight), tensor(&adapter));
        let stored = [&weight_tensor, &adapter_tensor].map(|tensor| locked("decoder", tensor).expect("contiguous"));
        let matrix = |part: usize, is_transposed| DecoderMatrix {
            values: MatrixValues::stored(stored[part].stored().expect("on the CPU"), is_transposed),
            vocab,
            width: widths[part],
        };
        let decoder = DecoderView { weight: matrix(0, transposed), adapter: (widths[1] > 0).then(|| matrix(1, false)) };
        let element = |id: usize, column: usize| match column.checked_sub(widths[0]) {
            Some(column) => to_f64(adapter[id * widths[1] + column]),
            None if transposed => to_f64(weight[column * vocab + id]),
            None => to_f64(weight[id * widths[0] + column]),
        };
        for isa in Isa::available() {
            let stride = ids + 3;
            let mut to = vec![T::Acc::from_f64(MARK); rows * stride];
            let product = Vectors { isa, copies_rows: T::DTYPE != T::Acc::DTYPE };
            let form = FormChoice { components, are_independent: true };
            let packed = product.contexts(&contexts, &decoder, form);
            let mut tile = ViewMut::new(&mut to, rows, ids, stride);
            let buffers = &mut VectorBuffers::default();
            product.multiply(&packed, &decoder, first..first + ids, &mut tile, buffers);
            for (i, &found) in to.iter().enumerate() {
                let (row, id) = (i / stride, i % stride);
                let product = |j: usize| Real::f64(contexts[row * d + j]) * element(first + id, j);
                let expected = if id < ids { (0..d).map(product).sum() } else { MARK };
                let what = format!("{} {:?} {shape:?} {transposed}", isa.kernels(), T::DTYPE);
                let found = Real::f64(found);
                assert!((found - expected).abs() < 1e-4, "{what}: {found} {expected} at {row}, {id}");
            }
        }
    }

    #[test]
    fn products_equal_sums_in_f64() {
        for (rows, components) in [(1, 1), (6, 3), (13, 1), (15, 15), (17, 17), (70, 10), (0, 15)] {
            for (ids, widths) in [(1, [1, 0]), (7, [5, 0]), (50, [37, 0]), (97, [16, 3]), (33, [600, 9])] {
                let shape = Shape { rows, components, ids, widths };
                for transposed in [false, true] {
                    check::<f32>(shape, transposed);
                    check::<f64>(shape, transposed);
                    check::<bf16>(shape, transposed);
                    check::<f16>(shape, transposed);
                }
            }
        }
    }
}
