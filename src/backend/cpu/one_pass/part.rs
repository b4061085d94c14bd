//! What the first pass leaves for the rows.

use super::exponentials::Running;

/// What the first pass leaves of a panel and a segment.
pub(super) struct Part<F> {
    pub(super) running: Running<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials, if these are kept
    pub(super) offsets: Vec<F>,
    /// The logits of the targets in this segment, with the rows that they belong to.
    pub(super) target_logits: Vec<(usize, F)>,
}
