//! The Metal backend: products by candle's kernel, row kernels compiled by the system when they are first used
//! (`mixture.metal`).

mod arguments;
#[cfg(feature = "metal")]
mod device;
mod products;
#[cfg(test)]
mod strict;

use candle_core::DType;

use super::gpu::Kind;

pub(super) use arguments::{bindings, Binding};
#[cfg(feature = "metal")]
pub(super) use device::Metal;
pub(super) use products::{multiply, Products, Scratch};

/// The kernels' text.
#[cfg(any(feature = "metal", test))]
pub(super) fn source() -> String {
    include_str!("mixture.metal").replace(r#"#include "../gpu/rows.h""#, include_str!("../gpu/rows.h"))
}

/// Products are those of f32. candle rounds what it allocates up to a power of two.
pub(super) const KIND: Kind = Kind {
    name: "metal",
    f32_gradient: true,
    product_bytes: |sizes, dtype| match dtype {
        DType::F32 => (0, 0),
        _ => products::bytes(sizes),
    },
    allocated: 2,
};
