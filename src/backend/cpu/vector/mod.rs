//! Vectors of the processor, and the functions that are computed on them.

pub(crate) mod log_sum_exp;
pub(crate) mod math;
pub(crate) mod simd;
pub(crate) mod softcap;
pub(crate) mod transposed;
