//! The first product for panels of contexts: the lanes of a register are rows, and each element of the decoder is
//! broadcast to them from where it lies.

use super::panel::{lanes, Left, Panel, PanelProduct, Start};
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};

/// The maximum number of columns of the decoder that a sum adds one after the other. The rounding errors of longer sums
/// are larger.
const MOST_DEPTH: usize = 512;

/// Computes `to[row, id] = contexts[row] . decoder[id]` for the rows of a panel and some ids.
pub(crate) struct RowsInLanes<'a, 'b, F> {
    pub(crate) panel: Panel,
    /// `[d, width]`
    pub(crate) contexts: &'a [F],
    /// The rows of the decoder, in blocks of columns.
    pub(crate) decoder: &'a [Left<'a, F>],
    pub(crate) ids: usize,
    /// The column of `to` that belongs to the first id.
    pub(crate) first_id: usize,
    pub(crate) to: &'a mut ViewMut<'b, F>,
    /// `[ids, width]`: a buffer
    pub(crate) products: &'a mut [F],
}

impl<F: Float> RowsInLanes<'_, '_, F> {
    /// Computes the products, and stores their transpose.
    pub(crate) fn multiply(self, isa: Isa) {
        let RowsInLanes { panel, contexts, decoder, ids, first_id, to, products } = self;
        let width = panel.width;
        let products = &mut products[..ids * width];
        let (mut start, mut right) = (Start::Zero, contexts);
        for block in decoder {
            // All depths are nearly the same.
            let depth = block.depth.div_ceil(block.depth.div_ceil(MOST_DEPTH).max(1));
            for first in (0..block.depth).step_by(depth.max(1)) {
                let depth = depth.min(block.depth - first);
                let left = &[Left { values: &block.values[first * block.step..], depth, ..*block }];
                let to = &mut *products;
                F::dispatch(
                    isa,
                    PanelProduct { start, rows: ids, left, right, width, to, to_row: width, columns: width },
                );
                (start, right) = (Start::Stored, &right[depth * width..]);
            }
        }
        F::dispatch(isa, StoreTransposed { panel, products, first_id, to });
    }
}

/// Writes products `[ids, width]` to the rows of a panel.
struct StoreTransposed<'a, 'b, F> {
    panel: Panel,
    products: &'a [F],
    first_id: usize,
    to: &'a mut ViewMut<'b, F>,
}

impl<F: Float> Kernel<F> for StoreTransposed<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let StoreTransposed { panel: Panel { first, rows, width }, products, first_id, to } = self;
        let lanes = lanes::<F, V>();
        for (block, products) in products.chunks(lanes * width).enumerate() {
            let ids = products.len() / width;
            for column in (0..rows).step_by(lanes) {
                let mut square = V::filled(v.splat(F::zero()));
                for (register, products) in square.as_mut().iter_mut().zip(products.chunks_exact(width)) {
                    *register = V::split(&products[column..][..lanes]).0[0];
                }
                let square = v.transposed(square);
                for (row, &products) in (column..rows).zip(square.as_ref()) {
                    let to = &mut to.row_mut(first + row)[first_id + block * lanes..][..ids];
                    match V::split_mut(to) {
                        ([to], _) => *to = products,
                        (_, to) => v.store_partial(products, to),
                    }
                }
            }
        }
    }
}

/// Computes `to[..] = values[..]` in the accumulation dtype.
pub(crate) struct WidenRow<'a, T: Element> {
    pub(crate) values: &'a [T],
    pub(crate) to: &'a mut [T::Acc],
}

impl<T: Element> Kernel<T::Acc> for WidenRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<T::Acc>>(self, v: V) {
        let ((values, rest), (to, to_rest)) = (V::split_lanes(self.values), V::split_mut(self.to));
        for (to, &values) in to.iter_mut().zip(values) {
            *to = T::load(v, values);
        }
        v.store_partial(T::load_partial(v, rest), to_rest);
    }
}
