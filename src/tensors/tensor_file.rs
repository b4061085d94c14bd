//! One safetensors file. Its header is read when it is opened, the bytes of its tensors when they are asked for; a new
//! file is written under a temporary name first. Checkpoints of ranks and the files of low-rank adapters consist of
//! such files.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::Dtype;

use crate::error::{Error, Result};

/// The number of bytes before the header, which say how long it is.
const LENGTH_BYTES: usize = 8;

/// The number of bytes of the longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A safetensors file that is open. It is read by seeking and copying, because a memory map would be `unsafe`, which
/// only `backend/` may use.
#[derive(Debug)]
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) header: Metadata,
    reader: Mutex<File>,
    /// The offset of the first tensor's bytes in the file.
    data_start: u64,
}

impl TensorFile {
    /// Reads the header, and checks that the tensors that it lists fill the file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut reader = File::open(path).map_err(|error| Error::checkpoint(path, "a file that can be read", error))?;
        let unreadable = |error| Error::checkpoint(path, "a header of safetensors", error);
        let file_bytes = reader.seek(SeekFrom::End(0)).map_err(unreadable)?;
        reader.rewind().map_err(unreadable)?;
        let mut first_bytes = Vec::new();
        Read::by_ref(&mut reader).take(FIRST_BYTES).read_to_end(&mut first_bytes).map_err(unreadable)?;
        reader.rewind().map_err(unreadable)?;
        // Bytes that are no header may be those of another format.
        let no_header = |expected: String, got: String| match recognize_format(&first_bytes) {
            Some(format) => Error::checkpoint(path, "a safetensors file", format),
            None => Error::checkpoint(path, expected, got),
        };
        let mut length = [0; LENGTH_BYTES];
        let too_short = |error: std::io::Error| no_header("a header of safetensors".into(), error.to_string());
        reader.read_exact(&mut length).map_err(too_short)?;
        let header_bytes = u64::from_le_bytes(length);
        let longest = MAX_HEADER_BYTES.min(file_bytes.saturating_sub(LENGTH_BYTES as u64));
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

    /// Returns the entry of a tensor in the header.
    pub(crate) fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.header.info(name).ok_or_else(|| Error::checkpoint(&self.path, format!("a tensor {name}"), "none"))
    }

    /// Reads a range of a tensor's bytes, and hands them to `take` block by block.
    pub(crate) fn read_blocks(
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
        let mut remaining = bytes.len();
        while remaining > 0 {
            let n = remaining.min(block.len());
            reader.read_exact(&mut block[..n]).map_err(unreadable)?;
            take(&block[..n])?;
            remaining -= n;
        }
        Ok(())
    }
}

/// The number of bytes by which a format is recognized.
const FIRST_BYTES: u64 = 64;

/// Returns the name of the format of a file that begins with these bytes, if it is one of the formats that are found
/// where safetensors are expected.
pub(crate) fn recognize_format(first_bytes: &[u8]) -> Option<&'static str> {
    let begins = |with: &[u8]| first_bytes.starts_with(with);
    if begins(b"version https://git-lfs") {
        return Some("a pointer of Git LFS, whose file has not been fetched (git lfs pull fetches it)");
    }
    // PyTorch writes a zip archive with a pickle in it, and earlier a pickle alone, by its second protocol.
    if begins(b"PK\x03\x04") {
        return Some("a zip archive, such as a pickle of PyTorch (.bin, .pt)");
    }
    if matches!(first_bytes, [0x80, 2..=5, ..]) {
        return Some("a pickle, such as PyTorch's (.bin, .pt)");
    }
    if begins(b"GGUF") {
        return Some("a GGUF file");
    }
    None
}

/// The number of bytes that are copied at once.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;

/// A tensor that a new file will hold; `values` says where its bytes come from.
#[derive(Debug)]
pub(crate) struct TensorEntry<T> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: T,
}

/// The ending of a file's temporary name.
pub(crate) const PARTIAL_ENDING: &str = ".partial";

/// A file that is complete on the disk under a temporary name, and is removed unless it is put in its place.
#[derive(Debug)]
pub(crate) struct PendingFile {
    temporary: PathBuf,
    destination: PathBuf,
}

impl PendingFile {
    /// Writes and syncs a file under a temporary name beside its destination.
    pub(crate) fn write(destination: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<Self> {
        let mut temporary = destination.as_os_str().to_owned();
        temporary.push(PARTIAL_ENDING);
        let pending = PendingFile { temporary: temporary.into(), destination: destination.to_owned() };
        let unwritable = |error| Error::checkpoint(destination, "a file that can be written", error);
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(&pending.temporary).map_err(unwritable)?);
        write(&mut writer)?;
        let file = writer.into_inner().map_err(|error| unwritable(error.into_error()))?;
        file.sync_all().map_err(unwritable)?;
        Ok(pending)
    }

    /// Writes a safetensors file of these tensors; `write` is called for the bytes of one tensor after the other.
    pub(crate) fn write_tensors<T>(
        destination: &Path,
        mut tensors: Vec<TensorEntry<T>>,
        mut write: impl FnMut(&T, &mut BufWriter<File>) -> Result<()>,
    ) -> Result<Self> {
        // The format puts the widest dtype first, so that all tensors are aligned.
        tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let header = header_bytes(destination, &tensors)?;
        Self::write(destination, |writer| {
            let length = (header.len() as u64).to_le_bytes();
            writer
                .write_all(&length)
                .and_then(|()| writer.write_all(&header))
                .map_err(|e| write_error(destination, e))?;
            tensors.iter().try_for_each(|tensor| write(&tensor.values, writer))
        })
    }

    /// Returns the path of the file until it is in its place.
    #[cfg(feature = "distributed")]
    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Returns the path that the file will have in its place.
    #[cfg(feature = "distributed")]
    pub(crate) fn destination(&self) -> &Path {
        &self.destination
    }

    /// Puts the file in its place, where it replaces an older file.
    pub(crate) fn put_in_place(self) -> Result<()> {
        let unplaced = |error| Error::checkpoint(&self.destination, "a place for a file", error);
        std::fs::rename(&self.temporary, &self.destination).map_err(unplaced)?;
        sync_folder(&self.destination).map_err(unplaced)
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        // A file in its place has no temporary name any more.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// Makes the error of a file whose bytes could not be written.
pub(crate) fn write_error(file: &Path, error: impl ToString) -> Error {
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

/// Makes a tensor in `dtype` of bytes that a file stores in `stored_dtype`, or returns `None` if they cannot be read so
/// ([`readable_dtype`]).
pub(crate) fn tensor_from_bytes(
    bytes: Vec<u8>,
    stored_dtype: Dtype,
    shape: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<Option<Tensor>> {
    let Some(stored_dtype) = readable_dtype(stored_dtype, dtype) else { return Ok(None) };
    let tensor = Tensor::from_raw_buffer(&bytes, stored_dtype, shape, device)?;
    drop(bytes);
    Ok(Some(tensor.to_dtype(dtype)?))
}

/// Returns candle's name of a dtype in a file, if its values can be read as `dtype`: the two are the same, or both
/// floats.
pub(crate) fn readable_dtype(stored: Dtype, dtype: DType) -> Option<DType> {
    // candle holds values of fewer than 8 bits, but does not compute with them.
    let stored = DType::try_from(stored).ok().filter(|stored| stored.size_in_bytes() > 0)?;
    (stored == dtype || stored.is_float() && dtype.is_float()).then_some(stored)
}

/// Returns the header of a file that holds these tensors in this order.
fn header_bytes<T>(destination: &Path, tensors: &[TensorEntry<T>]) -> Result<Vec<u8>> {
    let too_large = || Error::checkpoint(destination, "tensors of fewer than 2^64 bytes", "more");
    let mut end = 0usize;
    let mut entries = Vec::with_capacity(tensors.len());
    for TensorEntry { name, dtype, shape, .. } in tensors {
        let start = end;
        end = tensor_bytes(*dtype, shape).and_then(|bytes| end.checked_add(bytes)).ok_or_else(too_large)?;
        entries.push((name.clone(), TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (start, end) }));
    }
    // PyTorch's loaders ask for this entry.
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let header = Metadata::new(Some(format), entries).map_err(|error| write_error(destination, error))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| write_error(destination, error))?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
    if header.len() as u64 <= MAX_HEADER_BYTES {
        Ok(header)
    } else {
        let expected = format!("names and shapes in {MAX_HEADER_BYTES} bytes");
        Err(Error::checkpoint(destination, expected, format!("{} bytes", header.len())))
    }
}

/// Returns the number of bytes of a tensor, or `None` if its bits do not fill whole bytes, or its strides overflow, as
/// they can beside a size of 0.
pub(crate) fn tensor_bytes(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size.max(1)))?;
    let bits = if shape.contains(&0) { 0 } else { bits };
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Syncs the folder of a file, so that the file's name outlasts a crash, where the system can do it.
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

/// Returns the folder of a file.
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
        let header_with_name = |bytes: usize| {
            let entry = TensorEntry { name: "a".repeat(bytes), dtype: Dtype::F32, shape: vec![2], values: () };
            header_bytes(Path::new("a.safetensors"), &[entry])
        };
        assert!(header_with_name(1).is_ok());
        let error = header_with_name(MAX_HEADER_BYTES as usize).unwrap_err().to_string();
        assert!(error.starts_with("a.safetensors: expected names and shapes in 100000000 bytes"), "{error}");
    }
}
