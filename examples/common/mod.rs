//! Shared by the training examples. `heads` is the loop over the output layers, `session` the training of one of them,
//! `train` one epoch of it, for any `model`; `language_model` is the one of `lstm_lm` and `char_lm`.
#![allow(dead_code)] // each example includes this module and uses only some of it

pub(crate) mod awd;
pub(crate) mod batches;
pub(crate) mod bpe;
pub(crate) mod checkpoint;
pub(crate) mod codes;
pub(crate) mod device;
pub(crate) mod digest;
pub(crate) mod flags;
pub(crate) mod generate;
pub(crate) mod head;
pub(crate) mod heads;
pub(crate) mod init;
pub(crate) mod inplace;
pub(crate) mod language_model;
pub(crate) mod learn_table;
pub(crate) mod measure;
pub(crate) mod model;
pub(crate) mod optimizer;
pub(crate) mod output;
pub(crate) mod plot;
pub(crate) mod progress;
pub(crate) mod recipe;
pub(crate) mod recurrence;
pub(crate) mod recurrence_cpu;
pub(crate) mod recurrent;
pub(crate) mod report;
pub(crate) mod results;
pub(crate) mod session;
pub(crate) mod sizes;
pub(crate) mod table;
pub(crate) mod table_picture;
pub(crate) mod train;
pub(crate) mod values;

use std::process::ExitCode;

/// Errors end an example with one line on stderr and exit code 1.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Reads the flags and runs the example.
pub(crate) fn start<A: clap::Parser>(run: impl FnOnce(&A) -> Result<()>) -> ExitCode {
    let_idle_threads_sleep();
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(message) => {
            let _ = message.print();
            return if message.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// After each operation candle's threads spin until the next one; on few cores they keep rayon's from working. Called
/// before any thread is started, as `set_var` requires.
fn let_idle_threads_sleep() {
    const LIMIT: &str = "CANDLE_BARRIER_POOL_SPIN_LIMIT";
    if std::env::var_os(LIMIT).is_none() {
        std::env::set_var(LIMIT, "100");
    }
}
