//! A token as a short sequence of codes: the bijection ([`codebook`]), the tables of LightRNN and Hybrid-LightRNN
//! ([`table`]), how they are learned ([`costs`], [`assignment`]), and the words of a model of codes ([`best_words`],
//! [`word_probability`]).

mod assignment;
mod best_words;
mod codebook;
mod costs;
mod table;
mod word_probability;

pub use assignment::Assignment;
pub use codebook::Codebook;
pub use costs::{CodeCosts, CodePlace};
pub use table::{CodeTable, TableConfig};
