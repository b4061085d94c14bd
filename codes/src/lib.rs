//! This crate writes words as one or two codes of a small dictionary, so that the output layer of a language model, of
//! whatever kind, ranges over hundreds of codes in place of tens of thousands of words.
//!
//! - [`Codebook`] is the bijection of words and codes. It gives the log-probabilities of words under a model of codes,
//!   and the most probable words.
//! - [`CodeTable`] makes the tables of LightRNN and Hybrid-LightRNN by frequency, at random, or from saved codes.
//! - [`CodeCosts`] sums what every word would cost in every row and column. From these costs an [`Assignment`] finds a
//!   better table.
//!
//! The crate knows no output layer: it sees a model through its log-probabilities `[positions, codes]`, in nats.
//!
//! # References
//!
//! - Li, Qin, Yang, Hu, Liu: LightRNN: Memory and Computation-Efficient Recurrent Neural Networks. NIPS 2016, arXiv
//!   1610.09893.
//! - Kong et al.: Fast and Simple Mixture of Softmaxes with BPE and Hybrid-LightRNN for Language Generation. AAAI 2019,
//!   arXiv 1809.09296.

#![warn(unreachable_pub)]

mod assignment;
mod checks;
mod codebook;
mod costs;
mod error;
mod table;
mod top_words;
mod transfer;
mod word_probability;

pub use assignment::Assignment;
pub use codebook::Codebook;
pub use costs::{CodeCosts, TargetCode};
pub use error::{Error, Result};
pub use table::{CodeTable, TableConfig};
pub use top_words::TopWords;

/// Runs the example of the README as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
