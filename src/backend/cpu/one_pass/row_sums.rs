//! What the first product leaves: the sums of each panel and segment, and of a chunk the log-sum-exp of each row, from the
//! sums of all segments and the logits of the row's listed ids.

use rayon::prelude::*;

use super::chunk_ids::ChunkIds;
use super::exponentials::RunningSums;
use super::layout::{Layout, Panel};
use super::top_logits::TopLogits;
use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::vector::log_sum_exp::{finite_or_zero, LogSumExp};
use crate::backend::cpu::vector::math::{not_negative, weighted};
use crate::backend::cpu::vector::simd::Float;
use crate::backend::shared_rows::SharedRow;

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

/// A row's sums over the vocabulary.
#[derive(Clone, Copy, Default)]
pub(super) struct RowSums<F> {
    pub(super) lse: LogSumExp<F>,
    /// The log-sum-exp over the ids that are not listed.
    pub(super) outside: LogSumExp<F>,
}

impl<F: Float> RowSums<F> {
    /// Returns the softmax probability of an id with logit `z`.
    pub(super) fn softmax(&self, z: F) -> f64 {
        if z == F::neg_infinity() {
            0.0
        } else {
            ((z - self.lse.largest).f64() - self.lse.log_sum.f64()).exp()
        }
    }

    /// Returns what a mass outside the listed ids, whose logits are `listed`, takes from the gradient there, as a
    /// factor of `exp(z - outside.largest)`. With the softmax s, the gradient is
    ///
    /// ```text
    /// mass (s(v) - s(v) / s(outside)) = -mass s(listed) s(v) / s(outside)
    /// ```
    ///
    /// of which the left side may cancel, and s(outside) may be below the smallest number.
    pub(super) fn outside_factor(&self, mass: f64, listed: &[F]) -> f64 {
        if mass == 0.0 {
            return 0.0;
        }
        let listed: f64 = listed.iter().map(|&z| self.softmax(z)).sum();
        weighted(mass * listed, (-self.outside.log_sum.f64()).exp())
    }
}

/// What the first product leaves of a chunk.
pub(super) struct FirstProductResults<'a, F> {
    pub(super) layout: Layout,
    pub(super) panels: Vec<Panel>,
    pub(super) ids: ChunkIds<'a>,
    /// `[segment][panel]`
    pub(super) segments: Vec<SegmentSums<F>>,
    /// `[entries]`: the logits of the listed ids
    logits: Vec<F>,
    /// `[rows]`
    pub(super) sums: Vec<RowSums<F>>,
}

impl<'a, F: Float> FirstProductResults<'a, F> {
    /// Adds up the sums of all segments. `own_logits` are the logits of targets that are entries of their own;
    /// otherwise it is empty.
    pub(super) fn new(
        layout: Layout,
        panels: Vec<Panel>,
        ids: ChunkIds<'a>,
        segments: Vec<SegmentSums<F>>,
        own_logits: Vec<F>,
    ) -> Self {
        let mut logits = own_logits;
        // A logit that no segment has belongs to another rank.
        logits.resize(ids.entries(), F::neg_infinity());
        for &(entry, z) in segments.iter().flat_map(|sums| &sums.listed_logits) {
            logits[entry] = z;
        }
        let rows = panels.last().map_or(0, |panel| panel.first + panel.rows);
        let mut results = FirstProductResults { layout, panels, ids, segments, logits, sums: vec![] };
        let sums = |row: usize| row_sums(results.row_segments(row), results.logits(row));
        results.sums = (0..rows).into_par_iter().map(sums).collect();
        results
    }

    /// Returns the sums of each segment that have a row, and the row's place in their panel.
    pub(super) fn row_segments(&self, row: usize) -> impl Iterator<Item = (&SegmentSums<F>, usize)> + Clone {
        let panel = self.layout.panel_of(row);
        let first = self.panels[panel].first;
        self.segments.iter().skip(panel).step_by(self.panels.len()).map(move |sums| (sums, row - first))
    }

    /// Returns the rows for the ranks to join. Their listed ids are targets.
    pub(super) fn shared_rows(&mut self) -> impl Iterator<Item = SharedRow<'_, F>> {
        self.sums.iter_mut().zip(&mut self.logits).map(|(sums, target_logit)| {
            let LogSumExp { largest, log_sum } = &mut sums.lse;
            SharedRow { largest, log_sum, target_logit }
        })
    }

    /// Returns the log-sum-exp of a row.
    pub(super) fn lse(&self, row: usize) -> LogSumExp<F> {
        self.sums[row].lse
    }

    /// Returns the logits of a row's listed ids.
    pub(super) fn logits(&self, row: usize) -> &[F] {
        let (entry, ids) = self.ids.row_ids(row);
        &self.logits[entry..][..ids.len()]
    }
}

/// Returns the logarithm of the mass of the ids that are not listed, `log sum_k pi_k s_k(outside)`.
pub(super) fn log_outside<F: Float>(state: &Components<F>, sums: &[RowSums<F>]) -> LogSumExp<F> {
    let terms = sums.iter().zip(state.scales()).map(|(sums, scale)| log_outside_term(sums, scale));
    LogSumExp::from_terms(terms)
}

/// Returns `log(pi_k s_k(outside))`, from the sums of component k, its largest logit and its `log_scale`.
pub(super) fn log_outside_term<F: Float>(sums: &RowSums<F>, (largest, log_scale): (F, F)) -> F {
    (sums.outside.largest - largest) + sums.outside.log_sum + log_scale
}

/// Adds up a row's sums of all segments and the logits of its listed ids.
fn row_sums<'p, F: Float>(
    segments: impl Iterator<Item = (&'p SegmentSums<F>, usize)> + Clone,
    listed: &[F],
) -> RowSums<F> {
    let least = F::neg_infinity();
    let largest_outside = segments.clone().map(|(sums, r)| sums.running.largest[r]).fold(least, num_traits::Float::max);
    let largest = finite_or_zero(listed.iter().copied().fold(largest_outside, num_traits::Float::max));
    let largest_outside = finite_or_zero(largest_outside);
    let sum = |(sums, r): (&SegmentSums<F>, usize)| match sums.running.sum[r] {
        0.0 => 0.0,
        sum => sum * (sums.running.offset[r] - largest_outside).f64().exp(),
    };
    let outside: f64 = segments.map(sum).sum();
    let outside_sum = match outside {
        0.0 => 0.0,
        outside => outside * (largest_outside - largest).f64().exp(),
    };
    let listed_exponentials = listed.iter().map(|&z| (z - largest).f64().exp());
    RowSums {
        lse: LogSumExp { largest, log_sum: F::from_f64((outside_sum + listed_exponentials.sum::<f64>()).ln()) },
        outside: LogSumExp { largest: largest_outside, log_sum: F::from_f64(outside.ln()) },
    }
}

/// Returns the entropy of a row, `log s - m / s`, where the sum s and the moment m are over all segments and the logits
/// of the listed ids.
pub(super) fn entropy<'p, F: Float>(
    segments: impl Iterator<Item = (&'p SegmentSums<F>, usize)> + Clone,
    listed: &[F],
) -> f64 {
    let possible = segments.filter(|(sums, r)| sums.running.sum[*r] != 0.0);
    let listed = listed.iter().map(|z| z.f64()).filter(|&z| z != f64::NEG_INFINITY);
    let offsets = possible.clone().map(|(sums, r)| sums.running.offset[r].f64());
    let largest = offsets.chain(listed.clone()).fold(f64::NEG_INFINITY, f64::max);
    let segment_moments = possible.map(|(sums, r)| {
        let RunningSums { sum, moment, offset, .. } = &sums.running;
        let change = offset[r].f64() - largest;
        (change.exp() * sum[r], change.exp() * (moment[r] + change * sum[r]))
    });
    let listed_moments = listed.map(|z| ((z - largest).exp(), weighted((z - largest).exp(), z - largest)));
    let (sum, moment) =
        segment_moments.chain(listed_moments).fold((0.0, 0.0), |(sum, moment), (s, m)| (sum + s, moment + m));
    // If all logits are minus infinity there is no distribution, and the result is NaN.
    not_negative(sum.ln() - moment / sum)
}
