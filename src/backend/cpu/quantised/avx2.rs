//! Unpacking with AVX2: a unit is 32 weights in four registers.

use std::arch::x86_64::{__m256, __m256i, _mm256_cvtph_ps};

use pulp::cast;
use pulp::x86::V3;

use super::bytes::{at, unpacked_scales};
use super::kind::BlockType;
use super::unpack::{unpacks, BlockKernel, InMemory, Unpack};

/// The most contexts that are multiplied in registers.
pub(super) const MOST_ROWS: usize = 4;

/// The proof that this machine has AVX2 and conversions of half precision (F16C).
#[derive(Clone, Copy)]
pub(super) struct Avx2(V3);

impl std::ops::Deref for Avx2 {
    type Target = V3;

    #[inline(always)]
    fn deref(&self) -> &V3 {
        &self.0
    }
}

impl Avx2 {
    /// Returns the proof if the machine has the instructions.
    pub(super) fn new(v: V3) -> Option<Self> {
        std::arch::is_x86_feature_detected!("f16c").then_some(Avx2(v))
    }

    /// Runs a kernel over blocks.
    pub(super) fn run(self, kind: BlockType, kernel: impl BlockKernel) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe {
            match kind {
                BlockType::Q8_0 => run(kernel, Q8_0(self)),
                BlockType::Q6K => run(kernel, Q6K(self)),
                BlockType::Q4K => run(kernel, Q4K(self)),
                BlockType::Q5K => run(kernel, Q5K(self)),
                BlockType::Q4_0 => run(kernel, Q4_0(self)),
            }
        }
    }
}

/// Runs a kernel, compiled for these instructions.
#[target_feature(enable = "avx,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn run<B: Unpack>(kernel: impl BlockKernel, unpack: B) {
    kernel.run(unpack);
}

/// Returns a number in half precision in every lane.
#[inline(always)]
fn half(v: Avx2, bytes: [u8; 2]) -> __m256 {
    let bits = v.sse2._mm_set1_epi16(i16::from_le_bytes(bytes));
    // SAFETY: `v` proves that the machine has the instruction.
    unsafe { _mm256_cvtph_ps(bits) }
}

unpacks! { Avx2, V3, |proof: Avx2| *proof, 8 lanes;
    Q8_0, 34 bytes, 1 x 4 registers, ();
    Q4_0, 18 bytes, 1 x 4 registers, ();
    Q6K, 210 bytes, 8 x 4 registers, InMemory;
    Q4K, 144 bytes, 8 x 4 registers, InMemory;
    Q5K, 176 bytes, 8 x 4 registers, InMemory;
}

/// Converts 32 signed bytes.
#[inline(always)]
fn from_i8(v: Avx2, bytes: __m256i) -> [__m256; 4] {
    let halves = [v.avx._mm256_castsi256_si128(bytes), v.avx2._mm256_extracti128_si256::<1>(bytes)];
    let mut numbers = [v.avx._mm256_setzero_ps(); 4];
    for i in 0..2 {
        let high = v.sse2._mm_unpackhi_epi64(halves[i], halves[i]);
        numbers[2 * i] = v.avx._mm256_cvtepi32_ps(v.avx2._mm256_cvtepi8_epi32(halves[i]));
        numbers[2 * i + 1] = v.avx._mm256_cvtepi32_ps(v.avx2._mm256_cvtepi8_epi32(high));
    }
    numbers
}

/// Returns 32 numbers of a few bits each: those of `mask` that are `shift` bits up in each byte.
#[inline(always)]
fn bits(v: Avx2, bytes: [u8; 32], shift: usize, mask: i8) -> __m256i {
    let shifted = v.avx2._mm256_srlv_epi32(cast(bytes), v.avx._mm256_set1_epi32(shift as i32));
    v.avx2._mm256_and_si256(shifted, v.avx._mm256_set1_epi8(mask))
}

/// Adds bits above four others.
#[inline(always)]
fn above(v: Avx2, high: __m256i, low: __m256i) -> __m256i {
    v.avx2._mm256_or_si256(low, v.avx2._mm256_slli_epi16::<4>(high))
}

/// Multiplies four registers by one number.
#[inline(always)]
fn scaled(v: Avx2, mut numbers: [__m256; 4], d: __m256) -> [__m256; 4] {
    for number in &mut numbers {
        *number = v.avx._mm256_mul_ps(*number, d);
    }
    numbers
}

impl Q8_0 {
    #[inline(always)]
    fn block_scales(self, _: &[u8; 34]) {}
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 34], (): &()) -> [__m256; 4] {
        scaled(self.0, from_i8(self.0, cast(at::<32>(block, 2))), half(self.0, at(block, 0)))
    }
}

impl Q4_0 {
    #[inline(always)]
    fn block_scales(self, _: &[u8; 18]) {}
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 18], (): &()) -> [__m256; 4] {
        let v = self.0;
        let nibbles: [u8; 16] = at(block, 2);
        let nibbles = v.avx2._mm256_inserti128_si256::<1>(
            v.avx._mm256_castsi128_si256(cast(nibbles)),
            v.sse2._mm_srli_epi16::<4>(cast(nibbles)),
        );
        let q = v.avx2._mm256_and_si256(nibbles, v.avx._mm256_set1_epi8(15));
        let q = v.avx2._mm256_sub_epi8(q, v.avx._mm256_set1_epi8(8));
        scaled(v, from_i8(v, q), half(v, at(block, 0)))
    }
}

/// Computes the eight scales and the eight offsets of Q4_K and Q5_K.
#[inline(always)]
fn scales_and_offsets(v: Avx2, block: &[u8]) -> InMemory {
    let mut scales = [v.avx._mm256_setzero_ps(); 2];
    for (i, packed) in unpacked_scales(at(block, 4)).into_iter().enumerate() {
        let numbers = v.avx2._mm256_cvtepi8_epi32(cast([packed, 0]));
        scales[i] = v.avx._mm256_mul_ps(v.avx._mm256_cvtepi32_ps(numbers), half(v, at(block, 2 * i)));
    }
    InMemory(cast(scales)).kept()
}

/// Computes a group of Q4_K or Q5_K. A product of scale and number is exact, so that a fused subtraction rounds as a
/// separate one.
#[inline(always)]
fn group(v: Avx2, q: __m256i, scales: &InMemory, group: usize) -> [__m256; 4] {
    let (scale, offset) = (v.avx._mm256_set1_ps(scales.0[group]), v.avx._mm256_set1_ps(scales.0[8 + group]));
    let mut numbers = from_i8(v, q);
    for number in &mut numbers {
        *number = v.fma._mm256_fmsub_ps(*number, scale, offset);
    }
    numbers
}

impl Q4K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 144]) -> InMemory {
        scales_and_offsets(self.0, block)
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 144], scales: &InMemory) -> [__m256; 4] {
        group(self.0, bits(self.0, at(block, 16 + U / 2 * 32), U % 2 * 4, 15), scales, U)
    }
}

impl Q5K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 176]) -> InMemory {
        scales_and_offsets(self.0, block)
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 176], scales: &InMemory) -> [__m256; 4] {
        let low = bits(self.0, at(block, 48 + U / 2 * 32), U % 2 * 4, 15);
        group(self.0, above(self.0, bits(self.0, at(block, 16), U, 1), low), scales, U)
    }
}

impl Q6K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 210]) -> InMemory {
        let v = self.0;
        let numbers = from_i8(v, cast([at::<16>(block, 192), [0; 16]]));
        let scales = scaled(v, numbers, half(v, at(block, 208)));
        InMemory(cast([scales[0], scales[1]])).kept()
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 210], scales: &InMemory) -> [__m256; 4] {
        let (v, half, quarter) = (self.0, U / 4, U % 4);
        let low = bits(v, at(block, 64 * half + quarter % 2 * 32), quarter / 2 * 4, 15);
        let q = above(v, bits(v, at(block, 128 + 32 * half), 2 * quarter, 3), low);
        let mut numbers = from_i8(v, v.avx2._mm256_sub_epi8(q, v.avx._mm256_set1_epi8(32)));
        for (j, number) in numbers.iter_mut().enumerate() {
            *number = v.avx._mm256_mul_ps(*number, v.avx._mm256_set1_ps(scales.0[2 * U + j / 2]));
        }
        numbers
    }
}
