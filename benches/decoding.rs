//! Token ids chosen at a few positions at a time, as in generation: the mixture alone, without its projection.
//!
//!     cargo bench --bench decoding                      # all
//!     cargo bench --bench decoding -- 'top_k10/.*b1'    # some
//!
//! Names are `{device}/{way}/{what}/{shape}/{dtype}`, the shape as `v{vocab}-k{components}-b{batch}`; ways are
//! `mixture`, this crate, in other dtypes too and as `f32-bf16` with products rounded to bf16, and `composed`, the
//! formula from ordinary candle operations followed by a sort. `read` is the time to read the decoder's matrix once, on
//! all threads: a lower bound at one position. `softmax`, `mos` and `mos-ancestral` are whole heads.

#[path = "../tests/common/mod.rs"]
mod common;
#[allow(dead_code, unreachable_pub)]
mod shared;

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::ops::log_softmax;
use common::case::{Case, Head, Sizes};
use common::check;
use criterion::{criterion_group, criterion_main, BenchmarkGroup, BenchmarkId, Criterion, Throughput};
use mos_head::decode::{Sampler, Sampling};
use mos_head::{Distributions, Mixture, Precision};
use shared::read;

/// (vocab, d): Penn Treebank, WikiText-2, and the vocabulary of a large model.
const SHAPES: [(usize, usize); 3] = [(10_000, 280), (33_278, 300), (128_256, 1024)];
const COMPONENTS: [usize; 2] = [1, 15];
const BATCHES: [usize; 3] = [1, 8, 32];

struct Problem {
    contexts: Tensor,
    log_priors: Tensor,
    weight: Tensor,
}

impl Problem {
    fn new((vocab, d): (usize, usize), components: usize, batch: usize, device: &Device) -> Result<Self> {
        let scale = 3.0 / (d as f64).sqrt();
        Ok(Problem {
            contexts: Tensor::randn(0f32, 1.0, (batch, components, d), device)?,
            log_priors: log_softmax(&Tensor::randn(0f32, 1.0, (batch, components), device)?, D::Minus1)?,
            weight: (Tensor::rand(-1f32, 1.0, (vocab, d), device)? * scale)?,
        })
    }

    fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let [contexts, log_priors, weight] = [&self.contexts, &self.log_priors, &self.weight];
        let weight = weight.to_dtype(dtype)?;
        Ok(Problem { contexts: contexts.to_dtype(dtype)?, log_priors: log_priors.clone(), weight })
    }

    fn mixture(&self) -> mos_head::Result<Mixture> {
        Mixture::new(&self.contexts, Some(&self.log_priors), &self.weight, None)
    }

    fn composed_log_probs(&self) -> Result<Tensor> {
        let (batch, components, d) = self.contexts.dims3()?;
        let logits = self.contexts.reshape((batch * components, d))?.matmul(&self.weight.t()?)?;
        let log_p = log_softmax(&logits.reshape((batch, components, ()))?, D::Minus1)?;
        log_p.broadcast_add(&self.log_priors.unsqueeze(2)?)?.log_sum_exp(1)
    }

    fn composed_top_k(&self, k: usize) -> Result<Tensor> {
        let mut log_probs = self.composed_log_probs()?;
        // On CUDA candle sorts at most 8192 columns (huggingface/candle#2361); beyond that this sorts on the host.
        if log_probs.device().is_cuda() && log_probs.dim(D::Minus1)? > 8192 {
            log_probs = log_probs.to_device(&Device::Cpu)?;
        }
        let (sorted, _) = log_probs.sort_last_dim(false)?;
        sorted.narrow(D::Minus1, 0, k)
    }
}

fn timed(
    group: &mut BenchmarkGroup<'_, criterion::measurement::WallTime>,
    device: &Device,
    shape: &str,
    dtype: &str,
    mut call: impl FnMut(),
) {
    group.bench_function(BenchmarkId::new(shape, dtype), |bencher| {
        bencher.iter_custom(|iterations| {
            let start = Instant::now();
            (0..iterations).for_each(|_| call());
            device.synchronize().expect("synchronize");
            start.elapsed()
        });
    });
}

fn decoding(criterion: &mut Criterion) {
    for device in common::devices() {
        let name = format!("{:?}", device.location()).to_lowercase();
        for (vocab, d) in SHAPES {
            let bytes = Throughput::Bytes((vocab * d * 4) as u64);
            if device.is_cpu() {
                let weight = vec![1f32; vocab * d];
                let mut group = criterion.benchmark_group(format!("{name}/read"));
                group.throughput(bytes.clone());
                timed(&mut group, &device, &format!("v{vocab}"), "f32", || {
                    black_box(read(&weight));
                });
            }
            for components in COMPONENTS {
                for batch in BATCHES {
                    let problem = Problem::new((vocab, d), components, batch, &device).expect("tensors");
                    let mixture = problem.mixture().expect("a mixture");
                    let shape = format!("v{vocab}-k{components}-b{batch}");
                    let mut bench = |way: &str, what: &str, call: &mut dyn FnMut()| {
                        let mut group = criterion.benchmark_group(format!("{name}/{way}/{what}"));
                        group.throughput(bytes.clone());
                        timed(&mut group, &device, &shape, "f32", call);
                    };
                    for k in [1, 10, 50] {
                        let what = format!("top_k{k}");
                        bench("mixture", &what, &mut || drop(black_box(mixture.top_k(k).expect("ids"))));
                    }
                    let mut sampler = Sampler::new(Sampling::new(), 1).expect("valid options");
                    bench("mixture", "sample", &mut || drop(black_box(mixture.sample(&mut sampler).expect("ids"))));
                    let sampling = Sampling::new().with_temperature(0.8).with_top_p(0.95);
                    let mut sampler = Sampler::new(sampling, 1).expect("valid options");
                    bench("mixture", "nucleus", &mut || drop(black_box(mixture.sample(&mut sampler).expect("ids"))));
                    let mut sampler = Sampler::new(Sampling::new().with_ancestral(true), 1).expect("valid options");
                    bench("mixture", "ancestral", &mut || drop(black_box(mixture.sample(&mut sampler).expect("ids"))));
                    bench("mixture", "log_probs", &mut || drop(black_box(mixture.log_probs().expect("log-probs"))));
                    bench("composed", "top_k10", &mut || drop(black_box(problem.composed_top_k(10).expect("ids"))));
                    bench("composed", "log_probs", &mut || {
                        drop(black_box(problem.composed_log_probs().expect("log-probs")));
                    });
                }
            }
        }
    }
}

/// The ten most probable ids of one component, in every dtype that the device has.
fn dtypes(criterion: &mut Criterion) {
    for device in common::devices() {
        let name = format!("{:?}", device.location()).to_lowercase();
        for (vocab, d) in SHAPES {
            for batch in [1, 4, 8, 16, 64] {
                let problem = Problem::new((vocab, d), 1, batch, &device).expect("tensors");
                for (dtype, precision, dtype_name) in [
                    (DType::F32, Precision::Full, "f32"),
                    (DType::F32, Precision::Bf16Products, "f32-bf16"),
                    (DType::F16, Precision::Full, "f16"),
                    (DType::BF16, Precision::Full, "bf16"),
                ] {
                    let problem = problem.to_dtype(dtype).expect("tensors");
                    let mixture = problem.mixture().expect("a mixture").with_precision(precision);
                    let mut group = criterion.benchmark_group(format!("{name}/mixture/dtypes"));
                    timed(&mut group, &device, &format!("v{vocab}-b{batch}"), dtype_name, || {
                        drop(black_box(mixture.top_k(10).expect("ids")));
                    });
                }
            }
        }
    }
}

/// Samples from whole heads of the sizes of the paper's Penn Treebank model, contexts and priors included.
fn heads(criterion: &mut Criterion) {
    const SIZES: Sizes = Sizes::new(620, 280, 15, 10_000);
    for device in common::devices() {
        let name = format!("{:?}", device.location()).to_lowercase();
        for batch in BATCHES {
            for (head_name, head, ancestral) in [
                ("softmax", Head::Softmax, false),
                ("mos", Head::MixtureOfSoftmaxes, false),
                ("mos-ancestral", Head::MixtureOfSoftmaxes, true),
            ] {
                let sizes = if head == Head::Softmax { Sizes { hidden: 280, ..SIZES } } else { SIZES };
                let case = Case::random(head, sizes, &[batch], 1).scaled("decoder.weight", 0.1);
                let tensors = case.constants(DType::F32, &device).expect("tensors");
                let layer = check::build(&case, &tensors).expect("a head");
                let mut sampler = Sampler::new(Sampling::new().with_ancestral(ancestral), 1).expect("valid options");
                let mut group = criterion.benchmark_group(format!("{name}/{head_name}/sample"));
                timed(&mut group, &device, &format!("ptb-b{batch}"), "f32", || {
                    drop(black_box(layer.sample(&tensors["hidden"], &mut sampler).expect("ids")));
                });
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = decoding, dtypes, heads
}
criterion_main!(benches);
