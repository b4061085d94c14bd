//! The units that multiply squares, and the choice among them.

use super::product::{Operand, Parts, SquareProduct, TileProduct, SIDE};
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::processor::Processor;
use crate::backend::cpu::vector::simd::Isa;
use crate::backend::plan::Kernels;
use crate::error::Result;

/// A tile unit, with the proof that this process may use it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TileUnit {
    /// Intel AMX, on x86-64.
    #[cfg(target_arch = "x86_64")]
    Amx(super::amx::Amx),
    /// AVX512-BF16, on x86-64, whose vectors do the work of a unit.
    #[cfg(target_arch = "x86_64")]
    Bf16Dots(super::dots::Bf16Dots),
    /// A computation that has the results of AMX, bit for bit, without the unit.
    #[cfg(any(test, not(target_arch = "x86_64")))]
    #[cfg_attr(not(test), allow(dead_code))]
    Emulated,
}

impl TileUnit {
    /// Returns the unit that serves products: the fastest, or the one that `MOS_HEAD_SIMD` selects; `None` if vectors
    /// serve them.
    ///
    /// # Errors
    ///
    /// If `MOS_HEAD_SIMD` selects a unit that this machine lacks.
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

    /// Returns the units of this machine, the fastest first. Their operands are prepared by vectors of 512 bits:
    /// without these, there are none.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn available(isa: Isa) -> Vec<Self> {
        if !isa.prepares_tiles() {
            return Vec::new();
        }
        let amx = super::amx::Amx::detect().map(TileUnit::Amx);
        amx.into_iter().chain(super::dots::Bf16Dots::detect().map(TileUnit::Bf16Dots)).collect()
    }

    /// Returns no units: this architecture has none.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn available(_: Isa) -> Vec<Self> {
        Vec::new()
    }

    /// Returns whether its products are so much faster than those of vectors that rounding their operands is
    /// worthwhile.
    fn beats_vectors(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            TileUnit::Bf16Dots(_) => Processor::this().has_fast_bf16_dots(),
            _ => true,
        }
    }

    /// Returns the kernels that a plan with this unit has.
    pub(crate) fn kernels(self) -> Kernels {
        match self {
            #[cfg(target_arch = "x86_64")]
            TileUnit::Bf16Dots(_) => Kernels::Avx512Bf16,
            _ => Kernels::Amx,
        }
    }

    /// Computes the product. It sums over so many squares at a time that their right operand stays in the first-level
    /// cache.
    pub(crate) fn multiply_squares(self, product: SquareProduct<'_>) {
        let SquareProduct { left, right, depth, to, rows, width } = product;
        let parts = Parts::One;
        let (square, pairs) = (parts.square(), parts.square_pairs());
        for steps in parts.steps(0..depth) {
            self.multiply(TileProduct {
                parts,
                left: Operand { values: &left[steps.start * square..], step: square, square: depth * square },
                right: Operand { values: &right[steps.start * pairs..], step: pairs, square: depth * pairs },
                steps: steps.len(),
                to: &mut *to,
                to_row: width,
                rows,
                columns: width / SIDE,
                is_added: steps.start > 0,
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
            // SAFETY: the check above.
            TileUnit::Amx(unit) => unsafe { unit.multiply(product) },
            #[cfg(target_arch = "x86_64")]
            TileUnit::Bf16Dots(unit) => product.by_parts(|product| unit.multiply(product)),
            #[cfg(any(test, not(target_arch = "x86_64")))]
            TileUnit::Emulated => super::emulated::multiply(product),
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::product::{PAIRS, SQUARE};
    use super::super::rounding::{self, Pair};
    use super::*;
    use crate::backend::needs::AMX;

    const BOTH: [Parts; 2] = [Parts::One, Parts::Three];

    /// The squares of a product.
    #[derive(Clone, Copy, Debug)]
    struct Shape {
        rows: usize,
        columns: usize,
        steps: usize,
        parts: Parts,
    }

    /// Numbers of all magnitudes, among them subnormal ones, infinities and NaN if `has_special`.
    fn numbers(n: usize, seed: u32, has_special: bool) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let number = |_| {
            let bits = next();
            match (has_special, bits % 257) {
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

    /// The bits of a product on a unit, of operands with gaps between their squares. `has_special` is that of
    /// `numbers`.
    fn product(unit: TileUnit, shape: Shape, is_added: bool, has_special: bool) -> Vec<u32> {
        let Shape { rows, columns, parts, .. } = shape;
        let (left, right) = operands(shape, has_special);
        let to_row = SIDE * columns + 1;
        let mut to = numbers(SIDE * rows * to_row, 3, has_special);
        unit.multiply(TileProduct {
            parts,
            left: left_operand(shape, &left),
            right: right_operand(shape, &right),
            steps: shape.steps,
            to: &mut to,
            to_row,
            rows,
            columns,
            is_added,
        });
        to.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    /// The numbers of the operands, with those in the gaps.
    fn operands(shape: Shape, has_special: bool) -> (Vec<bf16>, Vec<Pair>) {
        let (left, right) = (left_operand(shape, &[]), right_operand(shape, &[]));
        let left = numbers(shape.rows * left.square + shape.steps * left.step, 1, has_special);
        let left = left.into_iter().map(|x| rounding::bf16_from_bits(rounding::bits(x))).collect();
        let right = numbers(2 * (shape.columns * right.square + shape.steps * right.step), 2, has_special);
        let right = right.chunks_exact(2);
        (left, right.map(|pair| rounding::pair(rounding::bits(pair[0]), rounding::bits(pair[1]))).collect())
    }

    fn left_operand(Shape { steps, parts, .. }: Shape, values: &[bf16]) -> Operand<'_, bf16> {
        let step = parts.square() + 5;
        Operand { values, step, square: steps * step + 3 }
    }

    fn right_operand(Shape { steps, parts, .. }: Shape, values: &[Pair]) -> Operand<'_, Pair> {
        let step = parts.square_pairs() + 7;
        Operand { values, step, square: steps * step + 1 }
    }

    #[test]
    fn amx_and_its_emulation_agree_bit_for_bit() {
        let units = TileUnit::available(Isa::available()[0]);
        let Some(unit) = units.into_iter().find(|unit| unit.kernels() == Kernels::Amx) else {
            return AMX.is_missing("the processor or the system lacks it");
        };
        let sizes = [[1, 1, 1], [2, 1, 3], [1, 3, 2], [3, 2, 9]];
        for ([rows, columns, steps], parts) in sizes.into_iter().flat_map(|s| BOTH.map(|parts| (s, parts))) {
            let shape = Shape { rows, columns, steps, parts };
            for (is_added, has_special) in [(false, false), (true, false), (false, true), (true, true)] {
                let found = product(unit, shape, is_added, has_special);
                let expected = product(TileUnit::Emulated, shape, is_added, has_special);
                assert!(found == expected, "{shape:?} {is_added} {has_special}");
            }
        }
    }

    #[test]
    fn products_equal_sums_in_f64() {
        let units = TileUnit::available(Isa::available()[0]);
        for unit in units.into_iter().chain([TileUnit::Emulated]) {
            BOTH.into_iter().for_each(|parts| compare_with_f64(unit, parts));
        }
    }

    /// Compares each sum of a product with that of its products in f64.
    fn compare_with_f64(unit: TileUnit, parts: Parts) {
        let shape @ Shape { rows, columns, steps, .. } = Shape { rows: 2, columns: 3, steps: 2, parts };
        let found = product(unit, shape, true, false);
        let start = numbers(SIDE * rows * (SIDE * columns + 1), 3, false);
        let (left, right) = operands(shape, false);
        let (left, right) = (left_operand(shape, &left), right_operand(shape, &right));
        for (i, j) in (0..SIDE * rows).flat_map(|i| (0..SIDE * columns).map(move |j| (i, j))) {
            let mut expected = f64::from(start[i * (SIDE * columns + 1) + j]);
            for (k, &(left_part, right_part)) in
                (0..SIDE * steps).flat_map(|k| parts.products().iter().map(move |parts| (k, parts)))
            {
                let at = i / SIDE * left.square + i % SIDE * SIDE + k / SIDE * left.step + k % SIDE;
                let x = left.values[at + left_part * SQUARE].to_f64();
                let at = j / SIDE * right.square + j % SIDE + k / SIDE * right.step + k % SIDE / 2 * SIDE;
                let pair = right.values[at + right_part * PAIRS * SIDE];
                let y = f32::from_bits(if k % 2 == 0 { pair << 16 } else { pair & 0xffff_0000 });
                expected += x * f64::from(y);
            }
            let found = f32::from_bits(found[i * (SIDE * columns + 1) + j]);
            assert!((f64::from(found) - expected).abs() < 1e-5, "{unit:?} {i} {j}: {found} {expected}");
        }
    }
}
