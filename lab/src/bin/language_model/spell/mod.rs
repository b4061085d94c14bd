//! `--spell`: a character LSTM in place of the output layer of a trained word model (Jozefowicz et al., 2016, section
//! 3.3). It spells the next word, so that its softmax is over characters.

mod model;
mod report;
mod spellings;
mod trie;
mod word;

use crate::args::Args;
use candle_core::Device;
use lab::data::{Corpus, Data};
use lab::training::{evaluate, heads, Model, Recipe, Session};
use lab::{show::plot::Axes, Result};
pub(crate) use model::Speller;
use report::{Spelled, WordModelResults};
use spellings::Spellings;
use std::path::Path;
use std::rc::Rc;
use trie::Trie;
use word::Word;

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
    let word_nll = |text: &Vec<u32>| evaluate(&word.model, text, recipe);
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
