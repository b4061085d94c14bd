//! A model that ends in `Linear` and `cross_entropy`, and the same model with `SoftmaxHead`: the loss, the seconds and
//! the peak memory of a training step over 1024 positions and 32,000 token ids.
//!
//!     cargo run --release --example swap_head
//!
//! The losses are equal, and the step with `SoftmaxHead` takes less time and memory. It runs for some seconds on 2
//! cores.
//!
//! Dependencies of a copy: candle-core 0.11, candle-nn 0.11, mos-head 0.3; no features.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{
    embedding, linear, linear_no_bias, loss::cross_entropy, Embedding, Linear, Module, VarBuilder, VarMap,
};
use mos_head::{LossOptions, OutputLayer, SoftmaxHead};

const VOCAB: usize = 32_000;
const HIDDEN: usize = 256;
const POSITIONS: usize = 1024;

/// The body of a model: embedding and one layer. (Any model of yours.)
fn hidden(body: &(Embedding, Linear), tokens: &Tensor) -> Result<Tensor> {
    body.1.forward(&body.0.forward(tokens)?)?.gelu()
}

/// MiB in a line of this process's status; NaN on other systems than Linux.
fn mib(line: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|text| text.strip_prefix(line)?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(f64::NAN, |kib: f64| kib / 1024.0)
}

/// Runs a training step twice; prints the loss, and the seconds and the additional memory of the second.
fn measure(name: &str, step: impl Fn() -> Result<f32>) -> Result<()> {
    step()?;
    let _ = std::fs::write("/proc/self/clear_refs", "5"); // the peak starts anew
    let (before, start) = (mib("VmRSS:"), Instant::now());
    let loss = step()?;
    let (seconds, extra) = (start.elapsed().as_secs_f64(), mib("VmHWM:") - before);
    println!("{name:26} loss {loss:.5}   {seconds:6.3} s   {extra:6.0} MiB");
    Ok(())
}

fn main() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let body = (embedding(VOCAB, HIDDEN, vb.pp("embedding"))?, linear(HIDDEN, HIDDEN, vb.pp("layer"))?);
    let lm_head = linear_no_bias(HIDDEN, VOCAB, vb.pp("lm_head"))?;
    let ids = |factor: usize| (0..POSITIONS).map(|i| (i * factor % VOCAB) as u32).collect::<Vec<_>>();
    let (tokens, targets) = (Tensor::new(ids(7919), &Device::Cpu)?, Tensor::new(ids(104_729), &Device::Cpu)?);

    measure("Linear and cross_entropy", || {
        let logits = lm_head.forward(&hidden(&body, &tokens)?)?; // [positions, vocab]
        let loss = cross_entropy(&logits, &targets)?;
        loss.backward()?;
        loss.to_scalar()
    })?;
    let head = SoftmaxHead::try_from(lm_head.clone())?;
    measure("SoftmaxHead", || {
        let loss = head.loss(&hidden(&body, &tokens)?, &targets, &LossOptions::default())?;
        loss.backward()?;
        loss.value.to_scalar()
    })
}
