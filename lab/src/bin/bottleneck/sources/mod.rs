//! Log-probabilities come from one of three sources: the checkpoint of a language model, two files with a decoder and
//! its contexts, or a file that has the log-probabilities themselves.

mod checkpoint;
mod file;
mod log_probs;
mod mixture;
#[cfg(test)]
pub(crate) use checkpoint::tests;
#[cfg(test)]
pub(crate) use file::tests::{log_softmax, random};

use crate::{args::Args, source::Source};
use lab::Result;

/// Returns the sources of all files.
pub(crate) fn open(args: &Args) -> Result<Vec<Source>> {
    if args.compare && args.checkpoints.len() != 2 {
        return Err(format!("--compare needs two checkpoints, got {}", args.checkpoints.len()).into());
    }
    args.checkpoints
        .iter()
        .map(|path| match (&args.log_probs, &args.weight, &args.hidden) {
            (Some(key), _, _) => log_probs::open(path, key, args),
            (None, Some(key), Some(hidden)) => mixture::open(path, key, hidden, args),
            _ => checkpoint::open(path, args),
        })
        .collect()
}
