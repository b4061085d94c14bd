//! The Metal backend: products by candle's kernel, and row kernels that the system compiles on first use
//! (`mixture.metal`).

pub(super) mod arguments;
#[cfg(feature = "metal")]
mod device;
pub(super) mod f32_products;
pub(super) mod kind;
#[cfg(test)]
mod language_rules;

#[cfg(feature = "metal")]
pub(super) use device::Metal;
