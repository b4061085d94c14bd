//! The objective of each position, which both computations share: its targets, the sums over its components, and the
//! results of all positions.

mod acceptance;
pub(crate) mod argmax_terms;
pub(crate) mod components;
pub(crate) mod divergence;
mod divergence_row;
pub(crate) mod ranks;
pub(crate) mod results;
pub(crate) mod targets;
