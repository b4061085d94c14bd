//! Times one training step of the output layer alone (contexts, priors, loss, and the gradients of the hidden states
//! and all parameters) and prints one JSON line: seconds, peak memory beyond parameters and inputs, loss; and from the
//! same process the fused mixture alone and the bare matrix products that any exact method needs.
//!
//!     cargo run --release -p lab --bin step_time -- --shape ptb
//!
//! A few seconds for `small`, half a minute for `ptb` on 2 cores, some minutes for `1b` and `llm`.

mod args;
mod composed;
mod floor;
mod gpu_floor;
mod kept;
mod output;
mod scores;
mod steps;

use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Implementation};
use candle_core::{DType, Device, Result, Tensor};
use clap::Parser;
use kept::Kept;
use lab::show::{report::median, values::name, Peak};
use mos_head::parts::LogitFunction;
use mos_head::sampled::NoiseDistribution;
use mos_head::{Distributions, LossOptions, Mixture, Plan, Precision};
use output::System;
use scores::{Score, Timed};
use serde_json::{json, Value};
use steps::{composed_step, constant_mixture, detached_mixture, fused_step, Leaves, Sizes, Train};

fn main() -> ExitCode {
    lab::exit_code(run(&Args::parse()))
}

fn run(args: &Args) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = args.device.open()?;
    let sizes = args.sizes();
    let Sizes { positions, components, context, vocab, .. } = sizes;
    let leaves = Leaves::new(sizes, args.rank, args.dtype, &device)?.with_logit_function(args.logit_function);
    let mut options = if args.forward_only { LossOptions::evaluation() } else { LossOptions::default() };
    if args.bf16_products {
        options = options.with_precision(Precision::Bf16Products);
    }
    if let Some(mib) = args.workspace_mib {
        options = options.with_workspace_bytes(mib << 20);
    }
    if let Some(rows) = args.chunk_rows {
        let bytes = budget_for_rows(&detached_mixture(&leaves, components)?, &options, rows)?;
        options = options.with_workspace_bytes(bytes);
    }
    let noise = NoiseDistribution::log_uniform(vocab)?;
    let mut step = 0;
    // This returns the options of the next step.
    let mut options = || match args.sampled {
        Some(samples) => {
            step += 1;
            let negatives = noise.draw(samples, step)?;
            Ok::<_, candle_core::Error>(
                options.clone().with_sampled_softmax(negatives).with_decoder_rows(args.decoder_rows),
            )
        }
        None => Ok(options.clone()),
    };
    let floor_vocab = args.sampled.map_or(vocab, |samples| samples + 1);
    let floor_sizes = floor::ProductSizes { rows: positions * components, context, vocab: floor_vocab };
    let products = || Products::new(floor_sizes, !args.forward_only, args.dtype, &device);
    check_implementation(args)?;
    let system = args.output.map(|output| System::new(output, sizes, args.dtype, &device)).transpose()?;

    if let Some(n) = args.kept {
        let kept = Kept::new(&detached_mixture(&leaves, components)?, &leaves.targets, n, vocab)?;
        let memory = Peak::watch(&device);
        kept.run()?;
        let peak = memory.extra_mib();
        let [(times, value), (full, _)] = in_turn(args, &device, args.reps, [&mut || kept.run(), &mut || kept.full()])?;
        let (seconds, loss) = (median(&times), median(&full));
        let measured = json!({
            "kept": n, "seconds": seconds, "loss_seconds": loss, "over_loss": seconds / loss,
            "peak_extra_mib": peak, "value": value,
        });
        println!("{}", line(args, sizes, measured));
        return Ok(());
    }

    if let Some(score) = args.score {
        let is_constant = !score.has_gradients();
        let mixture =
            if is_constant { constant_mixture(&leaves, components)? } else { detached_mixture(&leaves, components)? };
        let options = score.loss();
        let timed = Timed::new(score, args.divergence, &mixture, &leaves)?;
        let mut run = || timed.run();
        let mut loss = || {
            let loss = mixture.loss(&leaves.targets, &options)?;
            if !is_constant {
                loss.backward()?;
            }
            Ok(Some(loss.value.detach()))
        };
        let mut products = Products::new(floor_sizes, !is_constant, args.dtype, &device)?;
        let mut first = match score {
            Score::Gradients | Score::Teacher => Some(Products::new(floor_sizes, false, args.dtype, &device)?),
            _ => None,
        };
        let mut bare = || {
            products.run()?;
            first.as_mut().map_or(Ok(None), Products::run)
        };
        let memory = Peak::watch(&device);
        timed.run()?;
        let peak = memory.extra_mib();
        let [(scores, value), (loss, _), (bare, _)] =
            in_turn(args, &device, args.reps, [&mut run, &mut loss, &mut bare])?;
        let (scores, loss, bare) = (median(&scores), median(&loss), median(&bare));
        let measured = json!({
            "score": name(&score), "divergence": name(&args.divergence), "seconds": scores, "loss_seconds": loss,
            "products_seconds": bare, "over_loss": scores / loss, "over_products": scores / bare,
            "peak_extra_mib": peak, "value": value,
        });
        println!("{}", line(args, sizes, measured));
        return Ok(());
    }

    let mut pipelined_step = None;
    let full = |options: &LossOptions| fused_step(&leaves, components, Train::All, options);
    let memory = Peak::watch(&device);
    let mut whole_step = None;
    let (times, loss) = match (args.implementation, &system) {
        (Implementation::Fused, Some(system)) => time(args, &device, args.reps, || system.step(&options()?))?,
        (Implementation::Fused, None) if args.train == Train::All => {
            let timed = time(args, &device, args.reps, || full(&options()?))?;
            pipelined_step = pipelined(args.reps, &device, || full(&options()?))?;
            timed
        }
        (Implementation::Fused, None) => {
            let options = options()?;
            let mut part = || fused_step(&leaves, components, args.train, &options);
            let [(times, loss), (whole, _)] = in_turn(args, &device, args.reps, [&mut part, &mut || full(&options)])?;
            whole_step = Some((median(&whole), median(&times) / median(&whole)));
            (times, loss)
        }
        (Implementation::Composed, _) => {
            time(args, &device, args.reps, || composed_step(&leaves, components, args.forward_only))?
        }
        (Implementation::Gemm3, _) => {
            let mut products = products()?;
            time(args, &device, args.reps, || products.run())?
        }
    };
    let peak = memory.extra_mib();

    let measured = json!({
        "impl": name(&args.implementation),
        "device": format!("{:?}", device.location()).to_lowercase(),
        "output": args.output.as_ref().map(name), "sampled": args.sampled, "backward": !args.forward_only,
        "bf16_products": args.bf16_products, "threads": candle_core::utils::get_num_threads(),
        "seconds": median(&times), "min": times[0], "max": times[times.len() - 1],
        "peak_extra_mib": peak, "loss": loss,
    });
    let mut line = line(args, sizes, measured);
    line["pipelined_seconds"] = json!(pipelined_step);
    if let Some((whole, ratio)) = whole_step {
        line["train"] = json!(name(&args.train));
        line["rank"] = json!(Some(args.rank).filter(|_| args.train == Train::Adapter));
        line["whole_seconds"] = json!(whole);
        line["over_whole"] = json!(ratio);
    } else if args.implementation == Implementation::Fused && system.is_none() {
        let mixture = detached_mixture(&leaves, components)?;
        let plan = mixture.plan(&options()?)?;
        line["kernels"] = json!(plan.kernels.to_string());
        line["rows_per_chunk"] = json!(plan.rows_per_chunk);
        line["workspace_mib"] = json!(plan.workspace_bytes as f64 / f64::from(1 << 20));
        line["plan"] = json!(plan.to_string());
        if args.step_only {
            println!("{line}");
            return Ok(());
        }
        let mut loss = || Ok(Some(mixture.loss(&leaves.targets, &options()?)?.value));
        let name = if args.forward_only { "gemm1_seconds" } else { "gemm3_seconds" };
        // On a GPU the products may need more memory than the step, since they hold all logits.
        let in_turn = products().and_then(|mut products| {
            let mut products = || products.run();
            let timed = in_turn(args, &device, args.reps.max(3), [&mut loss, &mut products])?;
            let pipelined = [pipelined(args.reps, &device, loss)?, pipelined(args.reps, &device, products)?];
            Ok((timed, pipelined))
        });
        match in_turn {
            Ok(([(mixture, _), (products, _)], pipelined)) => {
                line["mixture_seconds"] = json!(median(&mixture));
                line[name] = json!(median(&products));
                line["mixture_over_products"] = json!(median(&mixture) / median(&products));
                line["mixture_pipelined_seconds"] = json!(pipelined[0]);
                line["products_pipelined_seconds"] = json!(pipelined[1]);
            }
            Err(error) => eprintln!("the matrix products alone: {error}"),
        }
    }
    println!("{line}");
    Ok(())
}

/// Returns the line of this library and these sizes, with what was measured.
fn line(args: &Args, sizes: Sizes, measured: Value) -> Value {
    let Sizes { positions, components, context, vocab, .. } = sizes;
    let mut line = json!({
        "library": concat!("mos-head ", env!("CARGO_PKG_VERSION")), "shape": name(&args.shape), "tokens": positions,
        "mixtures": components, "context": context, "vocab": vocab, "dtype": args.dtype.as_str(),
        "logit_function": format!("{:?}", args.logit_function).to_lowercase(),
    });
    if let (Value::Object(line), Value::Object(measured)) = (&mut line, measured) {
        line.extend(measured);
    }
    line
}

/// The matrix products alone.
enum Products {
    Cpu(floor::Floor),
    Gpu(gpu_floor::Products),
}

impl Products {
    /// Returns all three products, or the first alone.
    fn new(sizes: floor::ProductSizes, all: bool, dtype: DType, device: &Device) -> Result<Self> {
        Ok(if device.is_cpu() {
            Products::Cpu(floor::Floor::new(sizes, all))
        } else {
            Products::Gpu(gpu_floor::Products::new(sizes, all, dtype, device)?)
        })
    }

    fn run(&mut self) -> Result<Option<Tensor>> {
        match self {
            Products::Cpu(products) => products.run(),
            Products::Gpu(products) => products.run()?,
        }
        Ok(None)
    }
}

/// Fails if a flag is set that the implementation ignores.
fn check_implementation(args: &Args) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let of_fused = [
        ("--output", args.output.is_some()),
        ("--logit-function", args.logit_function != LogitFunction::Identity),
        ("--score", args.score.is_some()),
        ("--kept", args.kept.is_some()),
        ("--train", args.train != Train::All),
        ("--bf16-products", args.bf16_products),
        ("--workspace-mib", args.workspace_mib.is_some()),
        ("--chunk-rows", args.chunk_rows.is_some()),
        // The products of a sample are those of its ids.
        ("--sampled", args.sampled.is_some() && args.implementation == Implementation::Composed),
    ];
    match of_fused.iter().find(|(_, is_set)| *is_set && args.implementation != Implementation::Fused) {
        Some((flag, _)) => Err(format!("{flag} is for --impl fused").into()),
        None => Ok(()),
    }
}

/// Returns the largest budget in bytes that is known to give chunks of at most this many rows. The kernels of a plan may
/// depend on its budget, and with them the bytes of a row, so that the budget is searched for.
fn budget_for_rows(
    mixture: &Mixture,
    options: &LossOptions,
    rows: usize,
) -> std::result::Result<usize, Box<dyn std::error::Error>> {
    let plan = |bytes| mixture.plan(&options.clone().with_workspace_bytes(bytes));
    let mut low = match plan(1) {
        Err(mos_head::Error::Workspace { least, .. }) => least,
        planned => planned?.workspace_bytes,
    };
    let components = plan(low)?.rows_per_chunk;
    if components > rows {
        return Err(format!("--chunk-rows is {rows}, but one position has {components}").into());
    }
    let mut high = mixture.plan(options)?.workspace_bytes + 1;
    loop {
        let Plan { rows_per_chunk, positions, positions_per_chunk, .. } = plan(high)?;
        if rows_per_chunk > rows {
            break;
        }
        low = high;
        if positions_per_chunk == positions {
            return Ok(low);
        }
        high *= 2;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if plan(middle)?.rows_per_chunk <= rows {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

/// The sorted seconds of the timed steps, and the last loss.
type Seconds = (Vec<f64>, Option<f64>);

/// Runs `step` repeatedly.
fn time(
    args: &Args,
    device: &Device,
    reps: usize,
    mut step: impl FnMut() -> Result<Option<Tensor>>,
) -> Result<Seconds> {
    let [timed] = in_turn(args, device, reps, [&mut step])?;
    Ok(timed)
}

/// Runs the steps in turn, so that what changes with time, such as the clock rate, changes for all.
fn in_turn<const N: usize>(
    args: &Args,
    device: &Device,
    reps: usize,
    mut steps: [&mut dyn FnMut() -> Result<Option<Tensor>>; N],
) -> Result<[Seconds; N]> {
    let mut timed = [const { (Vec::new(), None) }; N];
    for rep in 0..args.warmup + reps {
        for (step, (times, loss)) in steps.iter_mut().zip(&mut timed) {
            let start = Instant::now();
            let value = step()?;
            device.synchronize()?;
            if rep >= args.warmup {
                times.push(start.elapsed().as_secs_f64());
            }
            // The loss is read on the CPU, because Metal has no f64.
            *loss = value.map(|value| value.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()).transpose()?;
        }
    }
    timed.iter_mut().for_each(|(times, _)| times.sort_by(f64::total_cmp));
    Ok(timed)
}

/// Returns the seconds of a step among `reps` on a GPU, between which nothing waits for it.
fn pipelined(reps: usize, device: &Device, mut step: impl FnMut() -> Result<Option<Tensor>>) -> Result<Option<f64>> {
    if device.is_cpu() {
        return Ok(None);
    }
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..reps {
        step()?;
    }
    device.synchronize()?;
    Ok(Some(start.elapsed().as_secs_f64() / reps as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_of_rows_gives_chunks_of_no_more() {
        let sizes = Sizes { positions: 97, components: 3, context: 5, vocab: 211, hidden: 4 };
        let leaves = Leaves::new(sizes, 2, DType::F32, &Device::Cpu).expect("leaves");
        let mixture = detached_mixture(&leaves, 3).expect("a mixture");
        for options in [LossOptions::default(), LossOptions::evaluation()] {
            let plan = |rows| {
                let bytes = budget_for_rows(&mixture, &options, rows).expect("a budget");
                mixture.plan(&options.clone().with_workspace_bytes(bytes)).expect("a plan")
            };
            for rows in [3, 30, 60, 96, 291, 1000] {
                let plan = plan(rows);
                assert!(plan.rows_per_chunk <= rows && plan.rows_per_chunk > rows.min(291) / 2, "{rows}: {plan}");
                assert!(plan.workspace_bytes <= plan.budget_bytes, "{rows}: {plan}");
            }
            assert!(budget_for_rows(&mixture, &options, 2).is_err());
        }
    }
}
