//! The first pass over the vocabulary: logits, exponentials, their sums and their products with the decoder.

use std::ops::Range;

use rayon::prelude::*;

use super::exponentials::{Capped, Exponentials, Running};
use super::layout::{Layout, Panel};
use super::product::{Left, Product, Start};
use super::scaling::Scaled;
use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::matrix::{transpose, Block};
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::simd::Float;

/// Columns of the decoder that the first product sums over at a time, so that the packed contexts stay in the cache.
const MOST_DEPTH: usize = 320;

/// What the first pass leaves of a panel and a segment.
pub(super) struct Part<F> {
    pub(super) running: Running<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials, if these are kept
    pub(super) offsets: Vec<F>,
    /// The logits of the targets in this segment, with the rows that they belong to.
    pub(super) target_logits: Vec<(usize, F)>,
}

/// The target of each row in the first pass.
pub(super) struct RowTargets<I> {
    pub(super) id: I,
    /// Whether targets are entries of their own, whose logits in the vocabulary take no part.
    pub(super) are_own: bool,
}

impl<F: Float> Part<F> {
    /// Elements per row of a panel of `rows` rows: a part without offsets, and the piece that it is computed from.
    pub(super) fn elements_per_row(rows: usize) -> usize {
        // An offset, the largest logit, a factor and the sum of each row.
        let numbers = 3 + size_of::<f64>().div_ceil(size_of::<F>());
        numbers + (size_of::<Self>() + size_of::<Piece<'_, F>>()).div_ceil(rows * size_of::<F>())
    }
}

/// Buffers of the first pass.
pub(super) struct Buffers<'b, F> {
    /// `[tile][panel][id][row]`; empty if they are not kept
    pub(super) exponentials: &'b mut [F],
    /// `[segment][panel][d][row]`: the products O of exponentials and decoder; empty if not needed
    pub(super) sums: &'b mut [F],
    /// `[panel][d][row]`: contexts times the logit scale
    pub(super) packed: &'b mut [F],
}

/// Computes the parts, segment by segment.
pub(super) fn first_pass<T: Element>(
    inputs: &Inputs<'_, T>,
    layout: &Layout,
    panels: &[Panel],
    contexts: &[T::Acc],
    targets: RowTargets<impl Fn(usize) -> Option<usize> + Sync>,
    Buffers { exponentials, sums, packed }: Buffers<'_, T::Acc>,
) -> Vec<Part<T::Acc>> {
    let d = inputs.sizes.context_dim;
    split(packed, panels, d).into_par_iter().zip(panels).for_each(|(to, panel)| pack(inputs, contexts, *panel, to));
    let packed = &*packed;

    let mut sums = sums.chunks_exact_mut(layout.panel_rows * d);
    let mut pieces: Vec<Piece<'_, T::Acc>> = (0..layout.segments())
        .flat_map(|segment| panels.iter().map(move |&panel| (segment, panel)))
        .map(|(segment, panel)| Piece { segment, panel, tiles: vec![], sums: sums.next().unwrap_or_default() })
        .collect();
    let columns: usize = panels.iter().map(|panel| panel.width).sum();
    for (tile, of_tile) in exponentials.chunks_mut(layout.tile_ids * columns).take(layout.tiles()).enumerate() {
        let first = layout.segment_of(tile) * panels.len();
        let of_panels = split(of_tile, panels, layout.ids(tile).len());
        pieces[first..].iter_mut().zip(of_panels).for_each(|(piece, of_panel)| piece.tiles.push(of_panel));
    }
    let run = |buffers: &mut _, piece: Piece<'_, _>| piece.run(inputs, layout, packed, &targets, buffers);
    pieces.into_par_iter().map_init(Tiles::default, run).collect()
}

/// The work of one thread for one segment and panel.
struct Piece<'b, F> {
    segment: usize,
    panel: Panel,
    /// `[ids, width]` for each tile: its exponentials, if they are kept
    tiles: Vec<&'b mut [F]>,
    /// `[d, width]`, or empty if not needed
    sums: &'b mut [F],
}

/// A thread's copies of the parts of a decoder's tile in half precision, widened, and its exponentials if they are not
/// kept.
#[derive(Default)]
struct Tiles<F> {
    decoder: [Vec<F>; 2],
    exponentials: Aligned<F>,
}

impl<F: Float> Piece<'_, F> {
    /// `packed` has the contexts of all panels.
    fn run<T: Element<Acc = F>>(
        self,
        inputs: &Inputs<'_, T>,
        layout: &Layout,
        packed: &[F],
        targets_of: &RowTargets<impl Fn(usize) -> Option<usize>>,
        buffers: &mut Tiles<F>,
    ) -> Part<F> {
        let d = inputs.sizes.context_dim;
        let Panel { first, rows, width } = self.panel;
        let packed = &packed[first * d..][..width * d];
        let running = Running::new(width);
        let mut part = Part { running, offsets: Vec::with_capacity(self.tiles.len() * width), target_logits: vec![] };
        let mut targets = Vec::with_capacity(rows);
        let matrices: Vec<_> = inputs.decoder.parts().collect();
        let are_kept = !self.tiles.is_empty();
        let mut tiles = self.tiles.into_iter();
        for (i, tile) in layout.segment(self.segment).enumerate() {
            let ids = layout.ids(tile);
            let mut decoder = Vec::with_capacity(matrices.len());
            for ((columns, matrix), buffer) in matrices.iter().zip(&mut buffers.decoder) {
                decoder.push((columns.clone(), matrix.block(ids.clone(), buffer)));
            }
            let to = match tiles.next() {
                Some(kept) => kept,
                None => buffers.exponentials.at_least(ids.len() * width),
            };
            logits(inputs, &decoder, ids.clone(), packed, width, to);
            targets.clear();
            for row in first..first + rows {
                if let Some(y) = (targets_of.id)(row).filter(|y| ids.contains(y)) {
                    let at = (y - ids.start) * width + row - first;
                    match targets_of.are_own {
                        true => to[at] = F::neg_infinity(),
                        false => part.target_logits.push((row, to[at])),
                    }
                    targets.push(at);
                }
            }
            let kernel = Exponentials { tile: to, running: &mut part.running, softcap: inputs.softcap };
            let has_moved = F::dispatch(inputs.isa, kernel);
            targets.iter().for_each(|&at| to[at] = F::zero());
            if are_kept {
                part.offsets.extend_from_slice(&part.running.offset);
            }
            if self.sums.is_empty() {
                continue;
            }
            let sums = &mut self.sums[..width * d];
            if has_moved && i > 0 {
                F::dispatch(inputs.isa, Scaled { values: sums, factors: &part.running.rescale });
            }
            let start = if i > 0 { Start::Stored } else { Start::Zero };
            for (columns, block) in &decoder {
                let left = Left { values: block.values, row: block.column, step: block.id, depth: ids.len() };
                let (rows, left, right) = (columns.len(), &[left][..], &to[..]);
                let to = &mut sums[columns.start * width..];
                F::dispatch(inputs.isa, Product { start, rows, left, right, width, to, to_row: width, columns: width });
            }
        }
        part
    }
}

/// A buffer with `rows` rows of each panel, panel by panel.
fn split<'b, F>(mut buffer: &'b mut [F], panels: &[Panel], rows: usize) -> Vec<&'b mut [F]> {
    let of_panel = |panel: &Panel| {
        let (first, others) = std::mem::take(&mut buffer).split_at_mut(rows * panel.width);
        buffer = others;
        first
    };
    panels.iter().map(of_panel).collect()
}

/// A panel's contexts times the logit scale, `[d, width]`.
fn pack<T: Element>(inputs: &Inputs<'_, T>, contexts: &[T::Acc], panel: Panel, to: &mut [T::Acc]) {
    let d = inputs.sizes.context_dim;
    let Panel { first, rows, width } = panel;
    if rows < width {
        to.fill(num_traits::Zero::zero());
    }
    transpose(&contexts[first * d..], d, 0..rows, 0..d, to, width, |x| x);
    if inputs.logit_scale != num_traits::One::one() {
        to.iter_mut().for_each(|x| *x *= inputs.logit_scale);
    }
}

/// The logits of a tile and a panel, `[ids, width]`.
fn logits<T: Element>(
    inputs: &Inputs<'_, T>,
    decoder: &[(Range<usize>, Block<'_, T::Acc>)],
    ids: Range<usize>,
    packed: &[T::Acc],
    width: usize,
    to: &mut [T::Acc],
) {
    for (columns, block) in decoder {
        let d = columns.len();
        // All pieces have nearly the same size.
        let depth = d.div_ceil(d.div_ceil(MOST_DEPTH));
        for first in (0..d).step_by(depth) {
            let left = Left {
                values: &block.values[first * block.column..],
                row: block.id,
                step: block.column,
                depth: depth.min(d - first),
            };
            let first = columns.start + first;
            let start = if first == 0 { Start::Rows(&inputs.bias[ids.clone()]) } else { Start::Stored };
            let (rows, left, right) = (ids.len(), &[left][..], &packed[first * width..]);
            let product = Product { start, rows, left, right, width, to, to_row: width, columns: width };
            T::Acc::dispatch(inputs.isa, product);
        }
    }
    if let Some(softcap) = inputs.softcap {
        T::Acc::dispatch(inputs.isa, Capped { tile: to, softcap });
    }
}
