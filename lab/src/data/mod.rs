//! Texts as token ids: words, pieces and codes, their batches, and a language whose entropy is known.

mod batches;
pub mod bpe;
mod codes;
mod dataset;
mod digest;
pub mod language;
pub mod sequences;
mod text;
pub mod words;

pub use batches::{Streams, Window, IGNORED};
pub use codes::{insert_table, load_table, table_from_json, table_json, Coding};
pub use dataset::Data;
pub use digest::Digest;
pub use text::{read, Corpus, END_OF_SENTENCE};
