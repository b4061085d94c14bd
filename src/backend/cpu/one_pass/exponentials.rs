//! From logits to scaled exponentials, in place, while a tile is in the cache.

use super::product::lanes;
use crate::backend::cpu::math::exp_or_zero;
use crate::backend::cpu::simd::{Float, Kernel, Vector};
use crate::backend::cpu::softcap::Softcap;

/// The state of a panel's rows as the tiles of a segment go by, `[width]` each.
pub(super) struct Running<F> {
    /// The kernel subtracts it from the logits before exponentiation. It starts at minus infinity, and stays until a
    /// logit exceeds it by [`SLACK`].
    pub(super) offset: Vec<F>,
    /// The largest logit.
    pub(super) largest: Vec<F>,
    /// The sum of the exponentials.
    pub(super) sum: Vec<f64>,
    /// When offsets change, earlier sums are multiplied by these factors.
    pub(super) rescale: Vec<F>,
}

impl<F: Float> Running<F> {
    pub(super) fn new(width: usize) -> Self {
        let least = vec![F::neg_infinity(); width];
        Running { offset: least.clone(), largest: least, sum: vec![0.0; width], rescale: vec![F::one(); width] }
    }
}

/// How far logits may exceed the offset: numbers up to e^16 are as precise as numbers up to 1.
const SLACK: f64 = 16.0;

/// Turns logits `[ids, width]` into `exp(z - offset)`, times the slope of the softcap if there is one, and adds up the
/// exponentials. Returns whether an offset has changed, and with it `rescale`.
pub(super) struct Exponentials<'a, F> {
    pub(super) tile: &'a mut [F],
    pub(super) running: &'a mut Running<F>,
    /// The softcap, which the logits already have.
    pub(super) softcap: Option<Softcap<F>>,
}

impl<F: Float> Kernel<F> for Exponentials<'_, F> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> bool {
        let Exponentials { tile, running, softcap } = self;
        let changed = update_offsets(v, tile, running);
        match softcap {
            None => exponentials::<false, F, V>(v, tile, running, Softcap::new(F::one())),
            Some(softcap) => exponentials::<true, F, V>(v, tile, running, softcap),
        }
        changed
    }
}

/// Updates the largest logits, and the offsets that are too small.
#[inline(always)]
fn update_offsets<F: Float, V: Vector<F>>(v: V, tile: &[F], running: &mut Running<F>) -> bool {
    /// Independent maxima, which hide the latency.
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
        let largest = &mut V::registers_mut(&mut running.largest)[j];
        *largest = v.max(*largest, tile_largest);
        let limit = v.add(V::registers(&running.offset)[j], v.splat(F::of(SLACK)));
        let (zero, one) = (v.splat(F::zero()), v.splat(F::one()));
        exceeds |= v.sum(v.if_less(limit, tile_largest, one, zero)) > F::zero();
    }
    if !exceeds {
        return false;
    }
    let Running { offset, largest, sum, rescale } = running;
    for (((offset, &largest), sum), rescale) in offset.iter_mut().zip(&*largest).zip(sum).zip(rescale) {
        *rescale = F::one();
        if largest > *offset + F::of(SLACK) {
            *rescale = (*offset - largest).exp();
            *sum *= rescale.f64();
            *offset = largest;
        }
    }
    true
}

#[inline(always)]
fn exponentials<const CAP: bool, F: Float, V: Vector<F>>(
    v: V,
    tile: &mut [F],
    running: &mut Running<F>,
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
        let mut sum = zero;
        for row in V::registers_mut(tile).chunks_exact_mut(n) {
            let z = row[j];
            let e = exp_or_zero(v, v.sub(z, offset), negligible);
            sum = v.add(sum, e);
            row[j] = if CAP { v.mul(e, softcap.slope(v, z)) } else { e };
        }
        let mut sums = [F::zero(); 16];
        v.store_partial(sum, &mut sums[..lanes]);
        for (total, sum) in running.sum[j * lanes..].iter_mut().zip(&sums[..lanes]) {
            *total += sum.f64();
        }
    }
}

/// Applies the softcap to a tile of logits.
pub(super) struct Capped<'a, F> {
    pub(super) tile: &'a mut [F],
    pub(super) softcap: Softcap<F>,
}

impl<F: Float> Kernel<F> for Capped<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        for z in V::registers_mut(self.tile) {
            *z = self.softcap.apply(v, *z);
        }
    }
}
