//! The errors of bf16 products: loss and gradients of a mixture against the same in f64.
//!
//!     cargo run --release -p lab --bin precision
//!
//! Prints a table, a second on 2 cores. *bf16* is a mixture in bf16 against f64 of the same rounded operands;
//! *f32* and *bf16 products* are a mixture in f32, the latter with `Precision::Bf16Products`, against f64 of its own
//! operands. Errors are the largest of an operand's gradient, relative to the largest element of it. On a CPU with
//! neither AMX nor AVX512-BF16, products are not rounded, and the errors are those of f32; *bf16 products* are also not
//! rounded where AVX512-BF16 is no faster than f32.

use std::process::ExitCode;

use candle_core::{DType, Device, Tensor, Var, D};
use clap::Parser;
use mos_head::{Distributions, LossOptions, Mixture, Precision, Result};
use rand::{rngs::StdRng, Rng, SeedableRng};

const POSITIONS: usize = 64;
const CONTEXT: usize = 96;
const VOCAB: usize = 2000;
/// Standard deviations of the logits.
const SCALES: [f64; 3] = [1.0, 6.0, 30.0];

/// Prints the errors of products in bf16, of a loss and its gradients, against f64
#[derive(Parser)]
struct Args {}

fn main() -> ExitCode {
    let Args {} = Args::parse();
    lab::exit_code(run())
}

fn run() -> Result<()> {
    println!("| targets | scale | K | operands | loss | contexts | weight | bias | log-priors |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (are_likely, components) in [(false, 1), (false, 15), (true, 1), (true, 15)] {
        for scale in SCALES {
            let case = Case::new(components, scale, are_likely)?;
            let kinds = [
                ("f32", DType::F32, Precision::Full),
                ("bf16 products", DType::F32, Precision::Bf16Products),
                ("bf16", DType::BF16, Precision::Full),
            ];
            for (name, dtype, precision) in kinds {
                let errors = case.errors(dtype, precision)?;
                let errors: Vec<String> = errors.iter().map(|error| format!("{error:.1e}")).collect();
                let targets = if are_likely { "likely" } else { "random" };
                println!("| {targets} | {scale} | {components} | {name} | {} |", errors.join(" | "));
            }
        }
    }
    Ok(())
}

/// A mixture in f64.
struct Case {
    contexts: Tensor,
    log_priors: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
}

impl Case {
    /// Makes a mixture. Its targets are random, or the most probable id of each position.
    fn new(components: usize, scale: f64, are_likely: bool) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(1);
        // Sums of 12 uniform numbers are nearly normal.
        let mut normal = |shape: &[usize], deviation: f64| {
            let mut number = || deviation * ((0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0);
            Tensor::from_vec((0..shape.iter().product()).map(|_| number()).collect::<Vec<f64>>(), shape, &Device::Cpu)
        };
        let contexts = normal(&[POSITIONS, components, CONTEXT], 1.0)?;
        let weight = normal(&[VOCAB, CONTEXT], scale / (CONTEXT as f64).sqrt())?;
        let bias = normal(&[VOCAB], 0.1)?;
        let log_priors = candle_nn::ops::log_softmax(&normal(&[POSITIONS, components], 1.0)?, D::Minus1)?;
        let targets: Vec<u32> = (0..POSITIONS).map(|i| (i * 7919 % VOCAB) as u32).collect();
        let targets = Tensor::from_vec(targets, POSITIONS, &Device::Cpu)?;
        let case = Case { contexts, log_priors, weight, bias, targets };
        let most_probable = Mixture::new(&case.contexts, Some(&case.log_priors), &case.weight, Some(&case.bias))?;
        let ids = most_probable.top_k(1)?.token_ids;
        Ok(Case { targets: if are_likely { ids.flatten_all()? } else { case.targets.clone() }, ..case })
    }

    /// Returns the relative error of the loss, and the largest errors of the gradients.
    fn errors(&self, dtype: DType, precision: Precision) -> Result<Vec<f64>> {
        // The bias and the log-priors of a mixture in half precision are f32.
        let bias_dtype = if dtype == DType::BF16 { DType::F32 } else { dtype };
        let leaf = |tensor: &Tensor, dtype: DType| -> Result<Tensor> { Ok(tensor.to_dtype(dtype)?) };
        let operands = [
            leaf(&self.contexts, dtype)?,
            leaf(&self.weight, dtype)?,
            leaf(&self.bias, bias_dtype)?,
            leaf(&self.log_priors, bias_dtype)?,
        ];
        let found = self.results(&operands, precision)?;
        let wide = operands.iter().map(|tensor| leaf(tensor, DType::F64)).collect::<Result<Vec<_>>>()?;
        let truth = self.results(&wide, Precision::Full)?;
        let error = |(found, truth): (&Vec<f64>, &Vec<f64>)| {
            let largest = truth.iter().fold(1e-300, |largest: f64, x| largest.max(x.abs()));
            found.iter().zip(truth).fold(0.0, |error: f64, (found, truth)| error.max((found - truth).abs())) / largest
        };
        Ok(found.iter().zip(&truth).map(error).collect())
    }

    /// Returns the loss, and the gradients of contexts, weight, bias and log-priors.
    fn results(&self, operands: &[Tensor], precision: Precision) -> Result<Vec<Vec<f64>>> {
        let leaves = operands.iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<_>>>()?;
        let mixture = Mixture::new(&leaves[0], Some(&leaves[3]), &leaves[1], Some(&leaves[2]))?;
        let loss = mixture.loss(&self.targets, &LossOptions::new().with_precision(precision))?;
        let gradients = loss.backward()?;
        let numbers =
            |tensor: &Tensor| -> Result<Vec<f64>> { Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?) };
        let mut results = vec![numbers(&loss.value)?];
        for leaf in &leaves {
            results.push(gradients.get(leaf).map(numbers).transpose()?.unwrap_or_default());
        }
        Ok(results)
    }
}
