//! Between the passes: the loss of each position, and the numbers that turn a row's exponentials into its gradient.

use num_traits::{Float as _, Zero};
use rayon::prelude::*;

use super::exponentials::Running;
use super::layout::{Layout, Panel};
use super::part::Part;
use crate::backend::contract::{Real, Sizes};
use crate::backend::cpu::components::{Components, PositionLoss};
use crate::backend::cpu::dtype::Element;
use crate::backend::cpu::gemv::Dots;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::log_sum_exp::{finite_or_zero, LogSumExp};
use crate::backend::cpu::math::{flushed, not_negative, weighted};
use crate::backend::cpu::matrix::ViewMut;
use crate::backend::cpu::simd::Float;
use crate::backend::cpu::targets::Targets;

/// A row once its log-sum-exp is known.
#[derive(Clone, Copy)]
pub(super) struct Row<F> {
    pub(super) target: usize,
    /// The factor of `exp(z - largest)` in the gradient, without `scale`.
    factor: f64,
    largest: F,
    /// The factor of the objective times the factor of the logits.
    scale: f64,
    /// The gradient of the target's logit, negated: h - f E.
    pub(super) mass: F,
    /// The gradient of the log-prior.
    pub(super) log_prior: F,
    /// Whether the row has no gradient, but a NaN or infinity among its exponentials, which must not spread.
    pub(super) is_void: bool,
}

impl<F: Float> Row<F> {
    /// The factor f of exponentials with this offset.
    fn factor(&self, offset: F) -> F {
        if self.is_void || offset == F::neg_infinity() && !self.factor.is_nan() {
            return F::zero();
        }
        let relative = self.factor * (offset - self.largest).f64().exp();
        match relative.abs() < F::NEGLIGIBLE.f64() {
            true => F::zero(),
            false => flushed(F::of(weighted(self.scale, relative))),
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
        let (Some(id), Some(shift)) = (targets.id(t), targets.own_shift(t)) else { return };
        inputs.decoder.row(id, decoder_row);
        let to = &mut ViewMut::new(logits, components, 1, 1);
        let decoder = &decoder_row[..];
        T::Acc::dispatch(inputs.isa, Dots::<T::Acc> { contexts, decoder, d, add: false, to });
        logits.iter_mut().for_each(|z| *z = *z * inputs.logit_scale + inputs.bias[id] + shift);
    });
    logits
}

/// What the first pass leaves of a chunk.
#[derive(Clone, Copy)]
pub(super) struct Passed<'p, F> {
    pub(super) panels: &'p [Panel],
    pub(super) parts: &'p [Part<F>],
    /// `[rows]`: the targets' logits if they are entries of their own; else empty
    pub(super) own: &'p [F],
}

/// The loss of each position, and its rows. `scales`, one for each of `positions`, replace the scales of the targets.
pub(super) fn rows<T: Element>(
    inputs: &Inputs<'_, T>,
    targets: &Targets<T::Acc>,
    positions: &[usize],
    layout: &Layout,
    Passed { panels, parts, own }: Passed<'_, T::Acc>,
    scales: Option<&[T::Acc]>,
) -> (Vec<PositionLoss>, Vec<Row<T::Acc>>) {
    let components = inputs.sizes.components;
    let mut target_logits = own.to_vec();
    target_logits.resize(positions.len() * components, T::Acc::zero());
    for &(row, z) in parts.iter().flat_map(|part| &part.target_logits) {
        target_logits[row] = z;
    }
    let parts_of = |row: usize| {
        let panel = layout.panel_of(row);
        parts.iter().skip(panel).step_by(panels.len()).map(move |part| (part, row - panels[panel].first))
    };
    let position = |state: &mut Components<T::Acc>, (i, &t): (usize, &usize)| {
        let rows = i * components..(i + 1) * components;
        let lse: Vec<_> = rows.clone().map(|row| log_sum_exp(parts_of(row), own.get(row).copied())).collect();
        state.set(&lse, &inputs.log_priors[t * components..][..components]);
        // An ignored position has no rows.
        let Some(target) = targets.position(t) else { return (PositionLoss::default(), vec![]) };
        let mut loss = state.hard_loss(&target, |k, _| target_logits[rows.start + k]);
        state.least_magnitude(&target, &mut loss);
        loss.entropy = entropy(parts_of(rows.start));
        let scale = scales.map_or_else(|| targets.scale(t), |scales| scales[i]);
        let logit_scale = scale.f64() * inputs.logit_scale.f64();
        let row = |(k, (row, lse)): (usize, (usize, LogSumExp<T::Acc>))| {
            let factor = state.precise_softmax_mass(&target, k);
            let z = target_logits[row];
            let slope = inputs.softcap.map_or(T::Acc::of(1.0), |softcap| softcap.slope_at(z));
            let at_target = match z == T::Acc::neg_infinity() {
                true => 0.0,
                false => weighted(factor, ((z - lse.largest).f64() - lse.log_sum.f64()).exp()),
            };
            let has_gradient = logit_scale != 0.0 && (factor != 0.0 || !state.mass[k].is_zero());
            Row {
                target: target.hard.map_or(0, |(y, _)| y),
                factor: match lse.log_sum == T::Acc::neg_infinity() {
                    // There is no distribution if all logits are minus infinity.
                    true => weighted(factor, f64::NAN),
                    false => weighted(factor, (-lse.log_sum.f64()).exp()),
                },
                largest: lse.largest,
                scale: logit_scale,
                mass: flushed(T::Acc::of(weighted(logit_scale, (state.hard_mass[k].f64() - at_target) * slope.f64()))),
                log_prior: flushed(weighted(scale, -state.mass[k])),
                is_void: !has_gradient && parts_of(row).any(|(part, r)| !part.running.sum[r].is_finite()),
            }
        };
        (loss, rows.zip(lse).enumerate().map(row).collect::<Vec<_>>())
    };
    let state = || Components::new(components);
    let found: Vec<_> = positions.par_iter().enumerate().map_init(state, position).collect();
    let (losses, rows): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    (losses, rows.into_iter().flatten().collect())
}

/// The log-sum-exp of a row from its sums over the segments, and from the logit of a target that is an entry of its
/// own.
fn log_sum_exp<'p, F: Float>(
    parts: impl Iterator<Item = (&'p Part<F>, usize)> + Clone,
    own: Option<F>,
) -> LogSumExp<F> {
    let of_parts = parts.clone().map(|(part, r)| part.running.largest[r]);
    let largest = of_parts.chain(own).fold(F::neg_infinity(), num_traits::Float::max);
    let largest = finite_or_zero(largest);
    let sum = |(part, r): (&Part<F>, usize)| match part.running.sum[r] {
        0.0 => 0.0,
        sum => sum * (part.running.offset[r] - largest).f64().exp(),
    };
    let own = own.map(|z| (z - largest).f64().exp());
    LogSumExp { largest, log_sum: F::of(parts.map(sum).chain(own).sum::<f64>().ln()) }
}

/// The entropy of a row from its sums and moments over the segments, `log s - m / s`; zero without moments.
fn entropy<'p, F: Float>(parts: impl Iterator<Item = (&'p Part<F>, usize)> + Clone) -> f64 {
    let mut possible = parts.filter(|(part, r)| part.running.sum[*r] != 0.0).peekable();
    if possible.peek().is_some_and(|(part, _)| part.running.moment.is_empty()) {
        return 0.0;
    }
    let largest = possible.clone().map(|(part, r)| part.running.offset[r].f64()).fold(f64::NEG_INFINITY, f64::max);
    let sums = possible.map(|(part, r)| {
        let Running { sum, moment, offset, .. } = &part.running;
        let change = offset[r].f64() - largest;
        (change.exp() * sum[r], change.exp() * (moment[r] + change * sum[r]))
    });
    let (sum, moment) = sums.fold((0.0, 0.0), |(sum, moment), (s, m)| (sum + s, moment + m));
    // There is no distribution, hence NaN, if all logits are minus infinity.
    not_negative(sum.ln() - moment / sum)
}

/// The factors of all rows, for the offsets of each segment and of each tile.
#[derive(Clone, Copy)]
pub(super) struct Factors<'p, F> {
    pub(super) parts: &'p [Part<F>],
    pub(super) rows: &'p [Row<F>],
    pub(super) layout: &'p Layout,
    pub(super) panels: &'p [Panel],
    /// `[segment][column]`: for the offsets at the end of each segment, which the sums have
    pub(super) of_segments: &'p [Vec<F>],
}

/// `[segment][column]`: the rows' factors for the offsets at the end of each segment.
pub(super) fn of_segments<F: Float>(
    layout: &Layout,
    panels: &[Panel],
    parts: &[Part<F>],
    rows: &[Row<F>],
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
