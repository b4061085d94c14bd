//! Trains an LSTM on characters with each of the three output layers at equal size: a task where a mixture cannot help.
//!
//!     cargo run --release --example char_lm
//!
//! The opposite of `lstm_lm` (Yang et al., appendix C.2): with no more characters than dimensions, vocab <= d, one
//! softmax can represent every log-probability matrix, so there is no bottleneck for a mixture to break. All models
//! have as many parameters as the softmax's. The mixtures' contexts are as wide as the alphabet, so that their
//! softmaxes have no bottleneck either; their larger projection (K d (hidden + 1) parameters, several times the
//! decoder's) is compensated by fewer LSTM units, as in the paper's table. With the softmax's LSTM, their contexts
//! would be far narrower than the alphabet. Without data it trains on some of the crate's own sources, for about a
//! minute on 2 cores.
//!
//!     cargo run --release --example char_lm -- --data FILE --generate 500 --temperature 0.8
//!
//! Any text works: the characters of all its parts are the alphabet; the first 90 % are for training, the next 5 % for
//! validation, the last 5 % for test.

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
        let mut session = Session::new(kind, sizes, &recipe, &device)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn every_head_learns_a_sentence_by_heart() {
        let text = "Where the vocabulary is small, one softmax is enough.\n".repeat(80);
        let corpus = Corpus::new("a sentence".into(), &text).expect("long enough");
        let args = Args::try_parse_from(["char_lm", "--hidden", "32", "--batch", "4", "--bptt", "16", "--epochs", "3"]);
        let args = args.expect("valid flags");
        for kind in args.common.head.kinds() {
            let sizes = args.sizes(kind, corpus.alphabet.len());
            let mut session =
                Session::new(kind, sizes, &args.recipe(), &candle_core::Device::Cpu).expect("valid sizes");
            let before = session.evaluate(&corpus.test).expect("evaluates");
            session.run(&corpus.train, &corpus.valid, None).expect("trains");
            let after = session.evaluate(&corpus.test).expect("evaluates");
            assert!(before > 2.5 && after < 1.5, "{kind:?}: {before} -> {after} nats per character");
        }
    }
}
