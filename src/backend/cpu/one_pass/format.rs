//! The seam between the engine and the units that multiply: which form the operands of the three products have.

use std::ops::Range;

use super::gradients::{DecoderGradient, Tile};
use super::layout::Panel;
use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::Number;

/// How the products cut a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// Ids that a product computes at a time; those of a tile are a multiple.
    pub(super) ids: usize,
    /// Rows of a full panel.
    pub(super) panel_rows: usize,
    /// The width of every panel is a multiple of this.
    pub(super) lanes: usize,
    /// The ids of a tile and the columns of the decoder are padded to multiples of this.
    pub(super) padding: usize,
    /// Minimum number of pieces, pairs of a panel and a segment, if the vocabulary is large enough: as many threads have
    /// work.
    pub(super) pieces: usize,
    /// Approximate minimum number of tiles, likewise.
    pub(super) tiles: usize,
    /// Elements of the decoder in a tile, which stays in the second-level cache with its logits.
    pub(super) tile_elements: usize,
    /// Ids whose gradients the third product computes at a time.
    pub(super) group_ids: usize,
}

/// The products of a unit. Between them, all formats share the engine: logits, exponentials and all sums are numbers of
/// `T::Acc`.
pub(crate) trait Format<T: Element>: Copy + Send + Sync {
    /// A number of the packed contexts.
    type Packed: Number;
    /// An exponential that is kept for the third product.
    type Kept: Number;
    /// The operands that a tile of the decoder is, perhaps in buffers.
    type Decoder<'t>
    where
        T: 't;
    type DecoderBuffers: Default + Send;
    type LogitBuffers: Default + Send;
    /// What the third products of a segment's tiles share.
    type Scaled: Send + Sync;
    /// A thread's buffers of the third product.
    type GradientBuffers: Default + Send;

    /// Whether gradients that need no further sum are rounded to the operands' dtype, bf16, at once.
    fn rounds() -> bool {
        false
    }

    fn blocks(self) -> Blocks;

    /// Numbers per row of the packed contexts.
    fn packed_per_row(self, d: usize) -> usize;

    /// Bytes of a thread's buffers for tiles of so many ids. The exponentials are kept for the third product, or not.
    fn thread_bytes(self, d: usize, ids: usize, keeps: bool) -> usize;

    /// Bytes per row of the chunk of what the tiles of a segment share.
    fn scaled_bytes(self, d: usize) -> usize;

    /// Panels that pass through a tile of the decoder together, at most.
    fn most_panels(self) -> usize;

    /// Writes a panel's contexts as an operand of the first product.
    fn pack(self, inputs: &Inputs<'_, T>, contexts: &[T::Acc], panel: Panel, to: &mut [Self::Packed]);

    /// The decoder's rows of some ids as operands of the first and the second product.
    fn decoder<'t>(
        self,
        inputs: &'t Inputs<'_, T>,
        ids: Range<usize>,
        buffers: &'t mut Self::DecoderBuffers,
    ) -> Self::Decoder<'t>;

    /// The first and the second product of a tile and a panel: writes logits `[ids, width]`, without softcap, and calls
    /// `exponentiate` with them and with the sums `[padded d, width]`, which may be empty; then adds the products of
    /// the exponentials to the sums, or replaces them in the first tile.
    fn multiply(
        self,
        operands: FirstOperands<'_, '_, T, Self>,
        buffers: &mut Self::LogitBuffers,
        exponentiate: impl FnOnce(&mut [T::Acc], &mut [T::Acc]),
    );

    /// Contexts times the factors of a segment.
    fn scaled(self, gradient: &DecoderGradient<'_, T, Self>, factors: &[T::Acc]) -> Self::Scaled;

    /// The third product: adds `E (f C)` to the gradients of some tiles, and `E f` to the bias's. `scaled` are those of
    /// all segments; a tile may have other factors.
    fn add_products(
        self,
        gradient: &DecoderGradient<'_, T, Self>,
        tiles: &mut [Tile<'_, T::Acc, Self::Kept>],
        scaled: &[Self::Scaled],
        buffers: &mut Self::GradientBuffers,
    );
}

/// The operands of the first and the second product.
pub(crate) struct FirstOperands<'a, 't, T: Element, X: Format<T>> {
    pub(super) inputs: &'a Inputs<'a, T>,
    pub(super) ids: Range<usize>,
    pub(super) decoder: &'a X::Decoder<'t>,
    pub(super) panel: Panel,
    pub(super) packed: &'a [X::Packed],
    /// `[padded ids, width]`, if the exponentials are kept
    pub(super) kept: Option<&'a mut [X::Kept]>,
    pub(super) sums: &'a mut [T::Acc],
    pub(super) is_first: bool,
}
