//! The largest logits of each row, collected while a tile's logits are in the cache. For a single component, these are
//! the top k.
//!
//! The order of logits needs no log-sum-exp. A tile hardly ever has a logit above the lowest collected one: for most
//! tiles the kernel compares nothing but the largest logit of each row.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::cpu::products::panel::Panel;
use crate::backend::operands::Real;
use crate::backend::ranking::{Ranked, Ranking};

/// For each row a lower bound of its `k`-th largest logit, the highest that any segment has found so far. Which logits
/// are skipped because of it depends on the threads; which remain once all segments are ranked does not.
pub(super) struct Floors(Vec<AtomicU64>);

impl Floors {
    /// Starts at minus infinity.
    pub(super) fn new(rows: usize) -> Self {
        Floors((0..rows).map(|_| AtomicU64::new(f64::NEG_INFINITY.to_bits())).collect())
    }

    /// Returns the bound of a row.
    fn at(&self, row: usize) -> f64 {
        f64::from_bits(self.0[row].load(Ordering::Relaxed))
    }

    /// Raises the bound of a row to `floor`, unless it is higher.
    fn raise(&self, row: usize, floor: f64) {
        let raised = |bits| (f64::from_bits(bits) < floor).then_some(floor.to_bits());
        // An error says that the bound is as high already.
        let _ = self.0[row].fetch_update(Ordering::Relaxed, Ordering::Relaxed, raised);
    }
}

/// The largest logits of a panel's rows in a segment, and their ids.
pub(super) struct TopLogits {
    panel: Panel,
    /// `[rows]`
    rows: Vec<Ranking>,
}

impl TopLogits {
    /// Starts without logits; collects the `n` largest of each row.
    pub(super) fn new(n: usize, panel: Panel) -> Self {
        let rows = (0..panel.rows).map(|_| Ranking::new(n)).collect();
        TopLogits { panel, rows }
    }

    /// Adds a tile of logits `[ids, width]`, of which each row's largest is in `largest`, `[width]`.
    pub(super) fn add<F: Real>(&mut self, ids: &Range<usize>, tile: &[F], largest: &[F], floors: &Floors) {
        for (row, (ranking, &largest)) in self.rows.iter_mut().zip(largest).enumerate() {
            // If logits are equal, another segment may have the lower id.
            let (floor, largest) = (floors.at(self.panel.first + row), largest.f64());
            if largest < floor || !ranking.has_place(largest) {
                continue;
            }
            for (id, z) in ids.clone().zip(tile.iter().skip(row).step_by(self.panel.width)) {
                let z = z.f64();
                if z >= floor && ranking.has_place(z) {
                    ranking.push(id as u32, z);
                }
            }
            if let Some(floor) = ranking.settle() {
                floors.raise(self.panel.first + row, floor);
            }
        }
    }

    /// Returns the largest logits of a row, in no order, perhaps with others.
    pub(super) fn row(&self, row: usize) -> &[Ranked] {
        self.rows[row].entries()
    }
}

/// Returns the bytes that the `n` largest logits of a row take.
pub(super) fn row_bytes(n: usize) -> usize {
    size_of::<Ranking>() + Ranking::capacity(n) * size_of::<Ranked>()
}
