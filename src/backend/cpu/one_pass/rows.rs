//! Between the passes: the loss of each position, and the numbers that turn a row's exponentials into its gradient.

use candle_core::WithDType;
use num_traits::{Float as _, Zero};
use rayon::prelude::*;

use super::chunk_ids::{ChunkIds, ListedId};
use super::exponentials::Running;
use super::layout::{Layout, Panel};
use super::segment_part::SegmentPart;
use crate::backend::cpu::objective::components::{Components, PositionLoss};
use crate::backend::cpu::objective::listed_ids::Candidates;
use crate::backend::cpu::objective::targets::Targets;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::products::gemv::DecoderDots;
use crate::backend::cpu::vector::log_sum_exp::{finite_or_zero, LogSumExp};
use crate::backend::cpu::vector::math::{flushed, not_negative, weighted};
use crate::backend::cpu::vector::simd::Float;
use crate::backend::distribution::Real;
use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::backend::shard::ELSEWHERE;
use crate::backend::shared_rows::SharedRow;

/// A row once its log-sum-exp is known.
#[derive(Clone, Copy)]
pub(super) struct GradientRow<F> {
    /// The place of its first entry, and how many it has.
    entries: (usize, usize),
    /// The factor of `exp(z - largest)` in the gradient, without `scale`.
    factor: f64,
    largest: F,
    /// What the mass outside the listed ids takes from it, as a factor of `exp(z - largest)` for the largest logit there
    outside: (f64, F),
    /// The factor of the objective times the factor of the logits.
    scale: f64,
    /// The gradient of the log-prior.
    pub(super) log_prior: F,
    /// Whether the row has no gradient, but a NaN or infinity among its exponentials, which must not spread.
    pub(super) is_void: bool,
}

/// The rows of a chunk, and the entries of all of them.
#[derive(Default)]
pub(super) struct ChunkRows<F> {
    pub(super) rows: Vec<GradientRow<F>>,
    pub(super) entries: Vec<ListedId<F>>,
}

impl<F: Float> GradientRow<F> {
    /// Its entries among those of all rows.
    pub(super) fn entries<'e>(&self, entries: &'e [ListedId<F>]) -> &'e [ListedId<F>] {
        &entries[self.entries.0..][..self.entries.1]
    }

    /// The factor f of exponentials with this offset.
    fn factor(&self, offset: F) -> F {
        if self.is_void || offset == F::neg_infinity() && !self.factor.is_nan() {
            return F::zero();
        }
        let (taken, largest_outside) = self.outside;
        let taken = weighted(taken, (offset - largest_outside).f64().exp());
        let relative = self.factor * (offset - self.largest).f64().exp() - taken;
        if relative.abs() < F::NEGLIGIBLE.f64() {
            F::zero()
        } else {
            flushed(F::from_f64(weighted(self.scale, relative)))
        }
    }
}

/// Each row's logit of its target, if targets are entries of their own; else nothing. `contexts` belong to `positions`.
pub(super) fn own_logits<T: Element>(
    inputs: &Inputs<'_, T>,
    targets: &Targets<T::Acc>,
    positions: &[usize],
    contexts: &[T::Acc],
) -> Vec<T::Acc> {
    let Sizes { components, context_dim: d, .. } = inputs.sizes;
    let rows = if targets.are_own() { positions.len() * components } else { 0 };
    let mut logits = vec![T::Acc::zero(); rows];
    let of_positions = logits.par_chunks_exact_mut(components).zip(contexts.par_chunks_exact(components * d));
    of_positions.zip(positions).for_each_init(Vec::new, |decoder_row, ((logits, contexts), &t)| {
        let (Some(id), Some(shift)) = (targets.row(t), targets.own_shift(t)) else { return };
        inputs.decoder.row(id, decoder_row);
        let to = &mut ViewMut::new(logits, components, 1, 1);
        let decoder = &decoder_row[..];
        T::Acc::dispatch(inputs.isa, DecoderDots::<T::Acc> { contexts, decoder, d, add: false, to });
        logits.iter_mut().for_each(|z| *z = *z * inputs.logit_scale + inputs.bias[id] + shift);
    });
    logits
}

/// A row's sums over the vocabulary.
#[derive(Clone, Copy, Default)]
pub(super) struct RowSums<F> {
    lse: LogSumExp<F>,
    /// Of the ids that are not listed.
    outside: LogSumExp<F>,
}

impl<F: Float> RowSums<F> {
    fn softmax(&self, z: F) -> f64 {
        if z == F::neg_infinity() {
            0.0
        } else {
            ((z - self.lse.largest).f64() - self.lse.log_sum.f64()).exp()
        }
    }

    /// What a mass outside the listed ids takes from the gradient there, as a factor of `exp(z - outside.largest)`: with
    /// the softmax s, `mass (s(v) - s(v) / s(outside)) = -mass s(listed) s(v) / s(outside)`. The difference may cancel, and
    /// s(outside) may be below the smallest number.
    fn outside_factor(&self, mass: f64, listed: &[F]) -> f64 {
        if mass == 0.0 {
            return 0.0;
        }
        let listed: f64 = listed.iter().map(|&z| self.softmax(z)).sum();
        weighted(mass * listed, (-self.outside.log_sum.f64()).exp())
    }
}

/// What the first pass leaves of a chunk.
pub(super) struct Passed<'a, F> {
    pub(super) ids: ChunkIds<'a>,
    pub(super) parts: Vec<SegmentPart<F>>,
    /// `[entries]`: the logits of the listed ids
    logits: Vec<F>,
    /// `[rows]`
    sums: Vec<RowSums<F>>,
}

impl<'a, F: Float> Passed<'a, F> {
    /// `own` are the logits of targets that are entries of their own; else it is empty.
    pub(super) fn new(
        layout: &Layout,
        panels: &[Panel],
        ids: ChunkIds<'a>,
        parts: Vec<SegmentPart<F>>,
        own: Vec<F>,
    ) -> Self {
        let mut logits = own;
        // What no part has, another rank has.
        logits.resize(ids.entries(), F::neg_infinity());
        for &(entry, z) in parts.iter().flat_map(|part| &part.listed_logits) {
            logits[entry] = z;
        }
        let rows = panels.last().map_or(0, |panel| panel.first + panel.rows);
        let sums = |row: usize| {
            let (entry, of_row) = ids.of_row(row);
            row_sums(parts_of(layout, panels, &parts, row), &logits[entry..][..of_row.len()])
        };
        let sums = (0..rows).into_par_iter().map(sums).collect();
        Passed { ids, parts, logits, sums }
    }

    /// The rows, whose listed ids are targets.
    pub(super) fn shared_rows(&mut self) -> impl Iterator<Item = SharedRow<'_, F>> {
        self.sums.iter_mut().zip(&mut self.logits).map(|(sums, target_logit)| {
            let LogSumExp { largest, log_sum } = &mut sums.lse;
            SharedRow { largest, log_sum, target_logit }
        })
    }

    /// The log-sum-exp of a row.
    pub(super) fn lse(&self, row: usize) -> LogSumExp<F> {
        self.sums[row].lse
    }

    /// The logits of a row's listed ids.
    pub(super) fn logits(&self, row: usize) -> &[F] {
        let (entry, of_row) = self.ids.of_row(row);
        &self.logits[entry..][..of_row.len()]
    }
}

/// A row's part of each segment, and its place there.
pub(super) fn parts_of<'p, F>(
    layout: &Layout,
    panels: &'p [Panel],
    parts: &'p [SegmentPart<F>],
    row: usize,
) -> impl Iterator<Item = (&'p SegmentPart<F>, usize)> + Clone {
    let panel = layout.panel_of(row);
    parts.iter().skip(panel).step_by(panels.len()).map(move |part| (part, row - panels[panel].first))
}

/// The scores of some positions, `[positions, n + 2]`.
pub(super) fn scores<T: Element>(
    inputs: &Inputs<'_, T>,
    (candidates, scored): (&Candidates, &Scored),
    positions: &[usize],
    layout: &Layout,
    panels: &[Panel],
    passed: &Passed<'_, T::Acc>,
) -> Vec<T::Acc> {
    let (components, columns) = (inputs.sizes.components, candidates.n + POSITION_SCORES);
    let zero = T::Acc::zero();
    let mut scores = vec![zero; positions.len() * columns];
    let of_position = |state: &mut Components<T::Acc>, (i, (to, &t)): (usize, (&mut [T::Acc], &usize))| {
        let first = i * components;
        let sums = &passed.sums[first..][..components];
        let lse: Vec<_> = sums.iter().map(|sums| sums.lse).collect();
        state.set(&lse, &inputs.log_priors[t * components..][..components]);
        // Not `neg`, which makes a minus zero.
        let bounded = |log_p: LogSumExp<T::Acc>| zero - not_negative(-log_p.value());
        let log_prob = |j: usize| bounded(state.log_prob(|k| passed.logits(first + k)[j]));
        let of_ids: Vec<_> = (0..passed.ids.of_position(i).len()).map(log_prob).collect();
        for (to, &place) in to.iter_mut().zip(candidates.places(t)) {
            *to = of_ids[place];
        }
        if scored.needs_entropy {
            let parts = parts_of(layout, panels, &passed.parts, first);
            to[candidates.n] = T::Acc::from_f64(entropy(parts, passed.logits(first)));
        }
        if scored.needs_outside {
            to[candidates.n + 1] = bounded(log_outside(state, sums));
        }
    };
    let state = || Components::new(components);
    scores.par_chunks_exact_mut(columns).zip(positions).enumerate().for_each_init(state, of_position);
    scores
}

/// The logarithm of the mass of the ids that are not listed, `log sum_k pi_k s_k(outside)`, from its terms.
fn log_outside<F: Float>(state: &Components<F>, sums: &[RowSums<F>]) -> LogSumExp<F> {
    LogSumExp::from_terms(sums.iter().zip(state.scales()).map(log_term))
}

/// `log(pi_k s_k(outside))`, from the sums and scales of component k.
fn log_term<F: Float>((sums, (largest, log_scale)): (&RowSums<F>, (F, F))) -> F {
    (sums.outside.largest - largest) + sums.outside.log_sum + log_scale
}

/// A position's place in the chunk, the position, and the entries of its rows.
type Indexed<'e, F> = (usize, (&'e usize, &'e mut [ListedId<F>]));

/// The loss of each position, and its rows.
pub(super) fn rows<T: Element>(
    inputs: &Inputs<'_, T>,
    targets: &Targets<T::Acc>,
    positions: &[usize],
    layout: &Layout,
    panels: &[Panel],
    passed: &Passed<'_, T::Acc>,
) -> (Vec<PositionLoss>, ChunkRows<T::Acc>) {
    let components = inputs.sizes.components;
    let mut entries = vec![ListedId::default(); passed.ids.entries()];
    let mut of_positions = Vec::with_capacity(positions.len());
    let mut rest = &mut entries[..];
    for i in 0..positions.len() {
        let (of_position, others) = rest.split_at_mut(components * passed.ids.of_position(i).len());
        of_positions.push(of_position);
        rest = others;
    }
    let position = |state: &mut Components<T::Acc>, (i, (&t, entries)): Indexed<'_, T::Acc>| {
        let rows = i * components..(i + 1) * components;
        let sums = &passed.sums[rows.clone()];
        let lse: Vec<_> = sums.iter().map(|sums| sums.lse).collect();
        state.set(&lse, &inputs.log_priors[t * components..][..components]);
        // Without a target the gradient is zero.
        let target = targets.position(t).unwrap_or_default();
        let logit = |k: usize, j: usize| passed.logits(rows.start + k)[j];
        let loss = state.hard_loss(&target, |k, _| logit(k, 0));
        state.add_candidates(target.candidates, logit, |_| num_traits::One::one());
        let log_outside =
            if target.outside.is_zero() { T::Acc::neg_infinity() } else { log_outside(state, sums).value() };
        let scale = targets.scale(t);
        let logit_scale = scale.f64() * inputs.logit_scale.f64();
        let n = passed.ids.of_position(i).len();
        let row = |k: usize| {
            let (row, lse) = (rows.start + k, sums[k].lse);
            // The row's part of the mass outside.
            let outside = if log_outside == T::Acc::neg_infinity() {
                0.0
            } else {
                let scales = (state.lse[k].largest, state.log_scale[k]);
                target.outside.f64() * (log_term((&sums[k], scales)) - log_outside).f64().exp()
            };
            let factor = state.precise_softmax_mass(&target, k);
            let (of_softmax, outside_factor) = (factor + outside, sums[k].outside_factor(outside, passed.logits(row)));
            let mass = |j: usize| match target.hard {
                Some(_) => state.hard_mass[k],
                None => state.candidate_masses.get(j * components + k).copied().unwrap_or_default(),
            };
            let entry = |(j, (&id, &z)): (usize, (&usize, &T::Acc))| {
                let slope = inputs.softcap.map_or(T::Acc::from_f64(1.0), |softcap| softcap.slope_at(z));
                if id == ELSEWHERE {
                    return ListedId { id, mass: T::Acc::zero() };
                }
                let mass = (mass(j).f64() - weighted(of_softmax, sums[k].softmax(z))) * slope.f64();
                ListedId { id, mass: flushed(T::Acc::from_f64(weighted(logit_scale, mass))) }
            };
            let listed = passed.ids.of_position(i).iter().zip(passed.logits(row)).enumerate();
            for (to, of_id) in entries[k * n..].iter_mut().zip(listed) {
                *to = entry(of_id);
            }
            let is_zero =
                factor == 0.0 && outside_factor == 0.0 && of_softmax == 0.0 && (0..n).all(|j| mass(j).is_zero());
            let has_gradient = logit_scale != 0.0 && !is_zero;
            let parts = parts_of(layout, panels, &passed.parts, row);
            GradientRow {
                entries: (passed.ids.of_row(row).0, n),
                factor: if lse.log_sum == T::Acc::neg_infinity() {
                    // There is no distribution if all logits are minus infinity.
                    weighted(factor, f64::NAN)
                } else {
                    weighted(factor, (-lse.log_sum.f64()).exp())
                },
                largest: lse.largest,
                outside: (outside_factor, sums[k].outside.largest),
                scale: logit_scale,
                log_prior: flushed(weighted(scale, -state.mass[k] - T::Acc::from_f64(outside))),
                is_void: !has_gradient && parts.into_iter().any(|(part, r)| !part.running.sum[r].is_finite()),
            }
        };
        (loss, (0..components).map(row).collect::<Vec<_>>())
    };
    let state = || Components::new(components);
    let found: Vec<_> = positions.par_iter().zip(of_positions).enumerate().map_init(state, position).collect();
    let (losses, rows): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    (losses, ChunkRows { rows: rows.into_iter().flatten().collect(), entries })
}

/// A row's sums, from its parts of all segments and the logits of its listed ids.
fn row_sums<'p, F: Float>(
    parts: impl Iterator<Item = (&'p SegmentPart<F>, usize)> + Clone,
    listed: &[F],
) -> RowSums<F> {
    let least = F::neg_infinity();
    let largest_outside = parts.clone().map(|(part, r)| part.running.largest[r]).fold(least, num_traits::Float::max);
    let largest = finite_or_zero(listed.iter().copied().fold(largest_outside, num_traits::Float::max));
    let largest_outside = finite_or_zero(largest_outside);
    let sum = |(part, r): (&SegmentPart<F>, usize)| match part.running.sum[r] {
        0.0 => 0.0,
        sum => sum * (part.running.offset[r] - largest_outside).f64().exp(),
    };
    let outside: f64 = parts.map(sum).sum();
    let of_outside = match outside {
        0.0 => 0.0,
        outside => outside * (largest_outside - largest).f64().exp(),
    };
    let of_listed = listed.iter().map(|&z| (z - largest).f64().exp());
    RowSums {
        lse: LogSumExp { largest, log_sum: F::from_f64((of_outside + of_listed.sum::<f64>()).ln()) },
        outside: LogSumExp { largest: largest_outside, log_sum: F::from_f64(outside.ln()) },
    }
}

/// The entropy of a row from its sums and moments over the segments and the logits of its listed ids, `log s - m / s`.
fn entropy<'p, F: Float>(parts: impl Iterator<Item = (&'p SegmentPart<F>, usize)> + Clone, listed: &[F]) -> f64 {
    let possible = parts.filter(|(part, r)| part.running.sum[*r] != 0.0);
    let listed = listed.iter().map(|z| z.f64()).filter(|&z| z != f64::NEG_INFINITY);
    let offsets = possible.clone().map(|(part, r)| part.running.offset[r].f64());
    let largest = offsets.chain(listed.clone()).fold(f64::NEG_INFINITY, f64::max);
    let sums = possible.map(|(part, r)| {
        let Running { sum, moment, offset, .. } = &part.running;
        let change = offset[r].f64() - largest;
        (change.exp() * sum[r], change.exp() * (moment[r] + change * sum[r]))
    });
    let of_listed = listed.map(|z| ((z - largest).exp(), weighted((z - largest).exp(), z - largest)));
    let (sum, moment) = sums.chain(of_listed).fold((0.0, 0.0), |(sum, moment), (s, m)| (sum + s, moment + m));
    // There is no distribution, hence NaN, if all logits are minus infinity.
    not_negative(sum.ln() - moment / sum)
}

/// The factors of all rows, for the offsets of each segment and of each tile.
#[derive(Clone, Copy)]
pub(super) struct Factors<'p, F> {
    pub(super) parts: &'p [SegmentPart<F>],
    pub(super) rows: &'p [GradientRow<F>],
    pub(super) entries: &'p [ListedId<F>],
    pub(super) layout: &'p Layout,
    pub(super) panels: &'p [Panel],
    /// `[segment][column]`: for the offsets at the end of each segment, which the sums have
    pub(super) of_segments: &'p [Vec<F>],
}

/// `[segment][column]`: the rows' factors for the offsets at the end of each segment.
pub(super) fn of_segments<F: Float>(
    layout: &Layout,
    panels: &[Panel],
    parts: &[SegmentPart<F>],
    rows: &[GradientRow<F>],
) -> Vec<Vec<F>> {
    let of_segment = |segment: usize| {
        let mut factors = vec![F::zero(); layout.columns(rows.len())];
        for (panel, part) in panels.iter().zip(&parts[segment * panels.len()..]) {
            let rows = &rows[panel.first..][..panel.rows];
            for ((factor, row), &offset) in factors[panel.first..].iter_mut().zip(rows).zip(&part.running.offset) {
                *factor = row.factor(offset);
            }
        }
        factors
    };
    (0..layout.segments()).into_par_iter().map(of_segment).collect()
}

impl<F: Float> Factors<'_, F> {
    /// `[column]`: for the exponentials of a tile, which may have an earlier offset than its segment.
    pub(super) fn of_tile(&self, tile: usize) -> Vec<F> {
        let segment = self.layout.segment_of(tile);
        let in_segment = tile - self.layout.segment(segment).start;
        let mut factors = self.of_segments[segment].clone();
        for (panel, part) in self.panels.iter().zip(&self.parts[segment * self.panels.len()..]) {
            let offsets = &part.offsets[in_segment * panel.width..][..panel.rows];
            for (r, (&offset, last)) in offsets.iter().zip(&part.running.offset).enumerate() {
                if offset != *last {
                    factors[panel.first + r] = self.rows[panel.first + r].factor(offset);
                }
            }
        }
        factors
    }
}
