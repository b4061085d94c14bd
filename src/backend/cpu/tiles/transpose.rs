//! The transpose of a matrix in bf16 that lies in squares, as squares or in pairs of rows.

use half::bf16;

use super::product::{PAIRS, SIDE, SQUARE};
use super::rounding::{pair, Pair};
use super::squares::Grid;
use crate::backend::cpu::vector::simd::Isa;

/// Transposes a matrix of squares. Each square lies in one piece, one row of squares after the other.
pub(crate) fn transpose(isa: Isa, from: &[bf16], grid: Grid, to: &mut [bf16]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(v) => v.vectorize(avx512::Squares { v, from, grid, to }),
        _ => each_square(from, grid, to, |from, to| {
            for (i, row) in from.chunks_exact(SIDE).enumerate() {
                to.iter_mut().skip(i).step_by(SIDE).zip(row).for_each(|(to, &x)| *to = x);
            }
        }),
    }
}

/// Writes the transpose of each square in pairs of its rows: the right operand of a product with the transpose of this
/// matrix.
pub(crate) fn pairs(isa: Isa, from: &[bf16], to: &mut [Pair]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(v) => v.vectorize(avx512::Pairs { v, from, to }),
        _ => each_pairs(from, to, |from, to| {
            for (i, row) in from.as_chunks::<SIDE>().0.iter().enumerate() {
                for (to, [first, second]) in to[i..].iter_mut().step_by(SIDE).zip(row.as_chunks().0) {
                    *to = pair(first.to_bits().into(), second.to_bits().into());
                }
            }
        }),
    }
}

/// Calls `transpose` with each square and the pairs of its transpose.
#[inline(always)]
fn each_pairs(from: &[bf16], to: &mut [Pair], transpose: impl Fn(&[bf16; SQUARE], &mut [Pair; PAIRS * SIDE])) {
    let (from, to) = (from.as_chunks::<SQUARE>().0, to.as_chunks_mut::<{ PAIRS * SIDE }>().0);
    for (from, to) in from.iter().zip(to) {
        transpose(from, to);
    }
}

/// Calls `transpose` with each part of a square and its place in the transpose.
#[inline(always)]
fn each_square(from: &[bf16], grid: Grid, to: &mut [bf16], transpose: impl Fn(&[bf16; SQUARE], &mut [bf16; SQUARE])) {
    let (from, to) = (from.as_chunks::<SQUARE>().0, to.as_chunks_mut::<SQUARE>().0);
    let parts = grid.parts.count();
    for i in 0..grid.down {
        for j in 0..grid.across {
            for part in 0..parts {
                transpose(&from[(i * grid.across + j) * parts + part], &mut to[(j * grid.down + i) * parts + part]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::__m512i;

    use half::bf16;
    use pulp::x86::V4;

    use super::{each_pairs, each_square, Grid, Pair, PAIRS, SIDE, SQUARE};

    /// The transpose of a matrix of squares.
    pub(super) struct Squares<'a> {
        pub(super) v: V4,
        pub(super) from: &'a [bf16],
        pub(super) grid: Grid,
        pub(super) to: &'a mut [bf16],
    }

    impl pulp::NullaryFnOnce for Squares<'_> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            let Squares { v, from, grid, to } = self;
            each_square(
                from,
                grid,
                to,
                #[inline(always)]
                |from, to| transpose_square(v, from, to),
            );
        }
    }

    /// The transpose of each square, in pairs of its rows.
    pub(super) struct Pairs<'a> {
        pub(super) v: V4,
        pub(super) from: &'a [bf16],
        pub(super) to: &'a mut [Pair],
    }

    impl pulp::NullaryFnOnce for Pairs<'_> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            let Pairs { v, from, to } = self;
            each_pairs(
                from,
                to,
                #[inline(always)]
                |from, to| {
                    for (half, rows) in from.chunks_exact(SQUARE / 2).enumerate() {
                        let mut pairs = [pulp::cast([0u32; 16]); PAIRS];
                        for (pairs, row) in pairs.iter_mut().zip(rows.chunks_exact(SIDE)) {
                            *pairs = load(row);
                        }
                        for (to, pairs) in to.chunks_exact_mut(SIDE).zip(transposed(v, pairs)) {
                            let pairs: [Pair; 16] = pulp::cast(pairs);
                            to[16 * half..][..16].copy_from_slice(&pairs);
                        }
                    }
                },
            );
        }
    }

    /// Transposes a square. Two rows at a time become rows of pairs, which are transposed as numbers of 32 bits.
    #[inline(always)]
    fn transpose_square(v: V4, from: &[bf16; SQUARE], to: &mut [bf16; SQUARE]) {
        let mut low = [pulp::cast([0u32; 16]); SIDE / 2];
        let mut high = low;
        for i in 0..SIDE / 2 {
            let (first, second) = (load(&from[2 * i * SIDE..]), load(&from[(2 * i + 1) * SIDE..]));
            // Columns 8k to 8k + 3 of lane k, and columns 8k + 4 to 8k + 7.
            low[i] = v.avx512bw._mm512_unpacklo_epi16(first, second);
            high[i] = v.avx512bw._mm512_unpackhi_epi16(first, second);
        }
        let (low, high) = (transposed(v, low), transposed(v, high));
        for i in 0..SIDE / 2 {
            let column = 8 * (i / 4) + i % 4;
            store(low[i], &mut to[column * SIDE..]);
            store(high[i], &mut to[(column + 4) * SIDE..]);
        }
    }

    /// Loads a row of a square.
    #[inline(always)]
    fn load(from: &[bf16]) -> __m512i {
        let mut bits = [0u16; SIDE];
        for (bits, x) in bits.iter_mut().zip(&from[..SIDE]) {
            *bits = x.to_bits();
        }
        pulp::cast(bits)
    }

    /// Stores a row of a square.
    #[inline(always)]
    fn store(x: __m512i, to: &mut [bf16]) {
        let bits: [u16; SIDE] = pulp::cast(x);
        for (to, bits) in to[..SIDE].iter_mut().zip(bits) {
            *to = bf16::from_bits(bits);
        }
    }

    /// Returns the transpose of 16 x 16 numbers of 32 bits: first within lanes of 128 bits, then of these lanes.
    #[inline(always)]
    fn transposed(v: V4, rows: [__m512i; 16]) -> [__m512i; 16] {
        let f = v.avx512f;
        let (mut pairs, mut quads, mut out) = (rows, rows, rows);
        for i in 0..8 {
            pairs[2 * i] = f._mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = f._mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
        }
        for i in 0..4 {
            let p = &pairs[4 * i..];
            quads[4 * i] = f._mm512_unpacklo_epi64(p[0], p[2]);
            quads[4 * i + 1] = f._mm512_unpackhi_epi64(p[0], p[2]);
            quads[4 * i + 2] = f._mm512_unpacklo_epi64(p[1], p[3]);
            quads[4 * i + 3] = f._mm512_unpackhi_epi64(p[1], p[3]);
        }
        /// Selects the lanes 0 and 2 of each of two vectors.
        const EVEN: i32 = 0x88;
        /// Selects the lanes 1 and 3.
        const ODD: i32 = 0xdd;
        for c in 0..4 {
            let first = f._mm512_shuffle_i32x4::<EVEN>(quads[c], quads[4 + c]);
            let last = f._mm512_shuffle_i32x4::<EVEN>(quads[8 + c], quads[12 + c]);
            out[c] = f._mm512_shuffle_i32x4::<EVEN>(first, last);
            out[8 + c] = f._mm512_shuffle_i32x4::<ODD>(first, last);
            let first = f._mm512_shuffle_i32x4::<ODD>(quads[c], quads[4 + c]);
            let last = f._mm512_shuffle_i32x4::<ODD>(quads[8 + c], quads[12 + c]);
            out[4 + c] = f._mm512_shuffle_i32x4::<EVEN>(first, last);
            out[12 + c] = f._mm512_shuffle_i32x4::<ODD>(first, last);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::product::Parts;
    use super::*;

    #[test]
    fn pairs_of_columns_become_rows() {
        for isa in Isa::available() {
            let from: Vec<bf16> = (0..2 * SQUARE).map(|i| bf16::from_bits(i as u16)).collect();
            let mut to = vec![0; SQUARE];
            pairs(isa, &from, &mut to);
            for (square, row, column) in
                (0..2).flat_map(|s| (0..PAIRS).flat_map(move |row| (0..SIDE).map(move |column| (s, row, column))))
            {
                let [first, second] = [0, 1].map(|i| from[(square * SIDE + column) * SIDE + 2 * row + i]);
                let expected = pair(first.to_bits().into(), second.to_bits().into());
                assert_eq!(to[(square * PAIRS + row) * SIDE + column], expected, "{square} {row} {column}");
            }
        }
    }

    #[test]
    fn rows_become_columns() {
        for isa in Isa::available() {
            let grid @ Grid { down, across, .. } = Grid { down: 2, across: 3, parts: Parts::One };
            let from: Vec<bf16> = (0..grid.elements()).map(|i| bf16::from_bits(i as u16)).collect();
            let mut to = vec![bf16::ZERO; from.len()];
            transpose(isa, &from, grid, &mut to);
            let at = |row: usize, column: usize, across: usize| {
                (row / SIDE * across + column / SIDE) * SQUARE + row % SIDE * SIDE + column % SIDE
            };
            for (i, j) in (0..SIDE * down).flat_map(|i| (0..SIDE * across).map(move |j| (i, j))) {
                assert_eq!(to[at(j, i, down)].to_bits(), from[at(i, j, across)].to_bits(), "{i} {j}");
            }
        }
    }
}
