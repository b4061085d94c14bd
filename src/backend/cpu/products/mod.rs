//! Matrix products on vectors and tile units, which one pass and two passes use.

pub(crate) mod decoder_squares;
pub(crate) mod gemv;
pub(crate) mod linear;
pub(crate) mod lists;
pub(crate) mod matmul;
pub(crate) mod multiplier;
pub(crate) mod panel;
pub(crate) mod rows_in_lanes;
