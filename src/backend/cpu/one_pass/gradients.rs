//! The gradients of contexts and decoder, from exponentials and factors: what is missing of the second product, and the
//! third; and the kernels that multiply by the factors of rows.

use std::ops::Range;

use super::exponentials::FirstProductResults;
use super::format::{Format, GradientTile, ThirdOperands, TileGradient};
use super::layout::{Layout, ListedId};
use super::rows::{ChunkRows, GradientRow};
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::objective::results::{ColumnGradient, DecoderGradients};
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::operands::transpose::transpose;
use crate::backend::cpu::pages::Finished;
use crate::backend::cpu::products::panel::{lanes, Left, Panel};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::parallel;

/// The gradient of a chunk's contexts, once the factors of its rows are known.
pub(super) struct ContextGradient<'c, 'a, F: Accumulator> {
    pub(super) inputs: &'c Inputs<'a, F>,
    pub(super) first_product: &'c FirstProductResults<'a, F>,
    pub(super) rows: &'c ChunkRows<F>,
    /// `[segment][column]`
    pub(super) factors: &'c [Vec<F>],
}

impl<F: Accumulator> ContextGradient<'_, '_, F> {
    /// Computes `dC = f O - sum_y m W[y]` for each row of contexts, over its listed ids, from the second product O,
    /// which is overwritten. `to` has the rows of the gradient, `[rows][d]`.
    pub(super) fn compute(&self, products: &mut [F], mut to: Vec<&mut [F]>) {
        let d = self.inputs.sizes.context_dim;
        let FirstProductResults { layout, panels, .. } = self.first_product;
        // The products of each panel, segment by segment.
        let mut by_panel: Vec<Vec<&mut [F]>> = Vec::new();
        by_panel.resize_with(panels.len(), Vec::new);
        let pieces = layout.pieces(self.rows.rows.len());
        for (piece, products) in
            products.chunks_exact_mut(layout.panel_rows * layout.padded(d)).take(pieces).enumerate()
        {
            by_panel[piece % panels.len()].push(products);
        }
        parallel::for_each_with(
            to.chunks_mut(layout.panel_rows).zip(by_panel).zip(panels),
            || (Vec::new(), Vec::new()),
            |(transposed, decoder_row), ((to, products), panel)| {
                let Some(total) = self.add_segments(panel, products) else { return };
                transposed.resize(panel.width * d, F::zero());
                transpose(total, panel.width, 0..d, 0..panel.width, transposed, d, |x| x);
                let rows = self.rows.rows[panel.first..].iter().zip(to);
                for ((row, to), values) in rows.zip(transposed.chunks_exact(d)) {
                    if !row.is_void {
                        to.copy_from_slice(values);
                    }
                    self.subtract_listed(row, to, decoder_row);
                }
            },
        );
    }

    /// Adds up the products of a panel's segments, `[d, width]`, each times its factors, into those of the first.
    fn add_segments<'s>(&self, panel: &Panel, products: Vec<&'s mut [F]>) -> Option<&'s [F]> {
        let (isa, size) = (self.inputs.isa, panel.width * self.inputs.sizes.context_dim);
        let factors = self.factors.iter().map(|factors| &factors[panel.first..][..panel.width]);
        let mut segments = products.into_iter().zip(factors);
        let (total, factors) = segments.next()?;
        let total = &mut total[..size];
        F::dispatch(isa, Scale { values: total, factors });
        for (products, factors) in segments {
            F::dispatch(isa, AddScaled { to: total, values: &products[..size], factors });
        }
        Some(total)
    }

    /// Subtracts `m W[y]` for each listed id of a row.
    fn subtract_listed(&self, row: &GradientRow<F>, to: &mut [F], decoder_row: &mut Vec<F>) {
        let entries = row.entries(&self.rows.entries);
        for &ListedId { id, mass } in entries.iter().filter(|entry| !entry.mass.is_zero()) {
            self.inputs.decoder.row(id, decoder_row);
            to.iter_mut().zip(&*decoder_row).for_each(|(g, &w)| *g -= mass * w);
        }
    }
}

/// The third product of a chunk, in a format.
pub(super) struct ThirdProduct<'a, F: Accumulator, X> {
    pub(super) format: X,
    pub(super) operands: ThirdOperands<'a, F>,
}

/// The tiles of the vocabulary, and the gradients of the rows behind it, which targets outside the vocabulary have.
struct SplitGradients<'b, F: Accumulator, E> {
    tiles: Vec<GradientTile<'b, F, E>>,
    behind: Vec<TileGradient<'b, F>>,
    bias_behind: Option<&'b mut [F]>,
}

impl<F: Accumulator, X: Format<F>> ThirdProduct<'_, F, X> {
    fn layout(&self) -> &Layout {
        &self.operands.factors.first_product.layout
    }

    /// Adds `dW += E (f C) - m c`, the last term for the listed ids, and likewise to the gradients of adapter and bias,
    /// of those that are needed. `packed` has the contexts of the first product, and is overwritten. If the pass
    /// gives the exponentials back, the system has their pages as the gradients take pages.
    pub(super) fn add_to(
        &self,
        gradients: &mut DecoderGradients<F>,
        exponentials: &mut [X::Exponential],
        packed: &mut [X::Packed],
        gives_back: bool,
    ) {
        let layout = self.layout();
        let finished = gives_back.then(|| Finished::new(exponentials));
        let SplitGradients { mut tiles, mut behind, bias_behind } = self.split(gradients, exponentials);
        let contexts = self.format.third_contexts(&self.operands, packed);
        let groups = tiles.chunks_mut(layout.tiles_at_a_time()).enumerate();
        parallel::for_each_with(groups, X::GradientBuffers::default, |buffers, (group, tiles)| {
            for (tile, index) in tiles.iter_mut().zip(group * layout.tiles_at_a_time()..) {
                let kept_rows = layout.padded(tile.ids.len()) * self.format.kept_per_exponential();
                self.clear_void_rows(kept_rows, tile.exponentials);
                tile.factors = self.operands.factors.tile_factors(index);
            }
            self.format.add_products(&self.operands, tiles, &contexts, buffers);
            for GradientTile { ids, exponentials, gradients, bias, .. } in tiles {
                self.subtract_listed(ids.clone(), gradients, bias.as_deref_mut());
                if let Some(finished) = &finished {
                    // SAFETY: each tile has exponentials of its own, and this was their last use.
                    unsafe { finished.finish(exponentials) };
                }
            }
        });
        self.subtract_listed(layout.vocab..usize::MAX, &mut behind, bias_behind);
    }

    /// Splits gradients and exponentials by tiles. From here on the gradients are started.
    fn split<'b>(
        &self,
        gradients: &'b mut DecoderGradients<F>,
        exponentials: &'b mut [X::Exponential],
    ) -> SplitGradients<'b, F, X::Exponential> {
        let layout = self.layout();
        let Layout { tile_ids, vocab, .. } = *layout;
        let columns = layout.columns(self.operands.factors.rows.len());
        let columns = columns * self.format.kept_per_exponential();
        let exponentials = exponentials.chunks_mut(layout.padded(tile_ids) * columns).take(layout.tiles());
        let tile = |(tile, exponentials)| GradientTile {
            ids: layout.ids(tile),
            segment: layout.segment_of(tile),
            exponentials,
            factors: vec![],
            gradients: vec![],
            bias: None,
        };
        let mut tiles: Vec<GradientTile<'_, F, X::Exponential>> = exponentials.enumerate().map(tile).collect();
        let mut behind = Vec::new();
        let (matrices, bias) = gradients.parts();
        for ColumnGradient { columns, values, rounded, is_started } in matrices {
            let in_vocab = values.len().min(vocab * columns.len());
            let (values, values_behind) = values.split_at_mut(in_vocab);
            let gradient =
                |values, rounded| TileGradient { columns: columns.clone(), values, rounded, is_started: *is_started };
            let mut values = values.chunks_mut(tile_ids * columns.len());
            let mut rounded = rounded.chunks_mut(tile_ids * columns.len());
            for tile in &mut tiles {
                let (values, rounded) = (values.next().unwrap_or_default(), rounded.next().unwrap_or_default());
                tile.gradients.push(gradient(values, rounded));
            }
            behind.push(gradient(values_behind, &mut []));
            *is_started = true;
        }
        let mut bias_behind = None;
        if let Some(bias) = bias {
            let (bias, others) = bias.split_at_mut(vocab);
            tiles.iter_mut().zip(bias.chunks_mut(tile_ids)).for_each(|(tile, bias)| tile.bias = Some(bias));
            bias_behind = Some(others);
        }
        SplitGradients { tiles, behind, bias_behind }
    }

    /// Subtracts the listed ids among `ids`, to which these gradients belong: `dW -= m c`, `db -= m`. A rounded
    /// gradient has them subtracted before it is rounded.
    fn subtract_listed(&self, ids: Range<usize>, gradients: &mut [TileGradient<'_, F>], mut bias: Option<&mut [F]>) {
        self.operands.for_each_listed(&ids, |id, mass, context| {
            if let Some(bias) = &mut bias {
                bias[id] -= mass;
            }
            for TileGradient { columns, values, .. } in
                gradients.iter_mut().filter(|gradient| gradient.rounded.is_empty())
            {
                let to = &mut values[id * columns.len()..(id + 1) * columns.len()];
                to.iter_mut().zip(&context[columns.clone()]).for_each(|(g, &c)| *g -= mass * c);
            }
        });
    }

    /// Sets the exponentials of void rows in a tile to zero, whose panels have `kept` numbers of each row.
    fn clear_void_rows(&self, kept: usize, exponentials: &mut [X::Exponential]) {
        let FirstProductResults { layout, panels, .. } = self.operands.factors.first_product;
        for (r, _) in self.operands.factors.rows.iter().enumerate().filter(|(_, row)| row.is_void) {
            let panel = panels[layout.panel_of(r)];
            let tile = &mut exponentials[kept * panel.first..][..kept * panel.width];
            tile.iter_mut().skip(r - panel.first).step_by(panel.width).for_each(|e| *e = X::Exponential::default());
        }
    }
}

/// Computes `values[.., row] := factors[row] values[.., row]`.
pub(super) struct Scale<'a, F> {
    /// `[n, width]`
    pub(super) values: &'a mut [F],
    /// `[width]`
    pub(super) factors: &'a [F],
}

impl<F: Float> Kernel<F> for Scale<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let factors = V::registers(self.factors);
        for values in V::registers_mut(self.values).chunks_exact_mut(factors.len()) {
            for (value, &factor) in values.iter_mut().zip(factors) {
                *value = v.mul(*value, factor);
            }
        }
    }
}

/// Computes `to[.., row] += factors[row] values[.., row]`.
pub(super) struct AddScaled<'a, F> {
    /// `[n, width]`
    pub(super) to: &'a mut [F],
    pub(super) values: &'a [F],
    /// `[width]`
    pub(super) factors: &'a [F],
}

impl<F: Float> Kernel<F> for AddScaled<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let factors = V::registers(self.factors);
        let to = V::registers_mut(self.to).chunks_exact_mut(factors.len());
        for (to, values) in to.zip(V::registers(self.values).chunks_exact(factors.len())) {
            for ((to, &value), &factor) in to.iter_mut().zip(values).zip(factors) {
                *to = v.mul_add(value, factor, *to);
            }
        }
    }
}

/// Computes `to[row, ..] = factors[row] contexts[row, ..]` for some columns, padded with zeros to whole vectors.
pub(super) struct ScaleRows<'a, F> {
    /// The rows, which start `stride` elements apart, from the first of the columns on.
    pub(super) contexts: &'a [F],
    pub(super) stride: usize,
    pub(super) columns: usize,
    pub(super) factors: &'a [F],
    pub(super) to: &'a mut [F],
}

impl<F: Float> Kernel<F> for ScaleRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let ScaleRows { contexts, stride, columns, factors, to } = self;
        let width = columns.div_ceil(lanes::<F, V>());
        let to = V::registers_mut(to).chunks_exact_mut(width);
        for ((to, context), &factor) in to.zip(contexts.chunks(stride)).zip(factors) {
            let factor = v.splat(factor);
            let (registers, rest) = V::split(&context[..columns]);
            for (to, &x) in to.iter_mut().zip(registers) {
                *to = v.mul(factor, x);
            }
            if !rest.is_empty() {
                to[width - 1] = v.mul(factor, v.load_partial(rest));
            }
        }
    }
}

/// Computes `to[i] += sum_k left[i, k] factors[k]`, for a left operand whose blocks have rows of whole vectors.
pub(super) struct AddWeightedSums<'a, F> {
    pub(super) left: &'a [Left<'a, F>],
    /// The factors, padded as the left operand's rows are.
    pub(super) factors: &'a [F],
    pub(super) to: &'a mut [F],
}

impl<F: Float> Kernel<F> for AddWeightedSums<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        /// The number of independent sums, which hide the latency.
        const SUMS: usize = 4;
        let AddWeightedSums { left, factors, to } = self;
        for (i, to) in to.chunks_mut(SUMS).enumerate() {
            let mut sums = [v.splat(F::zero()); SUMS];
            let mut factors = V::registers(factors);
            for left in left {
                let rows = V::registers(&left.values[i * SUMS * left.row..][..to.len() * left.row]);
                let (block_factors, others) = factors.split_at(left.row / lanes::<F, V>());
                factors = others;
                for (sum, row) in sums.iter_mut().zip(rows.chunks_exact(block_factors.len())) {
                    for (&x, &factor) in row.iter().zip(block_factors) {
                        *sum = v.mul_add(x, factor, *sum);
                    }
                }
            }
            for (to, &sum) in to.iter_mut().zip(&sums) {
                *to += v.sum(sum);
            }
        }
    }
}
