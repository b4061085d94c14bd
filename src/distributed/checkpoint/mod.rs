//! Checkpoints of heads whose vocabulary is cut among ranks: each rank reads and writes its own rows.
//!
//! [`tensor_file`](crate::tensors::tensor_file) is one safetensors file, [`index`] the list of the files of a checkpoint,
//! [`load`] reads rows and whole tensors from them, [`var_builder`] hands these to candle's constructors, [`merge`] writes them to one file,
//! [`save`] is what all ranks do together.

mod index;
mod load;
mod merge;
mod save;
mod var_builder;

pub use load::ShardedCheckpoint;
pub use save::save_sharded;
