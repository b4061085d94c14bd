//! Writes a checkpoint of several files to one.

use std::io::Write;
use std::path::Path;

use super::load::ShardedCheckpoint;
use crate::error::Result;
use crate::tensors::tensor_file::{unwritten, TensorEntry, Unplaced};

impl ShardedCheckpoint {
    /// Writes all tensors to one `.safetensors` file, whole and under their own names. The bytes are copied block by
    /// block, so that no tensor is in memory. A file with this name is replaced once the new one is complete.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if the checkpoint cannot be read, or the file not written.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use mos_head::distributed::ShardedCheckpoint;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// ShardedCheckpoint::open("head.safetensors.index.json")?.merge("head.safetensors")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn merge(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let tensors = self.tensors().iter().map(|(name, stored)| TensorEntry {
            name: name.clone(),
            dtype: stored.dtype,
            shape: stored.shape.clone(),
            values: stored,
        });
        let written = Unplaced::write_tensors(path, tensors.collect(), |&stored, writer| {
            self.read(stored, 0..stored.rows(), |block| writer.write_all(block).map_err(|error| unwritten(path, error)))
        })?;
        written.place()
    }
}
