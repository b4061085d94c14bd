//! Trains a caption model with attention over the features of an image with each of the output layers at equal size.
//!
//!     cargo run --release -p lab --bin captions -- --picture captions.svg
//!
//! Without data it draws its images, a few coloured shapes each, and describes them by a grammar in which there are
//! many ways to say the same. It prints how much information its captions have, which no model can be below, and ends
//! with BLEU-4, CIDEr-D, and the share of captions found that the grammar has for their image.
//!
//!     cargo run --release -p lab --bin captions -- --blind
//!
//! The same decoder without an image: what can be known of a caption from its words alone.
//!
//!     cargo run --release -p lab --bin captions -- --features FILE.safetensors --captions FILE.jsonl --min-count 5
//!
//! Trains on features from a file, such as those of the last layer of a network for images.

mod args;
mod data;
mod encoder;
mod files;
mod grammar;
mod model;
mod phrase;
mod picture;
mod report;
mod scene;
mod score;

use args::Args;
use data::Dataset;
use lab::show::{plot::Axes, report::number, Peak};
use lab::training::{heads, Recipe, Session};
use lab::{data::words::Words, layers::HeadKind, Result};
use model::{Captioner, Setting};
use report::Trained;
use std::cell::Cell;
use std::process::ExitCode;

/// A training frees and allocates large tensors in each step, and this allocator keeps their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    let device = args.common.device.open()?;
    let recipe = args.recipe();
    let dataset = match args.features.as_ref().zip(args.captions.as_ref()) {
        Some((features, captions)) => files::dataset(features, captions, &device)?,
        None => Dataset::drawn(args.images, args.common.seed, &device)?,
    };
    let texts = dataset.train.iter().flat_map(|example| example.captions.iter().map(String::as_str));
    let words = Words::from_texts(texts, args.min_count, &[]);
    let data = dataset.encode(&words)?;
    println!(
        "Training on {}: {} images with {} captions of {} words, validation {} images, test {}{}.",
        data.name,
        dataset.train.len(),
        data.train.len(),
        words.len(),
        dataset.valid.len(),
        dataset.test.len(),
        if args.blind { "; the model sees none of them" } else { "" }
    );
    let setting = Setting { images: dataset.images.clone(), words, blind: args.blind };
    let build = |kind: HeadKind, recipe: &Recipe, _: Option<&_>| {
        let recipe = Captioner::equal(kind, &setting, recipe, &device)?;
        Session::new(kind, Captioner::new(kind, setting.clone(), &recipe, &device)?, data.clone(), &recipe)
    };
    if let Some(path) = &args.picture {
        picture::check(path)?;
    }
    let (part, scored) = dataset.scored();
    let memory = Cell::new(Some(Peak::watch(&device)));
    let Some(rows) = heads::run(&args.common, &recipe, &device, build, |session| {
        let peak_mib = memory.take().and_then(Peak::mib);
        let scores = score::score(session, &dataset, scored, &args.search())?;
        println!("\n{}", report::samples(scored, &scores, args.samples));
        memory.set(Some(Peak::watch(&device)));
        Ok(Trained::new(session, &recipe, scores, peak_mib))
    })?
    else {
        return Ok(());
    };

    println!("{}", report::table(&rows, part));
    let floor = dataset.floor(&dataset.valid);
    if floor.is_some() {
        let (valid, scored) = (number(floor, 4), number(dataset.floor(scored), 4));
        println!("The captions have {valid} nats per word, those of the {part} images {scored}: no NLL is lower.");
    }
    if let Some(path) = &args.picture {
        picture::draw(path, &dataset, scored, args.samples, &rows)?;
    }
    let title = format!("Learning captions of {}", data.name);
    let floor_line = floor.map(|floor| ("information", floor));
    let axes = Axes { title: &title, x: "epoch", y: "validation NLL (nats)", floor: floor_line };
    heads::finish(&args.common, &rows, &axes, |nll| nll, |row| report::json(row, &rows, part, floor))
}

#[cfg(test)]
mod tests;
