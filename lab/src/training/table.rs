//! These flags choose the table of codes that words get.

use super::{learn_table::learn, recipe::Recipe};
use crate::show::{table_picture, values::positive};
use crate::{data::Data, Result};
use candle_core::Device;
use clap::ValueEnum;
use mos_codes::{CodeTable, TableConfig};
use std::path::PathBuf;

/// Number of words for each code, by default.
pub const WORDS_PER_CODE: usize = 5;

/// How words fill a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TableKind {
    /// Learned by a language model and a reallocation of the words in turn
    Learned,
    /// Words of similar frequency in one row
    Frequency,
    /// In random cells.
    Random,
}

/// The flags of tables of codes.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Codes of words")]
pub struct TableFlags {
    /// Number of codes [default: a fifth of the words, or the fewest that hold them]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub codes: Option<usize>,
    /// How words are put into a table [default: learned]. A checkpoint that training continues from has its own
    #[arg(long, value_enum)]
    pub table: Option<TableKind>,
    /// Epochs in which a table is learned, with a new table in each; the first is random [default: 4]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub rounds: Option<usize>,
    /// File of the learned table: continued if it exists, and written after each round
    #[arg(long, value_name = "FILE")]
    pub table_file: Option<PathBuf>,
    /// Draw rows of the table with their words as an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub table_picture: Option<PathBuf>,
}

impl TableFlags {
    /// Fails if a flag has no effect, because the vocabulary has no codes or no table.
    pub fn check(&self, has_codes: bool, has_table: bool) -> Result<()> {
        if self.codes.is_some() && !has_codes {
            return Err("--codes is for a hybrid table and for pieces of words".into());
        }
        let table_flags = [
            ("--table", self.table.is_some()),
            ("--rounds", self.rounds.is_some()),
            ("--table-file", self.table_file.is_some()),
            ("--table-picture", self.table_picture.is_some()),
        ];
        if let Some((flag, _)) = table_flags.iter().find(|(_, is_set)| *is_set && !has_table) {
            return Err(format!("{flag} is for words in a table: light or hybrid").into());
        }
        let is_learned = self.table.is_none_or(|table| table == TableKind::Learned);
        match table_flags[1..3].iter().find(|(_, is_set)| *is_set && !is_learned) {
            Some((flag, _)) => Err(format!("{flag} is for --table learned").into()),
            None => Ok(()),
        }
    }

    /// Returns the table of these sizes for words that occur `counts` times. A table is learned on `text`, by the
    /// recipe of a language model.
    pub fn choose(
        &self,
        config: TableConfig,
        words: &[String],
        counts: &[f64],
        text: &Data<u32>,
        recipe: &Recipe,
        device: &Device,
    ) -> Result<CodeTable> {
        let random = || CodeTable::random(config, counts, recipe.seed);
        Ok(match self.table.unwrap_or(TableKind::Learned) {
            TableKind::Frequency => CodeTable::by_frequency(config, counts)?,
            TableKind::Random => random()?,
            TableKind::Learned => {
                let rounds = self.rounds.unwrap_or(4);
                learn(text, words, random()?, rounds, recipe, self.table_file.as_deref(), device)?
            }
        })
    }

    /// Draws the table, if the flags ask for it.
    pub fn draw(&self, table: &CodeTable, words: &[String], counts: &[f64]) -> Result<()> {
        self.table_picture.iter().try_for_each(|path| table_picture::draw(path, table, words, counts))
    }
}
