//! Fine-tunes a language model with `Linear` and `cross_entropy`, and with the output layer of this crate: the seconds,
//! the peak memory and the losses of a step. The model has the shape of llama2.c's with 15 million parameters.
//!
//!     cargo run --release -p lab --bin fine_tune
//!     cargo run --release -p lab --bin fine_tune -- --text FILE --output head --steps 200 --save tuned.safetensors
//!
//! Each output layer is trained by a process of its own, so that its peak of memory is its own. All start with the same
//! values and read the same batches: the losses with the logits and with the head must be the same but for rounding.
//!
//!     cargo run --release -p lab --bin fine_tune -- --weights model.safetensors --tokenizer tokenizer.json --text FILE
//!
//! Starts from weights that are named as in Hugging Face's Llama, whose token ids are those of their own tokenizer.

mod model;
mod output;
#[cfg(test)]
mod tests;
mod text;

use candle_core::Device;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use clap::{Parser, ValueEnum};
use lab::show::report::{self, median, number};
use lab::show::values::{above_zero, name, positive};
use lab::{show::Peak, Result};
use model::Config;
use output::{FineTuned, Output};
use serde_json::{json, Value};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;
use text::Text;

/// Fine-tunes a language model with each of the output layers
#[derive(Clone, Debug, Parser)]
pub(crate) struct Args {
    /// The text to train on [default: a built-in language]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Makes token ids of the text [default: byte-pair encoding of its words, which is learned from them]
    #[arg(long, value_name = "FILE.json", requires = "text")]
    tokenizer: Option<PathBuf>,
    /// The output layer [default: all, each in a process of its own]
    #[arg(long, value_enum)]
    output: Option<Output>,
    /// Steps of training
    #[arg(long, value_parser = positive, default_value_t = 6)]
    steps: usize,
    /// Number of token ids
    #[arg(long, value_parser = positive, default_value_t = 32_000)]
    vocab_size: usize,
    /// Size of a hidden state
    #[arg(long, value_parser = positive, default_value_t = 288)]
    hidden: usize,
    /// Number of layers
    #[arg(long, value_parser = positive, default_value_t = 6)]
    layers: usize,
    /// Attention heads
    #[arg(long, value_parser = positive, default_value_t = 6)]
    attention_heads: usize,
    /// Width within the feed-forward networks
    #[arg(long, value_parser = positive, default_value_t = 768)]
    inner: usize,
    /// Added to mean squares in the norms
    #[arg(long, value_parser = above_zero, default_value_t = 1e-5)]
    rms_epsilon: f64,
    /// Base of the wavelengths of rotary positions
    #[arg(long, value_parser = above_zero, default_value_t = 10_000.0)]
    rope_theta: f64,
    /// Windows of text per step
    #[arg(long, value_parser = positive, default_value_t = 8)]
    batch: usize,
    /// Positions of a window
    #[arg(long, value_parser = positive, default_value_t = 128)]
    positions: usize,
    /// Rank of the adapter
    #[arg(long, value_parser = positive, default_value_t = 8)]
    rank: usize,
    /// Learning rate of AdamW
    #[arg(long, value_parser = above_zero, default_value_t = 3e-4)]
    lr: f64,
    /// Start from these weights, which are named as in Hugging Face's Llama [default: random ones]
    #[arg(long, value_name = "FILE.safetensors")]
    weights: Option<PathBuf>,
    /// A GGUF file whose quantised output layer is the decoder; the embedding remains that of the weights
    #[arg(long, value_name = "FILE.gguf", requires = "output")]
    gguf: Option<PathBuf>,
    /// Write the weights, an adapter's apart from the decoder's, and the tokenizer beside them if it was learned
    #[arg(long, value_name = "FILE.safetensors", requires = "output")]
    save: Option<PathBuf>,
    /// The seed of initial values and batches
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print a JSON line for each output layer instead of a table
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    let Args { hidden, attention_heads: heads, .. } = *args;
    if !hidden.is_multiple_of(2 * heads) {
        return Err(
            format!("--hidden is {hidden}, expected a multiple of twice the {heads} of --attention-heads").into()
        );
    }
    if args.weights.is_some() && args.text.is_some() && args.tokenizer.is_none() {
        return Err("--weights with --text needs the --tokenizer of these weights".into());
    }
    let lines = match args.output {
        Some(output) => vec![train(args, output, |step, loss| eprintln!("step {step:>4}  loss {loss:.5}"))?],
        None => Output::value_variants().iter().map(|output| in_a_process(*output)).collect::<Result<Vec<_>>>()?,
    };
    if args.json {
        lines.iter().for_each(|line| println!("{line}"));
    } else {
        println!("{}", table(&lines));
    }
    if args.output.is_some() {
        return Ok(());
    }
    let steps = args.steps.min(COMPARED);
    let difference = largest_difference(&lines[0], &lines[1], steps);
    eprintln!("The losses with the logits and with the head differ by at most {difference:.1e} nats in {steps} steps.");
    if difference < MOST_DIFFERENCE {
        Ok(())
    } else {
        Err(format!("a difference of {difference:.1e} nats is more than rounding").into())
    }
}

/// The number of steps whose losses are compared. Later, rounding grows with each step.
const COMPARED: usize = 6;
/// Losses of f32 that differ by more than this are not those of the same training.
const MOST_DIFFERENCE: f64 = 1e-4;

/// Returns the line of this program, called with the same flags for one output layer.
fn in_a_process(output: Output) -> Result<Value> {
    let name = name(&output);
    eprintln!("{name}");
    let found = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .args(["--output", &name])
        .args(if std::env::args_os().any(|flag| flag == "--json") { &[][..] } else { &["--json"] })
        .stderr(Stdio::inherit())
        .output()?;
    if !found.status.success() {
        return Err(format!("--output {name} failed").into());
    }
    Ok(serde_json::from_slice(&found.stdout)?)
}

/// Trains with one output layer; `show` is called with the number and the loss of each step.
fn train(args: &Args, output: Output, show: impl Fn(usize, f64)) -> Result<Value> {
    let Args { vocab_size: vocab, hidden, layers, attention_heads: heads, inner, batch, positions, .. } = *args;
    let text = match &args.text {
        Some(path) => Text::from_file(path, args.tokenizer.as_deref(), vocab)?,
        None => Text::built_in(vocab, args.seed)?,
    };
    let Args { rms_epsilon, rope_theta, .. } = *args;
    let config = Config { vocab, hidden, layers, heads, inner, positions, rms_epsilon, rope_theta };
    let tuned = FineTuned::new(config, output, args.rank, args.seed, args.gguf.as_deref())?;
    if let Some(path) = &args.weights {
        tuned.load(path)?;
    }
    let trained = tuned.trained.all_vars();
    let mut optimizer = AdamW::new(trained.clone(), ParamsAdamW { lr: args.lr, ..ParamsAdamW::default() })?;
    let (mut losses, mut seconds) = (vec![], vec![]);
    let memory = Peak::watch(&Device::Cpu);
    for step in 0..args.steps {
        let [tokens, targets] = text.batch(batch, positions, args.seed ^ ((step as u64) << 32))?;
        let start = Instant::now();
        let (loss, gradients) = tuned.step(&tokens, &targets)?;
        let without = tuned.without_gradient(&gradients);
        if !without.is_empty() {
            return Err(format!("no gradient reaches {}", without.join(", ")).into());
        }
        if !loss.is_finite() {
            return Err(format!("the loss of step {} is {loss}: try a lower --lr", step + 1).into());
        }
        optimizer.step(&gradients)?;
        seconds.push(start.elapsed().as_secs_f64());
        losses.push(loss);
        show(step + 1, loss);
    }
    let peak_mib = memory.mib();
    if let Some(path) = &args.save {
        tuned.save(path)?;
        text.save_tokenizer(&path.with_extension("tokenizer.json"))?;
    }
    // The first step also waits for memory.
    let later = &seconds[usize::from(seconds.len() > 1)..];
    Ok(json!({
        "output": name(&output),
        "text": text.name,
        "pieces": text.pieces,
        "parameters": tuned.variables().iter().map(|(_, var)| var.elem_count()).sum::<usize>(),
        "trained": trained.iter().map(|var| var.elem_count()).sum::<usize>(),
        "positions": batch * positions,
        "seconds": median(later),
        "peak_mib": peak_mib,
        "losses": losses,
    }))
}

fn numbers(line: &Value, key: &str) -> Vec<f64> {
    line[key].as_array().map_or(vec![], |all| all.iter().filter_map(Value::as_f64).collect())
}

/// Returns the largest difference of the losses of the first steps. It is NaN if a loss is missing, as one that is not
/// finite is in JSON.
fn largest_difference(a: &Value, b: &Value, steps: usize) -> f64 {
    let (a, b) = (numbers(a, "losses"), numbers(b, "losses"));
    if a.len().min(b.len()) < steps {
        return f64::NAN;
    }
    a.iter().zip(&b).take(steps).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn table(lines: &[Value]) -> String {
    let row = |line: &Value| {
        let losses = numbers(line, "losses");
        let whole = |key: &str| number(line[key].as_f64(), 0);
        vec![
            line["output"].as_str().unwrap_or("").to_owned(),
            whole("parameters"),
            whole("trained"),
            number(line["seconds"].as_f64(), 2),
            whole("peak_mib"),
            number(losses.first().copied(), 4),
            number(losses.last().copied(), 4),
        ]
    };
    let columns = ["output", "parameters", "trained", "s/step", "peak MiB", "first loss", "last loss"];
    report::table(&columns, &lines.iter().map(row).collect::<Vec<_>>())
}
