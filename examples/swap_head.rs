//! This example compares a model that ends in `Linear` and `cross_entropy` with the same model that ends in
//! `SoftmaxHead`: the loss, the seconds and the peak memory of a training step over 1024 positions and 32,000 token
//! ids.
//!
//!     cargo run --release --example swap_head
//!
//! The losses are equal but for rounding, and the step with `SoftmaxHead` takes less time and memory. Each is measured
//! in a process of its own, because the memory that one step has freed can serve the next. The example takes some
//! seconds on 2 cores.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9, without features.

use std::process::Command;
use std::time::Instant;

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{loss::cross_entropy, Embedding, Linear, Module};
use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
use rand::{rngs::StdRng, Rng, SeedableRng};

const VOCAB: usize = 32_000;
const HIDDEN: usize = 288;
const POSITIONS: usize = 1024;

/// Computes the hidden states by the body of a model, which is here an embedding and one layer, and may be any model.
fn hidden(body: &(Embedding, Linear), tokens: &Tensor) -> Result<Tensor> {
    body.1.forward(&body.0.forward(tokens)?)?.gelu()
}

/// Reads the MiB in a line of this process's status. They are NaN on other systems than Linux.
fn mib(line: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|text| text.strip_prefix(line)?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(f64::NAN, |kib: f64| kib / 1024.0)
}

/// Runs a training step twice. Prints the loss, the seconds of the second and the memory that the first adds at its
/// peak.
fn measure(name: &str, step: impl Fn() -> Result<f32>) -> Result<()> {
    let _ = std::fs::write("/proc/self/clear_refs", "5"); // the peak is measured from here on
    let before = mib("VmRSS:");
    step()?;
    let (extra, start) = (mib("VmHWM:") - before, Instant::now());
    let loss = step()?;
    println!("{name:26} loss {loss:.5}   {:6.3} s   {extra:6.0} MiB", start.elapsed().as_secs_f64());
    Ok(())
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let Some(output) = std::env::args().nth(1) else {
        for output in ["logits", "head"] {
            let status = Command::new(std::env::current_exe()?).arg(output).status()?;
            assert!(status.success(), "the process with {output} failed: {status}");
        }
        return Ok(());
    };

    let mut rng = StdRng::seed_from_u64(1); // the same initial values in both processes
    let mut weight = |rows: usize| {
        let values: Vec<f32> = (0..rows * HIDDEN).map(|_| rng.random_range(-0.1..0.1)).collect();
        Var::from_vec(values, (rows, HIDDEN), &Device::Cpu).map(Var::into_inner)
    };
    let body = (Embedding::new(weight(VOCAB)?, HIDDEN), Linear::new(weight(HIDDEN)?, None));
    let lm_head = Linear::new(weight(VOCAB)?, None);
    let ids = |factor: usize| (0..POSITIONS).map(|i| (i * factor % VOCAB) as u32).collect::<Vec<_>>();
    let (tokens, targets) = (Tensor::new(ids(7919), &Device::Cpu)?, Tensor::new(ids(104_729), &Device::Cpu)?);

    if output == "logits" {
        measure("Linear and cross_entropy", || {
            let logits = lm_head.forward(&hidden(&body, &tokens)?)?; // [positions, vocab]
            let loss = cross_entropy(&logits, &targets)?;
            loss.backward()?;
            loss.to_scalar()
        })
    } else {
        let head = SoftmaxHead::try_from(lm_head)?;
        measure("SoftmaxHead", || {
            let loss = head.loss(&hidden(&body, &tokens)?, &targets, &LossOptions::default())?;
            loss.backward()?;
            loss.value.to_scalar()
        })
    }
}
