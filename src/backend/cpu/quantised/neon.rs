//! Unpacking with NEON, which every AArch64 has: a unit is 32 weights in eight registers.

use std::arch::aarch64::*;

use half::f16;
use pulp::aarch64::Neon;
use pulp::cast;

use super::bytes::{at, unpacked_scales};
use super::kind::BlockType;
use super::unpack::{unpacks, BlockKernel, InMemory, Unpack};

/// The most contexts that are multiplied in registers.
pub(super) const MOST_ROWS: usize = 4;

unpacks! { Neon, Neon, |v: Neon| v, 4 lanes;
    Q8_0, 34 bytes, 1 x 8 registers, ();
    Q4_0, 18 bytes, 1 x 8 registers, ();
    Q6K, 210 bytes, 8 x 8 registers, InMemory;
    Q4K, 144 bytes, 8 x 8 registers, InMemory;
    Q5K, 176 bytes, 8 x 8 registers, InMemory;
}

/// Runs a kernel over blocks.
pub(super) fn run(v: Neon, kind: BlockType, kernel: impl BlockKernel) {
    match kind {
        BlockType::Q8_0 => kernel.run(Q8_0(v)),
        BlockType::Q6K => kernel.run(Q6K(v)),
        BlockType::Q4K => kernel.run(Q4K(v)),
        BlockType::Q5K => kernel.run(Q5K(v)),
        BlockType::Q4_0 => kernel.run(Q4_0(v)),
    }
}

/// Returns a number in half precision.
#[inline(always)]
fn half(block: &[u8], first: usize) -> f32 {
    f16::from_le_bytes(at(block, first)).to_f32()
}

/// Converts 32 signed bytes.
#[inline(always)]
fn from_i8(bytes: [int8x16_t; 2]) -> [float32x4_t; 8] {
    cast(bytes.map(sixteen))
}

/// Converts 16 signed bytes.
#[inline(always)]
fn sixteen(bytes: int8x16_t) -> [float32x4_t; 4] {
    // SAFETY: every AArch64 has NEON.
    unsafe {
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
            vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high)),
        ]
    }
}

/// Returns 32 numbers of a few bits each: those of `mask` that are `shift` bits up in each byte.
#[inline(always)]
fn bits(bytes: [u8; 32], shift: usize, mask: u8) -> [uint8x16_t; 2] {
    let halves: [uint8x16_t; 2] = cast(bytes);
    // SAFETY: every AArch64 has NEON.
    halves.map(|half| unsafe { vandq_u8(vshlq_u8(half, vdupq_n_s8(-(shift as i8))), vdupq_n_u8(mask)) })
}

/// Adds bits above four others.
#[inline(always)]
fn above(high: [uint8x16_t; 2], low: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    // SAFETY: every AArch64 has NEON.
    std::array::from_fn(|i| unsafe { vorrq_u8(low[i], vshlq_n_u8::<4>(high[i])) })
}

/// Subtracts a number from each of 32 below 128.
#[inline(always)]
fn less(numbers: [uint8x16_t; 2], offset: i8) -> [int8x16_t; 2] {
    // SAFETY: every AArch64 has NEON.
    numbers.map(|half| unsafe { vsubq_s8(vreinterpretq_s8_u8(half), vdupq_n_s8(offset)) })
}

/// Multiplies registers by one number.
#[inline(always)]
fn scaled<const N: usize>(numbers: [float32x4_t; N], d: f32) -> [float32x4_t; N] {
    // SAFETY: every AArch64 has NEON.
    numbers.map(|number| unsafe { vmulq_n_f32(number, d) })
}

impl Q8_0 {
    #[inline(always)]
    fn block_scales(self, _: &[u8; 34]) {}
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 34], (): &()) -> [float32x4_t; 8] {
        scaled(from_i8(cast(at::<32>(block, 2))), half(block, 0))
    }
}

impl Q4_0 {
    #[inline(always)]
    fn block_scales(self, _: &[u8; 18]) {}
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 18], (): &()) -> [float32x4_t; 8] {
        let nibbles: uint8x16_t = cast(at::<16>(block, 2));
        // SAFETY: every AArch64 has NEON.
        let q = unsafe { [vandq_u8(nibbles, vdupq_n_u8(15)), vshrq_n_u8::<4>(nibbles)] };
        scaled(from_i8(less(q, 8)), half(block, 0))
    }
}

/// Computes the eight scales and the eight offsets of Q4_K and Q5_K.
#[inline(always)]
fn scales_and_offsets(block: &[u8]) -> InMemory {
    let [s0, s1, o0, o1] = sixteen(cast(unpacked_scales(at(block, 4))));
    InMemory(cast([scaled([s0, s1], half(block, 0)), scaled([o0, o1], half(block, 2))])).kept()
}

/// Computes a group of Q4_K or Q5_K. A product of scale and number is exact, so that a fused subtraction rounds as a
/// separate one.
#[inline(always)]
fn group(q: [uint8x16_t; 2], scales: &InMemory, group: usize) -> [float32x4_t; 8] {
    // SAFETY: every AArch64 has NEON.
    unsafe {
        let (scale, offset) = (vdupq_n_f32(scales.0[group]), vdupq_n_f32(-scales.0[8 + group]));
        from_i8(cast(q)).map(|number| vfmaq_f32(offset, number, scale))
    }
}

impl Q4K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 144]) -> InMemory {
        scales_and_offsets(block)
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 144], scales: &InMemory) -> [float32x4_t; 8] {
        group(bits(at(block, 16 + U / 2 * 32), U % 2 * 4, 15), scales, U)
    }
}

impl Q5K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 176]) -> InMemory {
        scales_and_offsets(block)
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 176], scales: &InMemory) -> [float32x4_t; 8] {
        let low = bits(at(block, 48 + U / 2 * 32), U % 2 * 4, 15);
        group(above(bits(at(block, 16), U, 1), low), scales, U)
    }
}

impl Q6K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 210]) -> InMemory {
        InMemory(cast(scaled(sixteen(cast(at::<16>(block, 192))), half(block, 208)))).kept()
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 210], scales: &InMemory) -> [float32x4_t; 8] {
        let (half, quarter) = (U / 4, U % 4);
        let low = bits(at(block, 64 * half + quarter % 2 * 32), quarter / 2 * 4, 15);
        let q = above(bits(at(block, 128 + 32 * half), 2 * quarter, 3), low);
        let [first, second] = less(q, 32).map(sixteen);
        cast([scaled(first, scales.0[2 * U]), scaled(second, scales.0[2 * U + 1])])
    }
}
