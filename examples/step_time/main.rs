//! Times one training step of the output layer alone (contexts, priors, loss, and the gradients of the hidden states
//! and all parameters) and prints one JSON line: seconds, peak memory beyond parameters and inputs, loss; and from the
//! same process the fused mixture alone and the bare matrix products that any exact method needs.
//!
//!     cargo run --release --example step_time -- --shape ptb
//!
//! A few seconds for `small`, half a minute for `ptb` on 2 cores, some minutes for `1b` and `llm`.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../common/device.rs"]
#[allow(dead_code)] // the GPUs of the tests
mod device;
mod floor;
mod memory;
#[path = "../common/values.rs"]
#[allow(dead_code)] // the parsers of the other examples
mod values;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use clap::{Parser, ValueEnum};
use common::composed::Operands;
use device::DeviceKind;
use memory::Peak;
use mos_head::{Activation, LossOptions, Mixture, MixtureOfSoftmaxes, MixtureTensors, OutputLayer, SoftmaxHead};
use serde_json::json;
use values::{not_negative, positive};

#[derive(Parser)]
#[command(about = "Times one training step of the output layer")]
struct Args {
    /// The sizes of a published model
    #[arg(long, value_enum, default_value = "small")]
    shape: Shape,
    /// What to time
    #[arg(long = "impl", value_enum, default_value = "fused")]
    implementation: Implementation,
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Dtype,
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceKind,
    /// Number of timed steps
    #[arg(long, default_value_t = 5, value_parser = positive)]
    reps: usize,
    /// Number of steps before the timed ones
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Number of positions [default: that of the shape]
    #[arg(long, value_parser = positive)]
    tokens: Option<usize>,
    /// Number of components [default: that of the shape]
    #[arg(long, value_parser = positive)]
    components: Option<usize>,
    /// Time the loss without gradients, as in an evaluation
    #[arg(long)]
    forward_only: bool,
    /// Components with less responsibility than this get no gradient
    #[arg(long, default_value_t = 0.0, value_parser = not_negative)]
    filter: f64,
    /// Budget of the workspace, in MiB
    #[arg(long, value_parser = positive)]
    workspace_mib: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shape {
    /// Penn Treebank, Yang et al. 2018: batch 12 x 70, K = 15
    Ptb,
    /// WikiText-2, Yang et al. 2018: batch 15 x 70, K = 15
    Wt2,
    /// One Billion Word, Yang et al. 2018: batch 60 x 35, K = 7
    #[value(name = "1b")]
    OneBillion,
    /// The softmax of a language model of a billion parameters: 2048 positions
    Llm,
    /// Small sizes to try a script on
    Small,
}

impl Shape {
    /// (positions, K, d, vocab, hidden)
    fn sizes(self) -> (usize, usize, usize, usize, usize) {
        match self {
            Shape::Ptb => (840, 15, 280, 10_000, 620),
            Shape::Wt2 => (1050, 15, 300, 33_278, 650),
            Shape::OneBillion => (2100, 7, 900, 100_000, 1024),
            Shape::Llm => (2048, 1, 2048, 128_256, 2048),
            Shape::Small => (256, 4, 64, 2000, 96),
        }
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Implementation {
    /// This crate
    Fused,
    /// The same formula from ordinary candle operations
    Composed,
    /// The three matrix products alone
    Gemm3,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
}

/// The leaves of the computation.
struct Leaves {
    hidden: Var,
    prior_weight: Var,
    latent_weight: Var,
    latent_bias: Var,
    weight: Var,
    bias: Var,
    targets: Tensor,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = args.device.open()?;
    let dtype = match args.dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
    };
    let (positions, components, context, vocab, hidden) = args.shape.sizes();
    let (positions, components) = (args.tokens.unwrap_or(positions), args.components.unwrap_or(components));
    let leaf = |dims: &[usize], scale: f64| {
        Var::from_tensor(&(Tensor::randn(0f32, 1., dims, &device)? * scale)?.to_dtype(dtype)?)
    };
    let ids: Vec<u32> = (0..positions).map(|i| (i * 7919 % vocab) as u32).collect();
    let rows = components * context;
    let leaves = Leaves {
        hidden: leaf(&[positions, hidden], 1.0)?,
        prior_weight: leaf(&[components, hidden], 0.05)?,
        latent_weight: leaf(&[if components > 1 { rows } else { 1 }, hidden], 0.05)?,
        latent_bias: leaf(&[rows], 0.05)?,
        weight: leaf(&[vocab, context], 0.06)?,
        bias: leaf(&[vocab], 0.01)?,
        targets: Tensor::from_vec(ids, positions, &device)?,
    };
    let mut options = if args.forward_only { LossOptions::evaluation() } else { LossOptions::default() };
    options = options.with_responsibility_filter(args.filter);
    if let Some(mib) = args.workspace_mib {
        options = options.with_workspace_bytes(mib << 20);
    }
    let floor_sizes = floor::Sizes { rows: positions * components, context, vocab };
    let floor = || if args.forward_only { floor::one_product(floor_sizes) } else { floor::three_products(floor_sizes) };

    let memory = Peak::watch(&device);
    let (times, loss) = match args.implementation {
        Implementation::Fused => time(args, || fused_step(&leaves, components, &options))?,
        Implementation::Composed => time(args, || composed_step(&leaves, components, args.forward_only))?,
        Implementation::Gemm3 if device.is_cpu() => (floor(), None),
        Implementation::Gemm3 => return Err("--impl gemm3 measures the CPU only".into()),
    };
    device.synchronize()?;
    let peak = memory.extra_mib();

    let mut line = json!({
        "library": concat!("mos-head ", env!("CARGO_PKG_VERSION")),
        "impl": args.implementation.to_possible_value().map(|v| v.get_name().to_owned()),
        "shape": args.shape.to_possible_value().map(|v| v.get_name().to_owned()),
        "tokens": positions, "mixtures": components, "context": context, "vocab": vocab,
        "device": format!("{:?}", device.location()).to_lowercase(),
        "dtype": args.dtype.to_possible_value().map(|v| v.get_name().to_owned()),
        "backward": !args.forward_only, "filter": args.filter, "threads": candle_core::utils::get_num_threads(),
        "seconds": median(&times), "min": times[0], "max": times[times.len() - 1],
        "peak_extra_mib": peak, "loss": loss,
    });
    if args.implementation == Implementation::Fused {
        let mixture = detached_mixture(&leaves, components)?;
        let plan = mixture.plan(&options)?;
        let (mixture_times, _) = time(args, || Ok(Some(mixture.loss(&leaves.targets, &options)?.value)))?;
        line["mixture_seconds"] = json!(median(&mixture_times));
        if device.is_cpu() {
            let seconds = median(&floor());
            let name = if args.forward_only { "gemm1_seconds" } else { "gemm3_seconds" };
            line[name] = json!(seconds);
            line["mixture_over_products"] = json!(median(&mixture_times) / seconds);
        }
        line["plan"] = json!(plan.to_string());
    }
    println!("{line}");
    Ok(())
}

/// Runs `step` repeatedly: the sorted seconds of the timed steps, and the last loss.
fn time(args: &Args, mut step: impl FnMut() -> Result<Option<Tensor>>) -> Result<(Vec<f64>, Option<f64>)> {
    let mut times = Vec::new();
    let mut loss = None;
    for rep in 0..args.warmup + args.reps {
        let start = Instant::now();
        let value = step()?;
        if let Some(value) = &value {
            value.device().synchronize()?;
        }
        if rep >= args.warmup {
            times.push(start.elapsed().as_secs_f64());
        }
        // On the CPU: Metal has no f64.
        loss = value.map(|value| value.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()).transpose()?;
    }
    times.sort_by(f64::total_cmp);
    Ok((times, loss))
}

fn fused_step(leaves: &Leaves, components: usize, options: &LossOptions) -> Result<Option<Tensor>> {
    let weight = leaves.weight.as_tensor().clone();
    let head: Box<dyn OutputLayer> = match components {
        1 => Box::new(SoftmaxHead::from_tensors(weight, None)?),
        _ => {
            let tensors = MixtureTensors {
                prior_weight: leaves.prior_weight.as_tensor().clone(),
                prior_bias: None,
                latent_weight: leaves.latent_weight.as_tensor().clone(),
                latent_bias: leaves.latent_bias.as_tensor().clone(),
                decoder_weight: weight,
                decoder_bias: Some(leaves.bias.as_tensor().clone()),
            };
            Box::new(MixtureOfSoftmaxes::from_tensors(tensors, Activation::Tanh)?)
        }
    };
    let loss = head.loss(&leaves.hidden, &leaves.targets, options)?;
    if loss.value.track_op() {
        loss.backward()?;
    }
    Ok(Some(loss.value.detach()))
}

fn composed_step(leaves: &Leaves, components: usize, forward_only: bool) -> Result<Option<Tensor>> {
    let positions = leaves.hidden.dim(0)?;
    let var = |var: &Var| if forward_only { var.detach() } else { var.as_tensor().clone() };
    let hidden = var(&leaves.hidden);
    let operands = match components {
        1 => Operands { contexts: hidden.unsqueeze(1)?, log_priors: None, weight: var(&leaves.weight), bias: None },
        _ => {
            let contexts = hidden.matmul(&var(&leaves.latent_weight).t()?)?;
            let contexts = contexts.broadcast_add(&var(&leaves.latent_bias))?.tanh()?;
            let prior_logits = hidden.matmul(&var(&leaves.prior_weight).t()?)?;
            Operands {
                contexts: contexts.reshape((positions, components, ()))?,
                log_priors: Some(candle_nn::ops::log_softmax(&prior_logits, 1)?),
                weight: var(&leaves.weight),
                bias: Some(var(&leaves.bias)),
            }
        }
    };
    let (log_probs, _) = operands.log_probs(common::case::Logits::PLAIN)?;
    let nll = log_probs.gather(&leaves.targets.unsqueeze(1)?, 1)?.mean_all()?.neg()?;
    if !forward_only {
        nll.backward()?;
    }
    Ok(Some(nll.detach()))
}

/// The mixture of the leaves, with contexts and log-priors that are variables themselves.
fn detached_mixture(leaves: &Leaves, components: usize) -> Result<Mixture> {
    let positions = leaves.hidden.dim(0)?;
    if components == 1 {
        let contexts = Var::from_tensor(&leaves.hidden.unsqueeze(1)?)?;
        return Ok(Mixture::new(&contexts, None, &leaves.weight, None)?);
    }
    let contexts = leaves.hidden.matmul(&leaves.latent_weight.t()?)?.tanh()?.reshape((positions, components, ()))?;
    let log_priors = candle_nn::ops::log_softmax(&leaves.hidden.matmul(&leaves.prior_weight.t()?)?, 1)?;
    let (contexts, log_priors) = (Var::from_tensor(&contexts)?, Var::from_tensor(&log_priors)?);
    Ok(Mixture::new(&contexts, Some(&log_priors), &leaves.weight, Some(&leaves.bias))?)
}

fn median(times: &[f64]) -> f64 {
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_zero_are_errors_that_name_the_flag() {
        for flag in ["--tokens", "--components", "--reps", "--workspace-mib"] {
            let error = Args::try_parse_from(["step_time", flag, "0"]).err().expect("must fail").to_string();
            assert!(error.contains(flag) && error.contains("at least 1"), "{error}");
        }
    }
}
