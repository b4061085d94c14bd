//! What multiplies matrices: vectors, or a tile unit, for which vectors prepare the operands and finish the results.

use candle_core::DType;

use crate::backend::cpu::tiles::product::Parts;
use crate::backend::cpu::tiles::unit::TileUnit;
use crate::backend::cpu::vector::simd::Isa;

/// What multiplies in a computation.
#[derive(Clone, Copy)]
pub(crate) struct Multiplier {
    pub(crate) vectors: Vectors,
    /// The tile unit that takes the place of vectors, if there is one.
    pub(crate) tiles: Option<Tiles>,
}

/// Products on vectors, in the accumulation dtype.
#[derive(Clone, Copy)]
pub(crate) struct Vectors {
    pub(crate) isa: Isa,
    /// Whether the decoder is in half precision or in blocks, so that products read copies of its rows.
    pub(crate) copies_rows: bool,
}

/// Products on a tile unit, with sums in f32.
#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    pub(crate) unit: TileUnit,
    pub(crate) isa: Isa,
    /// The dtype in which the operands are stored.
    pub(crate) dtype: DType,
    /// How the operands are represented in bf16.
    pub(crate) parts: Parts,
}

impl From<Vectors> for Multiplier {
    fn from(vectors: Vectors) -> Self {
        Multiplier { vectors, tiles: None }
    }
}

impl From<Tiles> for Multiplier {
    fn from(tiles: Tiles) -> Self {
        Multiplier { vectors: tiles.vectors(), tiles: Some(tiles) }
    }
}

impl Tiles {
    /// Returns the products on vectors of the same operands, which are not rounded.
    pub(crate) fn vectors(self) -> Vectors {
        Vectors { isa: self.isa, copies_rows: matches!(self.dtype, DType::F16 | DType::BF16) }
    }
}
