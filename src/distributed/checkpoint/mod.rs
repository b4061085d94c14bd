//! Checkpoints of heads whose vocabulary is cut among ranks: each rank reads and writes its own rows.
//!
//! A checkpoint is several safetensors files ([`tensor_file`](crate::tensors::tensor_file)) and the [`index`] that
//! lists them. [`load`] reads rows and whole tensors from them, [`var_builder`] hands these to candle's constructors,
//! [`merge`] writes them to one file, and [`save`] writes a checkpoint, which all ranks do together.

mod index;
mod load;
mod merge;
mod save;
mod var_builder;

pub use load::ShardedCheckpoint;
pub use save::save_sharded;
