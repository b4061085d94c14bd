//! Scores of texts: BLEU, CIDEr-D, and the units of a likelihood.

pub mod bleu;
pub mod cider;
mod measure;

pub use measure::Measure;
