//! `--output light-rnn`, `hybrid-light-rnn` and `bpe`: what is a code.

use crate::args::Args;
use crate::common::codes::Coding;
use crate::common::output::{Entries, Output, OutputKind};
use crate::common::{recipe::Recipe, Result};
use crate::corpus::Corpus;
use candle_core::Device;
use mos_head::TableConfig;

/// One word in so many has a code, by default.
const WORDS_PER_CODE: usize = 5;

/// The codes of the words, if the output has codes. Learns the table, if it is learned.
pub(crate) fn coding(args: &Args, corpus: &Corpus, recipe: &Recipe, device: &Device) -> Result<Option<Coding>> {
    let (words, output) = (&corpus.words, recipe.output.kind);
    if !output.is_coded() {
        return Ok(None);
    }
    let counts = Entries::of(words, &corpus.data.train).counts;
    let light = TableConfig::light_rnn(words.len());
    let codes = args.tables.codes.unwrap_or(light.codes().max(words.len() / WORDS_PER_CODE));
    let config = match output {
        OutputKind::LightRnn => light,
        OutputKind::HybridLightRnn => TableConfig::hybrid(words.len(), codes)?,
        _ => return Ok(Some(Coding::of_pieces(words, &counts, codes)?)),
    };
    let recipe = Recipe { output: Output::FULL, ..*recipe };
    let table = args.tables.choose(config, (words, &counts), &corpus.data, &recipe, device)?;
    Ok(Some(Coding::of_table(&table, words)?))
}
