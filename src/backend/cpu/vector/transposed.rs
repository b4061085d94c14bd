//! The transpose of a square of numbers in registers, as [`Vector::transposed`] computes it.
//!
//! [`Vector::transposed`]: super::simd::Vector::transposed

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

use pulp::bytemuck::{cast_slice, cast_slice_mut, Pod};

/// Transposes number by number, which the compiler turns into shuffles.
#[inline(always)]
pub(crate) fn transpose_any<F: Pod, S, Reg: Pod, const N: usize>(_: S, rows: [Reg; N]) -> [Reg; N] {
    let mut columns = rows;
    let (from, to): (&[F], &mut [F]) = (cast_slice(&rows), cast_slice_mut(&mut columns));
    for (i, column) in to.chunks_exact_mut(N).enumerate() {
        for (to, row) in column.iter_mut().zip(from.chunks_exact(N)) {
            *to = row[i];
        }
    }
    columns
}

/// Transposes 16 x 16 numbers: first the 4 x 4 in each quarter of four registers, then the quarters.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn transpose_16(v: pulp::x86::V4, rows: [pulp::f32x16; 16]) -> [pulp::f32x16; 16] {
    let v = v.avx512f;
    let mut quarters = [[v._mm512_setzero_ps(); 4]; 4];
    for (quarters, rows) in quarters.iter_mut().zip(rows.as_chunks::<4>().0) {
        let [a, b, c, d]: [__m512; 4] = pulp::cast(*rows);
        let pairs = [
            [v._mm512_unpacklo_ps(a, b), v._mm512_unpacklo_ps(c, d)],
            [v._mm512_unpackhi_ps(a, b), v._mm512_unpackhi_ps(c, d)],
        ];
        for (quarters, [ab, cd]) in quarters.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
            let (ab, cd) = (v._mm512_castps_pd(ab), v._mm512_castps_pd(cd));
            quarters[0] = v._mm512_castpd_ps(v._mm512_unpacklo_pd(ab, cd));
            quarters[1] = v._mm512_castpd_ps(v._mm512_unpackhi_pd(ab, cd));
        }
    }
    let mut columns = [v._mm512_setzero_ps(); 16];
    for i in 0..4 {
        let [a, b, c, d] = [quarters[0][i], quarters[1][i], quarters[2][i], quarters[3][i]];
        let even = [v._mm512_shuffle_f32x4::<0x88>(a, b), v._mm512_shuffle_f32x4::<0x88>(c, d)];
        let odd = [v._mm512_shuffle_f32x4::<0xdd>(a, b), v._mm512_shuffle_f32x4::<0xdd>(c, d)];
        columns[i] = v._mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
        columns[4 + i] = v._mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
        columns[8 + i] = v._mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
        columns[12 + i] = v._mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
    }
    pulp::cast(columns)
}

/// Transposes 8 x 8 numbers: first the 4 x 4 in each half of four registers, then the halves.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn transpose_8(v: pulp::x86::V3, rows: [pulp::f32x8; 8]) -> [pulp::f32x8; 8] {
    let v = v.avx;
    let mut halves = [[v._mm256_setzero_ps(); 4]; 2];
    for (halves, rows) in halves.iter_mut().zip(rows.as_chunks::<4>().0) {
        let [a, b, c, d]: [__m256; 4] = pulp::cast(*rows);
        let pairs = [
            [v._mm256_unpacklo_ps(a, b), v._mm256_unpacklo_ps(c, d)],
            [v._mm256_unpackhi_ps(a, b), v._mm256_unpackhi_ps(c, d)],
        ];
        for (halves, [ab, cd]) in halves.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
            let (ab, cd) = (v._mm256_castps_pd(ab), v._mm256_castps_pd(cd));
            halves[0] = v._mm256_castpd_ps(v._mm256_unpacklo_pd(ab, cd));
            halves[1] = v._mm256_castpd_ps(v._mm256_unpackhi_pd(ab, cd));
        }
    }
    let mut columns = [v._mm256_setzero_ps(); 8];
    for i in 0..4 {
        columns[i] = v._mm256_permute2f128_ps::<0x20>(halves[0][i], halves[1][i]);
        columns[4 + i] = v._mm256_permute2f128_ps::<0x31>(halves[0][i], halves[1][i]);
    }
    pulp::cast(columns)
}

#[cfg(test)]
mod tests {
    use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};

    /// Transposes the numbers `0..lanes * lanes`; returns the result and the number of lanes.
    struct TransposeSquare;

    impl<F: Float> Kernel<F> for TransposeSquare {
        type Output = (Vec<F>, usize);

        #[inline(always)]
        fn run<V: Vector<F>>(self, v: V) -> (Vec<F>, usize) {
            let mut rows = V::filled(v.splat(F::zero()));
            let lanes = rows.as_ref().len();
            for (i, row) in rows.as_mut().iter_mut().enumerate() {
                let values: Vec<F> = (0..lanes).map(|j| F::from_f64((lanes * i + j) as f64)).collect();
                *row = v.load_partial(&values);
            }
            let mut found = vec![F::zero(); lanes * lanes];
            for (to, &column) in found.chunks_mut(lanes).zip(v.transposed(rows).as_ref()) {
                v.store_partial(column, to);
            }
            (found, lanes)
        }
    }

    fn check<F: Float>() {
        for isa in Isa::available() {
            let (found, lanes) = F::dispatch(isa, TransposeSquare);
            for (i, x) in found.into_iter().enumerate() {
                assert_eq!(x.f64(), (i % lanes * lanes + i / lanes) as f64, "{}", isa.kernels());
            }
        }
    }

    #[test]
    fn rows_become_columns() {
        check::<f32>();
        check::<f64>();
    }
}
