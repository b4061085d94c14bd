//! What the first product leaves of a panel and a segment of the vocabulary.

use super::exponentials::RunningSums;
use super::top_logits::TopLogits;

/// The sums over the ids of a segment, for the rows of a panel.
pub(super) struct SegmentSums<F> {
    pub(super) running: RunningSums<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials, if the third product needs the exponentials
    pub(super) offsets: Vec<F>,
    /// `[tiles, width]`: each row's largest logit in each tile, without the listed ids, if it is requested
    pub(super) tile_largest: Vec<F>,
    /// The largest logits of each row, if they are requested
    pub(super) top_logits: Option<TopLogits<F>>,
    /// The logits of the listed ids in this segment, with the entries that they belong to.
    pub(super) listed_logits: Vec<(usize, F)>,
}
