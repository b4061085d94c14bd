//! Rows of numbers in the parts that a tile unit's operands have.

use half::bf16;

use super::product::{Parts, SIDE};
use super::rounding::{bf16_from_bits, parts, RoundedRow, ToBf16};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};

/// Splits `values[..]` into three parts, the i-th of which becomes `to[i * distance..]`.
struct SplitRow<'a, T> {
    values: &'a [T],
    to: &'a mut [bf16],
    distance: usize,
}

impl<T: ToBf16> Kernel<f32> for SplitRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        let SplitRow { values, to, distance } = self;
        let (first, rest) = to.split_at_mut(distance);
        let (second, third) = rest.split_at_mut(distance);
        let (blocks, last) = values.as_chunks::<SIDE>();
        let at = blocks.len() * SIDE;
        let to = first.as_chunks_mut().0.iter_mut().zip(second.as_chunks_mut().0).zip(third.as_chunks_mut().0);
        for (block, ((first, second), third)) in blocks.iter().zip(to) {
            split(block, [first, second, third]);
        }
        let mut block = [T::default(); SIDE];
        block[..last.len()].copy_from_slice(last);
        let mut parts = [[bf16::ZERO; SIDE]; 3];
        split(&block, parts.each_mut());
        for (to, part) in [first, second, third].into_iter().zip(parts) {
            to[at..][..last.len()].copy_from_slice(&part[..last.len()]);
        }
    }
}

/// Splits a block of numbers.
#[inline(always)]
fn split<T: ToBf16>(values: &[T; SIDE], to: [&mut [bf16; SIDE]; 3]) {
    let mut lanes = [0.0; SIDE];
    for (lane, x) in lanes.iter_mut().zip(values) {
        *lane = x.to_f32();
    }
    let parts: [[u32; SIDE]; 3] = parts(lanes);
    for (to, part) in to.into_iter().zip(&parts) {
        for (to, bits) in to.iter_mut().zip(part) {
            *to = bf16_from_bits(*bits);
        }
    }
}

/// Rounds numbers, or splits them into parts, the i-th of which becomes `to[i * distance..]`.
pub(crate) fn write_parts<T: ToBf16>(isa: Isa, values: &[T], parts: Parts, to: &mut [bf16], distance: usize) {
    match parts {
        Parts::One => f32::dispatch(isa, RoundedRow { values, to }),
        Parts::Three => f32::dispatch(isa, SplitRow { values, to, distance }),
    }
}
