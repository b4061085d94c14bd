//! Products on AVX512-BF16: vectors of 16 lanes, each of which multiplies two pairs of bf16 and adds both products to
//! an f32.

use std::arch::x86_64::{__m512bh, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_setzero_ps};
use std::marker::PhantomData;
use std::mem::transmute;

use super::product::{TileProduct, PAIRS, SIDE};
use super::rounding::{pair, Pair};

/// The number of lanes of a vector.
const LANES: usize = 16;
/// The number of rows whose sums stay in registers.
const ROWS: usize = 8;

/// The proof that this machine has AVX512-BF16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Dots(PhantomData<()>);

impl Bf16Dots {
    /// Returns the proof if this machine has the instructions.
    pub(super) fn detect() -> Option<Self> {
        let is_there = std::is_x86_feature_detected!("avx512f") && std::is_x86_feature_detected!("avx512bf16");
        is_there.then_some(Bf16Dots(PhantomData))
    }

    /// Computes the product of operands of one part.
    pub(super) fn multiply(self, product: TileProduct<'_>) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { multiply(product) }
    }
}

/// Computes the product, 8 rows by a square's columns at a time.
///
/// All loops are written out: a closure would be compiled without the target features of this function.
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply(product: TileProduct<'_>) {
    let TileProduct { left, right, steps, to, to_row, rows, columns, is_added, .. } = product;
    for column in 0..columns {
        for first in (0..SIDE * rows).step_by(ROWS) {
            let to = &mut to[first * to_row + column * SIDE..];
            let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
            if is_added {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let (values, _) = to[row * to_row..][..SIDE].as_chunks::<LANES>();
                    *sums = [pulp::cast(values[0]), pulp::cast(values[1])];
                }
            }
            let left = &left.values[first / SIDE * left.square + first % SIDE * SIDE..];
            let right = &right.values[column * right.square..];
            for step in 0..steps {
                let left = &left[step * product.left.step..][..ROWS * SIDE];
                let right = &right[step * product.right.step..][..PAIRS * SIDE];
                let (left, _) = left.as_chunks::<2>();
                let (right, _) = right.as_chunks::<LANES>();
                for k in 0..PAIRS {
                    let vectors = [vector_from_pairs(right[2 * k]), vector_from_pairs(right[2 * k + 1])];
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let [first, second] = left[row * PAIRS + k];
                        let left = repeated_pair(pair(u32::from(first.to_bits()), u32::from(second.to_bits())));
                        for (sum, right) in sums.iter_mut().zip(vectors) {
                            *sum = _mm512_dpbf16_ps(*sum, left, right);
                        }
                    }
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                let (values, _) = to[row * to_row..][..SIDE].as_chunks_mut::<LANES>();
                (values[0], values[1]) = (pulp::cast(sums[0]), pulp::cast(sums[1]));
            }
        }
    }
}

/// Returns the vector of pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn vector_from_pairs(pairs: [Pair; LANES]) -> __m512bh {
    // SAFETY: both are 32 numbers of 16 bits, and every pattern of bits is valid.
    unsafe { transmute(pairs) }
}

/// Returns a vector that has the pair in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn repeated_pair(pair: Pair) -> __m512bh {
    // SAFETY: both types have 512 bits, and every pattern of them is valid.
    unsafe { transmute(_mm512_set1_epi32(pair as i32)) }
}
