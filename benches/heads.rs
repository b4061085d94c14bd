//! The heads against the same formula from ordinary candle operations, the composed form of the tests.
//!
//!     cargo bench --bench heads                       # all
//!     cargo bench --bench heads -- mos/loss_backward  # some
//!
//! Names are `{device}/{head}/{what}/{shape}/{dtype}`; `composed-` before the head marks a baseline. `ptb-tenth` and
//! `llm-slice` are sizes of published models (as the lab's `step_time` has them) with fewer positions and, for the
//! latter, smaller vocabulary and contexts.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use common::case::{Case, Head, Logits, Sizes, Tensors};
use common::check;
use common::composed::Operands;
use common::objective::Objective;
use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use mos_head::parts::LogitFunction;
use mos_head::{ContextActivation, LossOptions, OutputLayer};

struct Shape {
    name: &'static str,
    positions: usize,
    sizes: Sizes,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "small", positions: 128, sizes: Sizes::new(96, 64, 4, 2000) },
    Shape { name: "ptb-tenth", positions: 84, sizes: Sizes::new(620, 280, 15, 10_000) },
    Shape { name: "llm-slice", positions: 64, sizes: Sizes::new(1024, 1024, 1, 32_000) },
];

/// The heads, and the function of their logits.
const HEADS: [(&str, Head, LogitFunction); 5] = [
    ("softmax", Head::Softmax, LogitFunction::Identity),
    ("softcap", Head::Softmax, LogitFunction::Softcap(30.0)),
    ("sigsoftmax", Head::Softmax, LogitFunction::Sigsoftmax),
    ("moc", Head::MixtureOfContexts, LogitFunction::Identity),
    ("mos", Head::MixtureOfSoftmaxes, LogitFunction::Identity),
];

/// What is timed, for this crate and for the composed baseline.
#[derive(Clone, Copy)]
enum Work {
    Loss,
    LossBackward,
    LogProbs,
}

const WORK: [(&str, Work); 3] =
    [("loss", Work::Loss), ("loss_backward", Work::LossBackward), ("log_probs", Work::LogProbs)];

impl Work {
    fn fused(self, head: &dyn OutputLayer, tensors: &Tensors, targets: &Tensor) -> Result<()> {
        let hidden = &tensors["hidden"];
        match self {
            Work::Loss => drop(black_box(head.loss(hidden, targets, &LossOptions::evaluation())?)),
            Work::LossBackward => drop(black_box(head.loss(hidden, targets, &LossOptions::default())?.backward()?)),
            Work::LogProbs => drop(black_box(head.log_probs(hidden)?)),
        }
        Ok(())
    }

    fn composed(self, case: &Case, tensors: &Tensors) -> Result<()> {
        let operands = Operands::project(case.head, tensors, ContextActivation::Tanh)?;
        let loss = || operands.loss(&case.targets, &Objective::default(), case.logits);
        match self {
            Work::Loss => drop(black_box(loss()?)),
            Work::LossBackward => drop(black_box(loss()?.0.backward()?)),
            Work::LogProbs => drop(black_box(operands.log_probs(case.logits)?)),
        }
        Ok(())
    }
}

/// The time of `iterations` calls of `step`, including the work of the device.
fn timed(device: &Device, iterations: u64, step: impl Fn() -> Result<()>) -> Duration {
    let start = Instant::now();
    for _ in 0..iterations {
        step().expect("a step");
    }
    device.synchronize().expect("synchronize");
    start.elapsed()
}

fn heads(criterion: &mut Criterion) {
    for device in common::devices() {
        let device_name = format!("{:?}", device.location()).to_lowercase();
        for (head_name, head, function) in HEADS {
            for (work_name, work) in WORK {
                for shape in &SHAPES {
                    let logits = Logits { function, ..Logits::PLAIN };
                    let case = Case { logits, ..Case::random(head, shape.sizes, &[shape.positions], 1) };
                    let dtype = DType::F32;
                    // Only a backward pass needs variables.
                    let tensors = match work {
                        Work::LossBackward => case.variables(dtype, &device),
                        _ => case.constants(dtype, &device),
                    };
                    let tensors = tensors.expect("tensors");
                    let layer = check::build(&case, &tensors).expect("a head");
                    let targets = case.target_tensor(&device).expect("targets");
                    let mut group = criterion.benchmark_group(format!("{device_name}/{head_name}/{work_name}"));
                    group.throughput(Throughput::Elements(shape.positions as u64));
                    group.bench_function(BenchmarkId::new(shape.name, "f32"), |bencher| {
                        bencher.iter_custom(|n| timed(&device, n, || work.fused(&*layer, &tensors, &targets)));
                    });
                    group.finish();
                    let baseline = format!("{device_name}/composed-{head_name}/{work_name}");
                    let mut group = criterion.benchmark_group(baseline);
                    group.throughput(Throughput::Elements(shape.positions as u64));
                    group.bench_function(BenchmarkId::new(shape.name, "f32"), |bencher| {
                        bencher.iter_custom(|n| timed(&device, n, || work.composed(&case, &tensors)));
                    });
                    group.finish();
                }
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = heads
}
criterion_main!(benches);
