//! How a chunk is cut: into panels of rows, tiles of ids, and segments of tiles. The cut depends on the sizes alone, so
//! that sums do not depend on the number of threads.

use std::ops::Range;

use super::product::{panel_width, Lanes};
use crate::backend::cpu::simd::{Float, Isa};

/// Rows that are computed together, as the columns of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel {
    /// Index of its first row in the chunk; that of its first column if all panels lie side by side.
    pub(super) first: usize,
    pub(super) rows: usize,
    /// `rows`, up to a multiple of a vector.
    pub(super) width: usize,
}

/// Minimum number of pieces of the first pass where the vocabulary allows it, for so many threads.
const PIECES: usize = 64;
/// Maximum number of ids of a tile.
const MOST_IDS: usize = 256;
/// Bytes of the decoder's rows of a tile, which stay in the second-level cache with the tile's logits.
const TILE_BYTES: usize = 320 << 10;
/// The number of rows or ids that a product computes at a time, and whose number in a tile is a multiple of it.
const AT_A_TIME: usize = 8;

/// The cut of a chunk.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) vocab: usize,
    pub(super) panels: Vec<Panel>,
    /// Columns of all panels.
    pub(super) columns: usize,
    /// Columns of a full panel.
    pub(super) most_columns: usize,
    /// Elements of a vector.
    pub(super) lanes: usize,
    /// Ids of each tile but the last.
    pub(super) tile_ids: usize,
    /// Tiles of each segment but the last.
    segment_tiles: usize,
}

impl Layout {
    pub(super) fn new<F: Float>(isa: Isa, rows: usize, context: usize, vocab: usize) -> Self {
        let (full, lanes) = (panel_width::<F>(isa), F::dispatch(isa, Lanes));
        let panel = |first| {
            let rows = full.min(rows - first);
            Panel { first, rows, width: rows.next_multiple_of(lanes) }
        };
        let panels: Vec<Panel> = (0..rows).step_by(full).map(panel).collect();
        let tile_ids = Self::tile_ids::<F>(context, vocab);
        let tiles = vocab.div_ceil(tile_ids);
        let segments = PIECES.div_ceil(panels.len().max(1)).min(tiles).max(1);
        Layout {
            vocab,
            columns: panels.last().map_or(0, |panel| panel.first + panel.width),
            most_columns: full,
            lanes,
            panels,
            tile_ids,
            segment_tiles: tiles.div_ceil(segments),
        }
    }

    fn tile_ids<F>(context: usize, vocab: usize) -> usize {
        let ids = TILE_BYTES / (context * size_of::<F>()).max(1);
        (ids / AT_A_TIME * AT_A_TIME).clamp(4 * AT_A_TIME, MOST_IDS).min(vocab.max(1))
    }

    pub(super) fn tiles(&self) -> usize {
        self.vocab.div_ceil(self.tile_ids)
    }

    /// The pieces of the first pass: pairs of a segment and a panel.
    pub(super) fn pieces(&self) -> usize {
        self.segments() * self.panels.len()
    }

    /// The panel of a row.
    pub(super) fn panel_of(&self, row: usize) -> usize {
        row / self.most_columns
    }

    /// The ids of a tile.
    pub(super) fn ids(&self, tile: usize) -> Range<usize> {
        tile * self.tile_ids..self.vocab.min((tile + 1) * self.tile_ids)
    }

    pub(super) fn segments(&self) -> usize {
        self.tiles().div_ceil(self.segment_tiles)
    }

    /// The tiles of a segment.
    pub(super) fn segment(&self, segment: usize) -> Range<usize> {
        segment * self.segment_tiles..self.tiles().min((segment + 1) * self.segment_tiles)
    }

    /// The segment of a tile.
    pub(super) fn segment_of(&self, tile: usize) -> usize {
        tile / self.segment_tiles
    }
}
