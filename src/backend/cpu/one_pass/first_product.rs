//! The first and the second product of a chunk, tile by tile: logits, exponentials, their sums, and their products with
//! the decoder.

use std::ops::Range;

use super::exponentials::{Exponentiate, ExponentiateSigsoftmax, RunningSums, SegmentSums, UpdateOffsets};
use super::format::{FirstOperands, Format, PanelOperands};
use super::gradients::Scale;
use super::layout::{ChunkIds, Layout};
use super::top_logits::{Floors, TopLogits};
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::products::panel::Panel;
use crate::backend::cpu::scratch::Scratch;
use crate::backend::cpu::vector::logit_map::{ApplyLogitMap, LogitMap};
use crate::backend::cpu::vector::simd::Float;
use crate::backend::parallel;

/// What is requested of the first product besides the log-sum-exp of each row and the logits of its listed ids.
#[derive(Clone, Copy, Default)]
pub(super) struct FirstProductRequest {
    /// Whether the moment of each row's exponentials is requested, from which its entropy follows.
    pub(super) moment: bool,
    /// Whether each row's largest logit in each tile is requested, which bounds the probability of every id there.
    pub(super) tile_largest: bool,
    /// How many of each row's largest logits are requested. A row of such a request has no listed ids.
    pub(super) top_k: Option<usize>,
}

/// The first and the second product of a chunk.
pub(super) struct ChunkProducts<'c, 'a, F: Accumulator, X> {
    pub(super) format: X,
    pub(super) inputs: &'c Inputs<'a, F>,
    pub(super) layout: &'c Layout,
    pub(super) panels: &'c [Panel],
    /// `[rows, d]`
    pub(super) contexts: &'c [F],
    /// The ids that are left out of the sums and products.
    pub(super) ids: &'c ChunkIds<'a>,
    /// Whether the listed ids are targets with entries of their own, whose logits in the vocabulary take no part.
    pub(super) targets_are_own: bool,
    pub(super) request: FirstProductRequest,
    /// For each row, if its largest logits are requested, what all threads know about them.
    pub(super) floors: Option<Floors>,
}

/// The buffers that all chunks use.
pub(super) struct ChunkBuffers<F: Accumulator, X: Format<F>> {
    /// `[tile][panel][padded id][row]`: E, whose numbers may have parts; empty if the decoder needs no gradient
    pub(super) exponentials: Scratch<X::Exponential>,
    /// `[segment][panel][padded d][row]`: O, the products of exponentials and decoder; empty if the contexts need no
    /// gradient
    pub(super) products: Aligned<F>,
    /// `[panel]`: the contexts as operands of the first product
    pub(super) packed: Aligned<X::Packed>,
}

/// The work of one thread for one segment and some panels.
struct Piece<'b, F, E> {
    segment: usize,
    panels: &'b [Panel],
    /// `[tile][panel]`, each `[padded ids, width]`: where the exponentials are kept; empty if the decoder needs no
    /// gradient
    exponentials: Vec<&'b mut [E]>,
    /// For each panel `[padded d, width]`, or empty if the contexts need no gradient
    products: Vec<&'b mut [F]>,
}

/// A tile of ids by the rows of a panel.
struct PanelTile {
    ids: Range<usize>,
    panel: Panel,
    /// Whether the tile is the first of its segment.
    is_first: bool,
}

/// Returns the bytes that a row of a panel of `panel_rows` rows takes in each segment: those of [`SegmentSums`] without
/// offsets, and those of the piece that computes them.
pub(super) fn segment_bytes<F: Float>(panel_rows: usize) -> usize {
    // An offset, the largest logit, a factor, the sum and the moment of each row.
    let numbers = 3 * size_of::<F>() + 2 * size_of::<f64>();
    numbers + (size_of::<SegmentSums<F>>() + size_of::<Piece<'_, F, F>>()).div_ceil(panel_rows)
}

impl<F: Accumulator, X: Format<F>> ChunkProducts<'_, '_, F, X> {
    /// Computes the sums of all segments and panels, `[segment][panel]`, and fills the buffers.
    pub(super) fn run(&self, buffers: &mut ChunkBuffers<F, X>) -> Vec<SegmentSums<F>> {
        let ChunkBuffers { exponentials, products, packed } = buffers;
        let packed_panels =
            split_by_panel(packed, self.panels, self.format.packed_per_row(self.inputs.sizes.context_dim));
        parallel::for_each(packed_panels.into_iter().zip(self.panels), |(to, panel)| {
            self.format.pack(self.inputs, self.contexts, *panel, to)
        });
        let packed = &**packed;
        let pieces = self.pieces(exponentials, products);
        let run_piece = |buffers: &mut _, piece: Piece<'_, _, _>| self.run_piece(piece, packed, buffers);
        let sums = parallel::map_with(pieces, Default::default, run_piece);
        let mut all = Vec::with_capacity(self.panels.len() * self.layout.segments());
        sums.into_iter().for_each(|sums| all.extend(sums));
        all
    }

    /// Cuts the chunk into pieces of one segment and as many panels as pass through a tile together, and gives each its
    /// part of the buffers.
    fn pieces<'b>(
        &'b self,
        exponentials: &'b mut [X::Exponential],
        products: &'b mut [F],
    ) -> Vec<Piece<'b, F, X::Exponential>> {
        let (layout, panels) = (self.layout, self.panels);
        let mut products = products.chunks_exact_mut(layout.panel_rows * layout.padded(self.inputs.sizes.context_dim));
        let together = layout.panels_at_a_time(panels.len(), self.format.most_panels());
        let mut pieces = Vec::new();
        for segment in 0..layout.segments() {
            for panels in panels.chunks(together) {
                let products = panels.iter().map(|_| products.next().unwrap_or_default()).collect();
                pieces.push(Piece { segment, panels, exponentials: vec![], products });
            }
        }
        let columns: usize = panels.iter().map(|panel| panel.width).sum();
        let kept = self.format.kept_per_exponential();
        let tiles = exponentials.chunks_mut(layout.padded(layout.tile_ids) * columns * kept).take(layout.tiles());
        for (tile, exponentials) in tiles.enumerate() {
            let first = layout.segment_of(tile) * panels.len().div_ceil(together);
            let mut by_panel =
                split_by_panel(exponentials, panels, layout.padded(layout.ids(tile).len()) * kept).into_iter();
            for piece in &mut pieces[first..first + panels.len().div_ceil(together)] {
                piece.exponentials.extend(by_panel.by_ref().take(piece.panels.len()));
            }
        }
        pieces
    }

    /// Computes the sums of a piece's panels. `packed` has the contexts of all panels.
    fn run_piece(
        &self,
        mut piece: Piece<'_, F, X::Exponential>,
        packed: &[X::Packed],
        (decoder_buffers, logit_buffers): &mut (X::DecoderBuffers, X::LogitBuffers),
    ) -> Vec<SegmentSums<F>> {
        let d = self.inputs.sizes.context_dim;
        let per_row = self.format.packed_per_row(d);
        let mut sums: Vec<SegmentSums<F>> = piece.panels.iter().map(|panel| self.no_sums(*panel)).collect();
        let mut exponentials = piece.exponentials.into_iter();
        let needs_columns = piece.products.iter().any(|products| !products.is_empty());
        for (i, tile) in self.layout.tiles_of_segment(piece.segment).enumerate() {
            let ids = self.layout.ids(tile);
            let decoder = self.format.decoder_tile(self.inputs, ids.clone(), needs_columns, decoder_buffers);
            let mut panels = Vec::with_capacity(piece.panels.len());
            for (&panel, products) in piece.panels.iter().zip(&mut piece.products) {
                let Panel { first, width, .. } = panel;
                let products =
                    if products.is_empty() { &mut [][..] } else { &mut products[..width * self.layout.padded(d)] };
                let packed = &packed[first * per_row..][..width * per_row];
                panels.push(PanelOperands { panel, packed, exponentials: exponentials.next(), products });
            }
            let are_kept = panels.iter().all(|panel| panel.exponentials.is_some());
            let is_first = i == 0;
            let operands = FirstOperands {
                inputs: self.inputs,
                ids: ids.clone(),
                decoder: &decoder,
                panels,
                is_first_tile: is_first,
            };
            self.format.multiply(operands, logit_buffers, |panel, logits, products| {
                let tile = PanelTile { ids: ids.clone(), panel: piece.panels[panel], is_first };
                self.exponentiate(&tile, &mut sums[panel], logits, products);
            });
            for sums in &mut sums {
                if self.request.tile_largest {
                    sums.tile_largest.extend_from_slice(&sums.running.tile_largest);
                }
                if are_kept {
                    sums.offsets.extend_from_slice(&sums.running.offset);
                }
            }
        }
        sums
    }

    /// Returns the sums of a panel's rows over no ids.
    fn no_sums(&self, panel: Panel) -> SegmentSums<F> {
        let FirstProductRequest { moment, tile_largest, top_k } = self.request;
        SegmentSums {
            running: RunningSums::new(panel.width, moment, tile_largest || top_k.is_some()),
            offsets: vec![],
            tile_largest: vec![],
            top_logits: top_k.map(|k| TopLogits::new(k, panel)),
            listed_logits: vec![],
        }
    }

    /// Turns the logits `[ids, width]` of a tile into exponentials, which are zero for the listed ids, and adds them to
    /// the sums. Multiplies the products of earlier tiles, if there are any, by the factors that changed offsets need.
    fn exponentiate(
        &self,
        PanelTile { ids, panel, is_first }: &PanelTile,
        sums: &mut SegmentSums<F>,
        logits: &mut [F],
        products: &mut [F],
    ) {
        let (isa, logit_map) = (self.inputs.isa, self.inputs.logit_map);
        // Unless the logits of sigsoftmax are ranked, its exponentials are made of the products.
        let needs_logits = self.request.top_k.is_some();
        let later = logit_map.filter(|map| matches!(map, LogitMap::Sigsoftmax) && !needs_logits);
        if let (Some(map), None) = (logit_map, later) {
            F::dispatch(isa, ApplyLogitMap { tile: logits, map });
        }
        let listed = self.take_listed(ids, *panel, later, sums, logits);
        let running = &mut sums.running;
        let has_moved = F::dispatch(isa, UpdateOffsets { tile: logits, map: later, running });
        if let (Some(top_logits), Some(floors)) = (&mut sums.top_logits, &self.floors) {
            top_logits.add(ids, logits, &running.tile_largest, floors);
        }
        match later {
            Some(_) => F::dispatch(isa, ExponentiateSigsoftmax { tile: logits, running }),
            None => F::dispatch(isa, Exponentiate { tile: logits, running, logit_map }),
        }
        // The slope of a softcap is not finite there.
        listed.iter().for_each(|&at| logits[at] = num_traits::Zero::zero());
        if has_moved && !is_first && !products.is_empty() {
            F::dispatch(isa, Scale { values: products, factors: &running.rescale });
        }
    }

    /// Moves the logits of the listed ids from a tile `[ids, width]` to the sums, leaves minus infinity in their
    /// places, and returns these places. The tile may have the products that a function makes the logits of `later`.
    fn take_listed(
        &self,
        ids: &Range<usize>,
        Panel { first, rows, width }: Panel,
        later: Option<LogitMap<F>>,
        sums: &mut SegmentSums<F>,
        logits: &mut [F],
    ) -> Vec<usize> {
        let mut places = Vec::new();
        for row in first..first + rows {
            let (first_entry, listed) = self.ids.row_ids(row);
            let in_tile = listed.partition_point(|&id| id < ids.start)..listed.partition_point(|&id| id < ids.end);
            for j in in_tile {
                let at = (listed[j] - ids.start) * width + row - first;
                if !self.targets_are_own {
                    let logit = later.map_or(logits[at], |map| map.apply_at(self.inputs.isa, logits[at]));
                    sums.listed_logits.push((first_entry + j, logit));
                }
                logits[at] = num_traits::Float::neg_infinity();
                places.push(at);
            }
        }
        places
    }
}

/// Splits a buffer that has `per_row` elements for each row of a panel, panel by panel.
fn split_by_panel<'b, E>(mut buffer: &'b mut [E], panels: &[Panel], per_row: usize) -> Vec<&'b mut [E]> {
    let panel_elements = |panel: &Panel| {
        let (first, others) = std::mem::take(&mut buffer).split_at_mut(per_row * panel.width);
        buffer = others;
        first
    };
    panels.iter().map(panel_elements).collect()
}
