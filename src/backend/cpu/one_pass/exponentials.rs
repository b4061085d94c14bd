//! The kernels that turn a tile of logits into scaled exponentials, in place, while it is in the cache.

use crate::backend::cpu::products::panel::lanes;
use crate::backend::cpu::vector::math::{exp_or_zero, weighted};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::cpu::vector::softcap::Softcap;

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
    pub(super) running: &'a mut RunningSums<F>,
}

impl<F: Float> Kernel<F> for UpdateOffsets<'_, F> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> bool {
        let UpdateOffsets { tile, running } = self;
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
/// softcap if there is one. Adds the exponentials to the sums, and to the moments if these are needed.
pub(super) struct Exponentiate<'a, F> {
    pub(super) tile: &'a mut [F],
    pub(super) running: &'a mut RunningSums<F>,
    /// The softcap, which has been applied to the logits already.
    pub(super) softcap: Option<Softcap<F>>,
}

impl<F: Float> Kernel<F> for Exponentiate<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let Exponentiate { tile, running, softcap } = self;
        let no_softcap = Softcap::new(F::one());
        match (softcap, running.moment.is_empty()) {
            (None, true) => exponentiate::<false, false, F, V>(v, tile, running, no_softcap),
            (None, false) => exponentiate::<false, true, F, V>(v, tile, running, no_softcap),
            (Some(softcap), true) => exponentiate::<true, false, F, V>(v, tile, running, softcap),
            (Some(softcap), false) => exponentiate::<true, true, F, V>(v, tile, running, softcap),
        }
    }
}

/// As [`Exponentiate`], compiled with or without a softcap and moments.
#[inline(always)]
fn exponentiate<const CAP: bool, const MOMENT: bool, F: Float, V: Vector<F>>(
    v: V,
    tile: &mut [F],
    running: &mut RunningSums<F>,
    softcap: Softcap<F>,
) {
    let lanes = lanes::<F, V>();
    let n = running.offset.len() / lanes;
    let zero = v.splat(F::zero());
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
            row[j] = if CAP { v.mul(e, softcap.slope(v, z)) } else { e };
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

/// Applies the softcap to a tile of logits.
pub(super) struct ApplySoftcap<'a, F> {
    pub(super) tile: &'a mut [F],
    pub(super) softcap: Softcap<F>,
}

impl<F: Float> Kernel<F> for ApplySoftcap<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        for z in V::registers_mut(self.tile) {
            *z = self.softcap.apply(v, *z);
        }
    }
}
