//! What multiplies matrices: vectors, or a tile unit, for which vectors prepare the operands and finish the results.

use crate::backend::cpu::tiles::unit::TileUnit;
use crate::backend::cpu::vector::simd::Isa;

/// Products on vectors, in the accumulation dtype.
#[derive(Clone, Copy)]
pub(crate) struct Vectors(pub(crate) Isa);

/// Products on a tile unit, of operands in bf16, with sums in f32.
#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    pub(crate) unit: TileUnit,
    pub(crate) isa: Isa,
}
