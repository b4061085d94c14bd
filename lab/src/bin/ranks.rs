//! Times the loss of a mixture and its gradients, with the vocabulary cut among the processes of an MPI program or
//! whole, and prints one JSON line: seconds, the memory beyond parameters that a rank needs, and the bytes that it
//! sends.
//!
//!     cargo build --release -p lab --features mpi --bin ranks
//!     RAYON_NUM_THREADS=2 target/release/ranks --whole
//!     RAYON_NUM_THREADS=1 mpirun -n 2 target/release/ranks
//!
//! scripts/ranks.sh runs both in turn.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use clap::{Parser, ValueEnum};
use lab::show::{values::positive, Peak};
use mos_head::distributed::{Collectives, Mpi, Numbers, VocabShard};
use mos_head::{Distributions, LossOptions, Mixture, Result};
use serde_json::json;

#[derive(Parser)]
struct Args {
    #[arg(long, value_enum, default_value = "llm")]
    shape: Shape,
    /// Label smoothing, which takes a second sum
    #[arg(long, default_value_t = 0.0)]
    smoothing: f64,
    /// How often the step is timed
    #[arg(long, default_value_t = 5, value_parser = positive)]
    reps: usize,
    /// Use no shards: one process has the whole vocabulary
    #[arg(long)]
    whole: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shape {
    /// Penn Treebank, Yang et al. 2018
    Ptb,
    /// The softmax of a language model of a billion parameters
    Llm,
    /// To try the program on
    Small,
}

/// The sizes of a mixture.
struct Sizes {
    positions: usize,
    components: usize,
    /// The size of a context, d.
    d: usize,
    vocab: usize,
}

impl Shape {
    /// Returns the sizes of the published model.
    fn sizes(self) -> Sizes {
        let (positions, components, d, vocab) = match self {
            Shape::Ptb => (840, 15, 280, 10_000),
            Shape::Llm => (410, 1, 2048, 128_256),
            Shape::Small => (40, 3, 16, 500),
        };
        Sizes { positions, components, d, vocab }
    }
}

/// These ranks count the bytes that they send.
#[derive(Debug)]
struct Counted {
    ranks: Mpi,
    bytes: AtomicUsize,
}

impl Counted {
    fn count(&self, numbers: &Numbers<'_>) {
        self.bytes.fetch_add(numbers.bytes(), Ordering::Relaxed);
    }
}

impl Collectives for Counted {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn ranks(&self) -> usize {
        self.ranks.ranks()
    }

    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()> {
        self.count(&numbers);
        self.ranks.all_reduce_sum(numbers)
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        self.bytes.fetch_add(size_of_val(numbers), Ordering::Relaxed);
        self.ranks.all_gather(numbers)
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        self.count(&numbers);
        self.ranks.broadcast(numbers, root)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let ranks = Arc::new(Counted { ranks: Mpi::new()?, bytes: AtomicUsize::new(0) });
    let Sizes { positions, components, d, vocab } = args.shape.sizes();
    let shard = if args.whole { None } else { Some(VocabShard::new(ranks.clone(), vocab)?) };
    let ids = shard.as_ref().map_or(0..vocab, VocabShard::range);

    let device = &Device::Cpu;
    // The values are the same whatever the number of ranks is.
    let values = |indices: std::ops::Range<usize>, scale: f64, factor: f64| {
        (Tensor::arange(indices.start as u32, indices.end as u32, device)?.to_dtype(DType::F32)? * scale)?.sin()?
            * factor
    };
    let contexts = values(0..positions * components * d, 1.7, 1.0)?.reshape((positions, components, d))?;
    let contexts = Var::from_tensor(&contexts)?;
    let log_priors = values(0..positions * components, 0.9, 1.0)?.reshape((positions, components))?;
    let log_priors = log_softmax(&log_priors, D::Minus1)?;
    let log_priors = (components > 1).then(|| Var::from_tensor(&log_priors)).transpose()?;
    let weight = Var::from_tensor(&values(ids.start * d..ids.end * d, 2.3, 0.06)?.reshape((ids.len(), d))?)?;
    let bias = Var::zeros(ids.len(), DType::F32, device)?;
    let targets = Tensor::from_iter((0..positions).map(|t| (t * 7919 % vocab) as u32), device)?;
    let options = LossOptions::new().with_label_smoothing(args.smoothing);
    let step = || -> Result<f64> {
        let log_priors = log_priors.as_ref().map(Var::as_tensor);
        let mixture = Mixture::new(&contexts, log_priors, &weight, Some(bias.as_tensor()))?;
        let loss = match &shard {
            Some(shard) => mixture.vocab_parallel(shard).loss(&targets, &options)?,
            None => mixture.loss(&targets, &options)?,
        };
        loss.backward()?;
        Ok(f64::from(loss.value.to_scalar::<f32>()?))
    };
    let memory = Peak::watch(device);
    let loss = step()?;
    let peak = memory.extra_mib();
    ranks.bytes.store(0, Ordering::Relaxed);
    let mut seconds = Vec::new();
    for _ in 0..args.reps {
        let start = Instant::now();
        step()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let bytes = ranks.bytes.load(Ordering::Relaxed) / args.reps;
    // The line has the largest peak of any rank.
    let peaks = ranks.all_gather(&[peak.unwrap_or(f64::NAN)])?;
    if ranks.rank() == 0 {
        let line = json!({
            "program": "ranks", "shape": format!("{:?}", args.shape).to_lowercase(), "positions": positions,
            "mixtures": components, "context": d, "vocab": vocab, "smoothing": args.smoothing,
            "ranks": if args.whole { 0 } else { ranks.ranks() }, "threads": candle_core::utils::get_num_threads(),
            "seconds": seconds[args.reps / 2], "min": seconds[0], "loss": loss,
            "weight_mib": (ids.len() * d * 4) as f64 / f64::from(1 << 20),
            "peak_extra_mib": peaks.into_iter().fold(f64::NAN, f64::max), "sent_bytes": bytes,
        });
        println!("{line}");
    }
    Ok(())
}
