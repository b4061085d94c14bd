//! The multipliers that serve each type of numbers, and the choice of the one that a plan is made for.

use half::{bf16, f16};

use super::one_pass::Format;
use super::operands::dtype::Element;
use super::products::multiplier::{Tiles, Vectors};
use super::tiles::unit::TileUnit;
use super::two_pass::FirstProduct;
use super::vector::simd::Isa;
use crate::backend::plan::{Kernels, Plan};
use crate::error::Result;

/// A multiplier that serves one pass and two passes.
pub(crate) trait Products<T: Element>: Format<T> + FirstProduct<T> {}
impl<T: Element, X: Format<T> + FirstProduct<T>> Products<T> for X {}

/// A type of numbers that vectors multiply, and perhaps a tile unit.
pub(crate) trait Served: Element {
    /// The multiplier on a tile unit. For f64, which no unit multiplies, it is the multiplier on vectors.
    type Tiles: Products<Self>;

    /// Returns the multiplier on this tile unit; `None` for f64.
    fn tiles(tiles: Tiles) -> Option<Self::Tiles>;
}

macro_rules! served_by_tiles {
    ($($type:ty)*) => {
        $(impl Served for $type {
            type Tiles = Tiles;

            fn tiles(tiles: Tiles) -> Option<Tiles> {
                Some(tiles)
            }
        })*
    };
}

served_by_tiles!(f32 f16 bf16);

/// Returns the multiplier on the tile unit that the plan is made for; `None` if it is made for vectors.
pub(super) fn planned_tiles<T: Served>(plan: &Plan) -> Result<Option<T::Tiles>> {
    let (unit, isa) = (TileUnit::detected()?, Isa::detected()?);
    let unit = unit.filter(|_| Kernels::WITH_TILES.contains(&plan.kernels));
    Ok(unit.and_then(|unit| T::tiles(Tiles { unit, isa })))
}

/// Computes with the multiplier that the plan is made for: a tile unit's, or vectors'.
macro_rules! with_products {
    ($type:ty, $plan:expr, $products:ident => $compute:expr) => {
        match $crate::backend::cpu::served::planned_tiles::<$type>($plan)? {
            Some($products) => $compute,
            None => {
                let $products = $crate::backend::cpu::products::multiplier::Vectors(
                    $crate::backend::cpu::vector::simd::Isa::detected()?,
                );
                $compute
            }
        }
    };
}
pub(super) use with_products;

impl Served for f64 {
    type Tiles = Vectors;

    fn tiles(_: Tiles) -> Option<Vectors> {
        None
    }
}
