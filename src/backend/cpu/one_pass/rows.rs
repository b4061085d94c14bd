//! Between the products: the loss or the scores of each position, and the numbers that turn a row's exponentials into
//! its gradient.

use super::exponentials::{entropy, log_outside, log_outside_term, FirstProductResults, RowSums};
use super::layout::ListedId;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::objective::components::{Components, PositionLoss, Target};
use crate::backend::cpu::objective::targets::{Candidates, Targets};
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::products::gemv::DecoderDots;
use crate::backend::cpu::vector::math::{flushed, not_negative, weighted, LogSumExp};
use crate::backend::cpu::vector::simd::Float;
use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::backend::parallel;
use crate::backend::shard::ELSEWHERE;

/// The gradient of a row, as numbers that exponentials and listed ids are multiplied by.
#[derive(Clone, Copy)]
pub(super) struct GradientRow<F> {
    /// The index of its first entry, and the number of its entries.
    entries: (usize, usize),
    /// The factor of `exp(z - largest)` in the gradient, without `scale`.
    factor: f64,
    largest: F,
    /// What the mass outside the listed ids takes from the factor: the factor of `exp(z - largest)` for the largest
    /// logit outside, and this logit.
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
    /// Returns the row's entries among those of all rows.
    pub(super) fn entries<'e>(&self, entries: &'e [ListedId<F>]) -> &'e [ListedId<F>] {
        &entries[self.entries.0..][..self.entries.1]
    }

    /// Returns the factor f of exponentials with this offset.
    pub(super) fn factor(&self, offset: F) -> F {
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

/// Computes each row's logit of its target if targets are entries of their own; otherwise returns nothing. `contexts`
/// belong to `positions`.
pub(super) fn own_logits<F: Accumulator>(
    inputs: &Inputs<'_, F>,
    targets: &Targets<F>,
    positions: &[usize],
    contexts: &[F],
) -> Vec<F> {
    let Sizes { components, context_dim: d, .. } = inputs.sizes;
    let rows = if targets.are_own() { positions.len() * components } else { 0 };
    let mut logits = vec![F::zero(); rows];
    let by_position = logits.chunks_exact_mut(components).zip(contexts.chunks_exact(components * d)).zip(positions);
    parallel::for_each_with(by_position, Vec::new, |decoder_row, ((logits, contexts), &t)| {
        let (Some(id), Some(shift)) = (targets.row(t), targets.own_shift(t)) else { return };
        inputs.decoder.row(id, decoder_row);
        let to = &mut ViewMut::new(logits, components, 1, 1);
        let decoder = &decoder_row[..];
        let contexts = ContextRows { values: contexts, stride: d };
        F::dispatch(inputs.isa, DecoderDots::<F> { contexts, decoder, d, is_added: false, to });
        logits.iter_mut().for_each(|z| *z = *z * inputs.logit_scale + inputs.bias[id] + shift);
    });
    logits
}

/// A chunk after its first product: from here on, positions are independent.
pub(super) struct SummedChunk<'c, 'a, F: Accumulator> {
    pub(super) inputs: &'c Inputs<'a, F>,
    /// The positions that are not ignored.
    pub(super) positions: &'c [usize],
    pub(super) first_product: &'c FirstProductResults<'a, F>,
}

/// The gradient of a position's objective, as far as its rows share it.
struct PositionGradient<'p, F> {
    state: &'p Components<F>,
    target: &'p Target<'p, F>,
    /// `[K]`
    sums: &'p [RowSums<F>],
    /// The logarithm of the mass outside, which all components have together; minus infinity if the objective gives no
    /// mass to these ids
    log_outside: F,
    /// The factor of the objective.
    scale: F,
    /// The factor of the objective times the factor of the logits.
    logit_scale: f64,
}

/// The masses that the softmax of a row distributes over the ids.
struct SoftmaxMasses {
    /// The factor of the softmax in the gradient before the mass outside is added, see
    /// [`Components::precise_softmax_mass`].
    factor: f64,
    /// The row's share of the mass outside the listed ids.
    outside: f64,
    /// What `outside` takes from the gradient there, see [`RowSums::outside_factor`].
    outside_factor: f64,
}

impl SoftmaxMasses {
    /// Returns the factor of the softmax in the gradients of the listed ids.
    fn total(&self) -> f64 {
        self.factor + self.outside
    }

    fn are_zero(&self) -> bool {
        self.factor == 0.0 && self.outside_factor == 0.0 && self.total() == 0.0
    }
}

impl<F: Float> PositionGradient<'_, F> {
    /// Returns the masses that the softmax of component k distributes. `listed` are its logits of the listed ids.
    fn softmax_masses(&self, k: usize, listed: &[F]) -> SoftmaxMasses {
        let outside = if self.log_outside == F::neg_infinity() {
            0.0
        } else {
            let scales = (self.state.lse[k].largest, self.state.log_scale[k]);
            let share = log_outside_term(&self.sums[k], scales) - self.log_outside;
            self.target.outside.f64() * share.f64().exp()
        };
        let factor = self.state.precise_softmax_mass(self.target, k);
        SoftmaxMasses { factor, outside, outside_factor: self.sums[k].outside_factor(outside, listed) }
    }

    /// Returns the part of component k in the mass of the `j`-th listed id.
    fn listed_mass(&self, k: usize, j: usize) -> F {
        match self.target.hard {
            Some(_) => self.state.hard_mass[k],
            None => {
                let masses = &self.state.candidate_masses;
                masses.get(j * self.sums.len() + k).copied().unwrap_or_default()
            }
        }
    }
}

impl<F: Accumulator> SummedChunk<'_, '_, F> {
    /// Sets `state` to the components of the `i`-th position; returns their sums, `[K]`.
    fn set_components(&self, i: usize, state: &mut Components<F>) -> &[RowSums<F>] {
        let components = self.inputs.sizes.components;
        let sums = &self.first_product.sums[i * components..][..components];
        let lse: Vec<_> = sums.iter().map(|sums| sums.lse).collect();
        state.set(&lse, &self.inputs.log_priors[self.positions[i] * components..][..components]);
        sums
    }

    /// Computes the scores of the positions, `[positions, n + 3]`.
    pub(super) fn scores(&self, candidates: &Candidates, scored: &Scored) -> Vec<F> {
        let (components, columns) = (self.inputs.sizes.components, candidates.n + POSITION_SCORES);
        let zero = F::zero();
        let mut scores = vec![zero; self.positions.len() * columns];
        let score_position = |state: &mut Components<F>, (i, to): (usize, &mut [F])| {
            let first = i * components;
            let sums = self.set_components(i, state);
            // Not `neg`, which makes a minus zero.
            let bounded = |log_p: LogSumExp<F>| zero - not_negative(-log_p.value());
            let log_prob = |j: usize| bounded(state.log_prob(|k| self.first_product.logits(first + k)[j]));
            let log_probs: Vec<_> = (0..self.first_product.ids.position_ids(i).len()).map(log_prob).collect();
            for (to, &place) in to.iter_mut().zip(candidates.places(self.positions[i])) {
                *to = log_probs[place];
            }
            if scored.needs_entropy {
                let segments = self.first_product.row_segments(first);
                to[candidates.n] = F::from_f64(entropy(segments, self.first_product.logits(first)));
            }
            if scored.needs_outside {
                to[candidates.n + 1] = bounded(log_outside(state, sums));
            }
        };
        let state = || Components::new(components);
        parallel::for_each_with(scores.chunks_exact_mut(columns).enumerate(), state, score_position);
        scores
    }

    /// Computes the loss of each position, and its rows.
    pub(super) fn objective(&self, targets: &Targets<F>) -> (Vec<PositionLoss>, ChunkRows<F>) {
        let components = self.inputs.sizes.components;
        let mut entries = vec![ListedId::default(); self.first_product.ids.entries()];
        let mut by_position = Vec::with_capacity(self.positions.len());
        let mut remaining = &mut entries[..];
        for i in 0..self.positions.len() {
            let (first, others) = remaining.split_at_mut(components * self.first_product.ids.position_ids(i).len());
            by_position.push(first);
            remaining = others;
        }
        let state = || Components::new(components);
        let position = |state: &mut _, (i, entries): (usize, &mut [_])| self.position(targets, i, entries, state);
        let found = parallel::map_with(by_position.into_iter().enumerate(), state, position);
        let (mut losses, mut all_rows) =
            (Vec::with_capacity(found.len()), Vec::with_capacity(components * found.len()));
        for (loss, rows) in found {
            losses.push(loss);
            all_rows.extend(rows);
        }
        (losses, ChunkRows { rows: all_rows, entries })
    }

    /// Computes the loss of the `i`-th position and its rows, whose entries it writes.
    fn position(
        &self,
        targets: &Targets<F>,
        i: usize,
        entries: &mut [ListedId<F>],
        state: &mut Components<F>,
    ) -> (PositionLoss, Vec<GradientRow<F>>) {
        let (components, t) = (self.inputs.sizes.components, self.positions[i]);
        let first_row = i * components;
        let sums = self.set_components(i, state);
        // A position without a target has a gradient of zero.
        let target = targets.position(t).unwrap_or_default();
        let logit = |k: usize, j: usize| self.first_product.logits(first_row + k)[j];
        let loss = state.hard_loss(&target, |k, _| logit(k, 0));
        state.add_candidates(target.candidates, logit, |_| num_traits::One::one());
        let log_outside = if target.outside.is_zero() { F::neg_infinity() } else { log_outside(state, sums).value() };
        let scale = targets.scale(t);
        let logit_scale = scale.f64() * self.inputs.logit_scale.f64();
        let gradient = PositionGradient { state, target: &target, sums, log_outside, scale, logit_scale };
        let n = self.first_product.ids.position_ids(i).len();
        let row = |k: usize| self.gradient_row(&gradient, first_row + k, k, &mut entries[k * n..][..n]);
        (loss, (0..components).map(row).collect())
    }

    /// Computes the gradient of the logits of a position's component k, as the factor of their exponentials, and writes
    /// those of its listed ids to `entries`.
    fn gradient_row(
        &self,
        gradient: &PositionGradient<'_, F>,
        row: usize,
        k: usize,
        entries: &mut [ListedId<F>],
    ) -> GradientRow<F> {
        let &PositionGradient { state, sums, scale, logit_scale, .. } = gradient;
        let (first_entry, ids) = self.first_product.ids.row_ids(row);
        let logits = self.first_product.logits(row);
        let masses = gradient.softmax_masses(k, logits);
        let listed_mass = |j: usize| gradient.listed_mass(k, j);
        for (j, (to, (&id, &z))) in entries.iter_mut().zip(ids.iter().zip(logits)).enumerate() {
            let mass = if id == ELSEWHERE {
                F::zero()
            } else {
                let slope = self.inputs.logit_map.map_or(F::from_f64(1.0), |map| map.slope_at(z));
                let mass = (listed_mass(j).f64() - weighted(masses.total(), sums[k].softmax(z))) * slope.f64();
                flushed(F::from_f64(weighted(logit_scale, mass)))
            };
            *to = ListedId { id, mass };
        }
        let is_zero = masses.are_zero() && (0..ids.len()).all(|j| listed_mass(j).is_zero());
        let has_gradient = logit_scale != 0.0 && !is_zero;
        let lse = sums[k].lse;
        GradientRow {
            entries: (first_entry, ids.len()),
            factor: if lse.log_sum == F::neg_infinity() {
                // There is no distribution if all logits are minus infinity.
                weighted(masses.factor, f64::NAN)
            } else {
                weighted(masses.factor, (-lse.log_sum.f64()).exp())
            },
            largest: lse.largest,
            outside: (masses.outside_factor, sums[k].outside.largest),
            scale: logit_scale,
            log_prior: flushed(weighted(scale, -state.mass[k] - F::from_f64(masses.outside))),
            is_void: !has_gradient
                && self.first_product.row_segments(row).any(|(sums, r)| !sums.running.sum[r].is_finite()),
        }
    }
}

/// The factors of a chunk's rows, for each segment and each tile.
#[derive(Clone, Copy)]
pub(super) struct Factors<'p, F> {
    pub(super) first_product: &'p FirstProductResults<'p, F>,
    pub(super) rows: &'p [GradientRow<F>],
    pub(super) entries: &'p [ListedId<F>],
    /// `[segment][column]`: for the offsets at the end of each segment, which its second product has
    pub(super) by_segment: &'p [Vec<F>],
}

/// Computes `[segment][column]`, the rows' factors for the offsets at the end of each segment.
pub(super) fn segment_factors<F: Float>(
    first_product: &FirstProductResults<'_, F>,
    ChunkRows { rows, .. }: &ChunkRows<F>,
) -> Vec<Vec<F>> {
    let FirstProductResults { layout, panels, segments, .. } = first_product;
    let factors = |segment: usize| {
        let mut factors = vec![F::zero(); layout.columns(rows.len())];
        for (panel, sums) in panels.iter().zip(&segments[segment * panels.len()..]) {
            let rows = &rows[panel.first..][..panel.rows];
            for ((factor, row), &offset) in factors[panel.first..].iter_mut().zip(rows).zip(&sums.running.offset) {
                *factor = row.factor(offset);
            }
        }
        factors
    };
    parallel::map(0..layout.segments(), factors)
}

impl<F: Float> Factors<'_, F> {
    /// Computes `[column]`, the rows' factors for the exponentials of a tile, whose offsets may be those before its
    /// segment's last ones.
    pub(super) fn tile_factors(&self, tile: usize) -> Vec<F> {
        let FirstProductResults { layout, panels, segments, .. } = self.first_product;
        let segment = layout.segment_of(tile);
        let in_segment = tile - layout.tiles_of_segment(segment).start;
        let mut factors = self.by_segment[segment].clone();
        for (panel, sums) in panels.iter().zip(&segments[segment * panels.len()..]) {
            let offsets = &sums.offsets[in_segment * panel.width..][..panel.rows];
            for (r, (&offset, last)) in offsets.iter().zip(&sums.running.offset).enumerate() {
                if offset != *last {
                    factors[panel.first + r] = self.rows[panel.first + r].factor(offset);
                }
            }
        }
        factors
    }
}
