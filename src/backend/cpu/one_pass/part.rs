//! What the first pass leaves for the rows.

use super::exponentials::Running;

/// What the first pass leaves of a panel and a segment.
pub(super) struct Part<F> {
    pub(super) running: Running<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials, if these are kept
    pub(super) offsets: Vec<F>,
    /// The logits of the listed ids in this segment, with the entries that they belong to.
    pub(super) listed_logits: Vec<(usize, F)>,
}
