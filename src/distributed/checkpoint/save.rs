//! Saves a checkpoint, which all ranks do together: each rank writes its own rows, the first rank also the tensors that
//! all ranks have, and the index.

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::index::{Index, RowsName, SaveNames};
use super::load::ShardedCheckpoint;
use crate::backend::agreement::{first_other, Agreed, Call, WITHOUT_ERROR};
use crate::backend::collectives::Numbers;
use crate::backend::shard::VocabShard;
use crate::error::{Error, Result};
use crate::tensors::tensor_file::{tensor_bytes, write_error, write_values, PendingFile, TensorEntry};

/// Saves `rows`, each rank's own rows of tensors, and `replicated` tensors, which are the same on all ranks. Every rank
/// calls it with the same names and the same path of an index, `{stem}.safetensors.index.json`, in a folder that all
/// ranks see. [`ShardedCheckpoint`] reads it for any number of ranks.
///
/// Rank `r` of `P` writes its rows to `{stem}.{save}-{r + 1}-of-{P}.safetensors`, under the names
/// `{tensor}.rows.{start}-{end}-of-{vocab}`, where `save` counts the saves with this index; rank 0 also writes the
/// replicated tensors and the index. Until all files are complete on the disk, the index and the files of the previous
/// save remain; then the new index replaces the old one, and the files of other saves, interrupted ones included, are
/// removed. Whenever a save fails or is interrupted, the index is the old one or the new one, and its files are
/// complete.
///
/// The files hold only tensors. A head's [`HeadConfig`](crate::HeadConfig) has the rest of it, such as a mixture's
/// activation: save it beside them.
///
/// # Shapes
///
/// - rows: `[rows of this rank, ..]` each
/// - replicated: any
///
/// # Errors
///
/// On every rank: [`Error::Checkpoint`] if the tensors do not have the rank's rows, two tensors have one name, another
/// program has written the index, or a file cannot be written; [`Error::Ranks`] if another rank has such an error, or
/// other names, dtypes or columns.
///
/// # Examples
///
/// ```no_run
/// use candle_nn::VarMap;
/// use mos_head::distributed::{save_sharded, VocabShard};
///
/// /// Saves the variables of a head whose decoder has the shard's rows.
/// fn save(shard: &VocabShard, vars: &VarMap) -> mos_head::Result<()> {
///     let vars = vars.data().lock().expect("the variables");
///     let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor()));
///     let (rows, replicated) = tensors.partition(|(name, _)| name.starts_with("decoder."));
///     save_sharded(shard, "head.safetensors.index.json", &rows, &replicated)
/// }
/// ```
pub fn save_sharded(
    shard: &VocabShard,
    index: impl AsRef<Path>,
    rows: &HashMap<String, Tensor>,
    replicated: &HashMap<String, Tensor>,
) -> Result<()> {
    let index = index.as_ref();
    let save = Save { shard, index, rows: rows.iter().collect(), replicated: replicated.iter().collect() };
    let hash = [Agreed::hashed(SHARED_PROPERTIES, |state| save.hash_tensors(state))];
    let (names, previous) = match shard.agree(Call::Save, save.check(), &hash) {
        Err(Error::Ranks { argument: SHARED_PROPERTIES, values, .. }) => {
            let element = save.first_different_tensor()?;
            return Err(Error::Ranks { argument: SHARED_PROPERTIES, element, values });
        }
        agreed => agreed?,
    };
    let number = save.next_number(previous)?;
    let written = save.share_result("files that can be written", save.write(&names, number))?;
    save.put_in_place(written)?;
    let indexed = if save.is_first() { save.write_index(&names, number) } else { Ok(()) };
    save.share_result("an index that can be written", indexed)?;
    if save.is_first() {
        names.remove_others(number, shard.collectives().ranks());
    }
    Ok(())
}

/// The properties of tensors that ranks compare, as errors name them.
const SHARED_PROPERTIES: &str = "names, dtypes and columns of the tensors";

/// The part of a save that one rank does.
struct Save<'a> {
    shard: &'a VocabShard,
    index: &'a Path,
    rows: BTreeMap<&'a String, &'a Tensor>,
    replicated: BTreeMap<&'a String, &'a Tensor>,
}

impl<'a> Save<'a> {
    /// Returns whether this is the first rank, which writes the replicated tensors and the index.
    fn is_first(&self) -> bool {
        self.shard.collectives().rank() == 0
    }

    /// Checks the tensors of this rank. Returns the names of the files, and on the first rank the number of the
    /// previous save.
    fn check(&self) -> Result<(SaveNames, u64)> {
        let names = SaveNames::new(self.index)?;
        for (&name, tensor) in &self.rows {
            self.check_name(name)?;
            let range = self.shard.range();
            if tensor.dims().first() != Some(&range.len()) {
                let expected = format!("{} rows of {name}, {range:?}", range.len());
                return Err(Error::checkpoint(self.index, expected, format!("shape {:?}", tensor.dims())));
            }
        }
        for &name in self.replicated.keys() {
            self.check_name(name)?;
            if self.rows.contains_key(name) {
                return Err(Error::checkpoint(self.index, format!("{name} whole or in rows"), "both"));
            }
        }
        let previous = if self.is_first() { names.previous_save()? } else { 0 };
        Ok((names, previous))
    }

    /// Checks that a file can hold a tensor of this name.
    fn check_name(&self, name: &str) -> Result<()> {
        if name == "__metadata__" || RowsName::parse(name).is_some() {
            Err(Error::checkpoint(self.index, "names of whole tensors", name))
        } else {
            Ok(())
        }
    }

    /// Hashes the name of the index, and the properties of tensors that are the same on all ranks.
    fn hash_tensors(&self, state: &mut impl Hasher) {
        SaveNames::new(self.index).map_or(String::new(), |names| names.stem().to_owned()).hash(state);
        (self.rows.len(), self.replicated.len()).hash(state);
        self.shared_properties().for_each(|tensor| tensor.hash(state));
    }

    /// Returns the name, the dtype and the dimensions of each tensor that are the same on all ranks.
    fn shared_properties(&self) -> impl Iterator<Item = (&'a str, &'static str, Option<&'a [usize]>)> + use<'_, 'a> {
        let properties = |name: &'a String, tensor: &'a Tensor, first_dim: usize| {
            (name.as_str(), tensor.dtype().as_str(), tensor.dims().get(first_dim..))
        };
        let rows = self.rows.iter().map(move |(name, tensor)| properties(name, tensor, 1));
        rows.chain(self.replicated.iter().map(move |(name, tensor)| properties(name, tensor, 0)))
    }

    /// Returns the name of the first tensor whose properties differ between ranks.
    fn first_different_tensor(&self) -> Result<Option<String>> {
        let hash = |tensor: (_, _, _)| Agreed::hashed(SHARED_PROPERTIES, |state| tensor.hash(state)).value();
        let hashes: Vec<f64> = self.shared_properties().map(hash).collect();
        let first = first_other(&**self.shard.collectives(), &hashes)?;
        Ok(first.and_then(|i| self.shared_properties().nth(i)).map(|(name, ..)| name.to_owned()))
    }

    /// Returns the number of this save, which the first rank sends to all.
    fn next_number(&self, previous: u64) -> Result<u64> {
        let mut number = [previous as f64 + 1.0];
        self.shard.collectives().broadcast(Numbers::F64(&mut number), 0)?;
        Ok(number[0] as u64)
    }

    /// Returns a step's result if the step succeeds on all ranks, and an error on all ranks otherwise. Where another
    /// rank has failed, the error says that `expected` was expected.
    fn share_result<T>(&self, expected: &'static str, result: Result<T>) -> Result<T> {
        self.shard.agree(Call::Save, result, &[]).map_err(|error| match error {
            Error::Ranks { argument: WITHOUT_ERROR, element, values } => {
                Error::Ranks { argument: expected, element, values }
            }
            error => error,
        })
    }

    /// Writes this rank's file under a temporary name.
    fn write(&self, names: &SaveNames, number: u64) -> Result<PendingFile> {
        let ranks = self.shard.collectives();
        let file = names.path(&names.file_name(number, ranks.rank(), ranks.ranks()));
        let entry = |name: String, &values: &&'a Tensor| TensorEntry {
            name,
            dtype: values.dtype().into(),
            shape: values.dims().to_vec(),
            values,
        };
        let rows = self.rows.iter().map(|(name, tensor)| entry(self.rows_name(name, ranks.rank()), tensor));
        let replicated = self.replicated.iter().filter(|_| self.is_first());
        let tensors = rows.chain(replicated.map(|(&name, tensor)| entry(name.clone(), tensor)));
        PendingFile::write_tensors(&file, tensors.collect(), |tensor, writer| {
            write_values(tensor, writer).map_err(|error| write_error(&file, error))
        })
    }

    /// Returns the name of a rank's rows of a tensor.
    fn rows_name(&self, tensor: &str, rank: usize) -> String {
        let (rows, all) = (self.shard.range_of(rank), self.shard.vocab_size());
        RowsName { tensor: tensor.to_owned(), rows, all }.to_string()
    }

    /// Gives the files of all ranks their names.
    fn put_in_place(&self, written: PendingFile) -> Result<()> {
        let file: PathBuf = written.destination().to_owned();
        let placed = self.share_result("files that can be renamed", written.put_in_place());
        if matches!(placed, Err(Error::Ranks { .. })) {
            // All ranks have the error, and none will write an index of these files.
            let _ = std::fs::remove_file(file);
        }
        placed
    }

    /// Writes the index, and puts it in its place if it can be opened as a checkpoint. After an error here no file may
    /// be removed, because the index may already be in its place.
    fn write_index(&self, names: &SaveNames, number: u64) -> Result<()> {
        let mut index = Index { save: Some(number), files: BTreeMap::new() };
        let ranks = self.shard.collectives().ranks();
        for rank in 0..ranks {
            let file = names.file_name(number, rank, ranks);
            index.files.extend(self.rows.keys().map(|name| (self.rows_name(name, rank), file.clone())));
        }
        let first = names.file_name(number, 0, ranks);
        index.files.extend(self.replicated.keys().map(|&name| (name.clone(), first.clone())));
        let json = index.to_json(self.total_bytes());
        let pending = PendingFile::write(self.index, |writer| {
            writer.write_all(json.as_bytes()).map_err(|error| write_error(self.index, error))
        })?;
        ShardedCheckpoint::open_index(pending.temporary())?;
        pending.put_in_place()
    }

    /// Returns the number of bytes of all tensors on all ranks.
    fn total_bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor_bytes(tensor.dtype().into(), tensor.dims()).unwrap_or_default();
        let (own_rows, all_rows) = (self.shard.range().len(), self.shard.vocab_size());
        let sharded: usize = self.rows.values().map(|tensor| bytes(tensor) / own_rows * all_rows).sum();
        sharded + self.replicated.values().map(|tensor| bytes(tensor)).sum::<usize>()
    }
}
