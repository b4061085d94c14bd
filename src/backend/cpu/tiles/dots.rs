//! AVX512-BF16: vectors of 16 lanes, each of which multiplies two pairs of bf16 and adds both products to an f32.

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps,
};
use std::hint::black_box;
use std::marker::PhantomData;
use std::mem::transmute;
use std::sync::OnceLock;
use std::time::Instant;

use half::bf16;

use super::product::{Product, PAIRS, SIDE};
use super::rounding::{pair, Pair};

/// Lanes of a vector.
const LANES: usize = 16;
/// Rows whose sums stay in registers.
const ROWS: usize = 8;
/// How many times as many products as with FMA make it worthwhile to round the operands.
const LEAST_GAIN: f64 = 1.3;

/// The proof that this machine has AVX512-BF16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dots(PhantomData<()>);

impl Dots {
    pub(super) fn detect() -> Option<Self> {
        let is_there = std::is_x86_feature_detected!("avx512f") && std::is_x86_feature_detected!("avx512bf16");
        is_there.then_some(Dots(PhantomData))
    }

    /// Whether this processor multiplies pairs of bf16 so much faster than numbers in f32; measured once. Intel's
    /// Sapphire Rapids multiplies them more slowly.
    pub(super) fn beats_fma(self) -> bool {
        static GAIN: OnceLock<f64> = OnceLock::new();
        // SAFETY: `self` proves that the machine has the instructions.
        *GAIN.get_or_init(|| unsafe { gain() }) >= LEAST_GAIN
    }

    pub(super) fn multiply(self, product: Product<'_>) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { multiply(product) }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply(product: Product<'_>) {
    let Product { left, right, steps, to, to_row, rows, columns, add } = product;
    for (column, first) in (0..columns).flat_map(|column| (0..SIDE * rows).step_by(ROWS).map(move |row| (column, row)))
    {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        let place = |row: usize| (first + row) * to_row + column * SIDE;
        if add {
            for (row, sums) in sums.iter_mut().enumerate() {
                let (values, _) = to[place(row)..][..SIDE].as_chunks::<LANES>();
                for (sum, &values) in sums.iter_mut().zip(values) {
                    *sum = of_lanes(values);
                }
            }
        }
        for step in 0..steps {
            let left = &left.values[first / SIDE * left.square + first % SIDE * left.row + step * left.step..];
            let left: [&[[bf16; 2]]; ROWS] =
                std::array::from_fn(|row| left[row * product.left.row..][..SIDE].as_chunks().0);
            let right = &right.values[column * right.square + step * right.step..];
            for k in 0..PAIRS {
                let (vectors, _) = right[k * product.right.row..][..SIDE].as_chunks::<LANES>();
                let vectors = [of_pairs(vectors[0]), of_pairs(vectors[1])];
                for (left, sums) in left.iter().zip(&mut sums) {
                    let [first, second] = left[k].map(|x| u32::from(x.to_bits()));
                    let left = of_pair(pair(first, second));
                    for (sum, right) in sums.iter_mut().zip(vectors) {
                        *sum = _mm512_dpbf16_ps(*sum, left, right);
                    }
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            let (values, _) = to[place(row)..][..SIDE].as_chunks_mut::<LANES>();
            for (values, sum) in values.iter_mut().zip(sums) {
                *values = lanes(sum);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn of_lanes(values: [f32; LANES]) -> __m512 {
    // SAFETY: both are 16 numbers of 32 bits, and every pattern of bits is valid.
    unsafe { transmute(values) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(values: __m512) -> [f32; LANES] {
    // SAFETY: both are 16 numbers of 32 bits, and every pattern of bits is valid.
    unsafe { transmute(values) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn of_pairs(pairs: [Pair; LANES]) -> __m512bh {
    // SAFETY: both are 32 numbers of 16 bits, and every pattern of bits is valid.
    unsafe { transmute(pairs) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn of_pair(pair: Pair) -> __m512bh {
    // SAFETY: both are 512 bits, and every pattern of them is valid.
    unsafe { transmute(_mm512_set1_epi32(pair as i32)) }
}

/// How many times as many products in bf16 as in f32 this processor does in a second, in registers.
#[target_feature(enable = "avx512f,avx512bf16")]
fn gain() -> f64 {
    const SUMS: usize = 12;
    const TIMES: usize = 500;
    const RUNS: usize = 5;
    let mut least = [f64::INFINITY; 2];
    let (x, pairs) = (black_box(_mm512_set1_ps(1e-3)), black_box(of_pair(0)));
    for _ in 0..RUNS {
        let mut sums = [black_box(_mm512_setzero_ps()); SUMS];
        let start = Instant::now();
        for _ in 0..TIMES {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, x, *sum);
            }
        }
        total(sums);
        least[0] = least[0].min(start.elapsed().as_secs_f64());
        let mut sums = [black_box(_mm512_setzero_ps()); SUMS];
        let start = Instant::now();
        for _ in 0..TIMES {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
            }
        }
        total(sums);
        least[1] = least[1].min(start.elapsed().as_secs_f64());
    }
    // Each does twice as many.
    2.0 * least[0] / least[1]
}

/// Adds sums up, so that the compiler keeps them.
#[target_feature(enable = "avx512f")]
fn total(sums: impl IntoIterator<Item = __m512>) {
    let mut total = _mm512_setzero_ps();
    for sum in sums {
        total = _mm512_add_ps(total, sum);
    }
    black_box(_mm512_reduce_add_ps(total));
}
