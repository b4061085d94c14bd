//! The seam between the engine and the units that multiply: which form the operands of the three products have.

use std::ops::Range;

use half::bf16;
use num_traits::Zero;

use super::layout::{Blocks, Panel};
use super::rows::Factors;
use crate::backend::cpu::memory::BufferElement;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;

/// The products of a unit. Between them, all formats share the engine: logits, exponentials and all sums are numbers of
/// `T::Acc`.
pub(crate) trait Format<T: Element>: Copy + Send + Sync {
    /// A number of the packed contexts.
    type Packed: BufferElement;
    /// An exponential that is kept for the third product.
    type Exponential: BufferElement;
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
    fn scaled(self, gradient: &DecoderGradient<'_, T>, factors: &[T::Acc]) -> Self::Scaled;

    /// The third product: adds `E (f C)` to the gradients of some tiles, and `E f` to the bias's. `scaled` are those of
    /// all segments; a tile may have other factors.
    fn add_products(
        self,
        gradient: &DecoderGradient<'_, T>,
        tiles: &mut [Tile<'_, T::Acc, Self::Exponential>],
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
    pub(super) kept: Option<&'a mut [X::Exponential]>,
    pub(super) sums: &'a mut [T::Acc],
    pub(super) is_first: bool,
}

/// The operands of the decoder's gradients, beside the exponentials.
pub(crate) struct DecoderGradient<'a, T: Element> {
    pub(super) factors: Factors<'a, T::Acc>,
    /// `[rows, d]`
    pub(super) contexts: &'a [T::Acc],
    pub(super) d: usize,
}

/// What the third product needs of a tile of ids.
pub(crate) struct Tile<'b, F, K> {
    pub(super) ids: Range<usize>,
    pub(super) segment: usize,
    /// `[panel][padded id][row]`
    pub(super) exponentials: &'b mut [K],
    /// `[column]`: the rows' factors
    pub(super) factors: Vec<F>,
    /// The gradients of the parts of the decoder that need one
    pub(super) parts: Vec<TileGradient<'b, F>>,
    /// `[ids]`, if it is needed
    pub(super) bias: Option<&'b mut [F]>,
}

/// The gradient of some columns of a tile's ids.
pub(crate) struct TileGradient<'b, F> {
    pub(super) columns: Range<usize>,
    /// `[ids, columns]`
    pub(super) values: &'b mut [F],
    /// `[ids, columns]`, in place of `values`, if the gradient is rounded at once
    pub(super) rounded: &'b mut [bf16],
    /// Whether `values` already holds the contribution of earlier chunks.
    pub(super) is_started: bool,
}

impl<T: Element> DecoderGradient<'_, T> {
    /// Calls `subtract` with each listed id of a row that is one of `ids`: its place among them, its mass, and the row's
    /// context.
    pub(super) fn each_listed(&self, ids: &Range<usize>, mut subtract: impl FnMut(usize, T::Acc, &[T::Acc])) {
        for (row, context) in self.factors.rows.iter().zip(self.contexts.chunks_exact(self.d)) {
            let entries = row.entries(self.factors.entries);
            let first = entries.partition_point(|entry| entry.id < ids.start);
            let of_ids = entries[first..].iter().take_while(|entry| entry.id < ids.end);
            for entry in of_ids.filter(|entry| !entry.mass.is_zero()) {
                subtract(entry.id - ids.start, entry.mass, context);
            }
        }
    }
}
