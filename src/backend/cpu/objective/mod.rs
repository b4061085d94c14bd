//! What is computed of each position: targets and sums of components, and the results that collect it.

pub(crate) mod components;
pub(crate) mod divergence;
pub(crate) mod listed_ids;
pub(crate) mod ranks;
pub(crate) mod results;
pub(crate) mod targets;
