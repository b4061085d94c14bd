//! The vector instruction sets, and the functions that are computed on their registers.

pub(crate) mod logit_map;
pub(crate) mod math;
pub(crate) mod simd;
pub(crate) mod transposed;
