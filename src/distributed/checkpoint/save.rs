//! Saves a checkpoint together: each rank its own rows, the first rank also what all ranks have, and the index.

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::index::{Index, Names, RowsName};
use super::load::ShardedCheckpoint;
use crate::backend::agreement::{first_other, Agreed, Call, WITHOUT_ERROR};
use crate::backend::collectives::Numbers;
use crate::backend::shard::VocabShard;
use crate::error::{Error, Result};
use crate::tensors::tensor_file::{tensor_bytes, unwritten, write_values, TensorEntry, Unplaced};

/// Saves tensors of which each rank has its own rows, and `replicated` ones that all ranks have alike. Every rank calls
/// it with the same names and the same path of an index, `{stem}.safetensors.index.json`, in a folder that all ranks
/// see. [`ShardedCheckpoint`] reads it for any number of ranks.
///
/// Rank `r` of `P` writes its rows to `{stem}.{save}-{r + 1}-of-{P}.safetensors`, under the names
/// `{tensor}.rows.{start}-{end}-of-{vocab}`, where `save` counts the saves with this index; rank 0 also writes the
/// replicated tensors and the index. Until all files are complete on the disk, the index and the files of the save
/// before remain; then the new index takes the place of the old one, and files of other saves are removed, with what
/// interrupted ones have left. Whenever a save fails or is interrupted, the index is the old one or the new one, and its
/// files are complete.
///
/// The files hold tensors alone. What else makes a head, such as a mixture's activation, is in its
/// [`HeadConfig`](crate::HeadConfig): save it beside them.
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
/// /// Saves the variables of a head, of which the decoder has the shard's rows.
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
    let alike = [Agreed::hashed(ALIKE, |state| save.hash_tensors(state))];
    let (names, earlier) = match shard.agree(Call::Save, save.checked(), &alike) {
        Err(Error::Ranks { argument: ALIKE, of_ranks, .. }) => {
            let element = save.first_other()?;
            return Err(Error::Ranks { argument: ALIKE, element, of_ranks });
        }
        agreed => agreed?,
    };
    let number = save.next_number(earlier)?;
    let written = save.together("files that can be written", save.write(&names, number))?;
    save.place(written)?;
    let indexed = if save.is_first() { save.write_index(&names, number) } else { Ok(()) };
    save.together("an index that can be written", indexed)?;
    if save.is_first() {
        names.remove_others(number, shard.collectives().ranks());
    }
    Ok(())
}

/// What ranks compare, by the name that errors have for it.
const ALIKE: &str = "names, dtypes and columns of the tensors";

/// What one rank saves.
struct Save<'a> {
    shard: &'a VocabShard,
    index: &'a Path,
    rows: BTreeMap<&'a String, &'a Tensor>,
    replicated: BTreeMap<&'a String, &'a Tensor>,
}

impl<'a> Save<'a> {
    fn is_first(&self) -> bool {
        self.shard.collectives().rank() == 0
    }

    /// The names of the files, and on the first rank the number of the save before.
    fn checked(&self) -> Result<(Names, u64)> {
        let names = Names::new(self.index)?;
        for (&name, tensor) in &self.rows {
            self.check_name(name)?;
            let own = self.shard.range();
            if tensor.dims().first() != Some(&own.len()) {
                let expected = format!("{} rows of {name}, {own:?}", own.len());
                return Err(Error::checkpoint(self.index, expected, format!("shape {:?}", tensor.dims())));
            }
        }
        for &name in self.replicated.keys() {
            self.check_name(name)?;
            if self.rows.contains_key(name) {
                return Err(Error::checkpoint(self.index, format!("{name} whole or in rows"), "both"));
            }
        }
        let earlier = if self.is_first() { names.earlier()? } else { 0 };
        Ok((names, earlier))
    }

    /// Checks that a file can hold a tensor of this name.
    fn check_name(&self, name: &str) -> Result<()> {
        if name == "__metadata__" || RowsName::parse(name).is_some() {
            Err(Error::checkpoint(self.index, "names of whole tensors", name))
        } else {
            Ok(())
        }
    }

    /// Hashes the name of the index, and what all ranks have alike.
    fn hash_tensors(&self, state: &mut impl Hasher) {
        Names::new(self.index).map_or(String::new(), |names| names.stem().to_owned()).hash(state);
        (self.rows.len(), self.replicated.len()).hash(state);
        self.alike().for_each(|tensor| tensor.hash(state));
    }

    /// The names, dtypes and dimensions that all ranks have alike.
    fn alike(&self) -> impl Iterator<Item = (&'a str, &'static str, Option<&'a [usize]>)> + use<'_, 'a> {
        let of = |name: &'a String, tensor: &'a Tensor, first: usize| {
            (name.as_str(), tensor.dtype().as_str(), tensor.dims().get(first..))
        };
        let rows = self.rows.iter().map(move |(name, tensor)| of(name, tensor, 1));
        rows.chain(self.replicated.iter().map(move |(name, tensor)| of(name, tensor, 0)))
    }

    /// The name of the first tensor that another rank has otherwise.
    fn first_other(&self) -> Result<Option<String>> {
        let hash = |tensor: (_, _, _)| Agreed::hashed(ALIKE, |state| tensor.hash(state)).value();
        let hashes: Vec<f64> = self.alike().map(hash).collect();
        let first = first_other(&**self.shard.collectives(), &hashes)?;
        Ok(first.and_then(|i| self.alike().nth(i)).map(|(name, ..)| name.to_owned()))
    }

    /// The number of this save, which the first rank gives to all.
    fn next_number(&self, earlier: u64) -> Result<u64> {
        let mut number = [earlier as f64 + 1.0];
        self.shard.collectives().broadcast(Numbers::F64(&mut number), 0)?;
        Ok(number[0] as u64)
    }

    /// A result that all ranks have, or an error on all of them.
    fn together<T>(&self, what: &'static str, result: Result<T>) -> Result<T> {
        self.shard.agree(Call::Save, result, &[]).map_err(|error| match error {
            Error::Ranks { argument: WITHOUT_ERROR, element, of_ranks } => {
                Error::Ranks { argument: what, element, of_ranks }
            }
            error => error,
        })
    }

    /// Writes this rank's file.
    fn write(&self, names: &Names, number: u64) -> Result<Unplaced> {
        let ranks = self.shard.collectives();
        let file = names.path(&names.file_name(number, ranks.rank(), ranks.ranks()));
        let listed = |name: String, &values: &&'a Tensor| TensorEntry {
            name,
            dtype: values.dtype().into(),
            shape: values.dims().to_vec(),
            values,
        };
        let rows = self.rows.iter().map(|(name, tensor)| listed(self.rows_name(name, ranks.rank()), tensor));
        let replicated = self.replicated.iter().filter(|_| self.is_first());
        let tensors = rows.chain(replicated.map(|(&name, tensor)| listed(name.clone(), tensor)));
        Unplaced::write_tensors(&file, tensors.collect(), |tensor, writer| {
            write_values(tensor, writer).map_err(|error| unwritten(&file, error))
        })
    }

    /// The name of a rank's rows of a tensor.
    fn rows_name(&self, tensor: &str, rank: usize) -> String {
        let (rows, all) = (self.shard.range_of(rank), self.shard.vocab_size());
        RowsName { tensor: tensor.to_owned(), rows, all }.to_string()
    }

    /// Gives the files of all ranks their names.
    fn place(&self, written: Unplaced) -> Result<()> {
        let file: PathBuf = written.destination().to_owned();
        let placed = self.together("files that can be renamed", written.place());
        if matches!(placed, Err(Error::Ranks { .. })) {
            // All ranks know that there will be no index of these files.
            let _ = std::fs::remove_file(file);
        }
        placed
    }

    /// Writes the index once it reads as a checkpoint. Nothing is removed after an error here, for the index may have
    /// reached its place.
    fn write_index(&self, names: &Names, number: u64) -> Result<()> {
        let mut index = Index { save: Some(number), files: BTreeMap::new() };
        let ranks = self.shard.collectives().ranks();
        for rank in 0..ranks {
            let file = names.file_name(number, rank, ranks);
            index.files.extend(self.rows.keys().map(|name| (self.rows_name(name, rank), file.clone())));
        }
        let first = names.file_name(number, 0, ranks);
        index.files.extend(self.replicated.keys().map(|&name| (name.clone(), first.clone())));
        let json = index.to_json(self.total_bytes());
        let unplaced = Unplaced::write(self.index, |writer| {
            writer.write_all(json.as_bytes()).map_err(|error| unwritten(self.index, error))
        })?;
        ShardedCheckpoint::of_index(unplaced.temporary())?;
        unplaced.place()
    }

    /// The bytes of all tensors.
    fn total_bytes(&self) -> usize {
        let of = |tensor: &Tensor| tensor_bytes(tensor.dtype().into(), tensor.dims()).unwrap_or_default();
        let own = self.shard.range().len();
        let rows: usize = self.rows.values().map(|tensor| of(tensor) / own * self.shard.vocab_size()).sum();
        rows + self.replicated.values().map(|tensor| of(tensor)).sum::<usize>()
    }
}
