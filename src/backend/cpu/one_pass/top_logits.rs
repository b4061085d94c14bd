//! The most probable ids of rows of a single component, collected while a tile's logits are in the cache.
//!
//! The ids of one component are in the order of their logits, which need no log-sum-exp. A tile hardly ever has a logit
//! above the lowest collected one: the largest logit of each row in the tile is nearly all that is looked at.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::Panel;
use crate::backend::cpu::vector::simd::Float;
use crate::backend::distribution::Real;
use crate::backend::ranking::{Ranked, Ranking};

/// Lower bounds of the logits that are wanted of each row, as far as any segment knows. What is left out because of them
/// depends on the threads; what remains once the best of all segments are ranked does not.
pub(super) struct Floors(Vec<AtomicU64>);

impl Floors {
    pub(super) fn new(rows: usize) -> Self {
        Floors((0..rows).map(|_| AtomicU64::new(f64::NEG_INFINITY.to_bits())).collect())
    }

    fn at(&self, row: usize) -> f64 {
        f64::from_bits(self.0[row].load(Ordering::Relaxed))
    }

    fn raise(&self, row: usize, floor: f64) {
        let raised = |bits| (f64::from_bits(bits) < floor).then_some(floor.to_bits());
        // An error says that it is as high already.
        let _ = self.0[row].fetch_update(Ordering::Relaxed, Ordering::Relaxed, raised);
    }
}

/// The largest logits of a panel's rows in a segment, and their ids.
pub(super) struct TopLogits<F> {
    panel: Panel,
    /// `[rows]`
    rows: Vec<Ranking<F>>,
}

impl<F: Float> TopLogits<F> {
    /// None so far, of the `n` largest of each row.
    pub(super) fn new(n: usize, panel: Panel) -> Self {
        let rows = (0..panel.rows).map(|_| Ranking::new(n)).collect();
        TopLogits { panel, rows }
    }

    /// Adds a tile of logits `[ids, width]`, and each row's largest of them, `[width]`.
    pub(super) fn add(&mut self, ids: &Range<usize>, tile: &[F], largest: &[F], floors: &Floors) {
        for (row, (candidates, &largest)) in self.rows.iter_mut().zip(largest).enumerate() {
            // Of equals another segment may have the lower id.
            let floor = F::from_f64(floors.at(self.panel.first + row));
            if largest < floor || !candidates.has_place(largest) {
                continue;
            }
            for (id, &z) in ids.clone().zip(tile.iter().skip(row).step_by(self.panel.width)) {
                if z >= floor && candidates.has_place(z) {
                    candidates.push(id as u32, z);
                }
            }
            if let Some(floor) = candidates.settle() {
                floors.raise(self.panel.first + row, Real::f64(floor));
            }
        }
    }

    /// The largest logits of a row.
    pub(super) fn of_row(&self, row: usize) -> &[Ranked<F>] {
        self.rows[row].entries()
    }
}

/// Bytes of the `n` largest logits of a row.
pub(super) fn bytes<F: Float>(n: usize) -> usize {
    size_of::<Ranking<F>>() + Ranking::<F>::capacity(n) * size_of::<Ranked<F>>()
}
