//! The next token id of one text: by candle's product and its `LogitsProcessor`, and by `next_tokens`.
//!
//!     cargo bench -p lab --features candle-transformers --bench logits_processor
//!
//! Both have temperature 0.8, top-p 0.95 and a repetition penalty over 1,000 ids; `next_tokens` also returns the
//! log-probability, the five best ids and the entropy. They take turns, so that both see the same machine. Prints the
//! least and the median time in milliseconds.

#[allow(dead_code, unreachable_pub)]
#[path = "../../benches/shared/mod.rs"]
mod shared;

use std::hint::black_box;

use candle_core::{DType, Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling as CandleSampling};
use candle_transformers::utils::apply_repeat_penalty;
use mos_head::decode::{Constraints, Sampling, TokenRequest};
use mos_head::{Distributions, Mixture};
use shared::{median, turns};

/// Ids of the vocabulary of a large model, and of qwen2.
const SIZES: [(usize, usize); 2] = [(128_256, 1024), (151_936, 1024)];
const PENALTY: f32 = 1.1;

fn main() -> mos_head::Result<()> {
    // `cargo test --benches` checks that everything runs.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let (seconds, most) = if is_bench { (10.0, usize::MAX) } else { (0.0, 500) };
    for (vocab, d) in SIZES {
        for dtype in [DType::F32, DType::BF16] {
            one(vocab.min(most), d, dtype, seconds)?;
        }
    }
    Ok(())
}

fn one(vocab: usize, d: usize, dtype: DType, seconds: f64) -> mos_head::Result<()> {
    let device = &Device::Cpu;
    let weight = (Tensor::rand(-1f32, 1.0, (vocab, d), device)? * (3.0 / (d as f64).sqrt()))?.to_dtype(dtype)?;
    let hidden = Tensor::randn(0f32, 1.0, (1, d), device)?.to_dtype(dtype)?;
    let text: Vec<u32> = (0..1000).map(|i| i * 7919 % vocab as u32).collect();

    let (temperature, p) = (0.8, 0.95);
    let mut processor = LogitsProcessor::from_sampling(1, CandleSampling::TopP { p, temperature });
    let mixture = Mixture::new(&hidden.unsqueeze(1)?, None, &weight, None)?;
    let sampling = Sampling::new().with_temperature(temperature).with_top_p(p);
    let constraints = Constraints::new().with_repetition_penalty(f64::from(PENALTY));
    let request = TokenRequest::new(sampling, 1)?.with_constraints(constraints)?.with_prompt(&text);
    let request = request.with_best(5).with_entropy(true);

    let times = turns(2, seconds, |way| {
        if way == 0 {
            let logits = hidden.matmul(&weight.t()?)?.squeeze(0)?.to_dtype(DType::F32)?;
            let logits = apply_repeat_penalty(&logits, PENALTY, &text)?;
            black_box(processor.sample(&logits)?);
        } else {
            black_box(mixture.next_tokens(&[&request])?);
        }
        Ok(())
    })?;
    for (way, times) in ["candle", "next_tokens"].into_iter().zip(&times) {
        let (least, median, dtype) = (times[0], median(times), dtype.as_str());
        println!("v{vocab}-{dtype}-{way:<12} least {least:8.3} ms, median {median:8.3} ms");
    }
    Ok(())
}
