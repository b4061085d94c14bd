//! Serves several texts at once with an output layer of this crate: each request has settings of its own, joins the
//! batch when there is room, and leaves it when it is done. Prints a JSON line for each.
//!
//!     cargo run --release -p lab --bin serve
//!     cargo run --release -p lab --bin serve --features candle-transformers -- --model qwen2 --layers 4
//!
//! The LSTM (`--checkpoint` of `language_model --save`) computes the hidden states of a batch together; qwen2 of
//! candle-transformers (`--checkpoint` names a folder with `config.json` and `model.safetensors`) those of each text
//! alone. The last request has a grammar, whose mask changes at each step. Without a checkpoint the weights are random.
//! `--gguf` names a file whose output layer serves the qwen2. A step of the whole batch reads the decoder once.

mod backbone;
mod grammar;
mod lstm;
#[cfg(feature = "candle-transformers")]
mod qwen2;
mod request;

use backbone::Backbone;
use clap::{Parser, ValueEnum};
use lab::Result;
use mos_head::decode::NextToken;
use request::Request;
use serde_json::json;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// The LSTM of `language_model`
    Lstm,
    /// Qwen2 of candle-transformers, which needs the feature of this name
    Qwen2,
}

/// Serves several texts at once
#[derive(Parser)]
struct Args {
    #[arg(long, value_enum, default_value_t = Kind::Lstm)]
    model: Kind,
    /// Trained weights
    #[arg(long, value_name = "PATH")]
    checkpoint: Option<PathBuf>,
    /// A GGUF file whose output layer takes the place of a qwen2's
    #[arg(long, value_name = "FILE.gguf")]
    gguf: Option<PathBuf>,
    /// Layers of a qwen2 with random weights
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Token ids of each text, in place of those of the request
    #[arg(long)]
    tokens: Option<usize>,
    /// The most texts at once
    #[arg(long, default_value_t = 3)]
    batch: usize,
}

/// A text in the batch.
struct Text<S> {
    request: Request,
    state: S,
    /// The ids that the model has not read.
    unread: Vec<u32>,
    tokens: Vec<NextToken>,
    joined: u64,
}

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    let mut requests = request::examples()?;
    requests.iter_mut().for_each(|request| request.tokens = args.tokens.unwrap_or(request.tokens).max(1));
    match args.model {
        Kind::Lstm if args.gguf.is_some() => Err("--gguf needs --model qwen2".into()),
        Kind::Lstm => serve(&lstm::Lstm::new(args.checkpoint.as_deref())?, requests, args.batch),
        #[cfg(feature = "candle-transformers")]
        Kind::Qwen2 => {
            let model = qwen2::Qwen2::new(args.checkpoint.as_deref(), args.layers, args.gguf.as_deref())?;
            serve(&model, requests, args.batch)
        }
        #[cfg(not(feature = "candle-transformers"))]
        Kind::Qwen2 => Err("--model qwen2 needs a build with cargo's --features candle-transformers".into()),
    }
}

fn serve<B: Backbone>(backbone: &B, requests: Vec<Request>, most: usize) -> Result<()> {
    let mut waiting: VecDeque<Request> = requests.into();
    let mut batch: Vec<Text<B::State>> = Vec::new();
    let (mut step, mut drawn, mut model_time, mut head_time) = (0, 0, Duration::ZERO, Duration::ZERO);
    while !(waiting.is_empty() && batch.is_empty()) {
        while batch.len() < most.max(1) && waiting.front().is_some_and(|request| request.joins <= step) {
            let Some(request) = waiting.pop_front() else { break };
            let (state, unread) = (backbone.start()?, request.prompt.clone());
            batch.push(Text { request, state, unread, tokens: Vec::new(), joined: step });
        }
        if !batch.is_empty() {
            let start = Instant::now();
            let mut texts: Vec<_> = batch.iter_mut().map(|text| (&mut text.state, text.unread.as_slice())).collect();
            let hidden = backbone.read(&mut texts)?;
            model_time += start.elapsed();
            let start = Instant::now();
            let vocab = backbone.head().vocab_size();
            batch.iter_mut().try_for_each(|text| text.request.constrain(vocab))?;
            let settings: Vec<_> = batch.iter().map(|text| &text.request.settings).collect();
            let tokens = backbone.head().next_tokens(&hidden, &settings)?;
            head_time += start.elapsed();
            drawn += tokens.len();
            for (text, token) in batch.iter_mut().zip(tokens) {
                text.request.push(token.token_id);
                text.unread = vec![token.token_id];
                text.tokens.push(token);
            }
        }
        step += 1;
        let (done, others) = batch.into_iter().partition(|text| text.request.is_done(text.tokens.len()));
        batch = others;
        done.iter().for_each(|text| println!("{}", line(text, step)));
    }
    let seconds = |time: Duration| time.as_secs_f64() / step.max(1) as f64 * 1e3;
    eprintln!(
        "{drawn} token ids in {step} steps: {:.2} ms of the model and {:.2} ms of the output layer in a step",
        seconds(model_time),
        seconds(head_time)
    );
    Ok(())
}

/// Returns the line that is printed of a text that leaves.
fn line<S>(text: &Text<S>, step: u64) -> serde_json::Value {
    let each = |f: &dyn Fn(&NextToken) -> serde_json::Value| text.tokens.iter().map(f).collect::<Vec<_>>();
    json!({
        "request": text.request.number,
        "joined": text.joined,
        "left": step,
        "token_ids": each(&|token| json!(token.token_id)),
        "log_probs": each(&|token| json!(token.log_prob)),
        "sampled_log_probs": each(&|token| json!(token.sampled_log_prob)),
        "best": each(&|token| json!(token.best)),
        "entropies": each(&|token| json!(token.entropy)),
    })
}
