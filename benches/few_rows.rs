//! What the components cost when a few positions are decoded: the ten most probable ids with 15 softmaxes beside one.
//!
//!     cargo bench --bench few_rows
//!     cargo bench --bench few_rows -- v33278        # one vocabulary
//!
//! The cases of a vocabulary take turns, so that all of them see the same machine. Prints the least and the median time
//! in milliseconds, and the ratio of the medians to one softmax in f32 at one position.

#[allow(dead_code, unreachable_pub)]
mod shared;

use std::hint::black_box;

use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::ops::log_softmax;
use mos_head::Distributions;
use mos_head::Mixture;
use shared::{median, turns};

/// (vocab, d): WikiText-2, and the vocabulary of a large model.
const SHAPES: [(usize, usize); 2] = [(33_278, 300), (128_256, 1024)];
/// (components, batch, dtype); the first is what the others are compared with.
const CASES: [(usize, usize, DType); 12] = [
    (1, 1, DType::F32),
    (2, 1, DType::F32),
    (4, 1, DType::F32),
    (8, 1, DType::F32),
    (15, 1, DType::F32),
    (15, 8, DType::F32),
    (1, 8, DType::F32),
    (1, 64, DType::F32),
    (1, 1, DType::BF16),
    (15, 1, DType::BF16),
    (1, 64, DType::BF16),
    (15, 8, DType::BF16),
];

fn main() -> mos_head::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` checks that everything runs.
    let (seconds, vocab_limit) = if arguments.iter().any(|x| x == "--bench") { (8.0, usize::MAX) } else { (0.0, 500) };
    let wanted = arguments.iter().find(|x| !x.starts_with("--"));
    for (vocab, d) in SHAPES {
        let name = format!("v{vocab}");
        if wanted.is_some_and(|wanted| *wanted != name) {
            continue;
        }
        let vocab = vocab.min(vocab_limit);
        let mixtures = mixtures(vocab, d)?;
        let times = turns(mixtures.len(), seconds, |i| {
            black_box(mixtures[i].top_k(10)?);
            Ok(())
        })?;
        for ((components, batch, dtype), seconds) in CASES.iter().zip(&times) {
            let case = format!("k{components}-b{batch}/{}", dtype.as_str());
            let ratio = median(seconds) / median(&times[0]);
            println!("{name}-{case:<12} least {:8.3} ms, median {:8.3} ms, {ratio:6.2} x", seconds[0], median(seconds));
        }
    }
    Ok(())
}

/// The mixtures of all cases, with one decoder for each dtype.
fn mixtures(vocab: usize, d: usize) -> mos_head::Result<Vec<Mixture>> {
    let device = &Device::Cpu;
    let scale = 3.0 / (d as f64).sqrt();
    let weight = (Tensor::rand(-1f32, 1.0, (vocab, d), device)? * scale)?;
    let weights = [DType::F32, DType::BF16].map(|dtype| weight.to_dtype(dtype));
    let weight = |dtype| weights.iter().flatten().find(|weight| weight.dtype() == dtype).cloned();
    let mixture = |&(components, batch, dtype): &(usize, usize, DType)| {
        let contexts = Tensor::randn(0f32, 1.0, (batch, components, d), device)?.to_dtype(dtype)?;
        let log_priors = log_softmax(&Tensor::randn(0f32, 1.0, (batch, components), device)?, D::Minus1)?;
        let weight: Result<Tensor> = weight(dtype).ok_or_else(|| candle_core::Error::Msg("no weight".into()));
        Mixture::new(&contexts, Some(&log_priors), &weight?, None)
    };
    CASES.iter().map(mixture).collect()
}
