//! The unit that multiplies squares, and its choice.

use half::bf16;

use super::product::{steps, Operand, TileProduct, PAIRS, SIDE, SQUARE};
use super::rounding::Pair;
use crate::backend::cpu::vector::simd::Isa;
use crate::backend::plan::Kernels;
use crate::error::Result;

/// A tile unit, with the proof that this process may use it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TileUnit {
    /// Intel AMX, on x86-64.
    #[cfg(target_arch = "x86_64")]
    Amx(super::amx::Amx),
    /// AVX512-BF16, on x86-64: vectors do the unit's work.
    #[cfg(target_arch = "x86_64")]
    Bf16Dots(super::dots::Bf16Dots),
    /// The numbers of AMX, bit for bit, without the unit.
    #[cfg(any(test, not(target_arch = "x86_64")))]
    #[cfg_attr(not(test), allow(dead_code))]
    Emulated,
}

impl TileUnit {
    /// The unit that serves products: the fastest, or the one that `MOS_HEAD_SIMD` selects.
    pub(crate) fn detected() -> Result<Option<Self>> {
        let units = Self::available(Isa::detected()?);
        let Some(name) = Isa::selected() else { return Ok(units.into_iter().find(|unit| unit.beats_vectors())) };
        match units.into_iter().find(|unit| unit.kernels().to_string() == name) {
            Some(unit) => Ok(Some(unit)),
            None if Kernels::WITH_TILES.iter().any(|kernels| kernels.to_string() == name) => {
                Err(Isa::lacking(name.to_owned()))
            }
            None => Ok(None),
        }
    }

    /// The units of this machine, the best first, if kernels with vectors of 512 bits prepare their operands.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn available(isa: Isa) -> Vec<Self> {
        if !isa.prepares_tiles() {
            return Vec::new();
        }
        let amx = super::amx::Amx::detect().map(TileUnit::Amx);
        amx.into_iter().chain(super::dots::Bf16Dots::detect().map(TileUnit::Bf16Dots)).collect()
    }

    /// There are none.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn available(_: Isa) -> Vec<Self> {
        Vec::new()
    }

    /// Whether its products are worth the rounding of their operands.
    fn beats_vectors(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            TileUnit::Bf16Dots(unit) => unit.beats_fma(),
            _ => true,
        }
    }

    pub(crate) fn kernels(self) -> Kernels {
        match self {
            #[cfg(target_arch = "x86_64")]
            TileUnit::Bf16Dots(_) => Kernels::Avx512Bf16,
            _ => Kernels::Amx,
        }
    }

    /// Computes `to = left right`, rows of `width` numbers, of `depth` squares: left `[square of rows][square]`, right in
    /// pairs of rows `[square of columns][pair][SIDE]`. The right operand of each part of the depth stays in the
    /// first-level cache.
    pub(crate) fn multiply_squares(
        self,
        (left, right): (&[bf16], &[Pair]),
        depth: usize,
        to: &mut [f32],
        (rows, width): (usize, usize),
    ) {
        for steps in steps(0..depth) {
            self.multiply(TileProduct {
                left: Operand {
                    values: &left[steps.start * SQUARE..],
                    row: SIDE,
                    step: SQUARE,
                    square: depth * SQUARE,
                },
                right: Operand {
                    values: &right[steps.start * PAIRS * SIDE..],
                    row: SIDE,
                    step: PAIRS * SIDE,
                    square: depth * PAIRS * SIDE,
                },
                steps: steps.len(),
                to: &mut *to,
                to_row: width,
                rows,
                columns: width / SIDE,
                add: steps.start > 0,
            });
        }
    }

    /// Computes the product.
    pub(crate) fn multiply(self, product: TileProduct<'_>) {
        if product.is_empty() {
            return;
        }
        product.check();
        match self {
            #[cfg(target_arch = "x86_64")]
            TileUnit::Amx(unit) => unit.multiply(product),
            #[cfg(target_arch = "x86_64")]
            TileUnit::Bf16Dots(unit) => unit.multiply(product),
            #[cfg(any(test, not(target_arch = "x86_64")))]
            TileUnit::Emulated => super::emulated::multiply(product),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rounding;
    use super::*;

    /// Numbers of all magnitudes, with subnormal ones, infinities and NaN if they are `odd`.
    fn numbers(n: usize, seed: u32, odd: bool) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let number = |_| {
            let bits = next();
            match (odd, bits % 257) {
                (true, 0) => f32::INFINITY,
                (true, 1) => f32::NAN,
                (true, 2..20) => f32::from_bits(bits % (1 << 23)),
                (true, 20..60) => f32::from_bits(bits % (1 << 25)),
                (true, 60..90) => f32::from_bits(bits % (1 << 30) + (1 << 30)),
                _ => (bits >> 8) as f32 / (1 << 24) as f32 - 0.5,
            }
        };
        (0..n).map(number).collect()
    }

    /// The results on a unit, from operands with gaps between their rows.
    fn product(unit: TileUnit, (rows, columns, steps): (usize, usize, usize), add: bool, odd: bool) -> Vec<u32> {
        let depth = SIDE * steps + 2;
        let left: Vec<bf16> =
            numbers(SIDE * rows * depth, 1, odd).into_iter().map(|x| rounding::bf16_of(rounding::bits(x))).collect();
        let across = SIDE * columns + 3;
        let right: Vec<Pair> = numbers(2 * PAIRS * steps * across, 2, odd)
            .chunks_exact(2)
            .map(|pair| rounding::pair(rounding::bits(pair[0]), rounding::bits(pair[1])))
            .collect();
        let to_row = SIDE * columns + 1;
        let mut to = numbers(SIDE * rows * to_row, 3, odd);
        unit.multiply(TileProduct {
            left: Operand { values: &left, row: depth, step: SIDE, square: SIDE * depth },
            right: Operand { values: &right, row: across, step: PAIRS * across, square: SIDE },
            steps,
            to: &mut to,
            to_row,
            rows,
            columns,
            add,
        });
        to.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    #[test]
    fn amx_and_its_emulation_agree_bit_for_bit() {
        let units = TileUnit::available(Isa::available()[0]);
        let Some(unit) = units.into_iter().find(|unit| unit.kernels() == Kernels::Amx) else {
            println!("this machine has no AMX");
            return;
        };
        for shape in [(1, 1, 1), (2, 1, 3), (1, 3, 2), (3, 2, 9)] {
            for (add, odd) in [(false, false), (true, false), (false, true), (true, true)] {
                let (found, expected) = (product(unit, shape, add, odd), product(TileUnit::Emulated, shape, add, odd));
                assert!(found == expected, "{shape:?} {add} {odd}");
            }
        }
    }

    #[test]
    fn products_equal_sums_in_f64() {
        let units = TileUnit::available(Isa::available()[0]);
        units.into_iter().chain([TileUnit::Emulated]).for_each(equals_sums_in_f64);
    }

    fn equals_sums_in_f64(unit: TileUnit) {
        let (rows, columns, steps) = (2, 3, 2);
        let found = product(unit, (rows, columns, steps), true, false);
        let start = numbers(SIDE * rows * (SIDE * columns + 1), 3, false);
        let rounded = |x: f32| f64::from(rounding::bf16_of(rounding::bits(x)).to_f32());
        let (depth, across) = (SIDE * steps + 2, SIDE * columns + 3);
        let left = numbers(SIDE * rows * depth, 1, false);
        let right = numbers(2 * PAIRS * steps * across, 2, false);
        for i in 0..SIDE * rows {
            for j in 0..SIDE * columns {
                let of = |k: usize| rounded(left[i * depth + k]) * rounded(right[2 * (k / 2 * across + j) + k % 2]);
                let at = i * (SIDE * columns + 1) + j;
                let expected: f64 = f64::from(start[at]) + (0..SIDE * steps).map(of).sum::<f64>();
                let found = f32::from_bits(found[at]);
                assert!((f64::from(found) - expected).abs() < 1e-5, "{unit:?} {i} {j}: {found} {expected}");
            }
        }
    }
}
