//! What multiplies matrices: vectors, or a tile unit, for which vectors prepare the operands and finish the results.

use candle_core::DType;

use crate::backend::cpu::tiles::unit::TileUnit;
use crate::backend::cpu::vector::simd::Isa;

/// Products on vectors, in the accumulation dtype.
#[derive(Clone, Copy)]
pub(crate) struct Vectors {
    pub(crate) isa: Isa,
    /// The dtype in which the operands are stored.
    pub(crate) dtype: DType,
}

impl Vectors {
    /// Returns whether the operands are stored in half precision, so that products read widened copies.
    pub(crate) fn widens(self) -> bool {
        matches!(self.dtype, DType::F16 | DType::BF16)
    }
}

/// Products on a tile unit, of operands in bf16, with sums in f32.
#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    pub(crate) unit: TileUnit,
    pub(crate) isa: Isa,
    /// The dtype in which the operands are stored; those that are not bf16 are rounded.
    pub(crate) dtype: DType,
}

impl Tiles {
    /// Returns the products on vectors of the same operands, which are not rounded.
    pub(crate) fn vectors(self) -> Vectors {
        Vectors { isa: self.isa, dtype: self.dtype }
    }
}
