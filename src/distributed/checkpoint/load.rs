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
use crate::tensors::tensor_file::{convertible, folder, tensor_bytes, tensor_of, TensorFile};

/// A checkpoint of safetensors files, of which a rank reads its own rows: a plain file, the files of an index in
/// Hugging Face's form, or what [`save_sharded`](crate::distributed::save_sharded) has written, for any number of
/// ranks. The rows of a tensor that several files hold are one tensor again. No method waits for other ranks.
///
/// # Examples
///
/// A rank's head, from its rows of a model of Hugging Face's, whose output layer is `lm_head.weight` without a bias. (What a
/// head of this crate has saved, its constructor reads by the same `vb`: `SoftmaxHead::new(&config, vb)`.)
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
    tensors: BTreeMap<String, Stored>,
}

/// A tensor, and where its rows are.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// In the order of the rows, without gaps.
    pieces: Vec<FileRows>,
}

/// Consecutive rows of a tensor in one file: all of them if the tensor is whole.
#[derive(Debug)]
struct FileRows {
    file: usize,
    rows: Range<usize>,
    info: TensorInfo,
}

impl Stored {
    /// A scalar is one row.
    pub(super) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// The first row that no piece has.
    fn end(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.rows.end)
    }
}

impl ShardedCheckpoint {
    /// Opens a `.safetensors` file, or the files that a `.safetensors.index.json` names, and reads their headers.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file is missing or not what its header says (a pickle and a pointer of Git LFS are told by
    /// their first bytes), the index names a tensor that its file
    /// does not hold, or the rows of a tensor overlap, have a gap or differ in dtype or columns.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if is_index(path) {
            return Self::of_index(path);
        }
        let file = TensorFile::open(path)?;
        let named = file.header.offset_keys().into_iter().map(|name| (name, 0)).collect();
        Self::of_files(path, vec![file], named)
    }

    /// Opens the files that an index of any name lists.
    pub(super) fn of_index(path: &Path) -> Result<Self> {
        let index = Index::read(path)?;
        let mut places = BTreeMap::new();
        let mut files = Vec::new();
        let mut named = Vec::with_capacity(index.files.len());
        for (name, file) in index.files {
            let place = match places.entry(file) {
                Entry::Occupied(place) => *place.get(),
                Entry::Vacant(vacant) => {
                    files.push(TensorFile::open(&folder(path).join(vacant.key()))?);
                    *vacant.insert(files.len() - 1)
                }
            };
            named.push((name, place));
        }
        Self::of_files(path, files, named)
    }

    /// Joins the rows of tensors that files hold by these names.
    fn of_files(path: &Path, files: Vec<TensorFile>, named: Vec<(String, usize)>) -> Result<Self> {
        let mut pieces = Vec::with_capacity(named.len());
        for (name, file) in named {
            let info = files[file].info(&name)?;
            let all = info.shape.first().copied().unwrap_or(1);
            let of_tensor = RowsName::parse(&name).filter(|_| !info.shape.is_empty());
            let RowsName { tensor, rows, all } = of_tensor.unwrap_or(RowsName { tensor: name, rows: 0..all, all });
            pieces.push((tensor, all, FileRows { file, rows, info: info.clone() }));
        }
        pieces.sort_by(|(a, _, of_a), (b, _, of_b)| {
            (a, of_a.rows.start, of_a.rows.end).cmp(&(b, of_b.rows.start, of_b.rows.end))
        });
        let mut tensors: BTreeMap<String, Stored> = BTreeMap::new();
        for (name, all, FileRows { file, rows, info }) in pieces {
            let place = &files[file].path;
            let stored = tensors.entry(name.clone()).or_insert_with(|| {
                let whole = info.shape.iter().enumerate().map(|(dim, &size)| if dim == 0 { all } else { size });
                Stored { dtype: info.dtype, shape: whole.collect(), pieces: Vec::new() }
            });
            let end = stored.end();
            if rows.start != end || rows.end < rows.start || all != stored.rows() {
                let expected = format!("{name} from row {end} of {}", stored.rows());
                return Err(Error::checkpoint(place, expected, format!("the rows {rows:?} of {all}")));
            }
            let columns = stored.shape.get(1..);
            let fits = info.shape.first().is_none_or(|&own| own == rows.len());
            if !fits || info.shape.get(1..) != columns || info.dtype != stored.dtype {
                let (columns, dtype) = (columns.unwrap_or_default(), stored.dtype);
                let expected = format!("the rows {rows:?} of {name}, with columns {columns:?}, in {dtype}");
                return Err(Error::checkpoint(place, expected, format!("{:?} in {}", info.shape, info.dtype)));
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

    /// The names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a whole tensor.
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
    /// - result: `[rows, ..]`, of a tensor `[vocab, ..]`: a decoder's weight `[vocab, columns]`, or its bias `[vocab]`
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if there is no such tensor, or it does not have such rows; if it cannot be read; if its
    /// values are not floats and of another dtype, or of one that candle does not compute with.
    pub fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name)?;
        let mut shape = stored.shape.clone();
        let Some(first) = shape.first_mut() else {
            return Err(Error::checkpoint(&self.path, format!("{name} with rows"), "a scalar"));
        };
        if rows.start > rows.end || rows.end > *first {
            return Err(Error::checkpoint(
                &self.path,
                format!("rows among the {first} of {name}"),
                format!("{rows:?}"),
            ));
        }
        *first = rows.len();
        self.tensor(name, stored, rows, &shape, dtype, device)
    }

    /// Reads a whole tensor, such as one that all ranks have. The values are converted if they have another dtype.
    ///
    /// # Shapes
    ///
    /// - result: as [`shape`](Self::shape) says
    ///
    /// # Errors
    ///
    /// As for [`load_rows`](Self::load_rows).
    pub fn load(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name)?;
        self.tensor(name, stored, 0..stored.rows(), &stored.shape, dtype, device)
    }

    /// All tensors, by name.
    pub(super) fn tensors(&self) -> &BTreeMap<String, Stored> {
        &self.tensors
    }

    /// Hands over the bytes of some rows of a tensor, block by block.
    pub(super) fn read(
        &self,
        stored: &Stored,
        rows: Range<usize>,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        for FileRows { file, rows: own, info } in &stored.pieces {
            let (start, end) = (rows.start.max(own.start), rows.end.min(own.end));
            if start < end {
                let bytes = info.data_offsets.1 - info.data_offsets.0;
                // All bytes of a dtype whose rows are not whole bytes, of which only a merge reads, and all rows.
                let up_to = |row: usize| if row == own.end { bytes } else { bytes / own.len() * (row - own.start) };
                self.files[*file].read(info, up_to(start)..up_to(end), &mut take)?;
            }
        }
        Ok(())
    }

    fn tensor(
        &self,
        name: &str,
        stored: &Stored,
        rows: Range<usize>,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let other = || Error::checkpoint(&self.path, format!("{name} in {}", dtype.as_str()), stored.dtype);
        convertible(stored.dtype, dtype).ok_or_else(other)?;
        let mut bytes = Vec::with_capacity(tensor_bytes(stored.dtype, shape).ok_or_else(other)?);
        self.read(stored, rows, |block| {
            bytes.extend_from_slice(block);
            Ok(())
        })?;
        tensor_of(bytes, (stored.dtype, shape), dtype, device)?.ok_or_else(other)
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        self.tensors.get(name).ok_or_else(|| Error::checkpoint(&self.path, format!("a tensor {name}"), "none"))
    }
}
