//! The numbers of a tile unit's operands: bf16, rounded and widened, and pairs of them.

use half::{bf16, f16};

use crate::backend::cpu::vector::simd::{Kernel, Vector};

/// Two numbers in bf16, the first in the low half.
pub(crate) type Pair = u32;

/// Returns the bits of the nearest bf16, ties to even, in the low half; NaN stays NaN.
#[inline(always)]
pub(crate) fn bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() {
        bits >> 16 | 0x40
    } else {
        rounded
    }
}

/// Returns the nearest bf16.
#[inline(always)]
pub(crate) fn bf16(x: f32) -> bf16 {
    bf16_from_bits(bits(x))
}

/// Returns the bf16 whose bits are in the low half.
#[inline(always)]
pub(crate) fn bf16_from_bits(bits: u32) -> bf16 {
    bf16::from_bits(bits as u16)
}

/// Returns the parts of each number, as bits in the low halves: each part is the bf16 nearest to what those before it
/// leave of the number. The sum of three is the number, unless that is so small that a part would be subnormal, or
/// rounds to infinity.
#[inline(always)]
pub(crate) fn parts<const N: usize, const LANES: usize>(x: [f32; LANES]) -> [[u32; LANES]; N] {
    let mut rest = x;
    let mut parts = [[0; LANES]; N];
    for (i, part) in parts.iter_mut().enumerate() {
        for (part, rest) in part.iter_mut().zip(&rest) {
            *part = bits(*rest);
        }
        if i + 1 < N {
            for (part, rest) in part.iter().zip(&mut rest) {
                let widened = f32::from_bits(*part << 16);
                *rest = if widened.is_finite() { *rest - widened } else { 0.0 };
            }
        }
    }
    parts
}

/// Returns the pair of two bf16, from their bits in the low halves.
#[inline(always)]
pub(crate) fn pair(first: u32, second: u32) -> Pair {
    first | second << 16
}

/// Returns a bf16 as f32, exactly.
#[inline(always)]
pub(crate) fn widened(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Returns an f16 as f32, as `f16::to_f32` does, in operations that vectors have.
#[inline(always)]
pub(crate) fn widened_f16(x: f16) -> f32 {
    const INFINITY: u32 = 0x7c00 << 13;
    let (sign, magnitude) = (u32::from(x.to_bits() & 0x8000) << 16, u32::from(x.to_bits() & 0x7fff) << 13);
    // 112 is the difference of the exponents' biases, 127 - 15. Infinities and NaN have the largest exponent.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = if magnitude >= INFINITY { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled | special | sign)
}

/// Computes `to[..] = values[..]` in bf16.
pub(crate) struct RoundedRow<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) to: &'a mut [bf16],
}

impl<T: ToBf16> Kernel<f32> for RoundedRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        for (to, x) in self.to.iter_mut().zip(self.values) {
            *to = x.to_bf16();
        }
    }
}

/// A number that is rounded to bf16, or is one.
pub(crate) trait ToBf16: Copy + Default {
    fn to_bf16(self) -> bf16;

    /// Returns the number in f32, rounded if it is wider.
    fn to_f32(self) -> f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_widened_as_half_widens_them() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            let (found, expected) = (widened_f16(x), x.to_f32());
            assert!(found.to_bits() == expected.to_bits() || found.is_nan() && x.is_nan(), "{x}: {found}");
        }
    }

    #[test]
    fn three_parts_are_the_number() {
        let mut state = 1u32;
        for _ in 0..100_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(state);
            let widened = parts::<3, 1>([x]).map(|[bits]| f32::from_bits(bits << 16));
            if x.is_nan() || !widened[0].is_finite() {
                assert!(widened[1..] == [0.0; 2] && (widened[0].is_nan() == x.is_nan()), "{x}: {widened:?}");
            } else {
                let sum: f64 = widened.into_iter().map(f64::from).sum();
                assert!((sum - f64::from(x)).abs() <= f64::from(f32::MIN_POSITIVE) / 128.0, "{x}: {widened:?}");
                assert!(x.abs() < 1e-30 || sum == f64::from(x), "{x}: {widened:?}");
            }
        }
    }

    #[test]
    fn numbers_are_rounded_as_half_rounds_them() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (found, expected) = (bf16_from_bits(bits(x)), bf16::from_f32(x));
                assert!(found.to_bits() == expected.to_bits() || found.is_nan() && x.is_nan(), "{x}: {found}");
            }
        }
    }
}
