//! `--output light-rnn`, `hybrid-light-rnn` and `bpe`: what is a code.

use crate::args::Args;
use crate::common::codes::{Coding, TableKind};
use crate::common::learn_table::learn;
use crate::common::output::{Entries, Output, OutputKind};
use crate::common::values::positive;
use crate::common::{recipe::Recipe, table_picture, Result};
use crate::corpus::Corpus;
use candle_core::Device;
use mos_head::{CodeTable, TableConfig};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Codes of words")]
pub(crate) struct CodeFlags {
    /// Number of codes of --output hybrid-light-rnn and bpe [default: a fifth of the vocabulary]
    #[arg(long, value_name = "N", value_parser = positive)]
    codes: Option<usize>,
    /// How words are put into the table of --output light-rnn and hybrid-light-rnn
    #[arg(long, value_enum, default_value = "learned")]
    table: TableKind,
    /// Epochs in which a table is learned, with a new table after each
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive)]
    rounds: usize,
    /// File of the learned table: continued if it exists, and written after each round
    #[arg(long, value_name = "FILE")]
    table_file: Option<PathBuf>,
    /// Draw rows of the table with their words as an SVG file
    #[arg(long, value_name = "FILE.svg")]
    table_picture: Option<PathBuf>,
}

impl CodeFlags {
    /// Fails if flags have no effect.
    pub(crate) fn check(&self, output: OutputKind) -> Result<()> {
        let has_table = output.is_coded() && output != OutputKind::Bpe;
        if self.codes.is_some() && !matches!(output, OutputKind::HybridLightRnn | OutputKind::Bpe) {
            return Err("--codes is for --output hybrid-light-rnn and bpe".into());
        }
        if self.table_file.is_some() && !(has_table && self.table == TableKind::Learned) {
            return Err("--table-file is for --table learned".into());
        }
        if self.table_picture.is_some() && !has_table {
            return Err("--table-picture is for --output light-rnn and hybrid-light-rnn".into());
        }
        if self.table != TableKind::Learned && !has_table {
            return Err("--table is for --output light-rnn and hybrid-light-rnn".into());
        }
        Ok(())
    }
}

/// The codes of the words, if the output has codes. Learns the table, if it is learned.
pub(crate) fn coding(args: &Args, corpus: &Corpus, recipe: &Recipe, device: &Device) -> Result<Option<Coding>> {
    let (flags, words) = (&args.codes, &corpus.words);
    let codes = flags.codes.unwrap_or((words.len() / 5).max(2));
    let config = match recipe.output.kind {
        OutputKind::LightRnn => TableConfig::light_rnn(words.len()),
        OutputKind::HybridLightRnn => TableConfig::hybrid(words.len(), codes)?,
        OutputKind::Bpe => {
            let counts = Entries::of(words, &corpus.data.train).counts;
            return Ok(Some(Coding::of_pieces(words, &counts, codes)?));
        }
        _ => return Ok(None),
    };
    let counts = Entries::of(words, &corpus.data.train).counts;
    let table = match flags.table {
        TableKind::Frequency => CodeTable::by_frequency(config, &counts)?,
        TableKind::Random => CodeTable::random(config, &counts, recipe.seed)?,
        TableKind::Learned => {
            let start = CodeTable::random(config, &counts, recipe.seed)?;
            let recipe = Recipe { output: Output::FULL, ..*recipe };
            learn(&corpus.data, words, start, (flags.rounds, &recipe), flags.table_file.as_deref(), device)?
        }
    };
    if let Some(path) = &flags.table_picture {
        table_picture::draw(path, &table, words, &counts)?;
    }
    Ok(Some(Coding::of_table(&table, words)?))
}
