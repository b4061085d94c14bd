//! The lab's programs share this library: models, their training, their texts and what is printed about them.
//!
//! Each folder imports only those below it in this list: `training` (heads one by one, their sessions, the language
//! model), `scores` of texts, `data`, the `layers` of models with their output layers, and what a program asks and
//! shows (`show`). All use the type of errors, which stands here.

pub mod training;

pub mod scores;

pub mod data;

pub mod layers;

pub mod show;

use std::process::ExitCode;

/// Errors end a program with one line on stderr and exit code 1.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Reads the flags and runs the program, on one of rayon's threads: a parallel loop then wakes one thread less, and a
/// training step has dozens of loops.
pub fn start<A: clap::Parser + Sync>(run: impl FnOnce(&A) -> Result<()> + Send) -> ExitCode {
    let_idle_threads_sleep();
    start_threads();
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(message) => {
            let _ = message.print();
            return if message.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    rayon::scope(|_| exit_code(run(&args)))
}

/// Starts rayon's threads with as much stack as a main thread usually has: candle's backward pass recurses over the graph.
fn start_threads() {
    const STACK: usize = 8 << 20;
    // If there are threads already, or none can be started, the first loop finds out.
    let _ = rayon::ThreadPoolBuilder::new().stack_size(STACK).build_global();
}

/// Prints the error of a program, if it has one, and returns its exit code.
pub fn exit_code<E: std::fmt::Display>(result: std::result::Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Sets candle's limit of spinning. After each operation candle's threads spin until the next one, and on few cores
/// they keep rayon's from working. The call comes before any thread is started, as `set_var` requires.
fn let_idle_threads_sleep() {
    const LIMIT: &str = "CANDLE_BARRIER_POOL_SPIN_LIMIT";
    if std::env::var_os(LIMIT).is_none() {
        std::env::set_var(LIMIT, "100");
    }
}
