//! Trains an LSTM language model with each of the three output layers at equal size.
//!
//!     cargo run --release --example lstm_lm
//!
//! Without data: 256,000 tokens of a built-in language of 512 words, whose entropy is known. In about a minute on 2
//! cores the softmax gets within 0.65 nats of it, the mixture of contexts 0.58, the mixture of softmaxes 0.40.
//!
//!     cargo run --release --example lstm_lm -- --data DIR
//!
//! With a folder of train.txt and valid.txt (one sentence per line): a model of 4.8 million parameters for a vocabulary
//! of 10,000. On Penn Treebank, the validation perplexity after 3 epochs is 135 with the softmax, 129 with the mixture
//! of contexts and 126 with the mixture of softmaxes; an epoch takes minutes.

#[path = "../common/mod.rs"]
mod common;

mod args;
mod corpus;
mod language;
mod report;

use args::Args;
use common::checkpoint::Checkpoint;
use common::plot::{self, Axes};
use common::{generate::generate, session::Session, Result};
use corpus::Corpus;
use language::Teacher;
use report::Row;
use std::process::ExitCode;

/// Targets of the built-in language's texts.
const TRAIN_TOKENS: usize = 256_000;
const VALID_TOKENS: usize = 50_000;

fn main() -> ExitCode {
    common::start(run)
}

fn run(args: &Args) -> Result<()> {
    let device = args.common.device.open()?;
    let corpus = match &args.data {
        Some(folder) => Corpus::from_folder(folder)?,
        None => Teacher::new().corpus(TRAIN_TOKENS, VALID_TOKENS, args.common.seed),
    };
    let sizes = args.sizes(corpus.words.len());
    let recipe = args.recipe();
    println!(
        "Training on {}: {} tokens, vocabulary {}, validation {} tokens.",
        corpus.name,
        corpus.train.len() - 1,
        sizes.head.vocab,
        corpus.valid.len() - 1
    );

    let mut rows = vec![];
    let mut curves = vec![];
    for kind in args.common.head.kinds() {
        let mut session = Session::new(kind, sizes, &recipe, &device)?;
        if let Some(path) = args.common.resume_path(kind)? {
            session.restore(&Checkpoint::load(&path, &device)?)?;
        }
        session.run(&corpus.train, &corpus.valid, args.common.save_path(kind)?.as_deref())?;
        if args.generate > 0 {
            let mut sampler = args.sampling.sampler(args.common.seed)?;
            let text = generate(&session.model, corpus.train[0], args.generate, &mut sampler)?;
            println!("{} writes: {}", kind.name(), corpus.decode(&text));
        }
        curves.push(session.curve(|nll| nll));
        rows.push(Row {
            kind,
            parameters: session.model.parameters(),
            valid_nll: session.valid_nll(&corpus.valid)?,
            test_nll: corpus.test.as_ref().map(|text| session.evaluate(text)).transpose()?,
            tokens_per_second: session.tokens_per_second(),
        });
    }

    println!("\n{}", report::table(&rows, corpus.entropy));
    if let Some(summary) = report::summary(&rows, corpus.entropy) {
        println!("{summary}");
    }
    if let Some(path) = &args.common.plot {
        let title = format!("Learning {}", corpus.name);
        let floor = corpus.entropy.map(|entropy| ("entropy", entropy));
        plot::curves(path, &Axes { title: &title, x: "epoch", y: "validation NLL (nats)", floor }, &curves)?;
    }
    if args.common.json {
        println!("{}", report::json(&rows, corpus.entropy));
    }
    Ok(())
}
