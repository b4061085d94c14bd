//! The search that decides whether a listed id is the argmax of its position, without the mixture's probability of
//! every id.
//!
//! The largest logits of a position's rows in a tile bound the probability of every id of the tile:
//!
//! ```text
//! P(v) <= sum_k pi_k exp(max_{u in tile} z_ku - lse_k)
//! ```
//!
//! A tile whose bound is below the probability of the leader, the most probable listed id, has no id that is more
//! probable. In the other tiles, in descending order of the bounds, the logits are computed again for this position,
//! with the same bits. The bounds of all tiles add up to at most one, hence at most 1 / P tiles are computed, where P
//! is the probability of the argmax. The bound of a single component is the probability of an id of the tile: only a
//! tie in the leader's own tile needs the logits.

use super::exponentials::FirstProductResults;
use super::format::{FirstOperands, Format, PanelOperands};
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::Aligned;
use crate::backend::cpu::objective::argmax_terms::{argmax_term, reference};
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::products::panel::Panel;
use crate::backend::cpu::vector::logit_map::ApplyLogitMap;
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::operands::Sizes;
use crate::backend::parallel;
use crate::backend::ranking::{order, precedes};

/// The relative difference that rounding may make between a bound and a probability, which are added up differently.
const MARGIN: f64 = 1e-3;

/// The search of a chunk's positions.
pub(super) struct ArgmaxSearch<'a, F: Accumulator, X> {
    pub(super) format: X,
    pub(super) inputs: &'a Inputs<'a, F>,
    /// `[rows, d]`
    pub(super) contexts: &'a [F],
    pub(super) first_product: &'a FirstProductResults<'a, F>,
}

/// The buffers of a thread for a position and a tile.
struct SearchBuffers<F: Accumulator, X: Format<F>> {
    /// The position's contexts as operands of the first product
    packed: Aligned<X::Packed>,
    decoder: X::DecoderBuffers,
    logits: X::LogitBuffers,
    /// `[ids]`
    values: Vec<F>,
}

/// A position's most probable listed id, and its rows.
struct Leader<F> {
    /// The index of its first row in the chunk
    row: usize,
    id: usize,
    /// What ids are compared by: for a single component the logit, otherwise the probability relative to the largest
    /// term of a listed id
    value: F,
    scales: Scales<F>,
}

/// The numbers of a position's rows, padded to whole vectors.
struct Scales<F> {
    /// The largest logit
    largest: Vec<F>,
    /// `log pi_k - log sum_v exp(z_kv - largest)`, less the largest term of a listed id; minus infinity in the padding
    log_scale: Vec<F>,
}

impl<F: Accumulator, X: Format<F>> ArgmaxSearch<'_, F, X> {
    /// Returns for each position the place of its argmax among the listed ids, or `None` if the argmax is not listed,
    /// or no id has a probability. If several ids are equally probable, the lowest of them is the argmax.
    pub(super) fn run(&self, positions: &[usize]) -> Vec<Option<usize>> {
        let buffers = || SearchBuffers {
            packed: Aligned::default(),
            decoder: X::DecoderBuffers::default(),
            logits: X::LogitBuffers::default(),
            values: Vec::new(),
        };
        let search_position = |buffers: &mut SearchBuffers<F, X>, (i, &t): (usize, &usize)| {
            let leader = self.leader(i, t)?;
            let ids = self.first_product.ids.position_ids(i);
            (!self.is_beaten(&leader, buffers)).then(|| ids.partition_point(|&id| id < leader.id))
        };
        parallel::map_with(positions.iter().enumerate(), buffers, search_position)
    }

    /// Returns the most probable of the listed ids of the chunk's `i`-th position, which is position `t`; `None` if
    /// none of them has a probability.
    fn leader(&self, i: usize, t: usize) -> Option<Leader<F>> {
        let components = self.inputs.sizes.components;
        let (row, ids) = (i * components, self.first_product.ids.position_ids(i));
        let scales = self.scales(row, t)?;
        let mut values = vec![F::zero(); ids.len()];
        for panel in self.first_product.layout.panels(components) {
            let mut logits = vec![F::zero(); ids.len() * panel.width];
            for k in 0..panel.rows {
                let listed = self.first_product.logits(row + panel.first + k);
                listed.iter().enumerate().for_each(|(j, &z)| logits[j * panel.width + k] = z);
            }
            self.add_values(&scales, panel, &logits, &mut values);
        }
        let mut leader = (values[0], ids[0]);
        for other in values.into_iter().zip(ids.iter().copied()) {
            if precedes(other, leader) {
                leader = other;
            }
        }
        let (value, id) = leader;
        Some(Leader { row, id, value, scales })
    }

    /// Returns the scales of position `t`, whose first row is `row`; `None` if none of its listed ids has a
    /// probability.
    fn scales(&self, row: usize, t: usize) -> Option<Scales<F>> {
        let components = self.inputs.sizes.components;
        let columns = self.first_product.layout.columns(components);
        let (mut largest, mut log_scale) = (vec![F::zero(); columns], vec![F::neg_infinity(); columns]);
        let log_priors = &self.inputs.log_priors[t * components..][..components];
        for (k, &log_prior) in log_priors.iter().enumerate() {
            let lse = self.first_product.lse(row + k);
            (largest[k], log_scale[k]) = (lse.largest, log_prior - lse.log_sum);
        }
        let exponents = (0..components).flat_map(|k| {
            let (largest, log_scale) = (largest[k], log_scale[k]);
            self.first_product.logits(row + k).iter().map(move |&z| z - largest + log_scale)
        });
        let reference = reference(exponents)?;
        log_scale.iter_mut().for_each(|log_scale| *log_scale -= reference);
        Some(Scales { largest, log_scale })
    }

    /// Adds the terms of a panel's rows to the values of some ids, `[ids]`, from their logits `[ids, width]`. The value
    /// of a single component is the logit: two logits are equal exactly if the probabilities are, up to rounding.
    fn add_values(&self, scales: &Scales<F>, panel: Panel, logits: &[F], values: &mut [F]) {
        let Panel { first, width, .. } = panel;
        if self.inputs.sizes.components == 1 {
            values.iter_mut().zip(logits.iter().step_by(width)).for_each(|(value, &z)| *value = z);
        } else {
            let largest = &scales.largest[first..first + width];
            let log_scale = &scales.log_scale[first..first + width];
            F::dispatch(self.inputs.isa, AddTerms { logits, largest, log_scale, to: values });
        }
    }

    /// Returns whether an id that is not listed is more probable than the leader, or as probable and lower.
    fn is_beaten(&self, leader: &Leader<F>, buffers: &mut SearchBuffers<F, X>) -> bool {
        if self.inputs.sizes.components == 1 {
            return self.is_beaten_in_one_component(leader, buffers);
        }
        let tiles = 0..self.first_product.layout.tiles() as u32;
        let mut bounds: Vec<(f64, u32)> = tiles.map(|tile| (0.0, tile)).collect();
        for k in 0..self.inputs.sizes.components {
            let (largest, log_scale) = (leader.scales.largest[k], leader.scales.log_scale[k]);
            for ((bound, _), tile_largest) in bounds.iter_mut().zip(self.tile_largest(leader.row + k)) {
                *bound += (tile_largest - largest + log_scale).f64().exp();
            }
        }
        let least = leader.value.f64() * (1.0 - MARGIN);
        bounds.retain(|&(bound, _)| bound >= least);
        if bounds.is_empty() {
            return false;
        }
        bounds.sort_unstable_by(order);
        self.pack(leader, buffers);
        bounds.into_iter().any(|(_, tile)| self.is_beaten_in_tile(tile as usize, leader, buffers))
    }

    /// As [`Self::is_beaten`], for a single component, whose logits have the order of the probabilities.
    fn is_beaten_in_one_component(&self, leader: &Leader<F>, buffers: &mut SearchBuffers<F, X>) -> bool {
        let leader_tile = leader.id / self.first_product.layout.tile_ids;
        let mut is_tied = false;
        for (tile, largest) in self.tile_largest(leader.row).enumerate() {
            if precedes((largest, tile), (leader.value, leader_tile)) {
                return true;
            }
            is_tied |= largest == leader.value && tile == leader_tile;
        }
        is_tied && {
            self.pack(leader, buffers);
            self.is_beaten_in_tile(leader_tile, leader, buffers)
        }
    }

    /// Returns the largest logit of a row in each tile, without the listed ids.
    fn tile_largest(&self, row: usize) -> impl Iterator<Item = F> + '_ {
        let width = self.first_product.panels[self.first_product.layout.panel_of(row)].width;
        let segments = self.first_product.row_segments(row);
        segments.flat_map(move |(sums, r)| sums.tile_largest.iter().skip(r).step_by(width).copied())
    }

    /// Packs the contexts of the leader's position.
    fn pack(&self, leader: &Leader<F>, buffers: &mut SearchBuffers<F, X>) {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let (layout, per_row) = (&self.first_product.layout, self.format.packed_per_row(d));
        let packed = buffers.packed.at_least(layout.columns(components) * per_row);
        for panel in layout.panels(components) {
            let to = &mut packed[panel.first * per_row..][..panel.width * per_row];
            self.format.pack(self.inputs, self.contexts, Panel { first: leader.row + panel.first, ..panel }, to);
        }
    }

    /// Returns whether a tile has an id that is more probable than the leader, or as probable and lower.
    fn is_beaten_in_tile(&self, tile: usize, leader: &Leader<F>, buffers: &mut SearchBuffers<F, X>) -> bool {
        let SearchBuffers { packed, decoder, logits, values } = buffers;
        let (layout, per_row) = (&self.first_product.layout, self.format.packed_per_row(self.inputs.sizes.context_dim));
        let ids = layout.ids(tile);
        let decoder = self.format.decoder_tile(self.inputs, ids.clone(), false, decoder);
        values.clear();
        values.resize(ids.len(), F::zero());
        for panel @ Panel { first, width, .. } in layout.panels(self.inputs.sizes.components) {
            let packed = &packed[first * per_row..][..width * per_row];
            let panels = vec![PanelOperands { panel, packed, exponentials: None, products: &mut [] }];
            let operands =
                FirstOperands { inputs: self.inputs, ids: ids.clone(), decoder: &decoder, panels, is_first_tile: true };
            self.format.multiply(operands, logits, |_, logits, _| {
                if let Some(map) = self.inputs.logit_map {
                    F::dispatch(self.inputs.isa, ApplyLogitMap { tile: logits, map });
                }
                self.add_values(&leader.scales, panel, logits, values);
            });
        }
        let beats_leader =
            |(id, &value): (usize, &F)| id != leader.id && precedes((value, id), (leader.value, leader.id));
        ids.zip(&*values).any(beats_leader)
    }
}

/// Computes `to[id] += sum_k exp(z_k - largest_k + log_scale_k)`.
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
