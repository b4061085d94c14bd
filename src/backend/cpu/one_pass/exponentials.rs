//! The kernels that turn a tile of logits into scaled exponentials, in place, while it is in the cache, and the sums of
//! the exponentials: the log-sum-exp of each row.

use super::layout::{ChunkIds, Layout};
use super::top_logits::TopLogits;
use crate::backend::cpu::objective::components::Components;
use crate::backend::cpu::products::panel::{lanes, Panel};
use crate::backend::cpu::vector::logit_map::{before_sigsoftmax, LogitMap};
use crate::backend::cpu::vector::math::{exp, exp_or_zero, finite_or_zero, not_negative, weighted, LogSumExp};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::parallel;
use crate::backend::shared_rows::SharedRow;

/// The sums over the ids of a segment so far, for each row of a panel, `[width]` each.
pub(super) struct RunningSums<F> {
    /// What is subtracted from the logits before exponentiation. It starts at minus infinity, and stays until a logit
    /// exceeds it by [`SLACK`].
    pub(super) offset: Vec<F>,
    /// The largest logit.
    pub(super) largest: Vec<F>,
    /// The sum of the exponentials.
    pub(super) sum: Vec<f64>,
    /// The sum of the exponentials, each times its exponent, from which the entropy follows; empty unless it is needed.
    pub(super) moment: Vec<f64>,
    /// The largest logit of the latest tile; empty unless it is needed.
    pub(super) tile_largest: Vec<F>,
    /// The factors that multiply earlier sums since the offsets last changed.
    pub(super) rescale: Vec<F>,
}

impl<F: Float> RunningSums<F> {
    /// Returns the sums over no ids.
    pub(super) fn new(width: usize, needs_moment: bool, needs_tile_largest: bool) -> Self {
        let least = vec![F::neg_infinity(); width];
        RunningSums {
            tile_largest: if needs_tile_largest { least.clone() } else { vec![] },
            offset: least.clone(),
            largest: least,
            sum: vec![0.0; width],
            moment: vec![0.0; if needs_moment { width } else { 0 }],
            rescale: vec![F::one(); width],
        }
    }

    /// Gives row `r` a larger offset, and rescales its sums.
    fn set_offset(&mut self, r: usize, offset: F) {
        let change = self.offset[r] - offset;
        self.rescale[r] = change.exp();
        let factor = self.rescale[r].f64();
        if let Some(moment) = self.moment.get_mut(r) {
            // Each exponent changes by as much as the offset.
            *moment = weighted(factor, *moment) + weighted(self.sum[r] * factor, change.f64());
        }
        self.sum[r] *= factor;
        self.offset[r] = offset;
    }
}

/// How far logits may exceed the offset. Exponentials up to e^16 are as precise as those up to 1.
const SLACK: f64 = 16.0;

/// Updates the largest logits, and the offsets that are too small, by a tile of logits `[ids, width]`. The kernel
/// returns whether an offset has changed, and with it `rescale`.
pub(super) struct UpdateOffsets<'a, F> {
    pub(super) tile: &'a [F],
    /// An increasing function that makes the logits from the numbers of the tile.
    pub(super) map: Option<LogitMap<F>>,
    pub(super) running: &'a mut RunningSums<F>,
}

impl<F: Float> Kernel<F> for UpdateOffsets<'_, F> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> bool {
        let UpdateOffsets { tile, map, running } = self;
        /// The number of independent maxima, which hide the latency.
        const PARTS: usize = 4;
        let n = running.offset.len() / lanes::<F, V>();
        let least = v.splat(F::neg_infinity());
        let mut exceeds = false;
        for j in 0..n {
            let mut parts = [least; PARTS];
            let mut groups = V::registers(tile).chunks_exact(PARTS * n);
            for group in &mut groups {
                for (part, row) in parts.iter_mut().zip(group.chunks_exact(n)) {
                    *part = v.max(*part, row[j]);
                }
            }
            for row in groups.remainder().chunks_exact(n) {
                parts[0] = v.max(parts[0], row[j]);
            }
            let tile_largest = v.max(v.max(parts[0], parts[1]), v.max(parts[2], parts[3]));
            let tile_largest = map.map_or(tile_largest, |map| map.apply(v, tile_largest));
            if let Some(largest) = V::registers_mut(&mut running.tile_largest).get_mut(j) {
                *largest = tile_largest;
            }
            let largest = &mut V::registers_mut(&mut running.largest)[j];
            *largest = v.max(*largest, tile_largest);
            let limit = v.add(V::registers(&running.offset)[j], v.splat(F::from_f64(SLACK)));
            let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
            exceeds |= v.sum(v.if_less(limit, tile_largest, one, zero)) > F::zero();
        }
        if !exceeds {
            return false;
        }
        running.rescale.fill(F::one());
        for r in 0..running.offset.len() {
            if running.largest[r] > running.offset[r] + F::from_f64(SLACK) {
                running.set_offset(r, running.largest[r]);
            }
        }
        true
    }
}

/// Turns logits `[ids, width]`, for which the offsets are up to date, into `exp(z - offset)`, times the slope of the
/// logit function if there is one. Adds the exponentials to the sums, and to the moments if these are needed.
pub(super) struct Exponentiate<'a, F> {
    pub(super) tile: &'a mut [F],
    pub(super) running: &'a mut RunningSums<F>,
    /// The function of the logits, which has been applied to the logits already.
    pub(super) logit_map: Option<LogitMap<F>>,
}

impl<F: Float> Kernel<F> for Exponentiate<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let Exponentiate { tile, running, logit_map } = self;
        match (logit_map, running.moment.is_empty()) {
            (None, true) => exponentiate::<false, false, F, V>(v, tile, running, logit_map),
            (None, false) => exponentiate::<false, true, F, V>(v, tile, running, logit_map),
            (Some(_), true) => exponentiate::<true, false, F, V>(v, tile, running, logit_map),
            (Some(_), false) => exponentiate::<true, true, F, V>(v, tile, running, logit_map),
        }
    }
}

/// As [`Exponentiate`], compiled with or without a function of the logits, and moments.
#[inline(always)]
fn exponentiate<const MAPPED: bool, const MOMENT: bool, F: Float, V: Vector<F>>(
    v: V,
    tile: &mut [F],
    running: &mut RunningSums<F>,
    logit_map: Option<LogitMap<F>>,
) {
    let lanes = lanes::<F, V>();
    let n = running.offset.len() / lanes;
    let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
    let negligible = v.splat(F::NEGLIGIBLE_EXPONENT);
    for j in 0..n {
        let offset = V::registers(&running.offset)[j];
        // If all logits so far are minus infinity, exp(-inf - 0) is zero, while exp(-inf + inf) would be NaN.
        let offset = v.if_equal(offset, v.splat(F::neg_infinity()), zero, offset);
        let (mut sum, mut moment) = (zero, zero);
        for row in V::registers_mut(tile).chunks_exact_mut(n) {
            let z = row[j];
            let exponent = v.sub(z, offset);
            let e = exp_or_zero(v, exponent, negligible);
            sum = v.add(sum, e);
            if MOMENT {
                // An impossible id adds nothing.
                moment = v.mul_add(e, v.if_equal(e, zero, zero, exponent), moment);
            }
            row[j] = if MAPPED { v.mul(e, logit_map.map_or(one, |map| map.slope(v, z))) } else { e };
        }
        add_lanes(v, sum, &mut running.sum[j * lanes..]);
        if MOMENT {
            add_lanes(v, moment, &mut running.moment[j * lanes..]);
        }
    }
}

/// Turns products `[ids, width]`, for whose logits by sigsoftmax the offsets are up to date, into what [`Exponentiate`]
/// makes of these logits, with one exponential each.
pub(super) struct ExponentiateSigsoftmax<'a, F> {
    pub(super) tile: &'a mut [F],
    pub(super) running: &'a mut RunningSums<F>,
}

impl<F: Float> Kernel<F> for ExponentiateSigsoftmax<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        match self.running.moment.is_empty() {
            true => exponentiate_sigsoftmax::<false, F, V>(v, self),
            false => exponentiate_sigsoftmax::<true, F, V>(v, self),
        }
    }
}

/// As [`ExponentiateSigsoftmax`], compiled with or without moments.
#[inline(always)]
fn exponentiate_sigsoftmax<const MOMENT: bool, F: Float, V: Vector<F>>(
    v: V,
    ExponentiateSigsoftmax { tile, running }: ExponentiateSigsoftmax<'_, F>,
) {
    let lanes = lanes::<F, V>();
    let n = running.offset.len() / lanes;
    let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
    let negligible = v.splat(F::NEGLIGIBLE_EXPONENT);
    let least = exp(v, negligible);
    for j in 0..n {
        let offset = V::registers(&running.offset)[j];
        let offset = v.if_equal(offset, v.splat(F::neg_infinity()), zero, offset);
        // With the product o that gives the offset, e = exp(u - o) and sigma(-u) = 1 / (1 + exp(o) e), the logit z
        // has exp(z - offset) = e sigma(u) / sigma(o) = e^2 (1 + exp(o)) / (1 + exp(o) e) and the slope
        // 1 + sigma(-u). Fractions are expanded by exp(-o) for a positive o, so that nothing overflows.
        let o = before_sigsoftmax(v, offset);
        let t = exp(v, v.sub(zero, v.max(o, v.sub(zero, o))));
        let a = v.if_less(o, zero, one, v.max(t, v.splat(F::LEAST_GRADIENT)));
        let b = v.if_less(o, zero, t, one);
        let (mut sum, mut moment) = (zero, zero);
        for row in V::registers_mut(tile).chunks_exact_mut(n) {
            let e = exp_or_zero(v, v.sub(row[j], o), negligible);
            let inverse = v.div(one, v.mul_add(b, e, a));
            let result = v.mul(v.mul(e, e), v.mul(v.add(a, b), inverse));
            let result = v.if_less(result, least, zero, result);
            sum = v.add(sum, result);
            if MOMENT {
                let exponent = v.sub(LogitMap::Sigsoftmax.apply(v, row[j]), offset);
                moment = v.mul_add(result, v.if_equal(result, zero, zero, exponent), moment);
            }
            row[j] = v.mul(result, v.mul_add(a, inverse, one));
        }
        add_lanes(v, sum, &mut running.sum[j * lanes..]);
        if MOMENT {
            add_lanes(v, moment, &mut running.moment[j * lanes..]);
        }
    }
}

/// Adds each lane of a register to its total.
#[inline(always)]
fn add_lanes<F: Float, V: Vector<F>>(v: V, values: V::Reg, totals: &mut [f64]) {
    let mut stored = [F::zero(); 16];
    let stored = &mut stored[..lanes::<F, V>()];
    v.store_partial(values, stored);
    totals.iter_mut().zip(stored).for_each(|(total, value)| *total += value.f64());
}

/// The sums over the ids of a segment, for the rows of a panel.
pub(super) struct SegmentSums<F> {
    pub(super) running: RunningSums<F>,
    /// `[tiles, width]`: the offsets of each tile's exponentials, if the third product needs the exponentials
    pub(super) offsets: Vec<F>,
    /// `[tiles, width]`: each row's largest logit in each tile, without the listed ids, if it is requested
    pub(super) tile_largest: Vec<F>,
    /// The largest logits of each row, if they are requested
    pub(super) top_logits: Option<TopLogits>,
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
        for sums in &segments {
            sums.listed_logits.iter().for_each(|&(entry, z)| logits[entry] = z);
        }
        let rows = panels.last().map_or(0, |panel| panel.first + panel.rows);
        let mut results = FirstProductResults { layout, panels, ids, segments, logits, sums: vec![] };
        let sums = |row: usize| row_sums(results.row_segments(row), results.logits(row));
        results.sums = parallel::map(0..rows, sums);
        results
    }

    /// Returns the sums of each segment that have a row, and the row's place in their panel.
    pub(super) fn row_segments(&self, row: usize) -> impl Iterator<Item = (&SegmentSums<F>, usize)> + Clone {
        let panel = self.layout.panel_of(row);
        let first = self.panels[panel].first;
        self.segments.iter().skip(panel).step_by(self.panels.len()).map(move |sums| (sums, row - first))
    }

    /// Returns the rows for the ranks to join. Their listed ids are targets.
    pub(super) fn shared_rows<'r>(&'r mut self) -> Vec<SharedRow<'r, F>> {
        let shared = |(sums, target_logit): (&'r mut RowSums<F>, _)| {
            let LogSumExp { largest, log_sum } = &mut sums.lse;
            SharedRow { largest, log_sum, target_logit }
        };
        self.sums.iter_mut().zip(&mut self.logits).map(shared).collect()
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
