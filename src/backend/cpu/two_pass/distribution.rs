//! Decoding: the distribution of one position, computed tile by tile from its rows of logits.

use super::mix::{largest_term, mix_register};
use crate::backend::cpu::vector::log_sum_exp::{defect_of, LogSumExp};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector, ROW_ALIGN};
use crate::backend::distribution::{Defect, Distribution, TILE};

/// The K rows of logits of one position.
pub(super) struct PositionRows<'a, F> {
    /// `[K, stride]`: `vocab` logits per row, after bias and softcap, padded with minus infinity
    rows: &'a [F],
    stride: usize,
    vocab: usize,
    /// `[K]`: the largest logit of the row, and its `log_scale` as in `Components`
    components: Vec<(F, F)>,
    defect: Option<Defect>,
    isa: Isa,
}

impl<'a, F: Float> PositionRows<'a, F> {
    pub(super) fn new(
        rows: &'a [F],
        stride: usize,
        vocab: usize,
        lse: &[LogSumExp<F>],
        log_priors: &[F],
        isa: Isa,
    ) -> Self {
        let component = |(lse, &log_prior): (&LogSumExp<F>, &F)| (lse.largest, log_prior - lse.log_sum);
        let defect = defect_of(lse.iter().copied().zip(log_priors.iter().copied()));
        PositionRows {
            rows,
            stride,
            vocab,
            components: lse.iter().zip(log_priors).map(component).collect(),
            defect,
            isa,
        }
    }
}

impl<F: Float> Distribution<F> for PositionRows<'_, F> {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn defect(&self) -> Option<Defect> {
        self.defect
    }

    fn tile<'b>(&'b self, tile: usize, floor: F, buffer: &'b mut Vec<F>) -> &'b [F] {
        let ids = TILE.min(self.vocab - tile * TILE);
        buffer.resize(ids.next_multiple_of(ROW_ALIGN), F::zero());
        F::dispatch(self.isa, MixTile { of: self, first: tile * TILE, floor, to: buffer });
        &buffer[..ids]
    }

    fn logit_offset(&self) -> Option<F> {
        match self.components[..] {
            [(largest, log_scale)] => Some(largest - log_scale),
            _ => None,
        }
    }
}

/// `log p(v)` of the ids of one tile.
struct MixTile<'a, F> {
    of: &'a PositionRows<'a, F>,
    first: usize,
    floor: F,
    to: &'a mut [F],
}

impl<F: Float> Kernel<F> for MixTile<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let MixTile { of, first, floor, to } = self;
        let stride = V::registers(&of.rows[..of.stride]).len();
        let rows = V::registers(&of.rows[first..]);
        let components = of.components.iter().copied();
        // A sum of K terms is at most K times the largest; 1e-2 leaves room for rounding.
        let least_term = floor - F::from_f64((of.components.len() as f64).ln() + 1e-2);
        for (i, log_p) in V::registers_mut(to).iter_mut().enumerate() {
            let largest = largest_term(v, &rows[i..], stride, components.clone());
            *log_p = if v.largest(largest) < least_term {
                v.splat(F::neg_infinity())
            } else {
                mix_register(v, &rows[i..], stride, components.clone(), largest).0
            };
        }
    }
}
