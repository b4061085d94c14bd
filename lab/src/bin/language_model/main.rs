//! Trains an LSTM language model with each of the three output layers at equal size.
//!
//!     cargo run --release -p lab --bin language_model
//!
//! Without data, the text is 256,000 tokens of a built-in language of 512 words, whose entropy is known. The softmax
//! gets within 0.65 nats of it, the mixture of contexts 0.58, the mixture of softmaxes 0.40.
//!
//!     cargo run --release -p lab --bin language_model -- --data DIR
//!
//! With a folder of train.txt and valid.txt (one sentence per line), the program trains a model of 4.8 million
//! parameters for a vocabulary of 10,000. On Penn Treebank, the validation perplexity after 3 epochs is 135 with the
//! softmax (124 with --lr 35 --dropout 0.04, at which the mixtures are unstable), 129 with the mixture of contexts and
//! 126 with the mixture of softmaxes; an epoch takes minutes.
//!
//!     cargo run --release -p lab --bin language_model -- --data DIR --preset ptb-mos --save mos.safetensors --minutes 60
//!
//! This trains the model of the paper with its recipe, in legs of an hour (`presets`). `--evaluate` evaluates a
//! checkpoint, also a released one (`released`), with dynamic evaluation (`dynamic`) and a continuous cache (`cache`).
//!
//!     cargo run --release -p lab --bin language_model -- --data DIR --spell mos.safetensors --save spelled.safetensors
//!
//! This trains a character LSTM that spells the next word from the hidden states of a trained model (`spell`).
//!
//!     cargo build --release -p lab --features mpi --bin language_model
//!     RAYON_NUM_THREADS=1 mpirun -n 2 target/release/language_model --mpi --data DIR
//!
//! Two processes train one model, each with half of every batch (`ranks`).
//!
//! The way from here to the head is this: `heads::train` trains the heads one by one, `session` one head epoch by
//! epoch, `train` one epoch batch by batch; `language_model` is the LSTM, and `head` builds the output layer of this
//! crate.

mod args;
mod cache;
mod codes;
mod describe;
mod dynamic;
mod evaluate;
mod output;
mod presets;
mod released;
mod report;
mod spell;
mod spelling;

use args::Args;
use lab::data::{language::Teacher, Coding, Corpus};
use lab::layers::{Entries, OutputKind};
use lab::training::{generate, heads, InitialValues, LanguageModel, Ranks, Recipe, Session, Sizes};
use lab::{show::plot::Axes, Result};
use mos_codes::CodeTable;
use std::process::ExitCode;

/// A training frees and allocates large tensors in each step, and this allocator keeps their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    args.check_head()?;
    if let Some(words) = args.describe {
        return describe::run(args, words);
    }
    let ranks = args.ranks()?;
    // The error is printed before the process waits for the others to end, because one of them may end this process.
    train(args, &ranks).inspect_err(|error| ranks.report(error.as_ref()))
}

fn train(args: &Args, ranks: &Ranks) -> Result<()> {
    let mut flags = args.training();
    flags.ranks = ranks.clone();
    let recipe = args.recipe()?.divided(ranks)?;
    let device = flags.device.open()?;
    let corpus = match &args.data {
        Some(folder) => Corpus::from_folder(folder, args.words)?,
        None => Teacher::default().built_in(flags.seed),
    };
    let corpus = if recipe.output.kind == OutputKind::Adaptive { corpus.by_frequency() } else { corpus };
    if let Some(evaluation) = args.evaluation() {
        return evaluate::run(&evaluation, &corpus, &device);
    }
    if let Some(file) = args.spelling.word() {
        return spell::run(file, args, &corpus, &recipe, &device);
    }
    ranks.print(format_args!(
        "Training on {}: {} tokens, vocabulary {}, validation {} tokens.",
        corpus.data.name,
        corpus.data.train.len() - 1,
        corpus.words.len(),
        corpus.data.valid.len() - 1
    ));
    for (kind, reason) in flags.left_out.iter().filter(|_| ranks.is_first()) {
        eprintln!("{} is left out: {reason}", kind.name());
    }
    let coding = codes::coding(args, &corpus, &recipe, &device)?;
    let (data, vocabulary) = match &coding {
        None => (corpus.data.clone(), &corpus.words[..]),
        Some(coding) => {
            println!("{} codes, {:.3} for a word", coding.names().len(), coding.per_word(&corpus.data.train));
            (coding.data(&corpus.data), coding.names())
        }
    };
    let entries = Entries::count(vocabulary, &data.train);

    let softmax = args.grow.as_ref().map(|file| evaluate::readable(file, &corpus, &device)).transpose()?;
    let start = args.finetune.as_ref().map(|file| evaluate::readable(file, &corpus, &device)).transpose()?;
    let build = |kind, recipe: &Recipe, resumed: Option<&_>| {
        let sizes = Sizes::new(kind, recipe, vocabulary.len());
        let model = LanguageModel::with_entries(kind, sizes, InitialValues::Small, recipe, &entries, &device)?;
        let model = model.with_table(coding.as_ref().and_then(Coding::table));
        // Noise-contrastive estimation does not learn the normalisers: they start near one.
        if args.unigram_bias || recipe.output.kind == OutputKind::Nce {
            model.start_at_frequencies(&data.train)?;
        }
        if let Some(start) = &start {
            model.restore(start)?;
        }
        if let Some(softmax) = &softmax {
            model.grow(softmax, recipe.seed)?;
        }
        let session = Session::new(kind, model, data.clone(), recipe)?.with_ranks(ranks);
        if softmax.is_some() && resumed.is_none() {
            let valid = recipe.measure.shown(session.valid_nll()?);
            ranks.print(format_args!("{} starts at the softmax's {}: valid {valid:.3}", kind.name(), recipe.measure));
        }
        Ok(session)
    };
    let Some(rows) = heads::run(&flags, &recipe, &device, build, |session| {
        if args.generate > 0 && ranks.is_first() {
            let mut sampler = args.sampling.sampler(flags.seed)?;
            let book = coding.as_ref().and_then(Coding::table).map(CodeTable::codebook);
            let text = generate(&session.model, data.train[0], args.generate, &mut sampler, book)?;
            let text = match &coding {
                None => corpus.decode(&text),
                Some(coding) => coding.decode(&text, &corpus.words)?.join(" "),
            };
            println!("{} writes: {text}", session.kind.name());
        }
        let test = |text: &Vec<u32>| match &coding {
            None => session.evaluate(text),
            Some(coding) => Ok(coding.per_word(text) * session.evaluate(&coding.encode(text))?),
        };
        corpus.test.as_ref().map(test).transpose()
    })?
    else {
        return Ok(());
    };

    ranks.print(format_args!("\n{}", report::table(&rows, corpus.entropy)));
    if let Some(summary) = report::summary(&rows, corpus.entropy) {
        ranks.print(summary);
    }
    let floor = corpus.entropy.map(|entropy| ("entropy", entropy));
    let axes = Axes { title: &format!("Learning {}", data.name), x: "epoch", y: "validation NLL (nats)", floor };
    heads::finish(&flags, &rows, &axes, |nll| nll, |row| report::json(row, &rows, corpus.entropy))
}
