//! Draws the pictures in `docs` and rewrites the tables of the documents, from the measurements in `benches/results`. A
//! line there that no table or picture shows any more is removed.
//!
//!     cargo run --release -p lab --bin figures
//!
//! A table stands between the lines `<!-- figures: NAME -->` and `<!-- /figures -->`. Those whose rows are lines of the
//! measurements are data (`tables.json`), and `tables.rs` lists the others. Tables of time and memory show the
//! processor on which this crate was measured last, and the newest measurement there; a training step's other
//! processors have a table of their own.
//!
//! `tests.rs` fails if a picture or a table is not what this command makes.

mod bars;
mod captions;
mod columns;
mod drawing;
mod format;
mod outputs;
mod papers;
mod pictures;
mod quality;
mod results;
mod runs;
mod tables;
#[cfg(test)]
mod tests;
mod vocabularies;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

/// Draws the pictures in docs and rewrites the tables of the documents, from the measurements in benches/results
#[derive(Parser)]
struct Args {}

fn main() -> ExitCode {
    let Args {} = Args::parse();
    lab::exit_code(run(results::root()))
}

fn run(root: &Path) -> results::Result<()> {
    for (path, text) in outputs::outputs(root)? {
        let changed = results::read(root, &path).ok().as_ref() != Some(&text);
        if changed {
            std::fs::write(root.join(&path), text).map_err(|error| format!("cannot write {path}: {error}"))?;
        }
        println!("{path}: {}", if changed { "written" } else { "unchanged" });
    }
    Ok(())
}
