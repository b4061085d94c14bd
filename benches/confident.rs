//! A confident model must train as fast as a random one: logits of scale 15 and priors over 20 and 40 nats beside plain
//! ones.
//!
//!     cargo bench --bench confident
//!
//! Confident softmaxes and peaked priors make gradients down to the smallest numbers. If these reach the matrix
//! products as subnormal numbers, some processors multiply up to 20 times slower. Names are
//! `{device}/mixture/loss_backward/{case}/{dtype}`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor, Var, D};
use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use mos_head::{Distributions, LossOptions, Mixture};

/// The number of components of the paper's Penn Treebank model.
const COMPONENTS: usize = 15;
const CONTEXT: usize = 280;
const VOCAB: usize = 10_000;
const POSITIONS: usize = 84;

/// The scale of the logits, and the range of the log-priors in nats.
const CASES: [(&str, f64, f64); 5] = [
    ("plain", 1.0, 0.0),
    ("logits", 15.0, 0.0),
    ("priors", 1.0, 20.0),
    ("wide-priors", 1.0, 40.0),
    ("confident", 15.0, 20.0),
];

struct Case {
    contexts: Var,
    log_priors: Var,
    weight: Var,
    targets: Tensor,
}

impl Case {
    fn new(scale: f64, range: f64, device: &Device) -> Result<Self> {
        let contexts = Tensor::randn(0f32, 1., (POSITIONS, COMPONENTS, CONTEXT), device)?;
        let weight = (Tensor::randn(0f32, 1., (VOCAB, CONTEXT), device)? * (scale / (CONTEXT as f64).sqrt()))?;
        // Each position has another order of its components.
        let prior = |i: usize| -range * ((i * 7 + i / COMPONENTS) % COMPONENTS) as f64 / (COMPONENTS - 1) as f64;
        let priors: Vec<f32> = (0..POSITIONS * COMPONENTS).map(|i| prior(i) as f32).collect();
        let priors = Tensor::from_vec(priors, (POSITIONS, COMPONENTS), device)?;
        let targets: Vec<u32> = (0..POSITIONS).map(|i| (i * 7919 % VOCAB) as u32).collect();
        Ok(Case {
            contexts: Var::from_tensor(&contexts)?,
            log_priors: Var::from_tensor(&candle_nn::ops::log_softmax(&priors, D::Minus1)?)?,
            weight: Var::from_tensor(&weight)?,
            targets: Tensor::from_vec(targets, POSITIONS, device)?,
        })
    }

    fn step(&self) -> mos_head::Result<()> {
        let mixture = Mixture::new(&self.contexts, Some(&self.log_priors), &self.weight, None)?;
        mixture.loss(&self.targets, &LossOptions::default())?.backward().map(drop)
    }
}

fn confident(criterion: &mut Criterion) {
    for device in common::devices() {
        let device_name = format!("{:?}", device.location()).to_lowercase();
        let mut group = criterion.benchmark_group(format!("{device_name}/mixture/loss_backward"));
        group.throughput(Throughput::Elements(POSITIONS as u64));
        for (name, scale, range) in CASES {
            let case = Case::new(scale, range, &device).expect("a case");
            group.bench_function(BenchmarkId::new(name, "f32"), |bencher| {
                bencher.iter_custom(|iterations| {
                    let start = Instant::now();
                    (0..iterations).for_each(|_| case.step().expect("a step"));
                    device.synchronize().expect("synchronisation");
                    start.elapsed()
                });
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = confident
}
criterion_main!(benches);
