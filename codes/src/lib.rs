//! Words as one or two codes of a small dictionary, so that a language model's output layer, any of them, is over
//! hundreds of codes in place of tens of thousands of words.
//!
//! - [`Codebook`]: the bijection, with the log-probabilities of words under a model of codes, and the most probable words.
//! - [`CodeTable`]: the tables of LightRNN and Hybrid-LightRNN, by frequency, at random, or from saved codes.
//! - [`CodeCosts`]: what every word would cost in every row and column, from which [`Assignment`] finds a better table.
//!
//! The crate knows no output layer: a model is its log-probabilities `[positions, codes]`, in nats.
//!
//! # References
//!
//! - Li, Qin, Yang, Hu, Liu: LightRNN: Memory and Computation-Efficient Recurrent Neural Networks. NIPS 2016, arXiv
//!   1610.09893.
//! - Kong et al.: Fast and Simple Mixture of Softmaxes with BPE and Hybrid-LightRNN for Language Generation. AAAI 2019,
//!   arXiv 1809.09296.

#![warn(unreachable_pub)]

mod assignment;
mod best_words;
mod checks;
mod codebook;
mod costs;
mod error;
mod table;
mod transfer;
mod word_probability;

pub use assignment::Assignment;
pub use best_words::TopWords;
pub use codebook::Codebook;
pub use costs::{CodeCosts, CodePlace};
pub use error::{Error, Result};
pub use table::{CodeTable, TableConfig};

/// The example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
