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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::toy;
    use crate::vocabulary::{Vocabulary, SPECIAL};

    /// The targets of the built-in task as words, and as codes in a table.
    pub(crate) fn vocabularies(shape: Shape, flags: &TableFlags) -> Result<[Vocabulary; 2]> {
        let pairs = toy::corpus(300, 1, 7).train;
        let words = Vocabulary::words(pairs.iter().map(|pair| pair.target.as_str()), 1, &[]);
        let texts = pairs.iter().map(|pair| words.encode(&pair.target)).collect::<Result<Vec<_>>>()?;
        let table = flags.choose(shape, (words.len(), SPECIAL.len()), &texts, 3)?;
        Ok([words.clone(), words.with_table(table)?])
    }

    pub(crate) fn random() -> TableFlags {
        TableFlags { table: Some(TableKind::Random), ..TableFlags::default() }
    }

    fn error(flags: &TableFlags) -> String {
        vocabularies(Shape::Hybrid, flags).err().expect("must fail").to_string()
    }

    #[test]
    fn sizes_are_those_of_the_flags_or_fit() {
        let sizes = |shape, flags: &TableFlags| vocabularies(shape, flags).expect("fits").map(|vocab| vocab.len());
        let [words, light] = sizes(Shape::Light, &TableFlags::default());
        assert!(words > 100 && light < words / 3, "{words} {light}");
        let [_, fewest] = sizes(Shape::Hybrid, &TableFlags::default());
        assert!(fewest <= light && fewest > words / 5, "{words} {fewest}");
        let codes = |codes| TableFlags { codes: Some(codes), ..random() };
        assert_eq!(sizes(Shape::Hybrid, &codes(fewest + 20))[1], fewest + 20);
        assert_eq!(sizes(Shape::Hybrid, &codes(10 * words))[1], words);
        let error = error(&codes(fewest - 1));
        assert!(error.contains("--codes") && error.contains(&fewest.to_string()), "{error}");
        assert!(codes(9).check(Some(Shape::Light)).is_err() && codes(9).check(Some(Shape::Hybrid)).is_ok());
        assert!(random().check(None).expect_err("words").to_string().contains("--vocab"));
    }

    #[test]
    fn a_table_file_is_the_table_and_one_that_does_not_fit_is_an_error_that_says_so() {
        let [words, coded] = vocabularies(Shape::Hybrid, &random()).expect("fits");
        let table = coded.codes().expect("codes").table();
        let path = std::env::temp_dir().join(format!("seq2seq_table_{}.safetensors", std::process::id()));
        let save = |codes: candle_core::Tensor, own: usize| {
            let config = table.config();
            let sizes = [("own", own), ("rows", config.rows()), ("columns", config.columns())];
            let metadata = sizes.map(|(name, size)| (name.to_owned(), size.to_string())).into();
            let tensors = [("codes".to_owned(), codes)].into();
            Checkpoint { tensors, metadata }.save(&path).expect("writes");
        };
        let flags = TableFlags { table_file: Some(path.clone()), ..TableFlags::default() };
        assert!(error(&flags).contains("--table-file"), "there is no file");

        let (codes, own) = (table.codes().expect("copies"), table.config().own());
        save(codes.clone(), own);
        let [_, again] = vocabularies(Shape::Light, &flags).expect("fits");
        assert_eq!(again.codes().expect("codes").table(), table);

        save(codes.narrow(0, 0, words.len() - 1).expect("rows"), own);
        assert!(error(&flags).contains(&format!("{} words", words.len() - 1)), "{}", error(&flags));
        save(codes.clone(), own + 1);
        assert!(error(&flags).contains("codes"), "{}", error(&flags));
        // The first words are not the special tokens.
        let reversed: Vec<u32> = (0..words.len() as u32).rev().collect();
        let reversed = candle_core::Tensor::new(reversed, &Device::Cpu).expect("ids");
        save(codes.index_select(&reversed, 0).expect("rows"), own);
        assert!(error(&flags).contains("special token 0"), "{}", error(&flags));
        std::fs::remove_file(path).expect("was just written");
    }
}
