//! Trains an LSTM on characters with each of the three output layers at equal size: where mixtures must not help.
//!
//!     cargo run --release --example char_lm
//!     cargo run --release --example char_lm -- --data FILE

#[path = "../common/mod.rs"]
mod common;

mod args;
mod built_in;
mod corpus;
mod report;

use args::Args;
use common::checkpoint::Checkpoint;
use common::plot::{self, Axes};
use common::{generate::generate, measure::Measure, session::Session, Result};
use corpus::Corpus;
use report::Row;
use std::process::ExitCode;

fn main() -> ExitCode {
    common::start(run)
}

fn run(args: &Args) -> Result<()> {
    let device = args.common.device.open()?;
    let corpus = match &args.data {
        Some(file) => Corpus::from_file(file)?,
        None => Corpus::new("the crate's own text".into(), &built_in::text())?,
    };
    let vocab = corpus.alphabet.len();
    println!(
        "Training on {}: {} characters, {vocab} different ones, validation {}, test {}.",
        corpus.name,
        corpus.train.len(),
        corpus.valid.len() - 1,
        corpus.test.len() - 1
    );

    let recipe = args.recipe();
    let bits = |nll| Measure::BitsPerCharacter.of(nll);
    let mut rows = vec![];
    let mut curves = vec![];
    for kind in args.common.head.kinds() {
        let sizes = args.sizes(kind, vocab);
        let mut session = Session::new(kind, sizes, args.dropout, &recipe, &device)?;
        if let Some(path) = args.common.resume_path(kind)? {
            session.restore(&Checkpoint::load(&path, &device)?)?;
        }
        session.run(&corpus.train, &corpus.valid, args.common.save_path(kind)?.as_deref())?;
        if args.generate > 0 {
            let mut sampler = args.sampling.sampler(args.common.seed)?;
            let text = generate(&session.model, corpus.start(), args.generate, &mut sampler)?;
            println!("{} writes:\n{}\n", kind.name(), corpus.decode(&text).trim());
        }
        curves.push(session.curve(bits));
        rows.push(Row {
            kind,
            sizes,
            valid_bpc: bits(session.valid_nll(&corpus.valid)?),
            test_bpc: bits(session.evaluate(&corpus.test)?),
            characters_per_second: session.tokens_per_second(),
        });
    }

    println!("\n{}", report::table(&rows));
    if let Some(summary) = report::summary(&rows) {
        println!("{summary}");
    }
    if let Some(path) = &args.common.plot {
        let title = format!("Learning {}", corpus.name);
        let axes = Axes { title: &title, x: "epoch", y: "validation bits per character", floor: None };
        plot::curves(path, &axes, &curves)?;
    }
    if args.common.json {
        println!("{}", report::json(&rows));
    }
    Ok(())
}
