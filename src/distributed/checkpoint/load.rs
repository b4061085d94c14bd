//! Reads rows of tensors, or whole ones, from a checkpoint of one file or of several.

use std::collections::btree_map::Entry;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::TensorInfo;
use safetensors::Dtype;

use super::index::{is_index, Index, RowsName};
use super::tensor_file::{folder, tensor_bytes, TensorFile};
use crate::error::{Error, Result};

/// A checkpoint of safetensors files, of which a rank reads its own rows: a plain file, the files of an index in
/// Hugging Face's form, or what [`save_sharded`](crate::save_sharded) has written, for any number of ranks. The rows of
/// a tensor that several files hold are one tensor again.
///
/// # Examples
///
/// ```
/// use std::collections::HashMap;
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::ShardedCheckpoint;
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

/// Where the rows of a tensor are.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// In the order of the rows. A tensor that is whole is one.
    pieces: Vec<Piece>,
}

/// Consecutive rows of a tensor in one file.
#[derive(Debug)]
struct Piece {
    file: usize,
    info: TensorInfo,
    /// None of a tensor that is whole.
    rows: Option<Range<usize>>,
}

impl ShardedCheckpoint {
    /// Opens a `.safetensors` file, or the files that a `.safetensors.index.json` names, and reads their headers.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file is missing or not what its header says, the index names a tensor that its file
    /// does not hold, or the rows of a tensor overlap, have a gap or differ in dtype or columns.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if is_index(path) {
            return Self::of_index(path);
        }
        let file = TensorFile::open(path)?;
        let named = file.names().into_iter().map(|name| (name, 0)).collect();
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
        let mut pieces: BTreeMap<String, Vec<(Piece, Option<usize>)>> = BTreeMap::new();
        for (name, file) in named {
            let info = files[file].info(&name)?.clone();
            let (tensor, rows, all) = match RowsName::parse(&name) {
                Some(name) => (name.tensor, Some(name.rows), Some(name.all)),
                None => (name, None, None),
            };
            pieces.entry(tensor).or_default().push((Piece { file, info, rows }, all));
        }
        let mut tensors = BTreeMap::new();
        for (name, pieces) in pieces {
            let stored = joined(path, &files, &name, pieces)?;
            tensors.insert(name, stored);
        }
        Ok(ShardedCheckpoint { path: path.to_owned(), files, tensors })
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
    /// values are not floats and of another dtype, or of one that candle does not have.
    pub fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name)?;
        let Some((&all, columns)) = stored.shape.split_first() else {
            return Err(Error::checkpoint(&self.path, format!("{name} with rows"), "a scalar"));
        };
        if rows.start > rows.end || rows.end > all {
            return Err(Error::checkpoint(&self.path, format!("rows among the {all} of {name}"), format!("{rows:?}")));
        }
        let shape: Vec<usize> = std::iter::once(rows.len()).chain(columns.iter().copied()).collect();
        self.tensor(name, stored, Some(rows), &shape, dtype, device)
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
        self.tensor(name, stored, None, &stored.shape, dtype, device)
    }

    /// All tensors, by name.
    pub(super) fn tensors(&self) -> &BTreeMap<String, Stored> {
        &self.tensors
    }

    /// Hands over the bytes of some rows of a tensor, or of all, block by block.
    pub(super) fn read(
        &self,
        stored: &Stored,
        rows: Option<&Range<usize>>,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        for piece in &stored.pieces {
            let bytes = match rows {
                None => Some(0..piece.info.data_offsets.1 - piece.info.data_offsets.0),
                Some(rows) => self.bytes_within(piece, rows)?,
            };
            if let Some(bytes) = bytes {
                self.files[piece.file].read(&piece.info, bytes, &mut take)?;
            }
        }
        Ok(())
    }

    /// The bytes of a piece that are among these rows of the tensor.
    fn bytes_within(&self, piece: &Piece, rows: &Range<usize>) -> Result<Option<Range<usize>>> {
        let TensorInfo { dtype, shape, .. } = &piece.info;
        let own = piece.rows.clone().unwrap_or(0..shape.first().copied().unwrap_or(1));
        let (start, end) = (rows.start.max(own.start), rows.end.min(own.end));
        if start >= end {
            return Ok(None);
        }
        let whole_bytes = || {
            let file = &self.files[piece.file].path;
            Error::checkpoint(file, "rows of whole bytes", format!("rows of {:?} in {dtype}", &shape[1..]))
        };
        let row = tensor_bytes(*dtype, &shape[1..]).ok_or_else(whole_bytes)?;
        Ok(Some((start - own.start) * row..(end - own.start) * row))
    }

    fn tensor(
        &self,
        name: &str,
        stored: &Stored,
        rows: Option<Range<usize>>,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let other = || Error::checkpoint(&self.path, format!("{name} in {}", dtype.as_str()), stored.dtype);
        let of_file = DType::try_from(stored.dtype).map_err(|_| other())?;
        if of_file != dtype && !(of_file.is_float() && dtype.is_float()) {
            return Err(other());
        }
        let mut bytes = Vec::with_capacity(tensor_bytes(stored.dtype, shape).ok_or_else(other)?);
        self.read(stored, rows.as_ref(), |block| {
            bytes.extend_from_slice(block);
            Ok(())
        })?;
        Ok(Tensor::from_raw_buffer(&bytes, of_file, shape, device)?.to_dtype(dtype)?)
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        self.tensors.get(name).ok_or_else(|| Error::checkpoint(&self.path, format!("a tensor {name}"), "none"))
    }
}

/// A tensor of pieces, each with the number of rows that its name gives the tensor.
fn joined(path: &Path, files: &[TensorFile], name: &str, mut pieces: Vec<(Piece, Option<usize>)>) -> Result<Stored> {
    pieces.sort_by_key(|(piece, _)| piece.rows.as_ref().map_or((0, 0), |rows| (rows.start, rows.end)));
    let Some((first, all)) = pieces.first().map(|(first, all)| (&first.info, *all)) else {
        return Err(Error::checkpoint(path, format!("a tensor {name}"), "none"));
    };
    if pieces.len() > 1 && pieces.iter().any(|(piece, _)| piece.rows.is_none()) {
        return Err(Error::checkpoint(path, format!("{name} whole or in rows"), "both"));
    }
    let (dtype, mut shape) = (first.dtype, first.shape.clone());
    let mut end = 0;
    for (piece, of_piece) in &pieces {
        let file = &files[piece.file].path;
        let Some(rows) = &piece.rows else { continue };
        let TensorInfo { dtype: own_dtype, shape: own, .. } = &piece.info;
        if rows.start != end || rows.end < rows.start || *of_piece != all {
            let got = format!("the rows {rows:?} of {}", of_piece.unwrap_or_default());
            return Err(Error::checkpoint(file, format!("{name} from row {end} of {}", all.unwrap_or_default()), got));
        }
        if own.first() != Some(&rows.len()) || own.get(1..) != shape.get(1..) || *own_dtype != dtype {
            let columns = shape.get(1..).unwrap_or_default();
            let expected = format!("the rows {rows:?} of {name}, with columns {columns:?}, in {dtype}");
            return Err(Error::checkpoint(file, expected, format!("{own:?} in {own_dtype}")));
        }
        end = rows.end;
    }
    match all {
        None => {}
        Some(all) if end == all => shape[0] = all,
        Some(all) => return Err(Error::checkpoint(path, format!("{all} rows of {name}"), format!("the first {end}"))),
    }
    Ok(Stored { dtype, shape, pieces: pieces.into_iter().map(|(piece, _)| piece).collect() })
}
