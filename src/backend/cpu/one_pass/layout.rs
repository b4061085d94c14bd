//! How a chunk is cut: into panels of rows, tiles of ids, and segments of tiles. The cut depends on sizes alone, so
//! that sums do not depend on the number of threads. Each row lists the ids of its position whose logits it has one by
//! one.

use std::ops::Range;

use crate::backend::cpu::objective::targets::ListedIds;
use crate::backend::cpu::products::panel::Panel;
use crate::backend::operands::{NeedsGrad, Sizes};

/// The maximum number of ids of a tile.
const MOST_IDS: usize = 256;
/// The minimum number of ids of a tile, if the vocabulary has as many.
const LEAST_IDS: usize = 32;

/// Bytes of the decoder that a thread reads again for each panel of a loss without gradients.
const SEGMENT_BYTES: usize = 4 << 20;

/// The sizes by which the products of a format cut a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// The number of ids that a product computes at a time. The number of ids of a tile is a multiple of it.
    pub(super) ids: usize,
    /// The number of rows of a full panel.
    pub(super) panel_rows: usize,
    /// The width of every panel is a multiple of this.
    pub(super) lanes: usize,
    /// The ids of a tile and the columns of the decoder are padded to multiples of this.
    pub(super) padding: usize,
    /// The minimum number of pieces, pairs of a panel and a segment, if the vocabulary is large enough: as many threads
    /// have work.
    pub(super) pieces: usize,
    /// The approximate minimum number of tiles, likewise.
    pub(super) tiles: usize,
    /// The number of elements of the decoder in a tile. It stays in the second-level cache with its logits, or is
    /// multiplied in blocks that do.
    pub(super) tile_elements: usize,
    /// The number of ids whose gradients the third product computes at a time.
    pub(super) group_ids: usize,
}

/// The cut that all chunks share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(super) vocab: usize,
    /// The number of ids of each tile but the last.
    pub(super) tile_ids: usize,
    /// The number of tiles of each segment but the last.
    segment_tiles: usize,
    /// The number of rows of each panel but the last.
    pub(super) panel_rows: usize,
    /// The width of every panel is a multiple of this.
    pub(super) lanes: usize,
    /// The ids of a tile and the columns of the decoder are padded to multiples of this.
    padding: usize,
    /// The minimum number of pieces, pairs of a panel and a segment.
    pieces: usize,
    /// The number of ids whose gradients the third product computes at a time.
    group_ids: usize,
}

impl Layout {
    /// Cuts chunks of at most `rows` rows.
    pub(super) fn new<F>(blocks: Blocks, rows: usize, sizes: Sizes, needs_grad: NeedsGrad) -> Self {
        let Sizes { context_dim, vocab, .. } = sizes;
        let Blocks { ids: at_a_time, panel_rows, lanes, padding, pieces, tile_elements, group_ids, .. } = blocks;
        let balanced = vocab.div_ceil(blocks.tiles).next_multiple_of(at_a_time);
        let cached = tile_elements / context_dim.max(1);
        let ids = cached.min(balanced).clamp(LEAST_IDS, MOST_IDS);
        let tile_ids = (ids / at_a_time * at_a_time).min(vocab.max(1));
        let tiles = vocab.div_ceil(tile_ids);
        let segments = pieces.div_ceil(rows.div_ceil(panel_rows).max(1)).min(tiles).max(1);
        let segment_tiles = tiles.div_ceil(segments).max(1);
        let layout = Layout { vocab, tile_ids, segment_tiles, panel_rows, lanes, padding, pieces, group_ids };
        if needs_grad.contexts || needs_grad.decoder() {
            layout
        } else {
            layout.with_segment_bytes::<F>(SEGMENT_BYTES, context_dim)
        }
    }

    /// Limits segments to `bytes` bytes of the decoder, or to one tile if that is larger.
    fn with_segment_bytes<F>(self, bytes: usize, context_dim: usize) -> Self {
        let tile_bytes = (self.tile_ids * context_dim * size_of::<F>()).max(1);
        Layout { segment_tiles: self.segment_tiles.min((bytes / tile_bytes).max(1)), ..self }
    }

    /// Cuts `rows` rows into panels.
    pub(super) fn panels(&self, rows: usize) -> Vec<Panel> {
        let panel = |first| {
            let rows = self.panel_rows.min(rows - first);
            Panel { first, rows, width: rows.next_multiple_of(self.lanes) }
        };
        (0..rows).step_by(self.panel_rows).map(panel).collect()
    }

    /// Returns the index of the panel that has a row.
    pub(super) fn panel_of(&self, row: usize) -> usize {
        row / self.panel_rows
    }

    /// Returns the number of columns of all panels of `rows` rows.
    pub(super) fn columns(&self, rows: usize) -> usize {
        rows.next_multiple_of(self.lanes)
    }

    /// Returns the number of tiles.
    pub(super) fn tiles(&self) -> usize {
        self.vocab.div_ceil(self.tile_ids)
    }

    /// Returns how many tiles the third product computes at a time.
    pub(super) fn tiles_at_a_time(&self) -> usize {
        (self.group_ids / self.tile_ids).clamp(1, (self.tiles() / self.pieces).max(1))
    }

    /// Returns how many of a chunk's `panels` pass through a tile together: at most `most`, and fewer if threads would
    /// have no work otherwise.
    pub(super) fn panels_at_a_time(&self, panels: usize, most: usize) -> usize {
        /// The number of pieces for each thread.
        const PER_THREAD: usize = 2;
        (panels * self.segments() / (PER_THREAD * rayon::current_num_threads())).clamp(1, most)
    }

    /// Pads a number of ids, or of columns of the decoder.
    pub(super) fn padded(&self, n: usize) -> usize {
        n.next_multiple_of(self.padding)
    }

    /// Returns the ids of a tile.
    pub(super) fn ids(&self, tile: usize) -> Range<usize> {
        tile * self.tile_ids..self.vocab.min((tile + 1) * self.tile_ids)
    }

    /// Returns the number of segments.
    pub(super) fn segments(&self) -> usize {
        self.tiles().div_ceil(self.segment_tiles)
    }

    /// Returns the number of pieces, pairs of a panel and a segment, of `rows` rows.
    pub(super) fn pieces(&self, rows: usize) -> usize {
        self.segments() * rows.div_ceil(self.panel_rows)
    }

    /// Returns by how many the pieces of a chunk may outnumber its panels.
    pub(super) fn extra_pieces(&self) -> usize {
        if self.tiles() > 1 {
            self.pieces - 1
        } else {
            0
        }
    }

    /// Returns the tiles of a segment.
    pub(super) fn tiles_of_segment(&self, segment: usize) -> Range<usize> {
        segment * self.segment_tiles..self.tiles().min((segment + 1) * self.segment_tiles)
    }

    /// Returns the index of the segment that has a tile.
    pub(super) fn segment_of(&self, tile: usize) -> usize {
        tile / self.segment_tiles
    }
}

/// A listed id of a row, once the row's gradient is known.
#[derive(Clone, Copy, Default)]
pub(super) struct ListedId<F> {
    pub(super) id: usize,
    /// The gradient of its logit, negated.
    pub(super) mass: F,
}

/// The listed ids of a chunk's rows. Each row has an entry for each of its ids. The entries of all rows lie side by
/// side: those of the K rows of a position after each other, each with the ids of the position in ascending order.
pub(super) struct ChunkIds<'a> {
    components: usize,
    /// `[positions]`
    ids: Vec<&'a [usize]>,
    /// `[positions + 1]`: the first entry of each position
    starts: Vec<usize>,
}

impl<'a> ChunkIds<'a> {
    /// Lists the ids of these positions, none of which is ignored.
    pub(super) fn new(listed: ListedIds<'a>, positions: &[usize], components: usize) -> Self {
        let ids: Vec<&[usize]> = positions.iter().map(|&t| listed.at(t).unwrap_or_default()).collect();
        let mut starts = vec![0];
        starts.extend(ids.iter().scan(0, |end, ids| {
            *end += components * ids.len();
            Some(*end)
        }));
        ChunkIds { components, ids, starts }
    }

    /// Returns the number of entries.
    pub(super) fn entries(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns the ids of the chunk's `i`-th position.
    pub(super) fn position_ids(&self, i: usize) -> &'a [usize] {
        self.ids[i]
    }

    /// Returns the index of a row's first entry, and the row's ids.
    pub(super) fn row_ids(&self, row: usize) -> (usize, &'a [usize]) {
        let (i, k) = (row / self.components, row % self.components);
        let ids = self.ids[i];
        (self.starts[i] + k * ids.len(), ids)
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::Format;
    use super::*;

    use crate::backend::cpu::products::multiplier::Vectors;
    use crate::backend::cpu::vector::simd::Isa;

    fn layout(isa: Isa, rows: usize, context_dim: usize, vocab: usize) -> Layout {
        let sizes = Sizes { positions: rows, components: 1, context_dim, vocab };
        let needs_grad = NeedsGrad { contexts: true, ..NeedsGrad::default() };
        Layout::new::<f32>(Format::<f32>::blocks(Vectors { isa, copies_rows: false }), rows, sizes, needs_grad)
    }

    #[test]
    fn tiles_segments_and_panels_cover_everything_once() {
        for isa in Isa::available() {
            for (rows, context_dim, vocab) in [(1, 1, 1), (47, 3, 257), (480, 280, 10_000), (129, 2048, 128_256)] {
                let layout = layout(isa, rows, context_dim, vocab);
                let tiles: Vec<usize> =
                    (0..layout.segments()).flat_map(|segment| layout.tiles_of_segment(segment)).collect();
                assert_eq!(tiles, (0..layout.tiles()).collect::<Vec<_>>());
                assert!(
                    (0..layout.segments()).all(|s| layout.tiles_of_segment(s).all(|tile| layout.segment_of(tile) == s))
                );
                let ids: usize = tiles.iter().map(|&tile| layout.ids(tile).len()).sum();
                assert_eq!(ids, vocab);
                let panels = layout.panels(rows);
                assert_eq!(panels.iter().map(|panel| panel.rows).sum::<usize>(), rows);
                assert_eq!(panels.last().map(|panel| panel.first + panel.width), Some(layout.columns(rows)));
                assert!((0..rows).all(|row| (row - panels[layout.panel_of(row)].first) < layout.panel_rows));
                assert!(layout.pieces(rows) >= layout.pieces.min(panels.len() * layout.tiles()) / 2);
                assert!(layout.pieces(rows) <= panels.len() + layout.extra_pieces());
                assert!(layout.tiles() * LEAST_IDS >= vocab.min(layout.pieces * LEAST_IDS) * 9 / 10, "{layout:?}");
            }
        }
    }

    #[test]
    fn segments_have_at_most_the_given_bytes() {
        for (rows, context_dim, vocab, bytes) in [(768, 280, 33_278, 4 << 20), (768, 5, 1000, 4000), (768, 300, 900, 1)]
        {
            let layout = layout(Isa::available()[0], rows, context_dim, vocab);
            let cut = layout.with_segment_bytes::<f32>(bytes, context_dim);
            assert!(cut.segments() > layout.segments(), "{cut:?}");
            let tiles: Vec<usize> = (0..cut.segments()).flat_map(|segment| cut.tiles_of_segment(segment)).collect();
            assert_eq!(tiles, (0..layout.tiles()).collect::<Vec<_>>());
            for segment in 0..cut.segments() {
                let ids: usize = cut.tiles_of_segment(segment).map(|tile| cut.ids(tile).len()).sum();
                assert!(ids * context_dim * 4 <= bytes.max(cut.tile_ids * context_dim * 4), "{segment} of {cut:?}");
            }
        }
    }
}
