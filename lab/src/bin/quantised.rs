//! Products with quantised rows: their time beside candle's, and their error.
//!
//!     cargo run --release -p lab --bin quantised -- --vocab 128256 --context 2048
//!
//! Prints a table, some minutes on 2 cores. All that a row of it compares runs in turn, after candle has repacked its
//! weights; times are medians. *ratio* is the time over candle's `QMatMul`, which rounds the activations to 8 bits,
//! *f32* that over candle's product of the dequantised rows, and *gradient* the time of the gradient of the hidden
//! states, from the gradient of all logits, over candle's product in f32. The errors are root mean squares over a
//! sample of logits against f64 of the dequantised rows, relative to that of the logits. *loss* is a loss with the
//! gradient of the hidden states over the same of a frozen decoder in f32, *adapter* that with an adapter of rank 16
//! that is trained too, and *next* `next_tokens` over the same.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use clap::Parser;
use lab::show::{report::median, values::positive};
use mos_head::decode::{Sampling, TokenRequest};
use mos_head::parts::{LowRankAdapter, QuantisedLinear};
use mos_head::{LossOptions, OutputLayer, Result, SoftmaxHead};

const TYPES: [GgmlDType; 5] = [GgmlDType::Q8_0, GgmlDType::Q6K, GgmlDType::Q5K, GgmlDType::Q4K, GgmlDType::Q4_0];
/// The rank of the adapter.
const RANK: usize = 16;
/// The number of logits of a position whose errors are computed.
const SAMPLE: usize = 4096;

/// Prints the time and the error of products with quantised rows, beside candle's
#[derive(Parser)]
struct Args {
    /// Number of token ids
    #[arg(long, default_value_t = 32_768, value_parser = positive)]
    vocab: usize,
    /// Size of a context: a multiple of 256
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    context: usize,
    /// The types of rows
    #[arg(long, num_args = 1.., value_parser = row_type, default_values = ["Q8_0", "Q6K", "Q5K", "Q4K", "Q4_0"])]
    types: Vec<GgmlDType>,
    /// Numbers of positions
    #[arg(long, num_args = 1.., default_values_t = [1, 8, 64, 512])]
    positions: Vec<usize>,
    /// Number of times that each is run
    #[arg(long, default_value_t = 9, value_parser = positive)]
    reps: usize,
}

fn main() -> ExitCode {
    lab::exit_code(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    println!("| type | positions | ms | ratio | f32 | gradient | loss | adapter | next | error | candle's error |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let &Args { vocab, context, reps, .. } = args;
    // Logits of a root mean square of about one.
    let weight = (Tensor::randn(0f32, 1., (vocab, context), &Device::Cpu)? / (context as f64).sqrt())?;
    for &dtype in &args.types {
        let quantised = Arc::new(QTensor::quantize(&weight, dtype)?);
        let rows = quantised.dequantize(&Device::Cpu)?;
        let layer = QuantisedLinear::new(quantised.clone(), None)?;
        let candle = QMatMul::from_arc(quantised.clone())?;
        let head = SoftmaxHead::from_quantised(quantised, None)?;
        let dense = SoftmaxHead::from_tensors(rows.clone(), None)?;
        let (own_adapted, dense_adapted) = (adapted(&head)?, adapted(&dense)?);
        for &positions in &args.positions {
            let hidden = Var::randn(0f32, 1., (positions, context), &Device::Cpu)?;
            let input = hidden.detach();
            let targets: Vec<u32> = (0..positions).map(|i| (i * 7919 % vocab) as u32).collect();
            let targets = Tensor::new(targets, &Device::Cpu)?;
            let loss = |head: &SoftmaxHead| {
                head.loss(&hidden, &targets, &LossOptions::new())?.backward()?;
                Ok(())
            };
            let next = |head: &SoftmaxHead| {
                let request = |seed| TokenRequest::new(Sampling::new(), seed);
                let requests = (0..positions as u64).map(request).collect::<Result<Vec<_>>>()?;
                head.next_tokens(&input, &requests.iter().collect::<Vec<_>>())?;
                Ok(())
            };
            let logits = layer.forward(&hidden)?;
            let times: [f64; 11] = medians(
                reps,
                [
                    &mut || layer.forward(&input).map(|_| ()).map_err(Into::into),
                    &mut || candle.forward(&input).map(|_| ()).map_err(Into::into),
                    &mut || input.matmul(&rows.t()?).map(|_| ()).map_err(Into::into),
                    &mut || logits.backward().map(|_| ()).map_err(Into::into),
                    &mut || logits.ones_like()?.matmul(&rows).map(|_| ()).map_err(Into::into),
                    &mut || loss(&head),
                    &mut || loss(&dense),
                    &mut || loss(&own_adapted),
                    &mut || loss(&dense_adapted),
                    &mut || next(&head),
                    &mut || next(&dense),
                ],
            )?;
            let [own, theirs, product, own_gradient, gradient, ..] = times;
            let [.., own_loss, dense_loss, own_adapter, dense_adapter, own_next, dense_next] = times;
            let errors = [layer.forward(&input)?, candle.forward(&input)?];
            let [error, candles] = errors.map(|logits| relative_error(&logits, &input, &rows));
            println!(
                "| {dtype:?} | {positions} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1e} | {:.1e} |",
                own * 1e3,
                own / theirs,
                own / product,
                own_gradient / gradient,
                own_loss / dense_loss,
                own_adapter / dense_adapter,
                own_next / dense_next,
                error?,
                candles?
            );
        }
    }
    Ok(())
}

/// Reads the name of a type.
fn row_type(name: &str) -> std::result::Result<GgmlDType, String> {
    let found = TYPES.into_iter().find(|dtype| format!("{dtype:?}") == name);
    found.ok_or_else(|| format!("expected one of {TYPES:?}"))
}

/// Returns a head with a low-rank adapter, whose variables are trained.
fn adapted(head: &SoftmaxHead) -> Result<SoftmaxHead> {
    let variable = |shape: [usize; 2]| Var::randn(0f32, 0.02, &shape, &Device::Cpu);
    let (a, b) = (variable([RANK, head.hidden_size()])?, variable([head.vocab_size(), RANK])?);
    head.clone().with_adapter(LowRankAdapter::from_tensors(a.into_inner(), b.into_inner(), 1.0)?)
}

/// Returns the median seconds of several functions that run in turn, the first time of which does not count.
fn medians<const N: usize>(reps: usize, mut functions: [&mut dyn FnMut() -> Result<()>; N]) -> Result<[f64; N]> {
    let mut seconds = [const { Vec::new() }; N];
    for rep in 0..=reps {
        for (function, seconds) in functions.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            function()?;
            if rep > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    Ok(seconds.map(|seconds: Vec<f64>| median(&seconds)))
}

/// Returns the root mean square of the errors of each position's first logits against f64, relative to that of the
/// logits.
fn relative_error(logits: &Tensor, input: &Tensor, rows: &Tensor) -> Result<f64> {
    let n = SAMPLE.min(rows.dim(0)?);
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64);
    let exact = wide(input)?.matmul(&wide(&rows.narrow(0, 0, n)?)?.t()?)?;
    let square = |tensor: &Tensor| tensor.sqr()?.mean_all()?.to_scalar::<f64>();
    let errors = (wide(&logits.narrow(1, 0, n)?)? - &exact)?;
    Ok((square(&errors)? / square(&exact)?).sqrt())
}
