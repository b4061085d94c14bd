//! Matrices in blocks of a few bits for each weight, as GGUF files have them. A row is a sequence of blocks, each with
//! its own scales:
//!
//! | type | weights, bytes | weight |
//! |---|---|---|
//! | Q8_0 | 32, 34 | d q |
//! | Q4_0 | 32, 18 | d (q - 8) |
//! | Q4_K, Q5_K | 256, 144 and 176 | (d s) q - (e m), with a scale s and an offset m for each 32 weights |
//! | Q6_K | 256, 210 | (d s) (q - 32), with a scale s for each 16 weights |
//!
//! Each product and difference is rounded on its own, as candle rounds it.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod block;
pub(crate) mod blocks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod bytes;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod few;
pub(crate) mod kind;
mod many;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod rows;
#[cfg(test)]
mod tests;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod unpack;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod unpacking;
