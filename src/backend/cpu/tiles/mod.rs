//! Products of matrices on a tile unit, with sums in f32. The matrices are in bf16, or their numbers in f32 are split
//! into three parts in bf16.
//!
//! A unit multiplies squares: 32 rows of the left operand by 32 columns of the right one, and adds up 32 products at a
//! time. The left operand lies in rows. The right operand lies in pairs of its rows: the unit adds up the products of a
//! pair at once, and reads the pair as one number of 32 bits.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod emulated;
pub(super) mod matmul;
pub(super) mod product;
pub(super) mod rounding;
pub(super) mod split;
pub(super) mod squares;
pub(super) mod transpose;
pub(super) mod unit;
