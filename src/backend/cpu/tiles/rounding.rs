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
pub(crate) trait ToBf16: Copy {
    fn to_bf16(self) -> bf16;
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
