//! The log-sum-exp of each row of a tile of logits, after scale, bias and logit function, which is taken while the tile
//! is in the cache.

use crate::backend::cpu::vector::logit_map::LogitMap;
use crate::backend::cpu::vector::math::{exp, finite_or_zero, LogSumExp};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};

/// The kernel that computes the log-sum-exp of one row of a tile of logits. The row then holds the final logits, with
/// minus infinity in its padding.
pub(super) struct TileLogSumExp<'a, F> {
    /// The products of `ids` ids, before scale, bias and logit function, and padding.
    pub(super) row: &'a mut [F],
    pub(super) ids: usize,
    pub(super) scale: F,
    /// One number for each element of `row`, already multiplied by the scale; minus infinity for the padding.
    pub(super) bias: &'a [F],
    pub(super) logit_map: Option<LogitMap<F>>,
}

impl<F: Float> Kernel<F> for TileLogSumExp<'_, F> {
    type Output = LogSumExp<F>;

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) -> LogSumExp<F> {
        let TileLogSumExp { row, ids, scale, bias, logit_map } = self;
        row[ids..].fill(F::zero());
        match logit_map {
            None => log_sum_exp::<true, F, V>(v, row, scale, bias),
            Some(map) => {
                let factor = v.splat(scale);
                for (z, &b) in V::registers_mut(row).iter_mut().zip(V::registers(bias)) {
                    *z = map.apply(v, v.mul_add(*z, factor, b));
                }
                row[ids..].fill(F::neg_infinity());
                log_sum_exp::<false, F, V>(v, row, scale, bias)
            }
        }
    }
}

/// Computes `log sum_v exp(scale z_v + bias_v)` of a row. With `APPLY`, it applies scale and bias in place; otherwise
/// they have been applied.
///
/// It reads the row once, and rescales the running sum whenever a block has a larger maximum. The result is minus
/// infinity for a row of minus infinities, and NaN if the row has a NaN or plus infinity.
#[inline(always)]
fn log_sum_exp<const APPLY: bool, F: Float, V: Vector<F>>(v: V, row: &mut [F], scale: F, bias: &[F]) -> LogSumExp<F> {
    /// The number of registers per block, which stays in the first-level cache.
    const BLOCK: usize = 64;
    /// The number of independent accumulators, which hide the latency of the additions.
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
        // If all logits up to here are minus infinity, exp(-inf - 0) is zero, while exp(-inf + inf) would be NaN. A NaN
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

/// Returns the logit after scale and bias, which it applies with `APPLY`.
#[inline(always)]
fn with_bias<const APPLY: bool, F: Float, V: Vector<F>>(v: V, z: &mut V::Reg, scale: V::Reg, bias: V::Reg) -> V::Reg {
    if APPLY {
        *z = v.mul_add(*z, scale, bias);
    }
    *z
}
