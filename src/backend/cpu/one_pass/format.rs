//! The seam between one pass and the units that multiply: a format says which form the operands of the three products
//! have. Logits, sums and gradients are numbers of the accumulation dtype in every format.

use std::ops::Range;

use super::layout::Blocks;
use super::rows::Factors;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::BufferElement;
use crate::backend::cpu::operands::dtype::{Accumulator, NarrowRow};
use crate::backend::cpu::products::panel::Panel;
use crate::backend::cpu::vector::simd::Isa;

/// The products of a unit, and the form of their operands.
pub(crate) trait Format<F: Accumulator>: Copy + Send + Sync {
    /// A number of the packed contexts.
    type Packed: BufferElement;
    /// An exponential that is kept for the third product.
    type Exponential: BufferElement;
    /// A tile of the decoder as an operand of the first and the second product, perhaps in buffers.
    type Decoder<'t>
    where
        F: 't;
    type DecoderBuffers: Default + Send;
    type LogitBuffers: Default + Send;
    /// The contexts in a form that the third products of all tiles share.
    type ThirdContexts<'c>: Sync
    where
        F: 'c;
    /// A thread's buffers of the third product.
    type GradientBuffers: Default + Send;

    /// Returns the sizes by which these products cut a chunk.
    fn blocks(self) -> Blocks;

    /// Returns how many numbers of the packed contexts each row takes.
    fn packed_per_row(self, d: usize) -> usize;

    /// Returns how many numbers an exponential that is kept for the third product takes.
    fn kept_per_exponential(self) -> usize {
        1
    }

    /// Returns the bytes of a thread's buffers for tiles of `ids` ids, with a third product if `keeps_exponentials`.
    fn thread_bytes(self, d: usize, ids: usize, keeps_exponentials: bool) -> usize;

    /// Returns the bytes per row of the chunk that the copy of its contexts takes, multiplied by the factors of a
    /// segment. They are zero for a format that keeps no such copy.
    fn scaled_context_bytes(self, d: usize) -> usize;

    /// Returns the maximum number of panels that pass through a tile of the decoder together.
    fn most_panels(self) -> usize;

    /// Writes a panel's contexts as an operand of the first product.
    fn pack(self, inputs: &Inputs<'_, F>, contexts: &[F], panel: Panel, to: &mut [Self::Packed]);

    /// Reads the decoder's rows of a tile of ids, whose columns the second product needs if there is one.
    fn decoder_tile<'t>(
        self,
        inputs: &'t Inputs<'_, F>,
        ids: Range<usize>,
        needs_columns: bool,
        buffers: &'t mut Self::DecoderBuffers,
    ) -> Self::Decoder<'t>;

    /// Computes the first and the second product of a tile and some panels. For each panel, in their order, writes
    /// logits `[ids, width]`, without the logit function, and calls `exponentiate` with the panel's index, with them,
    /// and with the products `[padded d, width]` of earlier tiles, which may be empty. Then adds the products of the
    /// exponentials to these, or replaces them in the first tile.
    fn multiply(
        self,
        operands: FirstOperands<'_, '_, F, Self>,
        buffers: &mut Self::LogitBuffers,
        exponentiate: impl FnMut(usize, &mut [F], &mut [F]),
    );

    /// Prepares the contexts for the third product. `packed`, which the first product has read, may be overwritten.
    fn third_contexts<'c>(
        self,
        operands: &ThirdOperands<'_, F>,
        packed: &'c mut [Self::Packed],
    ) -> Self::ThirdContexts<'c>
    where
        F: 'c;

    /// Computes the third product: adds `E (f C)` to the gradients of some tiles, and `E f` to the bias's.
    fn add_products(
        self,
        operands: &ThirdOperands<'_, F>,
        tiles: &mut [GradientTile<'_, F, Self::Exponential>],
        contexts: &Self::ThirdContexts<'_>,
        buffers: &mut Self::GradientBuffers,
    );
}

/// The operands of the first and the second product of a tile and some panels.
pub(crate) struct FirstOperands<'a, 't, F: Accumulator, X: Format<F>> {
    pub(super) inputs: &'a Inputs<'a, F>,
    pub(super) ids: Range<usize>,
    pub(super) decoder: &'a X::Decoder<'t>,
    pub(super) panels: Vec<PanelOperands<'a, F, X>>,
    /// Whether the tile is the first, whose products replace what is there.
    pub(super) is_first_tile: bool,
}

/// The operands of a panel.
pub(crate) struct PanelOperands<'a, F: Accumulator, X: Format<F>> {
    pub(super) panel: Panel,
    /// The panel's contexts.
    pub(super) packed: &'a [X::Packed],
    /// `[padded ids, width]`, each with all its numbers, in the format's order: where the exponentials are kept, if the
    /// third product needs them
    pub(super) exponentials: Option<&'a mut [X::Exponential]>,
    /// `[padded d, width]`: the second product of the tiles so far; empty if the contexts need no gradient
    pub(super) products: &'a mut [F],
}

/// The operands of the third product that all tiles share.
pub(crate) struct ThirdOperands<'a, F: Accumulator> {
    pub(super) factors: Factors<'a, F>,
    /// `[rows, d]`
    pub(super) contexts: &'a [F],
    pub(super) d: usize,
}

/// A tile of ids in the third product: its exponentials, its factors, and the gradients to add to.
pub(crate) struct GradientTile<'b, F: Accumulator, E> {
    pub(super) ids: Range<usize>,
    pub(super) segment: usize,
    /// `[panel][padded id][row]`, each with all its numbers; the order in a panel is the format's
    pub(super) exponentials: &'b mut [E],
    /// `[column]`: the rows' factors
    pub(super) factors: Vec<F>,
    /// The gradients of the weight and of the adapter, of those that need one
    pub(super) gradients: Vec<TileGradient<'b, F>>,
    /// `[ids]`, if the bias needs a gradient
    pub(super) bias: Option<&'b mut [F]>,
}

/// The gradient of some columns of a tile's ids.
pub(crate) struct TileGradient<'b, F: Accumulator> {
    pub(super) columns: Range<usize>,
    /// `[ids, columns]`
    pub(super) values: &'b mut [F],
    /// `[ids, columns]`, in place of `values`, if the gradient is rounded at once
    pub(super) rounded: &'b mut [F::Bf16],
    /// Whether `values` already holds the contribution of earlier chunks.
    pub(super) is_started: bool,
}

impl<F: Accumulator> ThirdOperands<'_, F> {
    /// Calls `subtract` for each listed id of a row that is one of `ids`, with its place among them, its mass, and the
    /// row's context.
    pub(super) fn for_each_listed(&self, ids: &Range<usize>, mut subtract: impl FnMut(usize, F, &[F])) {
        for (row, context) in self.factors.rows.iter().zip(self.contexts.chunks_exact(self.d)) {
            let entries = row.entries(self.factors.entries);
            let first = entries.partition_point(|entry| entry.id < ids.start);
            let in_tile = entries[first..].iter().take_while(|entry| entry.id < ids.end);
            for entry in in_tile.filter(|entry| !entry.mass.is_zero()) {
                subtract(entry.id - ids.start, entry.mass, context);
            }
        }
    }

    /// Completes the gradient of a tile that is rounded at once, for some of the decoder's columns: subtracts `m c` for
    /// the listed ids, and rounds. `sums` has the products, in rows of `width` numbers, and is overwritten.
    pub(super) fn round(
        &self,
        isa: Isa,
        ids: &Range<usize>,
        columns: Range<usize>,
        (sums, width): (&mut [F], usize),
        gradient: &mut TileGradient<'_, F>,
    ) {
        self.for_each_listed(ids, |id, mass, context| {
            let sums = &mut sums[id * width..][..columns.len()];
            sums.iter_mut().zip(&context[columns.clone()]).for_each(|(sum, &c)| *sum -= mass * c);
        });
        let rows = gradient.rounded.chunks_exact_mut(gradient.columns.len());
        for (to, sums) in rows.zip(sums.chunks(width)) {
            let to = &mut to[columns.start - gradient.columns.start..][..columns.len()];
            F::dispatch(isa, NarrowRow { from: &sums[..columns.len()], to });
        }
    }
}
