//! Draws the pictures in `docs` and rewrites the tables of the READMEs and of benches/RESULTS.md, from the measurements in
//! `benches/results`.
//!
//!     cargo run --release --example figures
//!
//! A table stands between the lines `<!-- figures: NAME -->` and `<!-- /figures -->`; `tables.rs` lists the names.
//! `tests/figures.rs` fails if a picture or a table is not what this command makes.

mod codes;
mod outputs;
mod pictures;
mod quality;
mod results;
mod tables;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(Path::new(env!("CARGO_MANIFEST_DIR"))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(root: &Path) -> results::Result<()> {
    for (path, text) in outputs::outputs(root)? {
        let changed = results::read(root, path).ok().as_ref() != Some(&text);
        if changed {
            std::fs::write(root.join(path), text).map_err(|error| format!("cannot write {path}: {error}"))?;
        }
        println!("{path}: {}", if changed { "written" } else { "unchanged" });
    }
    Ok(())
}
