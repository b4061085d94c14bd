//! The Metal backend: products by candle's kernel, and row kernels that the system compiles on first use
//! (`mixture.metal`).

pub(super) mod arguments;
#[cfg(feature = "metal")]
mod device;
pub(super) mod kind;
#[cfg(test)]
mod language_rules;
pub(super) mod products;

#[cfg(feature = "metal")]
pub(super) use device::Metal;
