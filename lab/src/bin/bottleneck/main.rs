//! Does a model have a softmax bottleneck? Measures the matrix of its log-probabilities over many contexts.
//!
//!     cargo run --release -p lab --bin language_model -- --save models
//!     cargo run --release -p lab --bin bottleneck -- models/softmax.safetensors models/moc.safetensors models/mos.safetensors
//!
//! The numerical rank of the log-probabilities [contexts, vocab], their singular values, the mean divergence between
//! the distributions of two contexts, the components in use, and the perplexity that is left if the matrix is replaced
//! by its best approximation of a lower rank (Yang et al., 2018, tables 6, 7 and 11, figure 1).
//!
//!     cargo run --release -p lab --bin bottleneck -- --compare models/softmax.safetensors models/mos.safetensors
//!
//! The contexts in which two models differ most, with the most probable tokens of each (table 14).
//!
//!     cargo run --release -p lab --bin bottleneck -- model.safetensors --weight lm_head.weight --hidden states.safetensors
//!
//! The same for one softmax of any model, softmax(W h + b): its matrix W [vocab, d], `--bias` if it has one, and hidden
//! states `hidden` [.., d]. For a mixture of softmaxes, the second file has `contexts` [.., K, d] and `log_priors`
//! [.., K] instead (without the latter if K = 1).
//!
//!     cargo run --release -p lab --bin bottleneck -- log_probs.safetensors --log-probs log_probs --targets targets
//!
//! The same for log-probabilities [.., vocab] of any origin, or, with `--logits`, for logits. They must be in f32 or
//! f64; those in f32 have the roundoff of f32. The width d of a softmax is not known then, so that the rank is not
//! compared with d + 2.
//!
//!     cargo run --release -p lab --bin bottleneck -- --gradient models/softmax.safetensors models/mos.safetensors
//!
//! The share of the logits' gradient that the decoder of a model passes on to its contexts (the gradient bottleneck,
//! arXiv 2603.10145). With `--weight` and `--hidden` it is that of any model, if the second file has `targets`.

mod args;
mod compare;
mod distributions;
mod gradient;
mod low_rank;
mod picture;
mod report;
mod source;
mod sources;
mod spectrum;
mod study;

use args::Args;
use lab::Result;
use std::process::ExitCode;

fn main() -> ExitCode {
    lab::start(run)
}

fn run(args: &Args) -> Result<()> {
    let sources = sources::open(args)?;
    if args.compare {
        return compare::run(args, &sources);
    }
    if args.gradient {
        return gradient::run(args, &sources);
    }
    let studies = sources.iter().map(|source| study::study(source, args)).collect::<Result<Vec<_>>>()?;
    println!("{}", report::text(&studies));
    if let Some(path) = &args.plot {
        picture::draw(path, &studies)?;
    }
    if args.json {
        println!("{}", report::json(&studies));
    }
    Ok(())
}
