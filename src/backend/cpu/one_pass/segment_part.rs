//! What the first pass leaves for the rows.

use super::exponentials::Running;
use super::top_logits::TopLogits;

/// What the first pass leaves of a panel and a segment.
pub(super) struct SegmentPart<F> {
    pub(super) running: Running<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials, if these are kept
    pub(super) offsets: Vec<F>,
    /// `[tiles, width]`: each row's largest logit in each tile, without the listed ids, if it is needed
    pub(super) tile_largest: Vec<F>,
    /// The largest logits, if they are needed
    pub(super) top_k: Option<TopLogits<F>>,
    /// The logits of the listed ids in this segment, with the entries that they belong to.
    pub(super) listed_logits: Vec<(usize, F)>,
}
