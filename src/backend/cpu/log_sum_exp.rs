//! The log-sum-exp of each row, `log sum_v exp z_v` after bias and softcap, from the tiles of the first product.

use super::math::{exp, tanh};
use super::simd::{Float, Kernel, Vector};

/// A log-sum-exp in two parts. Added up into one number, they would lose the precision that `z - lse` needs when the
/// largest logit is far from zero.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LogSumExp<F> {
    /// The largest logit; zero if all are minus infinity.
    pub(super) largest: F,
    /// `log sum_v exp(z_v - largest)`
    pub(super) log_sum: F,
}

impl<F: Float> LogSumExp<F> {
    pub(super) fn value(self) -> F {
        self.largest + self.log_sum
    }

    /// The log-sum-exp of a few numbers.
    pub(super) fn of(values: impl Iterator<Item = F> + Clone) -> Self {
        let largest = finite_or_zero(values.clone().fold(F::neg_infinity(), num_traits::Float::max));
        let sum: F = values.map(|x| (x - largest).exp()).sum();
        LogSumExp { largest, log_sum: sum.ln() }
    }

    /// The log-sum-exp of a row from those of its parts.
    pub(super) fn of_parts(parts: impl Iterator<Item = Self> + Clone) -> Self {
        let possible = parts.clone().filter(|part| part.log_sum != F::neg_infinity());
        let largest = finite_or_zero(possible.map(|part| part.largest).fold(F::neg_infinity(), num_traits::Float::max));
        let sum: F = parts.map(|part| (part.largest - largest + part.log_sum).exp()).sum();
        LogSumExp { largest, log_sum: sum.ln() }
    }
}

/// The log-sum-exp of one row of a tile of logits, which holds the final logits afterwards, with minus infinity in its
/// padding.
pub(super) struct TileLogSumExp<'a, F> {
    /// The logits of `ids` ids before scale, bias and softcap, and padding.
    pub(super) row: &'a mut [F],
    pub(super) ids: usize,
    pub(super) scale: F,
    /// As long as `row`, multiplied by the scale, with minus infinity for the padding.
    pub(super) bias: &'a [F],
    pub(super) softcap: Option<F>,
}

impl<F: Float> Kernel<F> for TileLogSumExp<'_, F> {
    type Output = LogSumExp<F>;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> LogSumExp<F> {
        let TileLogSumExp { row, ids, scale, bias, softcap } = self;
        row[ids..].fill(F::zero());
        match softcap {
            None => log_sum_exp::<true, F, V>(v, row, scale, bias),
            Some(cap) => {
                soft_cap(v, row, scale, bias, cap);
                row[ids..].fill(F::neg_infinity());
                log_sum_exp::<false, F, V>(v, row, scale, bias)
            }
        }
    }
}

/// `log sum_v exp(scale z_v + bias_v)` of a row; with `APPLY`, scale and bias are applied in place, otherwise they
/// have been applied.
///
/// In one pass over memory: the running sum is rescaled whenever a block has a larger maximum. Minus infinity for a row
/// of minus infinities; NaN if the row has a NaN or plus infinity.
#[inline(always)]
fn log_sum_exp<const APPLY: bool, F: Float, V: Vector<F>>(v: V, row: &mut [F], scale: F, bias: &[F]) -> LogSumExp<F> {
    /// Registers per block, which stays in the first-level cache.
    const BLOCK: usize = 64;
    /// Independent accumulators, which hide the latency of the additions.
    const LANES: usize = 4;
    let scale = v.splat(scale);
    let mut largest = F::neg_infinity();
    let mut sum = F::zero();
    for (block, bias) in V::registers_mut(row).chunks_mut(BLOCK).zip(V::registers(bias).chunks(BLOCK)) {
        let (bias_groups, bias_rest) = bias.as_chunks::<LANES>();
        let mut maxima = [v.splat(F::neg_infinity()); LANES];
        let (groups, rest) = block.as_chunks_mut::<LANES>();
        for (group, bias) in groups.iter_mut().zip(bias_groups) {
            for lane in 0..LANES {
                maxima[lane] = v.max(maxima[lane], with_bias::<APPLY, F, V>(v, &mut group[lane], scale, bias[lane]));
            }
        }
        for (z, &b) in rest.iter_mut().zip(bias_rest) {
            maxima[0] = v.max(maxima[0], with_bias::<APPLY, F, V>(v, z, scale, b));
        }
        let block_largest = v.largest(v.max(v.max(maxima[0], maxima[1]), v.max(maxima[2], maxima[3])));
        if block_largest > largest {
            sum *= (largest - block_largest).exp();
            largest = block_largest;
        }
        // If all logits so far are minus infinity, exp(-inf - 0) is zero, while exp(-inf + inf) would be NaN. A NaN
        // stays NaN.
        let reference = v.splat(finite_or_zero(largest));
        let mut sums = [v.splat(F::zero()); LANES];
        let (groups, rest) = block.as_chunks::<LANES>();
        for group in groups {
            for lane in 0..LANES {
                sums[lane] = v.add(sums[lane], exp(v, v.sub(group[lane], reference)));
            }
        }
        for &z in rest {
            sums[0] = v.add(sums[0], exp(v, v.sub(z, reference)));
        }
        sum += v.sum(v.add(v.add(sums[0], sums[1]), v.add(sums[2], sums[3])));
    }
    LogSumExp { largest: finite_or_zero(largest), log_sum: sum.ln() }
}

/// The logit after scale and bias.
#[inline(always)]
fn with_bias<const APPLY: bool, F: Float, V: Vector<F>>(v: V, z: &mut V::Reg, scale: V::Reg, bias: V::Reg) -> V::Reg {
    if APPLY {
        *z = v.mul_add(*z, scale, bias);
    }
    *z
}

/// `x`, or zero if it is minus infinity.
pub(super) fn finite_or_zero<F: Float>(x: F) -> F {
    if x == F::neg_infinity() {
        F::zero()
    } else {
        x
    }
}

/// `z := cap tanh((scale z + bias) / cap)`.
#[inline(always)]
fn soft_cap<F: Float, V: Vector<F>>(v: V, row: &mut [F], scale: F, bias: &[F], cap: F) {
    let (scale, cap, inverse) = (v.splat(scale), v.splat(cap), v.splat(F::one() / cap));
    for (z, &b) in V::registers_mut(row).iter_mut().zip(V::registers(bias)) {
        *z = v.mul(cap, tanh(v, v.mul(v.mul_add(*z, scale, b), inverse)));
    }
}
