//! Trains an LSTM on characters with each of the three output layers at equal size: a task where a mixture cannot help.
//!
//!     cargo run --release -p lab --bin characters
//!
//! The opposite of `language_model` (Yang et al., appendix C.2): with no more characters than dimensions, vocab <= d,
//! one softmax can represent every log-probability matrix, so there is no bottleneck for a mixture to break. All models
//! have as many parameters as the softmax's. The mixtures' contexts are as wide as the alphabet, so that their
//! softmaxes have no bottleneck either; their larger projection (K d (hidden + 1) parameters, several times the
//! decoder's) is compensated by fewer LSTM units, as in the paper's table. With the softmax's LSTM, their contexts
//! would be far narrower than the alphabet. Without data it trains on 150,000 characters of a small grammar
//! (`built_in`).
//!
//!     cargo run --release -p lab --bin characters -- --data FILE --generate 500 --temperature 0.8
//!
//! Any text works: the characters of all its parts are the alphabet; the first 90 % are for training, the next 5 % for
//! validation, the last 5 % for test.

mod args;
mod built_in;
mod corpus;
mod report;

use args::{sizes, Args};
use corpus::Corpus;
use lab::layers::Entries;
use lab::training::{generate, heads, InitialValues, LanguageModel, Recipe, Session};
use lab::{show::plot::Axes, Result};
use std::process::ExitCode;

/// A training frees and allocates large tensors in each step, and this allocator keeps their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    let device = args.common.device.open()?;
    let corpus = match &args.data {
        Some(file) => Corpus::from_file(file)?,
        None => Corpus::new("the built-in text".into(), &built_in::built_in())?,
    };
    let (data, vocab) = (&corpus.data, corpus.alphabet.len());
    println!(
        "Training on {}: {} characters, {vocab} different ones, validation {}, test {}.",
        data.name,
        data.train.len(),
        data.valid.len() - 1,
        corpus.test.len() - 1
    );

    let recipe = args.recipe(vocab);
    let build = |kind, recipe: &Recipe, _: Option<&_>| {
        let sizes = sizes(recipe, kind, vocab);
        let model =
            LanguageModel::with_entries(kind, sizes, InitialValues::Even, recipe, &Entries::default(), &device)?;
        Session::new(kind, model, data.clone(), recipe)
    };
    let sizes = |kind| sizes(&recipe, kind, vocab);
    let Some(rows) = heads::run(&args.common, &recipe, &device, build, |session| {
        if args.generate > 0 {
            let mut sampler = args.sampling.sampler(args.common.seed)?;
            let text = generate(&session.model, corpus.start(), args.generate, &mut sampler, None)?;
            println!("{} writes:\n{}\n", session.kind.name(), corpus.decode(&text).trim());
        }
        session.evaluate(&corpus.test)
    })?
    else {
        return Ok(());
    };

    println!("\n{}", report::table(&rows, |kind| sizes(kind).head));
    if let Some(summary) = report::summary(&rows, |kind| sizes(kind).head) {
        println!("{summary}");
    }
    let title = format!("Learning {}", data.name);
    let axes = Axes { title: &title, x: "epoch", y: "validation bits per character", floor: None };
    heads::finish(&args.common, &rows, &axes, report::bits, |row| report::json(row, sizes(row.kind).head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn every_head_learns_a_sentence_by_heart() {
        let text = "Where the vocabulary is small, one softmax is enough.\n".repeat(80);
        let corpus = Corpus::new("a sentence".into(), &text).expect("long enough");
        let args =
            Args::try_parse_from(["characters", "--hidden", "32", "--batch", "4", "--bptt", "16", "--epochs", "3"]);
        let args = args.expect("valid flags");
        let (vocab, device) = (corpus.alphabet.len(), candle_core::Device::Cpu);
        let recipe = args.recipe(vocab);
        for kind in args.common.heads() {
            let (sizes, values) = (sizes(&recipe, kind, vocab), InitialValues::Even);
            let model = LanguageModel::with_entries(kind, sizes, values, &recipe, &Entries::default(), &device);
            let model = model.expect("valid sizes");
            let mut session = Session::new(kind, model, corpus.data.clone(), &recipe).expect("valid sizes");
            let before = session.evaluate(&corpus.test).expect("evaluates");
            session.run(None, None, None).expect("trains");
            let after = session.evaluate(&corpus.test).expect("evaluates");
            assert!(before > 2.5 && after < 1.5, "{kind:?}: {before} -> {after} nats per character");
        }
    }

    #[test]
    fn the_built_in_text_is_the_same_in_every_run() {
        let corpus = Corpus::new("the built-in text".into(), &built_in::built_in()).expect("long enough");
        assert_eq!(corpus.data.digest, "a6f7c65c70cce1d9");
    }
}
