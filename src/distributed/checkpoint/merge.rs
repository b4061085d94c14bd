//! Writes a checkpoint of several files to one.

use std::io::Write;
use std::path::Path;

use super::load::{ShardedCheckpoint, Stored};
use super::tensor_file::{unwritten, Listed, Unplaced};
use crate::error::{Error, Result};

impl ShardedCheckpoint {
    /// Writes all tensors to one `.safetensors` file, whole and under their own names. The bytes are copied block by
    /// block, so that no tensor is in memory. A file with this name is replaced once the new one is complete.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the checkpoint cannot be read, or the file not written.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use mos_head::ShardedCheckpoint;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// ShardedCheckpoint::open("head.safetensors.index.json")?.merge("head.safetensors")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn merge(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let listed = |(name, stored): (&String, &Stored)| Listed {
            name: name.clone(),
            dtype: stored.dtype,
            shape: stored.shape.clone(),
        };
        let tensors = self.tensors().iter().map(listed).collect();
        let written = Unplaced::write_tensors(path, tensors, |tensor, writer| {
            let stored = self.tensors().get(&tensor.name);
            let stored = stored.ok_or_else(|| Error::checkpoint(path, format!("a tensor {}", tensor.name), "none"))?;
            self.read(stored, None, |block| writer.write_all(block).map_err(|error| unwritten(path, error)))
        })?;
        written.place()
    }
}
