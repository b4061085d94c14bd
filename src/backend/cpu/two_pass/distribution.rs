//! Decoding: queries read the distribution of each position, which is computed tile by tile from its rows of logits.

use std::ops::Range;

use super::mix::{largest_term, least_term, mix_register};
use super::passes::TwoPasses;
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::vector::math::{defect_of, LogSumExp};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector, ROW_ALIGN};
use crate::backend::distribution::{read_positions, Defect, Distribution, Reader, TILE};
use crate::backend::operands::Sizes;
use crate::error::Result;

/// The K rows of logits of one position.
struct PositionRows<'a, F> {
    /// `[K, stride]`: `vocab` logits per row, after bias and logit function, padded with minus infinity.
    rows: &'a [F],
    stride: usize,
    vocab: usize,
    /// `[K]`: the largest logit of the row, and its `log_scale` as in `Components`.
    components: Vec<(F, F)>,
    defect: Option<Defect>,
    isa: Isa,
}

impl<F: Accumulator> TwoPasses<'_, F> {
    /// Lets a query read the distribution of each of the chunk's positions.
    pub(crate) fn visit_rows(&self, positions: Range<usize>, reader: &dyn Reader) -> Result<()> {
        let first = positions.start;
        read_positions(positions, &|position| {
            reader.read(position, &self.position_distribution(position, position - first))
        })
    }

    /// Returns the distribution of a position, which is the i-th of the chunk: the rows of logits of its components,
    /// with the numbers that turn these into log-probabilities.
    fn position_distribution(&self, position: usize, i: usize) -> PositionRows<'_, F> {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let rows = i * components..(i + 1) * components;
        let log_priors = &self.inputs.log_priors[position * components..][..components];
        let lse = &self.lse[rows.clone()];
        let component = |(lse, &log_prior): (&LogSumExp<F>, &F)| (lse.largest, log_prior - lse.log_sum);
        PositionRows {
            rows: &self.logits[rows.start * self.stride..rows.end * self.stride],
            stride: self.stride,
            vocab,
            components: lse.iter().zip(log_priors).map(component).collect(),
            defect: defect_of(lse.iter().copied().zip(log_priors.iter().copied())),
            isa: self.inputs.isa,
        }
    }
}

impl<F: Float> Distribution for PositionRows<'_, F> {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn defect(&self) -> Option<Defect> {
        self.defect
    }

    fn tile<'b>(&'b self, tile: usize, buffer: &'b mut Vec<f64>) -> &'b [f64] {
        self.tile_above(tile, f64::NEG_INFINITY, buffer)
    }

    fn tile_above<'b>(&'b self, tile: usize, floor: f64, buffer: &'b mut Vec<f64>) -> &'b [f64] {
        let ids = TILE.min(self.vocab - tile * TILE);
        buffer.resize(ids, 0.0);
        let mix = MixTile { position: self, first: tile * TILE, floor: F::from_f64(floor), to: buffer };
        if F::dispatch(self.isa, mix) {
            buffer
        } else {
            &[]
        }
    }

    fn logit_tile<'b>(&'b self, tile: usize, buffer: &'b mut Vec<f64>) -> Option<&'b [f64]> {
        if self.components.len() > 1 {
            return None;
        }
        buffer.clear();
        buffer.extend(self.rows[tile * TILE..self.vocab.min((tile + 1) * TILE)].iter().map(|x| x.f64()));
        Some(buffer)
    }

    fn logit_offset(&self) -> Option<f64> {
        match self.components[..] {
            [(largest, log_scale)] => Some((largest - log_scale).f64()),
            _ => None,
        }
    }
}

/// The kernel that computes `log p(v)` of the ids of one tile. It returns whether any is written: if all are below the
/// floor, none is.
struct MixTile<'a, F> {
    position: &'a PositionRows<'a, F>,
    /// The first id of the tile.
    first: usize,
    /// A register of ids that are all below this log-probability becomes minus infinity.
    floor: F,
    to: &'a mut [f64],
}

impl<F: Float> Kernel<F> for MixTile<'_, F> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> bool {
        let MixTile { position, first, floor, to } = self;
        let stride = V::registers(&position.rows[..position.stride]).len();
        let rows = V::registers(&position.rows[first..]);
        let components = position.components.iter().copied();
        let least_term = least_term(floor, position.components.len());
        let mut mixed = [F::zero(); TILE];
        let registers = V::registers_mut(&mut mixed[..to.len().next_multiple_of(ROW_ALIGN)]);
        let mut any = false;
        for (i, log_p) in registers.iter_mut().enumerate() {
            let largest = largest_term(v, &rows[i..], stride, components.clone());
            *log_p = if v.largest(largest) < least_term {
                v.splat(F::neg_infinity())
            } else {
                any = true;
                mix_register(v, &rows[i..], stride, components.clone(), largest).0
            };
        }
        if !any {
            return false;
        }
        for (to, log_p) in to.iter_mut().zip(mixed) {
            *to = log_p.f64();
        }
        true
    }
}
