//! The lab's programs share this library: models, their training, their texts and what is printed about them.
//!
//! `heads` is the loop over the output layers, `session` the training of one of them, `train` one epoch of it, for any
//! `model`; `language_model` is the LSTM of the programs `language_model` and `characters`.

pub mod attention;
pub mod awd;
pub mod batches;
pub mod bleu;
pub mod bpe;
pub mod checkpoint;
pub mod cider;
pub mod codes;
pub mod device;
pub mod digest;
pub mod dropout;
pub mod flags;
pub mod generate;
pub mod gguf;
pub mod head;
pub mod heads;
pub mod init;
pub mod inplace;
pub mod language;
pub mod language_model;
mod learn_table;
pub mod measure;
pub mod memory;
pub mod model;
pub mod optimizer;
pub mod output;
pub mod plot;
pub mod progress;
pub mod ranks;
pub mod recipe;
mod recurrence;
mod recurrence_cpu;
pub mod recurrent;
pub mod recurrent_decoder;
pub mod report;
mod results;
pub mod sequences;
pub mod session;
pub mod sizes;
pub mod table;
mod table_picture;
pub mod text;
pub mod train;
pub mod transformer;
pub mod values;
pub mod words;

use std::process::ExitCode;

/// Errors end a program with one line on stderr and exit code 1.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Reads the flags and runs the program.
pub fn start<A: clap::Parser>(run: impl FnOnce(&A) -> Result<()>) -> ExitCode {
    let_idle_threads_sleep();
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(message) => {
            let _ = message.print();
            return if message.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    exit_code(run(&args))
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
