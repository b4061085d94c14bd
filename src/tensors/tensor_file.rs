//! One safetensors file: its header is read at once, the bytes of its tensors when they are asked for; and it is
//! written under a temporary name first.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::Dtype;

use crate::error::{Error, Result};

/// The bytes before the header, which say how long it is.
const LENGTH_BYTES: usize = 8;

/// The longest header that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;

/// A safetensors file that is open. Reads seek and copy: a memory map would be `unsafe`, which only `backend/` may use.
#[derive(Debug)]
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) header: Metadata,
    reader: Mutex<File>,
    /// The place of the first tensor.
    data_start: u64,
}

impl TensorFile {
    /// Reads the header, and checks that the tensors that it lists fill the file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut reader = File::open(path).map_err(|error| Error::checkpoint(path, "a file that can be read", error))?;
        let unreadable = |error| Error::checkpoint(path, "a header of safetensors", error);
        let file_bytes = reader.seek(SeekFrom::End(0)).map_err(unreadable)?;
        reader.rewind().map_err(unreadable)?;
        let mut first = Vec::new();
        Read::by_ref(&mut reader).take(FIRST_BYTES).read_to_end(&mut first).map_err(unreadable)?;
        reader.rewind().map_err(unreadable)?;
        // A header that is none may be the bytes of another format.
        let no_header = |expected: String, got: String| match other_format(&first) {
            Some(format) => Error::checkpoint(path, "a safetensors file", format),
            None => Error::checkpoint(path, expected, got),
        };
        let mut length = [0; LENGTH_BYTES];
        let too_short = |error: std::io::Error| no_header("a header of safetensors".into(), error.to_string());
        reader.read_exact(&mut length).map_err(too_short)?;
        let header_bytes = u64::from_le_bytes(length);
        let longest = LONGEST_HEADER.min(file_bytes.saturating_sub(LENGTH_BYTES as u64));
        if header_bytes > longest {
            let got = format!("a header of {header_bytes} bytes");
            return Err(no_header(format!("a header of at most {longest} bytes"), got));
        }
        let mut header = vec![0; header_bytes as usize];
        reader.read_exact(&mut header).map_err(unreadable)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| no_header("a header of safetensors".into(), error.to_string()))?;
        let data_start = LENGTH_BYTES as u64 + header_bytes;
        match data_start.checked_add(header.data_len() as u64) {
            Some(expected) if expected == file_bytes => {
                Ok(TensorFile { path: path.to_owned(), header, reader: Mutex::new(reader), data_start })
            }
            _ => {
                let expected = format!("{} bytes of tensors, as its header says", header.data_len());
                Err(Error::checkpoint(path, expected, format!("{} bytes", file_bytes - data_start)))
            }
        }
    }

    /// What its header says of a tensor.
    pub(crate) fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.header.info(name).ok_or_else(|| Error::checkpoint(&self.path, format!("a tensor {name}"), "none"))
    }

    /// Hands over some bytes of a tensor, which lie within it, block by block.
    pub(crate) fn read(
        &self,
        tensor: &TensorInfo,
        bytes: Range<usize>,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let start = self.data_start + (tensor.data_offsets.0 + bytes.start) as u64;
        let unreadable = |error| {
            let expected = format!("{} bytes from byte {start} on", bytes.len());
            Error::checkpoint(&self.path, expected, error)
        };
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.seek(SeekFrom::Start(start)).map_err(unreadable)?;
        let mut block = vec![0; bytes.len().min(BLOCK_BYTES)];
        let mut left = bytes.len();
        while left > 0 {
            let part = left.min(block.len());
            reader.read_exact(&mut block[..part]).map_err(unreadable)?;
            take(&block[..part])?;
            left -= part;
        }
        Ok(())
    }
}

/// The bytes by which a format is known.
const FIRST_BYTES: u64 = 64;

/// The format of a file that begins with these bytes, if it is one that is found where safetensors are expected.
pub(crate) fn other_format(first: &[u8]) -> Option<&'static str> {
    let begins = |with: &[u8]| first.starts_with(with);
    if begins(b"version https://git-lfs") {
        return Some("a pointer of Git LFS, whose file has not been fetched (git lfs pull fetches it)");
    }
    // PyTorch writes a zip archive with a pickle in it, and earlier a pickle alone, by its second protocol.
    if begins(b"PK\x03\x04") {
        return Some("a zip archive, such as a pickle of PyTorch (.bin, .pt)");
    }
    if matches!(first, [0x80, 2..=5, ..]) {
        return Some("a pickle, such as PyTorch's (.bin, .pt)");
    }
    if begins(b"GGUF") {
        return Some("a GGUF file");
    }
    None
}

/// The bytes that are copied at once.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;

/// A tensor that a file is to hold, and where its values are.
#[derive(Debug)]
pub(crate) struct TensorEntry<T> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: T,
}

/// How the name of a file ends until the file is in its place.
pub(crate) const PARTIAL: &str = ".partial";

/// A file that is not yet in its place: it disappears if it never gets there.
#[derive(Debug)]
pub(crate) struct Unplaced {
    temporary: PathBuf,
    place: PathBuf,
}

impl Unplaced {
    /// Writes and syncs a file beside the place that it is for.
    pub(crate) fn write(place: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<Self> {
        let mut temporary = place.as_os_str().to_owned();
        temporary.push(PARTIAL);
        let unplaced = Unplaced { temporary: temporary.into(), place: place.to_owned() };
        let unwritable = |error| Error::checkpoint(place, "a file that can be written", error);
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(&unplaced.temporary).map_err(unwritable)?);
        write(&mut writer)?;
        let file = writer.into_inner().map_err(|error| unwritable(error.into_error()))?;
        file.sync_all().map_err(unwritable)?;
        Ok(unplaced)
    }

    /// Writes a safetensors file of these tensors, whose bytes `write` writes one tensor after the other.
    pub(crate) fn write_tensors<T>(
        place: &Path,
        mut tensors: Vec<TensorEntry<T>>,
        mut write: impl FnMut(&T, &mut BufWriter<File>) -> Result<()>,
    ) -> Result<Self> {
        // The order of the format: the widest dtype first, so that all tensors are aligned.
        tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let header = header_of(place, &tensors)?;
        Self::write(place, |writer| {
            let length = (header.len() as u64).to_le_bytes();
            writer.write_all(&length).and_then(|()| writer.write_all(&header)).map_err(|e| unwritten(place, e))?;
            tensors.iter().try_for_each(|tensor| write(&tensor.values, writer))
        })
    }

    /// Where the file is until it is in its place.
    #[cfg(feature = "distributed")]
    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// The place that the file is for.
    #[cfg(feature = "distributed")]
    pub(crate) fn destination(&self) -> &Path {
        &self.place
    }

    /// Renames the file, which replaces one that has its name.
    pub(crate) fn place(self) -> Result<()> {
        let unplaced = |error| Error::checkpoint(&self.place, "a place for a file", error);
        std::fs::rename(&self.temporary, &self.place).map_err(unplaced)?;
        sync_folder(&self.place).map_err(unplaced)
    }
}

impl Drop for Unplaced {
    fn drop(&mut self) {
        // A file in its place has no temporary name any more.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// Bytes of a file that could not be written.
pub(crate) fn unwritten(file: &Path, error: impl ToString) -> Error {
    Error::checkpoint(file, "tensors that can be written", error)
}

/// Writes the values of a tensor, some rows at a time.
pub(crate) fn write_values(tensor: &Tensor, writer: &mut impl Write) -> candle_core::Result<()> {
    let Some(&rows) = tensor.dims().first() else { return tensor.write_bytes(writer) };
    let row_bytes = tensor.elem_count() / rows.max(1) * tensor.dtype().size_in_bytes();
    let block = BLOCK_BYTES.checked_div(row_bytes).unwrap_or(rows).max(1);
    for start in (0..rows).step_by(block) {
        tensor.narrow(0, start, block.min(rows - start))?.write_bytes(writer)?;
    }
    Ok(())
}

/// Makes a tensor of bytes that a file holds, in another dtype of floats if it is asked for; `None` if candle does not
/// convert the dtype.
pub(crate) fn tensor_of(
    bytes: Vec<u8>,
    (of_file, shape): (Dtype, &[usize]),
    dtype: DType,
    device: &Device,
) -> Result<Option<Tensor>> {
    let Some(of_file) = convertible(of_file, dtype) else { return Ok(None) };
    let tensor = Tensor::from_raw_buffer(&bytes, of_file, shape, device)?;
    drop(bytes);
    Ok(Some(tensor.to_dtype(dtype)?))
}

/// candle's dtype of values in a file that can be read as `dtype`.
pub(crate) fn convertible(of_file: Dtype, dtype: DType) -> Option<DType> {
    // candle holds values of fewer than 8 bits, but does not compute with them.
    let of_file = DType::try_from(of_file).ok().filter(|of_file| of_file.size_in_bytes() > 0)?;
    (of_file == dtype || of_file.is_float() && dtype.is_float()).then_some(of_file)
}

/// The header of a file that holds these tensors in this order.
fn header_of<T>(place: &Path, tensors: &[TensorEntry<T>]) -> Result<Vec<u8>> {
    let too_large = || Error::checkpoint(place, "tensors of fewer than 2^64 bytes", "more");
    let mut end = 0usize;
    let mut listed = Vec::with_capacity(tensors.len());
    for TensorEntry { name, dtype, shape, .. } in tensors {
        let start = end;
        end = tensor_bytes(*dtype, shape).and_then(|bytes| end.checked_add(bytes)).ok_or_else(too_large)?;
        listed.push((name.clone(), TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (start, end) }));
    }
    // PyTorch's loaders ask for this entry.
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let header = Metadata::new(Some(format), listed).map_err(|error| unwritten(place, error))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| unwritten(place, error))?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
    if header.len() as u64 <= LONGEST_HEADER {
        Ok(header)
    } else {
        let expected = format!("names and shapes in {LONGEST_HEADER} bytes");
        Err(Error::checkpoint(place, expected, format!("{} bytes", header.len())))
    }
}

/// The bytes of a tensor, if they are a number, as are its strides: sizes beside a size of 0 may be of any magnitude.
pub(crate) fn tensor_bytes(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size.max(1)))?;
    let bits = if shape.contains(&0) { 0 } else { bits };
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Makes the names of a folder outlast a crash, where a system can.
fn sync_folder(file: &Path) -> std::io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    use std::io::ErrorKind::{InvalidInput, Unsupported};
    match File::open(folder(file))?.sync_all() {
        Err(error) if matches!(error.kind(), InvalidInput | Unsupported) => Ok(()),
        synced => synced,
    }
}

/// The folder of a file.
pub(crate) fn folder(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_no_program_reads_is_an_error() {
        let of_name = |bytes: usize| {
            let listed = TensorEntry { name: "a".repeat(bytes), dtype: Dtype::F32, shape: vec![2], values: () };
            header_of(Path::new("a.safetensors"), &[listed])
        };
        assert!(of_name(1).is_ok());
        let error = of_name(LONGEST_HEADER as usize).unwrap_err().to_string();
        assert!(error.starts_with("a.safetensors: expected names and shapes in 100000000 bytes"), "{error}");
    }
}
