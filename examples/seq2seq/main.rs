//! Trains an LSTM encoder-decoder with attention with each of the three output layers at equal size.
//!
//!     cargo run --release --example seq2seq
//!
//! Without data, translates English into a built-in language. Every head gets over 95% of new sentences exactly right.
//!
//!     cargo run --release --example seq2seq -- --data DIR --source de --target en --head mos --save mos.safetensors
//!     cargo run --release --example seq2seq -- --translate --resume mos.safetensors < lines
//!
//! Translates from DIR/train.de to DIR/train.en, and ends with the BLEU of a beam search over DIR/valid.de.
//!
//!     cargo run --release --example seq2seq -- --dialogue FILE.jsonl --head mos --save mos.safetensors
//!     cargo run --release --example seq2seq -- --chat --resume mos.safetensors --temperature 0.7
//!
//! Responds to the utterances before, and ends with precision and recall of five responses to each held-out context.
//!
//! candle's threads busy-wait for each other. On a machine with other load, the environment variable
//! CANDLE_NUM_THREADS=1 makes training twice as fast; the matrix products use RAYON_NUM_THREADS.

#[path = "../common/mod.rs"]
mod common;

mod args;
mod attention;
mod batches;
mod bleu;
mod corpus;
mod dialogue;
mod interactive;
mod model;
mod report;
mod score;
mod search;
mod session;
mod task;
mod toy;
mod train;
mod vocabulary;

use args::Args;
use common::checkpoint::Checkpoint;
use common::plot::{self, Axes, Curve};
use common::Result;
use report::Row;
use session::{Session, Setting};
use std::process::ExitCode;
use task::Task;

fn main() -> ExitCode {
    common::start(run)
}

fn run(args: &Args) -> Result<()> {
    let device = args.common.device.open()?;
    if args.translate || args.chat {
        return interactive::run(args, &device);
    }
    let task = Task::new(args);
    let recipe = args.recipe();
    let corpus = task::corpus(args)?;
    println!("Training on {}: {} pairs, validation {} pairs.", corpus.name, corpus.train.len(), corpus.valid.len());

    let mut rows = vec![];
    let mut curves = vec![];
    for kind in args.common.head.kinds() {
        let resumed = args.common.resume_path(kind)?.map(|path| Checkpoint::load(&path, &device)).transpose()?;
        let setting = match &resumed {
            Some(checkpoint) => Setting::from_checkpoint(checkpoint)?,
            None => {
                let [source, target] = task::vocabularies(args, &corpus.train)?;
                Setting { task, source, target, turns: args.turns }
            }
        };
        let (source, target) = (&setting.source, &setting.target);
        println!("{} with vocabularies of {} and {}", kind.name(), source.len(), target.len());
        let train = corpus::encode(&corpus.train, source, target)?;
        let valid = corpus::encode(&corpus.valid, source, target)?;
        let mut session = Session::new(kind, args.sizes(source.len(), target.len()), &setting, &recipe, &device)?;
        if let Some(checkpoint) = &resumed {
            session.restore(checkpoint)?;
        }
        session.run(&train, &valid, args.common.save_path(kind)?.as_deref())?;

        let beam = task.beam(args, task.n_best());
        let scores = score::score(task, &session.model, target, &corpus.valid, &valid, beam)?;
        println!("\n{}", report::samples(&corpus.valid, &scores, args.samples));
        let points = session.history.iter().enumerate();
        curves.push(Curve {
            name: kind.name().into(),
            points: points.map(|(i, [_, valid])| ((i + 1) as f64, *valid)).collect(),
        });
        rows.push(Row {
            kind,
            parameters: session.model.parameters(),
            epochs: session.history.len(),
            valid_nll: session.valid_nll(&valid)?,
            measures: scores.measures,
            tokens_per_second: session.tokens_per_second(),
        });
    }

    println!("{}", report::table(&rows));
    if let Some(path) = &args.common.plot {
        let title = format!("Learning {}", corpus.name);
        plot::curves(path, &Axes { title: &title, x: "epoch", y: "validation NLL (nats)", floor: None }, &curves)?;
    }
    if args.common.json {
        println!("{}", report::json(&rows));
    }
    Ok(())
}
