//! Which table of codes the target's words get.

use crate::common::values::positive;
use crate::common::{checkpoint::Checkpoint, Result};
use candle_core::Device;
use clap::ValueEnum;
use mos_head::{CodeTable, TableConfig};
use std::path::{Path, PathBuf};

/// One word in so many has a code, by default.
const WORDS_PER_CODE: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shape {
    /// LightRNN: all words share the table, but for the special tokens.
    Light,
    /// Hybrid-LightRNN: rare words share the table.
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TableKind {
    Frequency,
    Random,
}

#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct TableFlags {
    /// Number of codes of --vocab hybrid [default: a fifth of the words, or the fewest that hold them]
    #[arg(long, value_parser = positive)]
    pub(crate) codes: Option<usize>,
    /// How the words of --vocab light and hybrid fill their table: by frequency or at random [default: frequency]
    #[arg(long, value_enum)]
    pub(crate) table: Option<TableKind>,
    /// Table of --vocab light and hybrid: `codes` [words, 2], with `own`, `rows` and `columns` in the metadata
    #[arg(long, value_name = "FILE.safetensors", conflicts_with_all = ["codes", "table"])]
    pub(crate) table_file: Option<PathBuf>,
}

impl TableFlags {
    /// Fails if there is no table of this shape that a flag could be for.
    pub(crate) fn check(&self, shape: Option<Shape>) -> Result<()> {
        if self.codes.is_some() && shape != Some(Shape::Hybrid) {
            return Err("--codes needs --vocab hybrid".into());
        }
        if shape.is_none() && (self.table.is_some() || self.table_file.is_some()) {
            let flag = if self.table.is_some() { "--table" } else { "--table-file" };
            return Err(format!("{flag} needs --vocab light or hybrid").into());
        }
        Ok(())
    }

    /// The table of `words` words that occur in `texts`; the first `special` ones have codes of their own, their ids.
    pub(crate) fn choose(
        &self,
        shape: Shape,
        (words, special): (usize, usize),
        texts: &[Vec<u32>],
        seed: u64,
    ) -> Result<CodeTable> {
        if let Some(path) = &self.table_file {
            let failed = |error| format!("--table-file {}: {error}", path.display());
            return Ok(read(path, (words, special)).map_err(failed)?);
        }
        let config = self.config(shape, (words, special))?;
        let mut counts = vec![0.0; words];
        texts.iter().flatten().for_each(|&id| counts[id as usize] += 1.0);
        counts[..special].fill(f64::INFINITY);
        Ok(match self.table.unwrap_or(TableKind::Frequency) {
            TableKind::Frequency => CodeTable::by_frequency(config, &counts)?,
            TableKind::Random => CodeTable::random(config, &counts, seed)?,
        })
    }

    fn config(&self, shape: Shape, (words, special): (usize, usize)) -> Result<TableConfig> {
        if shape == Shape::Light {
            return Ok(TableConfig::light_rnn(words).with_own(special));
        }
        let fewest = special + TableConfig::light_rnn(words - special).codes();
        let codes = self.codes.unwrap_or(fewest.max(words / WORDS_PER_CODE));
        if codes < fewest {
            let expected = format!("expected at least {fewest} for {words} words, {special} of them special tokens");
            return Err(format!("--codes is {codes}, {expected}").into());
        }
        Ok(TableConfig::hybrid(words, codes)?)
    }
}

fn read(path: &Path, (words, special): (usize, usize)) -> Result<CodeTable> {
    let file = Checkpoint::load(path, &Device::Cpu)?;
    let codes = file.tensors.get("codes").ok_or("it has no tensor codes")?;
    let placed = codes.dims().first().copied().unwrap_or(0);
    if placed != words {
        return Err(format!("its table has {placed} words, but the target vocabulary has {words}").into());
    }
    let config = TableConfig::light_rnn(words).with_own(file.get("own")?);
    let table = CodeTable::from_codes(config.with_table(file.get("rows")?, file.get("columns")?), codes)?;
    for token in 0..special as u32 {
        let found = table.codebook().codes_of(token)?;
        if found != [token] {
            return Err(format!("special token {token} has the codes {found:?}, expected its id alone").into());
        }
    }
    Ok(table)
}
