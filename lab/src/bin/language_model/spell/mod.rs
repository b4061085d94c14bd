//! `--spell`: a character LSTM in place of the output layer of a trained word model (Jozefowicz et al., 2016, section
//! 3.3). It spells the next word, so that its softmax is over characters.

mod model;
mod report;
mod spellings;
mod trie;
mod word;

use crate::args::Args;
use candle_core::Device;
use lab::model::Data;
use lab::optimizer::OptimizerKind;
use lab::plot::Axes;
use lab::recipe::Recipe;
use lab::text::Corpus;
use lab::{heads, model::Model, session::Session, train, Result};
use model::Speller;
use report::{Spelled, WordModelResults};
use spellings::Spellings;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use trie::Trie;
use word::Word;

/// The sizes and the recipe of the character LSTM.
pub(crate) const RECIPE: Recipe = Recipe {
    hidden: 128,
    embedding: Some(32),
    batch: 20,
    bptt: 8,
    lr: 0.005,
    decay: 0.7,
    optimizer: OptimizerKind::Adam,
    ..Recipe::BASE
};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Spelling")]
pub(crate) struct SpellFlags {
    /// Freeze the word model of this checkpoint, and train a character LSTM that spells the next word from its hidden
    /// states; --hidden, --embedding, --head and all other sizes are those of the character LSTM [--head: softmax]
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "TableFlags", "Awd", "EvaluationFlags", "preset", "finetune", "unigram_bias", "output", "samples", "generate",
    ])]
    spell: Option<PathBuf>,
    /// Random positions of the validation text at which the spellings of the whole vocabulary are summed up; 0 for none
    /// [default: 200]
    #[arg(long, value_name = "N", requires = "spell")]
    renormalise: Option<usize>,
}

impl SpellFlags {
    /// Returns the word model to spell with.
    pub(crate) fn word(&self) -> Option<&Path> {
        self.spell.as_deref()
    }
}

/// Trains the character LSTM of every head, and prints how well it spells.
pub(crate) fn run(file: &Path, args: &Args, corpus: &Corpus, recipe: &Recipe, device: &Device) -> Result<()> {
    let (flags, data) = (args.training(), &corpus.data);
    let word = Rc::new(Word::load(file, corpus, device)?);
    let spellings = Rc::new(Spellings::new(&corpus.words));
    let trie = Trie::new(&spellings);
    println!(
        "Spelling {}: {} words of {} characters, {:.2} in a word, {} prefixes.",
        data.name,
        corpus.words.len(),
        spellings.characters(),
        spellings.per_word(&data.train),
        trie.prefixes()
    );
    let data = Data { per_word: [&data.train, &data.valid].map(|text| spellings.per_word(text)), ..data.clone() };
    let build = |kind, recipe: &Recipe| {
        let model = Speller::new(kind, word.clone(), spellings.clone(), recipe)?;
        Session::new(kind, model, data.clone(), recipe)
    };
    if let Some(trials) = flags.search {
        return heads::search(&flags, trials, recipe, build);
    }
    let sample = match args.spelling.renormalise.unwrap_or(200) {
        0 => None,
        positions => Some(word.sample(&data.valid, positions, recipe)?),
    };
    let build = |kind, _: Option<&_>| build(kind, recipe);
    let Some(rows) = heads::train(&flags, device, build, |session| {
        let test =
            |text: &Vec<u32>| Ok::<_, Box<dyn std::error::Error>>(spellings.per_word(text) * session.evaluate(text)?);
        let mass = |sample| trie.mass(&session.model, sample);
        Ok(Spelled {
            test_nll: corpus.test.as_ref().map(test).transpose()?,
            mass: sample.as_ref().map(mass).transpose()?,
        })
    })?
    else {
        return Ok(());
    };
    let word_nll = |text: &Vec<u32>| train::evaluate(&word.model, text, recipe);
    let words = WordModelResults {
        kind: word.kind,
        parameters: word.model.parameters(),
        valid_nll: word_nll(&data.valid)?,
        test_nll: corpus.test.as_ref().map(word_nll).transpose()?,
        sample_nll: sample.as_ref().map(|sample| sample.nll),
        positions: sample.as_ref().map(|sample| sample.words.len()),
    };
    println!("\n{}", report::table(&words, &rows));
    let axes = Axes { title: &format!("Spelling {}", data.name), x: "epoch", y: "validation NLL (nats)", floor: None };
    heads::finish(&flags, &rows, &axes, |nll| nll, |row| report::json(&words, row))
}

#[cfg(test)]
mod tests;
