//! Rows of the decoder that are stored in blocks of a few bits for each weight.

use std::ops::Range;

use super::context_rows::ContextRows;
use super::matrix::ViewMut;

/// Rows `[vocab, d]` in blocks, which are computed in `F`. No type but f32 has such rows.
pub(crate) trait BlockRows<F>: Sync {
    /// Writes the rows of some ids, the i-th at `to[i * stride..]`.
    fn dequantise(&self, ids: Range<usize>, stride: usize, to: &mut [F]);

    /// Computes `to[row, id - ids.start] = contexts[row] . rows[id]` for contexts of `d` columns, or adds these products
    /// to what `to` holds. The order of a sum does not depend on the number of contexts.
    fn multiply(&self, contexts: ContextRows<'_, F>, ids: Range<usize>, is_added: bool, to: &mut ViewMut<'_, F>);
}
