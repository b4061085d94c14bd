//! The next token id of one text or eight, with what a server asks for beside it, over reading the decoder once.
//!
//!     cargo bench --bench serving
//!     cargo bench --bench serving -- v33278-k15    # one mixture
//!
//! With a single softmax, `verify-token` and `verify-service` verify four drafts of a text, beside the same head at one
//! position; `mask-token` allows the odd ids by a mask, and `processor-token` has a processor of all logits that
//! changes nothing. An eighth of the ids is a draft vocabulary: `frozen-..` is a frozen head of these, beside
//! `rows-..`, a head that is made of their rows. The ways of a mixture take turns, so that all of them see the same
//! machine. Prints the least and the median time in milliseconds, and the ratio of the medians to `read`, the time to
//! read the decoder's matrix in f32 on all threads, and to `sample` at one position.

#[allow(unreachable_pub)]
mod shared;

use std::hint::black_box;

use candle_core::{DType, Device, Tensor, D};
use candle_nn::ops::log_softmax;
use mos_head::decode::{Constraints, Sampler, Sampling, TokenRequest};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::{Distributions, Mixture, OutputLayer, SoftmaxHead};
use shared::{median, read, turns};

/// (vocab, d, K): WikiText-2, and the vocabulary of a large model.
const SHAPES: [(usize, usize, usize); 3] = [(33_278, 300, 15), (128_256, 1024, 1), (128_256, 1024, 15)];
const BATCH: usize = 8;
const DRAFTS: [u32; 4] = [5, 17, 23, 400];

type Way<'a> = (&'static str, Box<dyn FnMut() -> mos_head::Result<()> + 'a>);

fn main() -> mos_head::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` checks that everything runs.
    let (seconds, vocab_limit) = if arguments.iter().any(|x| x == "--bench") { (20.0, usize::MAX) } else { (0.0, 512) };
    let wanted = arguments.iter().find(|x| !x.starts_with("--"));
    for (vocab, d, components) in SHAPES {
        let name = format!("v{vocab}-k{components}");
        if wanted.is_none_or(|wanted| *wanted == name) {
            shape(&name, (vocab.min(vocab_limit), d, components), seconds)?;
        }
    }
    Ok(())
}

fn shape(name: &str, (vocab, d, components): (usize, usize, usize), seconds: f64) -> mos_head::Result<()> {
    let device = &Device::Cpu;
    let weight = (Tensor::rand(-1f32, 1.0, (vocab, d), device)? * (3.0 / (d as f64).sqrt()))?;
    let numbers = weight.flatten_all()?.to_vec1::<f32>()?;
    let mixture = |batch: usize, dtype: DType| {
        let contexts = Tensor::randn(0f32, 1.0, (batch, components, d), device)?.to_dtype(dtype)?;
        let log_priors = log_softmax(&Tensor::randn(0f32, 1.0, (batch, components), device)?, D::Minus1)?;
        Mixture::new(&contexts, Some(&log_priors), &weight.to_dtype(dtype)?, None)
    };
    let (one, half, many) = (mixture(1, DType::F32)?, mixture(1, DType::BF16)?, mixture(BATCH, DType::F32)?);

    // Top-p and a temperature, as most servers have them, and with penalties, bans, entropy and the five best.
    let sampling = Sampling::new().with_temperature(0.8).with_top_p(0.95);
    let mut sampler = Sampler::new(sampling.clone(), 1)?;
    let plain = TokenRequest::new(sampling.clone(), 1)?;
    let constraints = Constraints::new().with_repetition_penalty(1.1).with_frequency_penalty(0.2);
    let constraints = constraints.with_presence_penalty(0.1).with_banned(&[0, 1, 2]).with_bias(&[(3, 1.0)]);
    let mut full = plain.clone().with_constraints(constraints)?.with_best(5).with_entropy(true);
    (0..1000).for_each(|i| full.push(i * 7919 % vocab as u32));
    let ids = Tensor::new(&[5u32], device)?;

    let head = SoftmaxHead::from_tensors(weight.clone(), None)?;
    let hidden = Tensor::randn(0f32, 1.0, (DRAFTS.len() + 1, d), device)?;
    let last = hidden.narrow(0, 0, 1)?;

    let subset: Vec<u32> = (0..vocab as u32).step_by(8).collect();
    let restricted = Restricted::new(&head, AllowedIds::new(&subset))?;
    let frozen = restricted.frozen()?;
    let rows = SoftmaxHead::from_tensors(weight.index_select(&Tensor::new(&subset[..], device)?, 0)?, None)?;
    let words = vec![0xaaaa_aaaa_u32; vocab.div_ceil(32)];
    let mask = plain.clone().with_constraints(Constraints::new().with_allowed_mask(words.into()))?;
    let processor = plain.clone().with_constraints(Constraints::new().with_logits_processor(|_, _| {}))?;

    let mut ways: Vec<Way<'_>> = vec![
        ("read", Box::new(|| done(Ok(read(&numbers))))),
        ("sample", Box::new(|| done(one.sample(&mut sampler)))),
        ("token", Box::new(|| done(one.next_tokens(&[&plain])))),
        ("service", Box::new(|| done(one.next_tokens(&[&full])))),
        // What one call replaces: a sample, its log-probability, the five best.
        (
            "three-calls",
            Box::new(|| {
                let mut sampler = Sampler::new(sampling.clone(), 1)?;
                black_box((one.sample(&mut sampler)?, one.log_prob(&ids)?, one.top_k(5)?));
                Ok(())
            }),
        ),
        ("service-bf16", Box::new(|| done(half.next_tokens(&[&full])))),
        ("service-b8", Box::new(|| done(many.next_tokens(&[&full; BATCH])))),
    ];
    if components == 1 {
        for (name, request) in [("mask-token", &mask), ("processor-token", &processor)] {
            let (head, last) = (&head, &last);
            ways.push((name, Box::new(move || done(head.next_tokens(last, &[request])))));
        }
        for (names, layer) in
            [(["frozen-token", "frozen-top1"], &frozen as &dyn OutputLayer), (["rows-token", "rows-top1"], &rows)]
        {
            let (last, plain) = (&last, &plain);
            ways.push((names[0], Box::new(move || done(layer.next_tokens(last, &[plain])))));
            ways.push((names[1], Box::new(move || done(layer.top_k(last, 1)))));
        }
        for (names, request) in [(["head-token", "verify-token"], &plain), (["head-service", "verify-service"], &full)]
        {
            let (head, hidden, last) = (&head, &hidden, &last);
            ways.push((names[0], Box::new(move || done(head.next_tokens(last, &[request])))));
            ways.push((names[1], Box::new(move || done(head.verify(hidden, &[&DRAFTS], &mut [&mut request.clone()])))));
        }
    }
    let times = turns(ways.len(), seconds, |i| ways[i].1())?;
    let (read_time, sample_time) = (median(&times[0]), median(&times[1]));
    for ((way, _), times) in ways.iter().zip(&times) {
        let (least, median) = (times[0], median(times));
        let (reads, samples) = (median / read_time, median / sample_time);
        println!(
            "{name}-{way:<15} least {least:8.3} ms, median {median:8.3} ms, {reads:5.2} x read, {samples:5.2} x sample"
        );
    }
    Ok(())
}

fn done<T>(result: mos_head::Result<T>) -> mos_head::Result<()> {
    result.map(|result| {
        black_box(result);
    })
}
