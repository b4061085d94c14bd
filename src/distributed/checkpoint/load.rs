//! Reads rows of tensors, or whole ones, from a checkpoint of one file or of several.

use std::collections::btree_map::Entry;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::TensorInfo;
use safetensors::Dtype;

use super::index::{is_index, Index, RowsName};
use crate::error::{Error, Result};
use crate::tensors::tensor_file::{folder, readable_dtype, tensor_bytes, tensor_from_bytes, TensorFile};

/// A checkpoint of safetensors files, from which each rank reads its own rows: a plain file, the files of an index in
/// Hugging Face's form, or the files that [`save_sharded`](crate::distributed::save_sharded) has written, for any
/// number of ranks. It joins rows that several files hold to one tensor. No method waits for other ranks.
///
/// # Examples
///
/// A rank's head, from its rows of a model of Hugging Face, whose output layer is `lm_head.weight` without a bias. (The
/// constructor of a head of this crate reads the head's own files by the same `vb`: `SoftmaxHead::new(&config, vb)`.)
///
/// ```no_run
/// use std::sync::Arc;
/// use candle_core::{DType, Device};
/// use mos_head::distributed::{Collectives, ShardedCheckpoint, VocabParallel, VocabShard};
/// use mos_head::SoftmaxHead;
///
/// fn load(ranks: Arc<dyn Collectives>) -> mos_head::Result<VocabParallel<SoftmaxHead>> {
///     let checkpoint = ShardedCheckpoint::open("model.safetensors.index.json")?;
///     let shard = VocabShard::new(ranks, 128_256)?;
///     let vb = checkpoint.var_builder(&shard, DType::F32, &Device::Cpu);
///     let weight = vb.get((shard.range().len(), 4096), "lm_head.weight")?;
///     VocabParallel::new(SoftmaxHead::from_tensors(weight, None)?, shard)
/// }
/// ```
///
/// Some rows of a tensor:
///
/// ```
/// use std::collections::HashMap;
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::distributed::ShardedCheckpoint;
///
/// # fn main() -> mos_head::Result<()> {
/// let path = std::env::temp_dir().join(format!("rows-of-{}.safetensors", std::process::id()));
/// let weight = Tensor::arange(0f32, 14., &Device::Cpu)?.reshape((7, 2))?;
/// candle_core::safetensors::save(&HashMap::from([("decoder.weight", weight)]), &path)?;
///
/// let checkpoint = ShardedCheckpoint::open(&path)?;
/// assert_eq!(checkpoint.shape("decoder.weight")?, [7, 2]);
/// let rows = checkpoint.load_rows("decoder.weight", 2..4, DType::F32, &Device::Cpu)?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[4., 5.], [6., 7.]]);
/// # let _ = std::fs::remove_file(path);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ShardedCheckpoint {
    path: PathBuf,
    files: Vec<TensorFile>,
    tensors: BTreeMap<String, StoredTensor>,
}

impl ShardedCheckpoint {
    /// Checks that a file to be written is none of this checkpoint.
    pub(super) fn check_is_other(&self, path: &Path) -> Result<()> {
        let Ok(written) = path.canonicalize() else { return Ok(()) };
        let mut own = self.files.iter().map(|file| &file.path).chain([&self.path]);
        if own.any(|own| own.canonicalize().is_ok_and(|own| own == written)) {
            return Err(Error::checkpoint(path, "a file that is not part of the checkpoint", "one of its files"));
        }
        Ok(())
    }
}

/// A tensor of a checkpoint, and the files that hold its rows.
#[derive(Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// The rows in the files, in ascending order without gaps.
    pieces: Vec<FileRows>,
}

/// Consecutive rows of a tensor in one file, which holds all rows if the tensor is whole.
#[derive(Debug)]
struct FileRows {
    /// The index of the file.
    file: usize,
    rows: Range<usize>,
    info: TensorInfo,
}

impl StoredTensor {
    /// Returns the number of rows; a scalar is one row.
    pub(super) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Returns the first row that no piece has.
    fn end(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.rows.end)
    }
}

impl ShardedCheckpoint {
    /// Opens a `.safetensors` file, or the files that a `.safetensors.index.json` names, and reads their headers.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file is missing or not what its header says (a pickle and a pointer of Git LFS are
    /// recognized by their first bytes), the index names a tensor that its file does not hold, or the rows of a tensor
    /// overlap, have a gap or differ in dtype or columns.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if is_index(path) {
            return Self::open_index(path);
        }
        let file = TensorFile::open(path)?;
        let named = file.header.offset_keys().into_iter().map(|name| (name, 0)).collect();
        Self::from_files(path, vec![file], named)
    }

    /// Opens the files that an index lists, whatever the name of the index.
    pub(super) fn open_index(path: &Path) -> Result<Self> {
        let index = Index::read(path)?;
        let mut file_indices = BTreeMap::new();
        let mut files = Vec::new();
        let mut named = Vec::with_capacity(index.files.len());
        for (name, file) in index.files {
            let file_index = match file_indices.entry(file) {
                Entry::Occupied(occupied) => *occupied.get(),
                Entry::Vacant(vacant) => {
                    files.push(TensorFile::open(&folder(path).join(vacant.key()))?);
                    *vacant.insert(files.len() - 1)
                }
            };
            named.push((name, file_index));
        }
        Self::from_files(path, files, named)
    }

    /// Joins the rows of tensors that files hold under these names; each name has the index of its file.
    fn from_files(path: &Path, files: Vec<TensorFile>, named: Vec<(String, usize)>) -> Result<Self> {
        let mut pieces = Vec::with_capacity(named.len());
        for (name, file) in named {
            let info = files[file].info(&name)?;
            let all = info.shape.first().copied().unwrap_or(1);
            let rows_name = RowsName::parse(&name).filter(|_| !info.shape.is_empty());
            let RowsName { tensor, rows, all } = rows_name.unwrap_or(RowsName { tensor: name, rows: 0..all, all });
            pieces.push((tensor, all, FileRows { file, rows, info: info.clone() }));
        }
        pieces.sort_by(|(tensor, _, piece), (other_tensor, _, other)| {
            (tensor, piece.rows.start, piece.rows.end).cmp(&(other_tensor, other.rows.start, other.rows.end))
        });
        let mut tensors: BTreeMap<String, StoredTensor> = BTreeMap::new();
        for (name, all, FileRows { file, rows, info }) in pieces {
            let path = &files[file].path;
            let stored = tensors.entry(name.clone()).or_insert_with(|| {
                let whole = info.shape.iter().enumerate().map(|(dim, &size)| if dim == 0 { all } else { size });
                StoredTensor { dtype: info.dtype, shape: whole.collect(), pieces: Vec::new() }
            });
            let end = stored.end();
            if rows.start != end || rows.end < rows.start || all != stored.rows() {
                let expected = format!("{name} from row {end} of {}", stored.rows());
                return Err(Error::checkpoint(path, expected, format!("the rows {rows:?} of {all}")));
            }
            let columns = stored.shape.get(1..);
            let has_rows = info.shape.first().is_none_or(|&count| count == rows.len());
            if !has_rows || info.shape.get(1..) != columns || info.dtype != stored.dtype {
                let (columns, dtype) = (columns.unwrap_or_default(), stored.dtype);
                let expected = format!("the rows {rows:?} of {name}, with columns {columns:?}, in {dtype}");
                return Err(Error::checkpoint(path, expected, format!("{:?} in {}", info.shape, info.dtype)));
            }
            stored.pieces.push(FileRows { file, rows, info });
        }
        match tensors.iter().find(|(_, stored)| stored.end() != stored.rows()) {
            None => Ok(ShardedCheckpoint { path: path.to_owned(), files, tensors }),
            Some((name, stored)) => {
                let expected = format!("{} rows of {name}", stored.rows());
                Err(Error::checkpoint(path, expected, format!("the first {}", stored.end())))
            }
        }
    }

    /// Returns the names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the shape of a whole tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.stored(name)?.shape)
    }

    /// Reads some rows of a tensor, and no other bytes of it. The values are converted if they have another dtype.
    ///
    /// # Shapes
    ///
    /// - returns `[rows, ..]` for a tensor `[vocab, ..]`, such as a decoder's weight `[vocab, columns]` or bias
    ///   `[vocab]`
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if there is no such tensor, or it does not have these rows; if it cannot be read; if its
    /// dtype is another one and not both are floats, or candle does not compute with it.
    pub fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name)?;
        let Some(&count) = stored.shape.first() else {
            return Err(Error::checkpoint(&self.path, format!("{name} with rows"), "a scalar"));
        };
        if rows.start > rows.end || rows.end > count {
            return Err(Error::checkpoint(
                &self.path,
                format!("rows among the {count} of {name}"),
                format!("{rows:?}"),
            ));
        }
        self.read_tensor(name, stored, rows, dtype, device)
    }

    /// Reads a whole tensor, such as one that all ranks have. The values are converted if they have another dtype.
    ///
    /// # Shapes
    ///
    /// - returns the [`shape`](Self::shape) of the tensor
    ///
    /// # Errors
    ///
    /// The errors of [`load_rows`](Self::load_rows).
    pub fn load(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name)?;
        self.read_tensor(name, stored, 0..stored.rows(), dtype, device)
    }

    /// Returns all tensors, by name.
    pub(super) fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// Reads the bytes of some rows of a tensor, and hands them to `take` block by block.
    pub(super) fn read_blocks(
        &self,
        stored: &StoredTensor,
        rows: Range<usize>,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        for FileRows { file, rows: file_rows, info } in &stored.pieces {
            let (start, end) = (rows.start.max(file_rows.start), rows.end.min(file_rows.end));
            if start < end {
                let bytes = info.data_offsets.1 - info.data_offsets.0;
                // If the rows of a dtype are not whole bytes, only a merge reads them, which reads all rows.
                let byte_of = |row: usize| {
                    if row == file_rows.end {
                        bytes
                    } else {
                        bytes / file_rows.len() * (row - file_rows.start)
                    }
                };
                self.files[*file].read_blocks(info, byte_of(start)..byte_of(end), &mut take)?;
            }
        }
        Ok(())
    }

    /// Reads some rows of a tensor in this dtype.
    fn read_tensor(
        &self,
        name: &str,
        stored: &StoredTensor,
        rows: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let unreadable = || Error::checkpoint(&self.path, format!("{name} in {}", dtype.as_str()), stored.dtype);
        readable_dtype(stored.dtype, dtype).ok_or_else(unreadable)?;
        let mut shape = stored.shape.clone();
        if let Some(count) = shape.first_mut() {
            *count = rows.len();
        }
        let mut bytes = Vec::with_capacity(tensor_bytes(stored.dtype, &shape).ok_or_else(unreadable)?);
        self.read_blocks(stored, rows, |block| {
            bytes.extend_from_slice(block);
            Ok(())
        })?;
        tensor_from_bytes(bytes, stored.dtype, &shape, dtype, device)?.ok_or_else(unreadable)
    }

    /// Returns the tensor of this name.
    fn stored(&self, name: &str) -> Result<&StoredTensor> {
        self.tensors.get(name).ok_or_else(|| Error::checkpoint(&self.path, format!("a tensor {name}"), "none"))
    }
}
