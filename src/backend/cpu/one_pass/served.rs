//! Which formats serve which type.

use half::{bf16, f16};

use super::format::Format;
use super::tiles::Tiles;
use super::vectors::Vectors;
use crate::backend::cpu::dtype::Element;

/// A type whose products have formats: vectors, and perhaps tiles.
pub(crate) trait Served: Element {
    /// The products of a tile unit, or, for f64, which has none, of vectors.
    type Tiles: Format<Self>;

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
