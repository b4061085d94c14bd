//! The workspace of one pass, and how its chunks are cut.

use super::first_product::segment_bytes;
use super::format::Format;
use super::layout::Layout;
use super::top_logits;
use crate::backend::cpu::memory::Workspace;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::vector::simd::ROW_ALIGN;
use crate::backend::objective::Task;
use crate::backend::operands::{NeedsGrad, Sizes};

/// Bytes of the decoder that a thread reads again for each panel of a loss without gradients.
const SEGMENT_BYTES: usize = 4 << 20;

/// Returns how chunks of at most `rows` rows are cut.
pub(super) fn layout<T: Element, X: Format<T>>(format: X, rows: usize, sizes: Sizes, needs_grad: NeedsGrad) -> Layout {
    let layout = Layout::new(format.blocks(), rows, sizes.context_dim, sizes.vocab);
    if needs_grad.contexts || needs_grad.decoder() {
        layout
    } else {
        layout.with_segment_bytes::<T::Acc>(SEGMENT_BYTES, sizes.context_dim)
    }
}

/// Returns the workspace of a task. Besides small numbers, the decoder's gradient needs the exponentials of a chunk,
/// and the contexts' gradient a product for each of its pieces.
pub(in crate::backend::cpu) fn workspace<T: Element, X: Format<T>>(format: X, sizes: Sizes, task: &Task) -> Workspace {
    /// The number of elements that the numbers of a row take.
    const ROW_NUMBERS: usize = 32;
    /// The number of elements that the numbers of a listed id take, besides the first.
    const LISTED_NUMBERS: usize = 16;
    let needs_grad = task.needs_grad();
    let candidates = if let Task::Scores { scores, .. } = task { scores.candidates } else { 1 };
    let listed = LISTED_NUMBERS * candidates.saturating_sub(1);
    let Sizes { context_dim: d, vocab, .. } = sizes;
    let element = size_of::<T::Acc>();
    let layout = layout(format, 1, sizes, needs_grad);
    let (panel, ids) = (layout.panel_rows, layout.padded(layout.tile_ids));
    let product_bytes = if needs_grad.contexts { layout.padded(d) * element } else { 0 };
    let scaled_bytes = if needs_grad.decoder() { format.scaled_context_bytes(d) } else { 0 };
    // For the decoder's gradient, a row has its exponentials, the offsets of each tile, the factors of each segment,
    // and what the segment's tiles share. Otherwise it has the sums and factors of each segment.
    let sum_bytes = if needs_grad.decoder() {
        let exponentials = layout.padded(vocab) * size_of::<X::Exponential>();
        exponentials + 2 * layout.tiles() * element + scaled_bytes
    } else {
        let segment = segment_bytes::<T::Acc>(panel) + usize::from(needs_grad.contexts) * element;
        segment * layout.segments()
    };
    // The search for the argmax needs the largest logit of each tile, and buffers for a position and a tile.
    let (tile_largest_bytes, search_bytes) = if task.needs_argmax() {
        let packed = layout.columns(sizes.components) * format.packed_per_row(d) * size_of::<X::Packed>();
        (layout.tiles() * element, packed + (panel + 1) * ids * element + layout.tiles() * size_of::<f64>())
    } else {
        (0, 0)
    };
    let top_k_bytes =
        if let Task::TopK { k } = *task { layout.segments() * top_logits::row_bytes::<T::Acc>(k) } else { 0 };
    // All panels but the last are full.
    let piece_bytes = (layout.extra_pieces() + 1) * panel * (product_bytes + scaled_bytes);
    // The contexts exist packed and gathered.
    let packed = format.packed_per_row(d) * size_of::<X::Packed>();
    let numbers = (d + ROW_NUMBERS + listed) * element;
    let per_row = sum_bytes + tile_largest_bytes + top_k_bytes + product_bytes + packed + numbers;
    let per_thread = format.thread_bytes(d, ids, needs_grad.decoder()) + panel * product_bytes + search_bytes;
    let fixed = layout.lanes * per_row + piece_bytes + vocab.next_multiple_of(ROW_ALIGN) * element;
    Workspace { per_row, fixed, per_thread }
}
