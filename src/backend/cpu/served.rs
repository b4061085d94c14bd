//! Which multipliers serve which type.

use half::{bf16, f16};

use super::dtype::Element;
use super::multiplier::{Tiles, Vectors};
use super::one_pass::Format;
use super::two_pass::FirstProduct;

/// What one pass and two passes need of a multiplier.
pub(crate) trait Products<T: Element>: Format<T> + FirstProduct<T> {}
impl<T: Element, X: Format<T> + FirstProduct<T>> Products<T> for X {}

/// A type whose products vectors serve, and perhaps tiles.
pub(crate) trait Served: Element {
    /// The products of a tile unit, or, for f64, which has none, of vectors.
    type Tiles: Products<Self>;

    /// The products of this tile unit; `None` for f64.
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

impl Served for f64 {
    type Tiles = Vectors;

    fn tiles(_: Tiles) -> Option<Vectors> {
        None
    }
}
