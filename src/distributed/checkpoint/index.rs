//! The index of a checkpoint of several files, in Hugging Face's form, and the names of the files and rows of ranks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use serde_json::{json, Value};

use crate::error::{Error, Result};
use crate::tensors::tensor_file::{folder, other_format, PARTIAL};

/// How the name of an index ends.
const INDEX_ENDING: &str = ".safetensors.index.json";

/// The entry of the metadata that marks an index that [`save_sharded`](super::save_sharded) has written.
const SAVE: &str = "mos_head_save";

/// The number of saves that JSON and the exchange of ranks have exactly.
const MOST_SAVES: u64 = 1 << 53;

/// An index: which file holds which tensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Which save has written it, from 1 on; none if another program has.
    pub(super) save: Option<u64>,
    pub(super) files: BTreeMap<String, String>,
}

impl Index {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let expected = "an index of safetensors files";
        let bytes = std::fs::read(path).map_err(|error| Error::checkpoint(path, expected, error))?;
        let index: Value = serde_json::from_slice(&bytes).map_err(|error| match other_format(&bytes) {
            Some(format) => Error::checkpoint(path, expected, format),
            None => Error::checkpoint(path, expected, error),
        })?;
        let Some(Value::Object(map)) = index.get("weight_map") else {
            return Err(Error::checkpoint(path, "a weight_map of names and files", "none"));
        };
        let mut files = BTreeMap::new();
        for (name, file) in map {
            match file.as_str().filter(|file| is_within(Path::new(file))) {
                Some(file) => files.insert(name.clone(), file.to_owned()),
                None => return Err(Error::checkpoint(path, format!("a file in its folder for {name}"), file)),
            };
        }
        let save = index.get("metadata").and_then(|metadata| metadata.get(SAVE)?.as_u64());
        Ok(Index { save: save.filter(|&save| save < MOST_SAVES), files })
    }

    /// The JSON of the index.
    pub(super) fn to_json(&self, total_bytes: usize) -> String {
        let mut metadata = json!({ "total_size": total_bytes });
        if let Some(save) = self.save {
            metadata[SAVE] = save.into();
        }
        let index = json!({ "metadata": metadata, "weight_map": self.files });
        format!("{index:#}\n")
    }
}

/// Whether a path leads to a file of the folder that it starts from.
fn is_within(path: &Path) -> bool {
    path.file_name().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether a path names an index.
pub(super) fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// The files that a save writes: `{stem}.{save}-{rank + 1}-of-{ranks}.safetensors`, beside the index
/// `{stem}.safetensors.index.json`.
#[derive(Clone, Debug)]
pub(super) struct Names {
    stem: String,
    index: PathBuf,
}

impl Names {
    pub(super) fn new(index: &Path) -> Result<Self> {
        let name = index.file_name().and_then(|name| name.to_str());
        match name.and_then(|name| name.strip_suffix(INDEX_ENDING)).filter(|stem| !stem.is_empty()) {
            Some(stem) => Ok(Names { stem: stem.to_owned(), index: index.to_owned() }),
            None => Err(Error::checkpoint(index, format!("a name that ends in {INDEX_ENDING}"), "another")),
        }
    }

    pub(super) fn stem(&self) -> &str {
        &self.stem
    }

    pub(super) fn file_name(&self, save: u64, rank: usize, ranks: usize) -> String {
        format!("{}.{save}-{:05}-of-{ranks:05}.safetensors", self.stem, rank + 1)
    }

    pub(super) fn path(&self, file_name: &str) -> PathBuf {
        folder(&self.index).join(file_name)
    }

    /// The number of the save before: 0 if there is none. An index of another program is an error, since a save does not
    /// replace its files.
    pub(super) fn earlier(&self) -> Result<u64> {
        if !self.index.try_exists().map_err(|error| Error::checkpoint(&self.index, "an index, or none", error))? {
            return Ok(0);
        }
        let expected = format!("no index, or one that save_sharded has written, with {SAVE} in its metadata");
        let save = Index::read(&self.index)?.save;
        save.ok_or_else(|| Error::checkpoint(&self.index, expected, "another index"))
    }

    /// Removes the files of other saves, such as the one before, and what is left of interrupted ones. A file that cannot
    /// be removed is in no one's way.
    pub(super) fn remove_others(&self, save: u64, ranks: usize) {
        for entry in std::fs::read_dir(folder(&self.index)).into_iter().flatten().flatten() {
            let of_file = entry.file_name().to_str().and_then(|name| self.parse(name));
            if of_file.is_some_and(|of_file| of_file != (save, ranks)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// The save and the ranks of a name that [`Names::file_name`] gives, whether or not the file has been in its place.
    fn parse(&self, name: &str) -> Option<(u64, usize)> {
        let name = name.strip_suffix(PARTIAL).unwrap_or(name);
        let numbers = name.strip_prefix(&self.stem)?.strip_prefix('.')?.strip_suffix(".safetensors")?;
        let (save, of_ranks) = numbers.split_once('-')?;
        let (rank, ranks) = of_ranks.split_once("-of-")?;
        let (save, rank, ranks) = (save.parse().ok()?, rank.parse::<usize>().ok()?, ranks.parse().ok()?);
        // Other spellings of the numbers are other names.
        (self.file_name(save, rank.checked_sub(1)?, ranks) == name).then_some((save, ranks))
    }
}

/// Some rows of a tensor, which a file holds under a name of their own: `{tensor}.rows.{start}-{end}-of-{all}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowsName {
    pub(super) tensor: String,
    pub(super) rows: Range<usize>,
    pub(super) all: usize,
}

impl RowsName {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (tensor, rows) = name.rsplit_once(".rows.")?;
        let (ends, all) = rows.split_once("-of-")?;
        let (start, end) = ends.split_once('-')?;
        let rows = start.parse().ok()?..end.parse().ok()?;
        let parsed = RowsName { tensor: tensor.to_owned(), rows, all: all.parse().ok()? };
        // Other spellings of the numbers are other names.
        (parsed.to_string() == name).then_some(parsed)
    }
}

impl std::fmt::Display for RowsName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.rows.{}-{}-of-{}", self.tensor, self.rows.start, self.rows.end, self.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rows_are_read_as_they_are_written() {
        let name = RowsName { tensor: "a.rows.b".into(), rows: 3..70, all: 128_256 };
        assert_eq!(RowsName::parse(&name.to_string()), Some(name));
        for other in ["a", "a.rows.1-2", "a.rows.1-of-2", "a.rows.+1-2-of-3", "a.rows.1-2-of-99999999999999999999"] {
            assert_eq!(RowsName::parse(other), None);
        }
    }
}
