//! Whether a listed id is the most probable of all, without the mixture's probability of every id.
//!
//! The largest logits of a position's rows in a tile bound the probability of every id of the tile:
//!
//! ```text
//! P(v) <= sum_k pi_k exp(max_{u in tile} z_ku - lse_k)
//! ```
//!
//! A tile whose bound is below the probability of the best listed id has no better one. The logits of the others are
//! computed again for this position, with the same bits, in descending order of the bounds. The bounds of all tiles add
//! up to at most one: with P the probability of the best id of all, at most 1 / P tiles are computed. The bound of a
//! single component is a probability of the tile, so that only a tie in the id's own tile is computed.

use num_traits::{Float as _, Zero};
use rayon::prelude::*;

use super::exponentials::Capped;
use super::format::{FirstOperands, Format};
use super::layout::{Layout, Panel};
use super::rows::{parts_of, Passed};
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::objective::argmax_terms::argmax_term;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::operands::inputs::Inputs;
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::distribution::Real;
use crate::backend::operands::Sizes;

/// A bound and a probability are sums of exponentials with other rounding errors.
const MARGIN: f64 = 1e-3;

/// The search of a chunk's positions.
pub(super) struct ArgmaxSearch<'a, T: Element, X> {
    pub(super) format: X,
    pub(super) inputs: &'a Inputs<'a, T>,
    pub(super) layout: &'a Layout,
    pub(super) panels: &'a [Panel],
    /// `[rows, d]`
    pub(super) contexts: &'a [T::Acc],
    pub(super) passed: &'a Passed<'a, T::Acc>,
}

/// What a thread computes of a position and a tile.
struct SearchBuffers<T: Element, X: Format<T>> {
    /// The position's contexts as operands of the first product
    packed: Aligned<X::Packed>,
    decoder: X::DecoderBuffers,
    logits: X::LogitBuffers,
    /// `[ids]`
    values: Vec<T::Acc>,
}

/// A position's best listed id, and its rows.
struct Leader<F> {
    /// The place of its first row in the chunk
    row: usize,
    id: usize,
    /// For several components its probability relative to the largest term of a listed id, else its logit
    value: F,
    scales: Scales<F>,
}

/// The numbers of a position's rows, padded to whole vectors.
struct Scales<F> {
    /// The largest logit.
    largest: Vec<F>,
    /// `log pi_k - log sum_v exp(z_kv - largest)`, less the largest term of a listed id; minus infinity in the padding
    log_scale: Vec<F>,
}

impl<T: Element, X: Format<T>> ArgmaxSearch<'_, T, X> {
    /// For each position, the place of its most probable id among the listed ones; `None` if another id is more
    /// probable, or no id has a probability. Among equals the lowest id counts as the most probable.
    pub(super) fn run(&self, positions: &[usize]) -> Vec<Option<usize>> {
        let buffers = || SearchBuffers {
            packed: Aligned::default(),
            decoder: X::DecoderBuffers::default(),
            logits: X::LogitBuffers::default(),
            values: Vec::new(),
        };
        let of_position = |buffers: &mut SearchBuffers<T, X>, (i, &t): (usize, &usize)| {
            let (place, leader) = self.leader(i, t)?;
            (!self.is_beaten(&leader, buffers)).then_some(place)
        };
        positions.par_iter().enumerate().map_init(buffers, of_position).collect()
    }

    /// The best of the listed ids of the `i`-th position, which is position `t`, and its place among them.
    fn leader(&self, i: usize, t: usize) -> Option<(usize, Leader<T::Acc>)> {
        let components = self.inputs.sizes.components;
        let (row, ids) = (i * components, self.passed.ids.of_position(i));
        let columns = self.layout.columns(components);
        let (mut largest, mut log_scale) = (vec![T::Acc::zero(); columns], vec![T::Acc::neg_infinity(); columns]);
        let log_priors = &self.inputs.log_priors[t * components..][..components];
        let mut reference = T::Acc::neg_infinity();
        for (k, &log_prior) in log_priors.iter().enumerate() {
            let lse = self.passed.lse(row + k);
            (largest[k], log_scale[k]) = (lse.largest, log_prior - lse.log_sum);
            for &z in self.passed.logits(row + k) {
                let term = z - largest[k] + log_scale[k];
                // There is no distribution.
                if term.is_nan() {
                    return None;
                }
                reference = reference.max(term);
            }
        }
        // No listed id has a probability.
        if reference == T::Acc::neg_infinity() {
            return None;
        }
        log_scale.iter_mut().for_each(|log_scale| *log_scale -= reference);
        let scales = Scales { largest, log_scale };
        let mut values = vec![T::Acc::zero(); ids.len()];
        for Panel { first, rows, width } in self.layout.panels(components) {
            let mut logits = vec![T::Acc::zero(); ids.len() * width];
            for k in 0..rows {
                let of_row = self.passed.logits(row + first + k);
                of_row.iter().enumerate().for_each(|(j, &z)| logits[j * width + k] = z);
            }
            self.add_values(&scales, (first, width), &logits, &mut values);
        }
        let mut place = 0;
        for (j, value) in values.iter().enumerate() {
            if *value > values[place] {
                place = j;
            }
        }
        Some((place, Leader { row, id: ids[place], value: values[place], scales }))
    }

    /// Adds the terms of a panel's rows to the values of some ids, `[ids]`, from their logits `[ids, width]`. The value of
    /// a single component is the logit, which equals others exactly where its probability may do so by rounding.
    fn add_values(
        &self,
        scales: &Scales<T::Acc>,
        (first, width): (usize, usize),
        logits: &[T::Acc],
        values: &mut [T::Acc],
    ) {
        match self.inputs.sizes.components {
            1 => values.iter_mut().zip(logits.iter().step_by(width)).for_each(|(value, &z)| *value = z),
            _ => {
                let largest = &scales.largest[first..first + width];
                let log_scale = &scales.log_scale[first..first + width];
                T::Acc::dispatch(self.inputs.isa, AddTerms { logits, largest, log_scale, to: values });
            }
        }
    }

    /// Whether an id that is not listed is more probable, or as probable and lower.
    fn is_beaten(&self, leader: &Leader<T::Acc>, buffers: &mut SearchBuffers<T, X>) -> bool {
        let own = leader.id / self.layout.tile_ids;
        if self.inputs.sizes.components == 1 {
            let mut is_tied = false;
            for (tile, largest) in self.largest_of_tiles(leader.row).enumerate() {
                if largest > leader.value || largest == leader.value && tile < own {
                    return true;
                }
                is_tied |= largest == leader.value && tile == own;
            }
            return is_tied && {
                self.pack(leader, buffers);
                self.has_better(own, leader, buffers)
            };
        }
        let mut bounds: Vec<(f64, usize)> = (0..self.layout.tiles()).map(|tile| (0.0, tile)).collect();
        for k in 0..self.inputs.sizes.components {
            let (largest, log_scale) = (leader.scales.largest[k], leader.scales.log_scale[k]);
            for ((bound, _), of_tile) in bounds.iter_mut().zip(self.largest_of_tiles(leader.row + k)) {
                *bound += (of_tile - largest + log_scale).f64().exp();
            }
        }
        let least = leader.value.f64() * (1.0 - MARGIN);
        bounds.retain(|&(bound, _)| bound >= least);
        if bounds.is_empty() {
            return false;
        }
        bounds.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        self.pack(leader, buffers);
        bounds.into_iter().any(|(_, tile)| self.has_better(tile, leader, buffers))
    }

    /// The largest logit of a row in each tile, without the listed ids.
    fn largest_of_tiles(&self, row: usize) -> impl Iterator<Item = T::Acc> + '_ {
        let width = self.panels[self.layout.panel_of(row)].width;
        let parts = parts_of(self.layout, self.panels, &self.passed.parts, row);
        parts.flat_map(move |(part, r)| part.tile_largest.iter().skip(r).step_by(width).copied())
    }

    /// Packs the contexts of a position.
    fn pack(&self, leader: &Leader<T::Acc>, buffers: &mut SearchBuffers<T, X>) {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let per_row = self.format.packed_per_row(d);
        let packed = buffers.packed.at_least(self.layout.columns(components) * per_row);
        for panel in self.layout.panels(components) {
            let to = &mut packed[panel.first * per_row..][..panel.width * per_row];
            self.format.pack(self.inputs, self.contexts, Panel { first: leader.row + panel.first, ..panel }, to);
        }
    }

    /// Whether a tile has an id that is more probable than the leader, or as probable and lower.
    fn has_better(&self, tile: usize, leader: &Leader<T::Acc>, buffers: &mut SearchBuffers<T, X>) -> bool {
        let SearchBuffers { packed, decoder, logits, values } = buffers;
        let per_row = self.format.packed_per_row(self.inputs.sizes.context_dim);
        let ids = self.layout.ids(tile);
        let decoder = self.format.decoder(self.inputs, ids.clone(), decoder);
        values.clear();
        values.resize(ids.len(), T::Acc::zero());
        for panel @ Panel { first, width, .. } in self.layout.panels(self.inputs.sizes.components) {
            let operands = FirstOperands {
                inputs: self.inputs,
                ids: ids.clone(),
                decoder: &decoder,
                panel,
                packed: &packed[first * per_row..][..width * per_row],
                kept: None,
                sums: &mut [],
                is_first: true,
            };
            self.format.multiply(operands, logits, |logits, _| {
                if let Some(softcap) = self.inputs.softcap {
                    T::Acc::dispatch(self.inputs.isa, Capped { tile: logits, softcap });
                }
                self.add_values(&leader.scales, (first, width), logits, values);
            });
        }
        let is_better = |(id, &value): (usize, &T::Acc)| {
            id != leader.id && (value > leader.value || value == leader.value && id < leader.id)
        };
        ids.zip(&*values).any(is_better)
    }
}

/// `to[id] += sum_k exp(z_k - largest_k + log_scale_k)`
struct AddTerms<'a, F> {
    /// `[ids, width]`
    logits: &'a [F],
    /// `[width]`
    largest: &'a [F],
    log_scale: &'a [F],
    /// `[ids]`
    to: &'a mut [F],
}

impl<F: Float> Kernel<F> for AddTerms<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let AddTerms { logits, largest, log_scale, to } = self;
        let (largest, log_scale) = (V::registers(largest), V::registers(log_scale));
        for (to, logits) in to.iter_mut().zip(V::registers(logits).chunks_exact(largest.len())) {
            let mut sum = v.splat(F::zero());
            for ((&z, &largest), &log_scale) in logits.iter().zip(largest).zip(log_scale) {
                sum = v.add(sum, argmax_term(v, z, largest, log_scale));
            }
            *to += v.sum(sum);
        }
    }
}
