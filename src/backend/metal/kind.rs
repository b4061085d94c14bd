//! The properties of Metal that the chunks and their plan depend on, and the source of its kernels.

use super::f32_products;
use crate::backend::gpu::device::GpuKind;
use crate::backend::plan::Kernels;

/// The source of the kernels.
#[cfg(any(feature = "metal", test))]
pub(in crate::backend) fn source() -> String {
    include_str!("mixture.metal").replace(r#"#include "../gpu/rows.h""#, include_str!("../gpu/rows.h"))
}

/// Products are in f32. candle rounds allocations up to a power of two.
pub(in crate::backend) const KIND: GpuKind = GpuKind {
    kernels: Kernels::Metal,
    f32_gradient: true,
    reads_transposed: false,
    product_bytes: f32_products::bytes,
    allocated: 2,
    default_rows: 512,
    default_bytes: 256 << 20,
};
