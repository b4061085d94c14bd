//! Writes a checkpoint of several files to one.

use std::io::Write;
use std::path::Path;

use super::load::ShardedCheckpoint;
use crate::error::Result;
use crate::tensors::tensor_file::{write_error, PendingFile, TensorEntry};

impl ShardedCheckpoint {
    /// Writes all tensors to one `.safetensors` file, whole and under their own names. It copies block by block, so
    /// that no tensor is in memory. The new file replaces an older one once it is complete, but no file of the
    /// checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if `path` is the index or another file of the checkpoint, the
    /// checkpoint cannot be read, or the file cannot be written.
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
        self.check_is_other(path)?;
        let tensors = self.tensors().iter().map(|(name, stored)| TensorEntry {
            name: name.clone(),
            dtype: stored.dtype,
            shape: stored.shape.clone(),
            values: stored,
        });
        let pending = PendingFile::write_tensors(path, tensors.collect(), |&stored, writer| {
            let write_block = |block: &[u8]| writer.write_all(block).map_err(|error| write_error(path, error));
            self.read_blocks(stored, 0..stored.rows(), write_block)
        })?;
        pending.put_in_place()
    }
}
