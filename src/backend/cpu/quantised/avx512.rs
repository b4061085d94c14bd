//! Unpacking with AVX-512 and its permutations of bytes (VBMI).

use std::arch::x86_64::{__m128i, __m256i, __m512, __m512i, _mm512_permutex2var_epi8};

use pulp::cast;
use pulp::x86::V4;

use super::bytes::{at, unpacked_scales};
use super::kind::BlockType;
use super::unpack::{unpacks, BlockKernel, InMemory, Unpack};

/// The most contexts that are multiplied in registers.
pub(super) const MOST_ROWS: usize = 8;

/// The proof that this machine has AVX-512 with VBMI.
#[derive(Clone, Copy)]
pub(super) struct Vbmi(V4);

impl Vbmi {
    /// Returns the proof if the machine has the instructions.
    pub(super) fn new(v: V4) -> Option<Self> {
        std::arch::is_x86_feature_detected!("avx512vbmi").then_some(Vbmi(v))
    }

    /// Returns the vectors.
    pub(super) fn simd(self) -> V4 {
        self.0
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

    /// Returns a number in half precision in every lane.
    #[inline(always)]
    fn half(self, bytes: [u8; 2]) -> __m512 {
        self.0.avx512f._mm512_cvtph_ps(self.0.avx._mm256_set1_epi16(i16::from_le_bytes(bytes)))
    }

    /// Converts 16 signed bytes.
    #[inline(always)]
    fn signed(self, bytes: [u8; 16]) -> __m512 {
        let f = self.0.avx512f;
        f._mm512_cvtepi32_ps(f._mm512_cvtepi8_epi32(cast(bytes)))
    }

    /// Returns 16 bytes as integers.
    #[inline(always)]
    fn integers(self, bytes: __m128i) -> __m512i {
        self.0.avx512f._mm512_cvtepu8_epi32(bytes)
    }

    /// Returns a register with `low` in its lower half and `high` in the other.
    #[inline(always)]
    fn halves(self, low: i32, high: i32) -> __m512i {
        let mut lanes = [low; 16];
        lanes[8..].fill(high);
        cast(lanes)
    }

    /// Computes the eight scales and the eight offsets of Q4_K and Q5_K.
    #[inline(always)]
    fn scales_and_offsets(self, block: &[u8]) -> InMemory {
        let f = self.0.avx512f;
        let (d, least) = (self.half(at(block, 0)), self.half(at(block, 2)));
        let factors = f._mm512_mask_blend_ps(0xff00, d, least);
        let numbers = self.signed(cast(unpacked_scales(at(block, 4))));
        InMemory(cast(f._mm512_mul_ps(numbers, factors))).kept()
    }
}

/// Runs a kernel, compiled for these instructions.
#[target_feature(enable = "avx,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi")]
fn run<B: Unpack>(kernel: impl BlockKernel, unpack: B) {
    kernel.run(unpack);
}

unpacks! { Vbmi, V4, Vbmi::simd, 16 lanes;
    Q8_0, 34 bytes, 1 x 2 registers, ();
    Q4_0, 18 bytes, 1 x 2 registers, ();
    Q6K, 210 bytes, 4 x 4 registers, InMemory;
    Q4K, 144 bytes, 4 x 4 registers, InMemory;
    Q5K, 176 bytes, 4 x 4 registers, InMemory;
}

impl Q8_0 {
    #[inline(always)]
    fn block_scales(self, _: &[u8; 34]) {}
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 34], (): &()) -> [__m512; 2] {
        let f = self.0 .0.avx512f;
        let d = self.0.half(at(block, 0));
        let [low, high] = [self.0.signed(at(block, 2)), self.0.signed(at(block, 18))];
        [f._mm512_mul_ps(low, d), f._mm512_mul_ps(high, d)]
    }
}

/// The numbers that four bits stand for.
const NIBBLES: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

impl Q4_0 {
    #[inline(always)]
    fn block_scales(self, _: &[u8; 18]) {}
    /// Looks nibbles up in a table of the 16 weights that there are.
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 18], (): &()) -> [__m512; 2] {
        let f = self.0 .0.avx512f;
        let table = f._mm512_mul_ps(cast(NIBBLES.map(|q| q - 8.0)), self.0.half(at(block, 0)));
        let bytes = self.0.integers(cast(at::<16>(block, 2)));
        [f._mm512_permutexvar_ps(bytes, table), f._mm512_permutexvar_ps(f._mm512_srli_epi32::<4>(bytes), table)]
    }
}

impl Q4K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 144]) -> InMemory {
        self.0.scales_and_offsets(block)
    }
    /// Looks nibbles up in tables of the 16 weights of a group. A product of scale and number is exact, so that a fused
    /// subtraction rounds as a separate one.
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 144], scales: &InMemory) -> [__m512; 4] {
        let f = self.0 .0.avx512f;
        let mut tables = [f._mm512_setzero_ps(); 2];
        for (i, table) in tables.iter_mut().enumerate() {
            let (scale, offset) = (scales.0[2 * U + i], scales.0[8 + 2 * U + i]);
            *table = f._mm512_fmsub_ps(cast(NIBBLES), f._mm512_set1_ps(scale), f._mm512_set1_ps(offset));
        }
        let bytes =
            [self.0.integers(cast(at::<16>(block, 16 + 32 * U))), self.0.integers(cast(at::<16>(block, 32 + 32 * U)))];
        [
            f._mm512_permutexvar_ps(bytes[0], tables[0]),
            f._mm512_permutexvar_ps(bytes[1], tables[0]),
            f._mm512_permutexvar_ps(f._mm512_srli_epi32::<4>(bytes[0]), tables[1]),
            f._mm512_permutexvar_ps(f._mm512_srli_epi32::<4>(bytes[1]), tables[1]),
        ]
    }
}

impl Q5K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 176]) -> InMemory {
        self.0.scales_and_offsets(block)
    }
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 176], scales: &InMemory) -> [__m512; 4] {
        let f = self.0 .0.avx512f;
        let nibbles: __m256i = cast(at::<32>(block, 48 + 32 * U));
        let low = f._mm512_castsi256_si512(nibbles);
        let low = f._mm512_inserti64x4::<1>(low, self.0 .0.avx2._mm256_srli_epi16::<4>(nibbles));
        let low = f._mm512_and_si512(low, f._mm512_set1_epi8(15));
        // A rotation brings the fifth bit of each byte to its place.
        let fifth = f._mm512_broadcast_i64x4(cast(at::<32>(block, 16)));
        let fifth = f._mm512_rolv_epi32(fifth, self.0.halves(4 - 2 * U as i32, 3 - 2 * U as i32));
        // low | fifth & 16
        let q = f._mm512_ternarylogic_epi32::<0xf8>(low, fifth, f._mm512_set1_epi8(16));
        let q: [__m128i; 4] = cast(q);
        let mut weights = [f._mm512_setzero_ps(); 4];
        for j in 0..4 {
            let (scale, offset) = (scales.0[2 * U + j / 2], scales.0[8 + 2 * U + j / 2]);
            let q = f._mm512_cvtepi32_ps(self.0.integers(q[j]));
            weights[j] = f._mm512_fmsub_ps(q, f._mm512_set1_ps(scale), f._mm512_set1_ps(offset));
        }
        weights
    }
}

/// For each 16 of 64 codes, the bytes of 16 floats: those of 128.0, with the code in byte 2.
static AS_FLOATS: [[u8; 64]; 4] = {
    let mut to = [[64; 64]; 4];
    let mut i = 0;
    while i < 256 {
        to[i / 64][i % 64] = match i % 4 {
            2 => (i / 4) as u8,
            3 => 65,
            _ => 64,
        };
        i += 1;
    }
    to
};

impl Q6K {
    #[inline(always)]
    fn block_scales(self, block: &[u8; 210]) -> InMemory {
        let scales = self.0.signed(at(block, 192));
        InMemory(cast(self.0 .0.avx512f._mm512_mul_ps(scales, self.0.half(at(block, 208))))).kept()
    }
    /// Moves a code of six bits into the float 128 + code by a permutation of bytes; a subtraction leaves code - 32.
    #[inline(always)]
    fn weights<const U: usize>(self, block: &[u8; 210], scales: &InMemory) -> [__m512; 4] {
        let (f, bw) = (self.0 .0.avx512f, self.0 .0.avx512bw);
        let half = U / 2;
        let low: __m512i = cast(at::<64>(block, 64 * half));
        let low = if U.is_multiple_of(2) { low } else { bw._mm512_srli_epi16::<4>(low) };
        let low = f._mm512_and_si512(low, f._mm512_set1_epi8(15));
        // A rotation brings the two high bits of each code to their place.
        let high = f._mm512_broadcast_i64x4(cast(at::<32>(block, 128 + 32 * half)));
        let high =
            f._mm512_rolv_epi32(high, if U.is_multiple_of(2) { self.0.halves(4, 2) } else { self.0.halves(0, 30) });
        // low | high & 0x30
        let codes = f._mm512_ternarylogic_epi32::<0xf8>(low, high, f._mm512_set1_epi8(0x30));
        // The bytes 0 and 1 of 128.0 are 0, and its byte 3 is 0x43.
        let rest = f._mm512_set1_epi16(0x4300);
        let mut weights = [f._mm512_setzero_ps(); 4];
        for j in 0..4 {
            // SAFETY: `self` proves that the machine has the instruction.
            let code = unsafe { _mm512_permutex2var_epi8(codes, cast(AS_FLOATS[j]), rest) };
            let q = f._mm512_sub_ps(f._mm512_castsi512_ps(code), f._mm512_set1_ps(160.0));
            weights[j] = f._mm512_mul_ps(q, f._mm512_set1_ps(scales.0[4 * U + j]));
        }
        weights
    }
}
