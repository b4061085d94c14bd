//! Products of bf16 matrices on a tile unit, with sums in f32.
//!
//! The unit multiplies squares: 32 rows of the left operand by 32 columns of the right one, 32 products deep at a time.
//! The left operand lies in rows. The right operand lies in pairs of its rows, so that the two factors that the unit
//! adds up at once are one 32-bit number.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod emulated;
pub(super) mod matmul;
pub(super) mod product;
pub(super) mod rounding;
pub(super) mod squares;
pub(super) mod transpose;
pub(super) mod unit;
