//! The index of a checkpoint of several files, in Hugging Face's form, and the names of the files and rows of ranks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use serde_json::{json, Value};

use crate::error::{Error, Result};
use crate::tensors::tensor_file::{folder, recognize_format, PARTIAL_ENDING};

/// The ending of an index's name.
const INDEX_ENDING: &str = ".safetensors.index.json";

/// The key of the metadata by which an index says that [`save_sharded`](super::save_sharded) has written it.
const SAVE_KEY: &str = "mos_head_save";

/// The limit of numbers of saves: JSON and the exchange of ranks represent smaller ones exactly.
const MAX_SAVES: u64 = 1 << 53;

/// An index, which says which file holds which tensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// The number of the save that has written it, from 1 on; `None` if another program has.
    pub(super) save: Option<u64>,
    /// The file of each tensor, by the tensor's name.
    pub(super) files: BTreeMap<String, String>,
}

impl Index {
    /// Reads an index. Its files must be in its folder.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let expected = "an index of safetensors files";
        let bytes = std::fs::read(path).map_err(|error| Error::checkpoint(path, expected, error))?;
        let index: Value = serde_json::from_slice(&bytes).map_err(|error| match recognize_format(&bytes) {
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
        let save = index.get("metadata").and_then(|metadata| metadata.get(SAVE_KEY)?.as_u64());
        Ok(Index { save: save.filter(|&save| save < MAX_SAVES), files })
    }

    /// Returns the index as JSON.
    pub(super) fn to_json(&self, total_bytes: usize) -> String {
        let mut metadata = json!({ "total_size": total_bytes });
        if let Some(save) = self.save {
            metadata[SAVE_KEY] = save.into();
        }
        let index = json!({ "metadata": metadata, "weight_map": self.files });
        format!("{index:#}\n")
    }
}

/// Returns whether a path leads to a file within the folder that it starts from.
fn is_within(path: &Path) -> bool {
    path.file_name().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Returns whether a path names an index.
pub(super) fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// The names of the files that a save writes: `{stem}.{save}-{rank + 1}-of-{ranks}.safetensors`, beside the index
/// `{stem}.safetensors.index.json`.
#[derive(Clone, Debug)]
pub(super) struct SaveNames {
    stem: String,
    /// The path of the index.
    index: PathBuf,
}

impl SaveNames {
    /// Makes the names for an index at this path.
    pub(super) fn new(index: &Path) -> Result<Self> {
        let name = index.file_name().and_then(|name| name.to_str());
        match name.and_then(|name| name.strip_suffix(INDEX_ENDING)).filter(|stem| !stem.is_empty()) {
            Some(stem) => Ok(SaveNames { stem: stem.to_owned(), index: index.to_owned() }),
            None => Err(Error::checkpoint(index, format!("a name that ends in {INDEX_ENDING}"), "another")),
        }
    }

    /// Returns the beginning of all names.
    pub(super) fn stem(&self) -> &str {
        &self.stem
    }

    /// Returns the name of a rank's file.
    pub(super) fn file_name(&self, save: u64, rank: usize, ranks: usize) -> String {
        format!("{}.{save}-{:05}-of-{ranks:05}.safetensors", self.stem, rank + 1)
    }

    /// Returns the path of a file beside the index.
    pub(super) fn path(&self, file_name: &str) -> PathBuf {
        folder(&self.index).join(file_name)
    }

    /// Reads the number of the previous save, which is 0 if there is none. An index of another program is an error,
    /// since a save does not replace its files.
    pub(super) fn previous_save(&self) -> Result<u64> {
        if !self.index.try_exists().map_err(|error| Error::checkpoint(&self.index, "an index, or none", error))? {
            return Ok(0);
        }
        let expected = format!("no index, or one that save_sharded has written, with {SAVE_KEY} in its metadata");
        let save = Index::read(&self.index)?.save;
        save.ok_or_else(|| Error::checkpoint(&self.index, expected, "another index"))
    }

    /// Removes the files of other saves, such as the previous one, and the leftovers of interrupted saves. A file that
    /// cannot be removed does no harm.
    pub(super) fn remove_others(&self, save: u64, ranks: usize) {
        for entry in std::fs::read_dir(folder(&self.index)).into_iter().flatten().flatten() {
            let save_and_ranks = entry.file_name().to_str().and_then(|name| self.parse(name));
            if save_and_ranks.is_some_and(|other| other != (save, ranks)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Reads the save and the number of ranks from a name that [`SaveNames::file_name`] gives, or from its temporary
    /// name.
    fn parse(&self, name: &str) -> Option<(u64, usize)> {
        let name = name.strip_suffix(PARTIAL_ENDING).unwrap_or(name);
        let numbers = name.strip_prefix(&self.stem)?.strip_prefix('.')?.strip_suffix(".safetensors")?;
        let (save, rank_and_ranks) = numbers.split_once('-')?;
        let (rank, ranks) = rank_and_ranks.split_once("-of-")?;
        let (save, rank, ranks) = (save.parse().ok()?, rank.parse::<usize>().ok()?, ranks.parse().ok()?);
        // A name with another spelling of the numbers is another name.
        (self.file_name(save, rank.checked_sub(1)?, ranks) == name).then_some((save, ranks))
    }
}

/// The name of some rows of a tensor in a file: `{tensor}.rows.{start}-{end}-of-{all}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowsName {
    pub(super) tensor: String,
    pub(super) rows: Range<usize>,
    /// The number of all rows of the tensor.
    pub(super) all: usize,
}

impl RowsName {
    /// Reads such a name, or returns `None` for the name of a whole tensor.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (tensor, rows) = name.rsplit_once(".rows.")?;
        let (ends, all) = rows.split_once("-of-")?;
        let (start, end) = ends.split_once('-')?;
        let rows = start.parse().ok()?..end.parse().ok()?;
        let parsed = RowsName { tensor: tensor.to_owned(), rows, all: all.parse().ok()? };
        // A name with another spelling of the numbers is another name.
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
