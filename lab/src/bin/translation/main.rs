//! Trains an encoder-decoder with attention, recurrent or a Transformer, with each of the three output layers at equal
//! size.
//!
//!     cargo run --release -p lab --bin translation
//!
//! Without data, the program translates English into a built-in language. Every head gets over 95% of new sentences
//! exactly right.
//!
//!     cargo run --release -p lab --bin translation -- --data DIR --source de --target en --head mos --save mos.safetensors
//!     cargo run --release -p lab --bin translation -- --translate --resume mos.safetensors < lines
//!
//! Translates from DIR/train.de to DIR/train.en, and ends with the BLEU of a beam search over DIR/test.de, or over
//! DIR/valid.de if there is no test. With `--vocab bpe`, `light` or `hybrid`, few token ids serve for many words, so
//! that a mixture is cheap. With `--architecture transformer` the model is a Transformer.
//!
//!     cargo run --release -p lab --bin translation -- --dialogue FILE.jsonl --head mos --save mos.safetensors
//!     cargo run --release -p lab --bin translation -- --chat --resume mos.safetensors --temperature 0.7
//!
//! Responds to the utterances before, and ends with precision and recall of five responses to each context of the test.

mod args;
mod batches;
mod codes;
mod corpus;
mod dialogue;
mod interactive;
mod kinds;
mod model;
mod prepare;
mod recurrent;
mod report;
mod score;
mod search;
mod setting;
mod table;
mod toy;
mod transformer;
mod vocabulary;

use args::Args;
use kinds::Task;
use lab::show::{plot::Axes, Peak};
use lab::training::{heads, Recipe, Session};
use lab::{layers::HeadKind, Result};
use model::Seq2Seq;
use report::Trained;
use setting::Setting;
use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// A training frees and allocates large tensors in each step, and this allocator keeps their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    let device = args.common.device.open()?;
    if args.translate || args.chat {
        return interactive::run(args, &device);
    }
    let task = args.task();
    let recipe = args.recipe();
    let architecture = args.architecture(&recipe)?;
    let corpus = prepare::corpus(args)?;
    let (train, valid) = (corpus.train.len(), corpus.valid.len());
    let (scores_of, scored) = corpus.scored();
    let test = if scores_of == "test" { format!(", test {} pairs", scored.len()) } else { String::new() };
    println!("Training on {}: {train} pairs, validation {valid} pairs{test}.", corpus.name);

    // Once, and only if there is no checkpoint: a table may have to be learned.
    let first = OnceCell::new();
    let setting = || -> Result<Setting> {
        if let Some(setting) = first.get() {
            return Ok(Setting::clone(setting));
        }
        let [source, target] = prepare::vocabularies(args, &corpus.train, &device)?;
        Ok(first.get_or_init(|| Setting { task, architecture, source, target, turns: args.turns }).clone())
    };
    let build = |kind: HeadKind, recipe: &Recipe, checkpoint: Option<&_>| {
        let setting = match checkpoint {
            Some(checkpoint) => Setting::from_checkpoint(checkpoint)?
                .require_architecture(architecture)?
                .require_vocabulary(args.vocab)?,
            None => setting()?,
        };
        let (source, target) = (&setting.source, &setting.target);
        println!("{} with vocabularies of {} and {}", kind.name(), source.len(), target.len());
        let data = corpus::encode(&corpus, source, target)?;
        Session::new(kind, Seq2Seq::new(kind, setting, recipe, &device)?, data, recipe)
    };
    let beam = args.beam(task, task.n_best());
    let found = args.write_found.as_deref().map(create).transpose()?;
    let memory = Cell::new(Some(Peak::watch(&device)));
    let Some(rows) = heads::run(&args.common, &recipe, &device, build, |session| {
        let peak_mib = memory.take().and_then(Peak::mib);
        let setting = &session.model.setting;
        let encoded = corpus::encode_pairs(scored, &setting.source, &setting.target)?;
        let is_test = scores_of == "test";
        let test_nll = is_test.then(|| score::nll_per_word(session, scored, &encoded)).transpose()?;
        let mut scores = score::score(task, &session.model, scored, &encoded, beam)?;
        if task == Task::Translation && setting.target.kind() == "bpe" {
            let known = score::bleu_of_known_words(&corpus.train, scored, &scores.found);
            scores.measures.push(("BLEU known words", known));
        }
        println!("\n{}", report::samples(scored, &scores, args.samples));
        if let Some(mut file) = found.as_ref() {
            file.write_all(report::found(session.kind, scored, &scores)?.as_bytes())?;
        }
        memory.set(Some(Peak::watch(&device)));
        Ok(Trained::new(session, &recipe, scores.measures, test_nll, peak_mib))
    })?
    else {
        return Ok(());
    };

    if scores_of == "test" {
        println!(
            "The scores and samples are those of the test pairs, the model that of the best epoch if there is --save."
        );
    }
    println!("{}", report::table(&rows));
    let title = format!("Learning {}", corpus.name);
    let axes = Axes { title: &title, x: "epoch", y: "validation NLL (nats)", floor: None };
    heads::finish(&args.common, &rows, &axes, |nll| nll, |row| report::json(row, &rows))
}

/// Creates the file of `--write-found`, before anything is trained.
fn create(path: &Path) -> Result<File> {
    File::create(path).map_err(|error| format!("--write-found {} cannot be written: {error}", path.display()).into())
}
