//! The properties of Metal that the chunks and their plan depend on, and the source of its kernels.

use super::f32_products;
use crate::backend::gpu::device::GpuKind;
#[cfg(any(feature = "metal", test))]
use crate::backend::gpu::kernels::HEADERS;
use crate::backend::plan::Kernels;

/// Returns the source of the kernels, with the headers in place of the lines that include them.
#[cfg(any(feature = "metal", test))]
pub(in crate::backend) fn source() -> String {
    let include = |source: String, (name, text): &(&str, &str)| {
        source.replace(&format!("#include \"../gpu/kernels/{name}\""), text)
    };
    HEADERS.iter().fold(include_str!("mixture.metal").to_owned(), include)
}

/// The properties of Metal. Products are in f32. candle rounds allocations up to a power of two.
pub(in crate::backend) const KIND: GpuKind = GpuKind {
    kernels: Kernels::Metal,
    needs_f32_gradient: true,
    rounds_products: false,
    half_row_align: 1,
    most_one_pass_width: 0,
    reads_transposed: false,
    product_bytes: f32_products::product_bytes,
    allocation_factor: 2,
    default_logit_bytes: 32 << 20,
    least_default_rows: 512,
    most_default_bytes: 256 << 20,
};
