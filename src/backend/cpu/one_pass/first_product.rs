//! The first pass over the vocabulary: logits, exponentials, their sums and their products with the decoder.

use std::ops::Range;

use rayon::prelude::*;

use super::chunk_ids::ChunkIds;
use super::exponentials::{Capped, Exponentials, Offsets, Running};
use super::format::{FirstOperands, Format};
use super::layout::{Layout, Panel};
use super::scaling::Scaled;
use super::segment_part::SegmentPart;
use super::top_logits::{Floors, TopLogits};
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;
use crate::backend::cpu::vector::simd::Float;

/// What the first pass leaves out of its sums.
pub(super) struct LeftOut<'a> {
    pub(super) ids: &'a ChunkIds<'a>,
    /// Whether the ids are targets with entries of their own, whose logits in the vocabulary take no part.
    pub(super) are_own: bool,
    /// Whether the entropy of each row is needed.
    pub(super) with_entropy: bool,
    /// Whether each row's largest logit in each tile is needed.
    pub(super) with_tiles: bool,
    /// How many of each row's largest logits are needed; of rows that need any, no ids are left out.
    pub(super) top_k: Option<(usize, &'a Floors)>,
}

/// Bytes per row of a panel of `rows` rows: a part without offsets, and the piece that it is computed from.
pub(super) fn part_bytes<F: Float>(rows: usize) -> usize {
    // An offset, the largest logit, a factor, the sum and the moment of each row.
    let numbers = 3 * size_of::<F>() + 2 * size_of::<f64>();
    numbers + (size_of::<SegmentPart<F>>() + size_of::<Piece<'_, F, F>>()).div_ceil(rows)
}

/// Buffers of the first pass.
pub(super) struct FirstProductBuffers<'b, F, P, K> {
    /// `[tile][panel][padded id][row]`; empty if they are not kept
    pub(super) exponentials: &'b mut [K],
    /// `[segment][panel][padded d][row]`: the products O of exponentials and decoder; empty if not needed
    pub(super) sums: &'b mut [F],
    /// `[panel]`: the contexts as operands of the first product
    pub(super) packed: &'b mut [P],
}

/// Computes the parts, segment by segment, `[segment][panel]`.
pub(super) fn first_pass<T: Element, X: Format<T>>(
    format: X,
    inputs: &Inputs<'_, T>,
    layout: &Layout,
    panels: &[Panel],
    contexts: &[T::Acc],
    left_out: LeftOut<'_>,
    FirstProductBuffers { exponentials, sums, packed }: FirstProductBuffers<'_, T::Acc, X::Packed, X::Exponential>,
) -> Vec<SegmentPart<T::Acc>> {
    let d = inputs.sizes.context_dim;
    let of_panels = split(packed, panels, format.packed_per_row(d));
    of_panels.into_par_iter().zip(panels).for_each(|(to, panel)| format.pack(inputs, contexts, *panel, to));
    let packed = &*packed;

    let mut sums = sums.chunks_exact_mut(layout.panel_rows * layout.padded(d));
    let together = layout.panels_at_a_time(panels.len(), format.most_panels());
    let mut pieces: Vec<Piece<'_, T::Acc, X::Exponential>> = (0..layout.segments())
        .flat_map(|segment| panels.chunks(together).map(move |panels| (segment, panels)))
        .map(|(segment, panels)| {
            let sums = panels.iter().map(|_| sums.next().unwrap_or_default()).collect();
            Piece { segment, panels, tiles: vec![], sums }
        })
        .collect();
    let columns: usize = panels.iter().map(|panel| panel.width).sum();
    let of_tiles = exponentials.chunks_mut(layout.padded(layout.tile_ids) * columns).take(layout.tiles());
    for (tile, of_tile) in of_tiles.enumerate() {
        let first = layout.segment_of(tile) * panels.len().div_ceil(together);
        let mut of_panels = split(of_tile, panels, layout.padded(layout.ids(tile).len())).into_iter();
        for piece in &mut pieces[first..first + panels.len().div_ceil(together)] {
            piece.tiles.extend(of_panels.by_ref().take(piece.panels.len()));
        }
    }
    let run = |buffers: &mut _, piece: Piece<'_, _, _>| piece.run(format, inputs, layout, packed, &left_out, buffers);
    let parts: Vec<Vec<_>> = pieces.into_par_iter().map_init(Default::default, run).collect();
    parts.into_iter().flatten().collect()
}

/// The work of one thread for one segment and some panels.
struct Piece<'b, F, K> {
    segment: usize,
    panels: &'b [Panel],
    /// `[tile][panel]`, each `[padded ids, width]`: the exponentials, if they are kept
    tiles: Vec<&'b mut [K]>,
    /// For each panel `[padded d, width]`, or empty if not needed
    sums: Vec<&'b mut [F]>,
}

impl<F: Float, K> Piece<'_, F, K> {
    /// `packed` has the contexts of all panels.
    fn run<T: Element<Acc = F>, X: Format<T, Exponential = K>>(
        mut self,
        format: X,
        inputs: &Inputs<'_, T>,
        layout: &Layout,
        packed: &[X::Packed],
        left_out: &LeftOut<'_>,
        (decoder_buffers, logit_buffers): &mut (X::DecoderBuffers, X::LogitBuffers),
    ) -> Vec<SegmentPart<F>> {
        let d = inputs.sizes.context_dim;
        let per_row = format.packed_per_row(d);
        let running = |panel: &Panel| {
            Running::new(panel.width, left_out.with_entropy, left_out.with_tiles || left_out.top_k.is_some())
        };
        let part = |panel: &Panel| SegmentPart {
            running: running(panel),
            offsets: vec![],
            tile_largest: vec![],
            top_k: left_out.top_k.map(|(n, _)| TopLogits::new(n, *panel)),
            listed_logits: vec![],
        };
        let mut parts: Vec<SegmentPart<F>> = self.panels.iter().map(part).collect();
        let mut tiles = self.tiles.into_iter();
        for (i, tile) in layout.segment(self.segment).enumerate() {
            let ids = layout.ids(tile);
            let decoder = format.decoder(inputs, ids.clone(), decoder_buffers);
            for ((panel, part), sums) in self.panels.iter().zip(&mut parts).zip(&mut self.sums) {
                let Panel { first, width, .. } = *panel;
                let sums = if sums.is_empty() { &mut [][..] } else { &mut sums[..width * layout.padded(d)] };
                let kept = tiles.next();
                let are_kept = kept.is_some();
                let operands = FirstOperands {
                    inputs,
                    ids: ids.clone(),
                    decoder: &decoder,
                    panel: *panel,
                    packed: &packed[first * per_row..][..width * per_row],
                    kept,
                    sums,
                    is_first: i == 0,
                };
                format.multiply(operands, logit_buffers, |logits, sums| {
                    part.exponentiate(inputs, &ids, *panel, left_out, logits, sums, i == 0);
                });
                if left_out.with_tiles {
                    part.tile_largest.extend_from_slice(&part.running.tile_largest);
                }
                if are_kept {
                    part.offsets.extend_from_slice(&part.running.offset);
                }
            }
        }
        parts
    }
}

impl<F: Float> SegmentPart<F> {
    /// Turns the logits `[ids, width]` of a tile into exponentials, which are zero for the listed ids. Multiplies the
    /// sums of earlier tiles, if there are any, by the factors that changed offsets need.
    #[allow(clippy::too_many_arguments)]
    fn exponentiate<T: Element<Acc = F>>(
        &mut self,
        inputs: &Inputs<'_, T>,
        ids: &Range<usize>,
        panel: Panel,
        left_out: &LeftOut<'_>,
        logits: &mut [F],
        sums: &mut [F],
        is_first: bool,
    ) {
        if let Some(softcap) = inputs.softcap {
            F::dispatch(inputs.isa, Capped { tile: logits, softcap });
        }
        let Panel { first, rows, width } = panel;
        let mut listed = Vec::new();
        for row in first..first + rows {
            let (entry, of_row) = left_out.ids.of_row(row);
            let of_tile = of_row.partition_point(|&id| id < ids.start)..of_row.partition_point(|&id| id < ids.end);
            for j in of_tile {
                let at = (of_row[j] - ids.start) * width + row - first;
                if !left_out.are_own {
                    self.listed_logits.push((entry + j, logits[at]));
                }
                logits[at] = F::neg_infinity();
                listed.push(at);
            }
        }
        let has_moved = F::dispatch(inputs.isa, Offsets { tile: logits, running: &mut self.running });
        if let (Some(top_k), Some((_, floors))) = (&mut self.top_k, left_out.top_k) {
            top_k.add(ids, logits, &self.running.tile_largest, floors);
        }
        F::dispatch(inputs.isa, Exponentials { tile: logits, running: &mut self.running, softcap: inputs.softcap });
        // The slope of a softcap is not finite there.
        listed.iter().for_each(|&at| logits[at] = F::zero());
        if has_moved && !is_first && !sums.is_empty() {
            F::dispatch(inputs.isa, Scaled { values: sums, factors: &self.running.rescale });
        }
    }
}

/// A buffer with `rows` rows of each panel, panel by panel.
fn split<'b, E>(mut buffer: &'b mut [E], panels: &[Panel], rows: usize) -> Vec<&'b mut [E]> {
    let of_panel = |panel: &Panel| {
        let (first, others) = std::mem::take(&mut buffer).split_at_mut(rows * panel.width);
        buffer = others;
        first
    };
    panels.iter().map(of_panel).collect()
}
