//! This example trains a language model whose vocabulary is cut among the processes of an MPI program, and saves it for
//! any number of processes.
//!
//!     apt-get install openmpi-bin libopenmpi-dev libclang-dev    # Debian
//!     cargo build --release --features mpi --example vocab_parallel
//!     RAYON_NUM_THREADS=1 mpirun -n 2 target/release/examples/vocab_parallel
//!     RAYON_NUM_THREADS=1 mpirun -n 3 target/release/examples/vocab_parallel --resume --epochs 8
//!
//! Embedding and LSTM are the same on every process. Each process has the rows of its own words of the decoder, and of
//! Adam's moments for the decoder, in memory and on the disk. The language has 1500 words and a known entropy.
//!
//! In half a minute on 2 cores, one or two processes reach perplexity 6.9354; that of the language is 5.5929. Runs of 1
//! to 3 processes differ in the sixth digit; with `--double`, one and two print the same ten digits. If a process
//! fails, the others end with an error too.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, clap 4.5 (feature `derive`), mos-head 0.6 (feature `mpi`),
//! rand 0.9, rand_distr 0.5.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{backprop::GradStore, DType, Device, Module, Tensor, Var};
use candle_nn::rnn::{LSTMState, LSTM, RNN};
use candle_nn::{embedding, lstm, Embedding, LSTMConfig, VarBuilder, VarMap};
use clap::Parser;
use mos_head::{
    distributed::{save_sharded, Collectives, Mpi, ShardedCheckpoint, VocabParallel, VocabShard},
    ContextActivation, Loss, LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer,
};
use rand::{distr::weighted::WeightedIndex, rngs::StdRng, Rng, SeedableRng};
use rand_distr::StandardNormal;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Parser)]
struct Args {
    /// Number of epochs, those before a resumption included.
    #[arg(long, default_value_t = 6)]
    epochs: u32,
    /// Folder of the checkpoint, which all processes see.
    #[arg(long, default_value = "target/vocab_parallel")]
    dir: PathBuf,
    /// Goes on from the checkpoint, which any number of processes may have written.
    #[arg(long)]
    resume: bool,
    /// Computes in double precision.
    #[arg(long)]
    double: bool,
    /// Seconds that processes wait for each other.
    #[arg(long, default_value_t = 300)]
    time_limit: u64,
}

const VOCAB: usize = 1500;
const HIDDEN: usize = 32;
const CONTEXT: usize = 16;
const COMPONENTS: usize = 6;
/// The number of texts that are read in parallel.
const STREAMS: usize = 128;
/// The number of steps of backpropagation through time.
const STEPS: usize = 4;
/// The number of windows of as many steps in an epoch.
const WINDOWS: usize = 400;
const LEARNING_RATE: f64 = 0.01;
/// The factor of the learning rate per epoch.
const DECAY: f64 = 0.7;

/// Computes P(next | word) = sum_k pi_k(word) softmax(E c_k(word)), with 4 components and 8 columns, and its entropy,
/// for each word.
fn language() -> Result<Vec<(WeightedIndex<f64>, f64)>> {
    let softmax = |logits: Vec<f64>| {
        let sum: f64 = logits.iter().map(|z| z.exp()).sum();
        logits.into_iter().map(move |z| z.exp() / sum)
    };
    let mut rng = StdRng::seed_from_u64(1711);
    let mut normals = |count: usize, scale: f64| -> Vec<f64> {
        (0..count).map(|_| scale * rng.sample::<f64, _>(StandardNormal)).collect()
    };
    let embedding = normals(VOCAB * 8, 1.0);
    let word = |_| {
        let mut row = vec![0.0; VOCAB];
        for prior in softmax(normals(4, 3.0)) {
            let context = normals(8, 2.5);
            let logits = embedding.chunks(8).map(|word| word.iter().zip(&context).map(|(e, c)| e * c).sum());
            row.iter_mut().zip(softmax(logits.collect())).for_each(|(p, component)| *p += prior * component);
        }
        let entropy = -row.iter().map(|p| p * p.ln()).sum::<f64>();
        Ok((WeightedIndex::new(row)?, entropy))
    };
    (0..VOCAB).map(word).collect()
}

/// Returns words `[STREAMS, length + 1]`, and the mean entropy of those that follow another.
fn texts(language: &[(WeightedIndex<f64>, f64)], length: usize, seed: u64) -> Result<(Tensor, f64)> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut words, mut sum) = (Vec::new(), 0.0);
    for _ in 0..STREAMS {
        let mut word = rng.random_range(0..VOCAB);
        words.push(word as u32);
        for _ in 0..length {
            let (next, entropy) = &language[word];
            (word, sum) = (rng.sample(next), sum + entropy);
            words.push(word as u32);
        }
    }
    Ok((Tensor::from_vec(words, (STREAMS, length + 1), &Device::Cpu)?, sum / (STREAMS * length) as f64))
}

/// Returns whether each rank has its own rows of a tensor, and not the whole.
fn is_cut(name: &str) -> bool {
    name.starts_with("head.decoder.")
}

struct Model {
    embedding: Embedding,
    lstm: LSTM,
    head: VocabParallel<MixtureOfSoftmaxes>,
    /// Adam's means of the gradient and of its square, and the parameter itself.
    parameters: BTreeMap<String, [Var; 3]>,
}

impl Model {
    fn new(shard: VocabShard, dtype: DType) -> Result<Self> {
        let (vars, rows) = (VarMap::new(), shard.range());
        let vb = VarBuilder::from_varmap(&vars, dtype, &Device::Cpu);
        let embedding = embedding(VOCAB, HIDDEN, vb.pp("embedding"))?;
        let lstm = lstm(HIDDEN, HIDDEN, LSTMConfig::default(), vb.pp("lstm"))?;
        let config = MixtureConfig::new(HIDDEN, rows.len(), COMPONENTS)
            .with_context_dim(CONTEXT)
            .with_activation(ContextActivation::Identity);
        let head = VocabParallel::new(MixtureOfSoftmaxes::new(&config, vb.pp("head"))?, shard)?;

        // Each row has a seed of its own, so that its values do not depend on the rank that has it.
        let vars: BTreeMap<String, Var> = vars.data().lock().unwrap().clone().into_iter().collect();
        let mut parameters = BTreeMap::new();
        for (number, (name, var)) in vars.into_iter().enumerate() {
            let (count, first) = (var.dim(0)?, if is_cut(&name) { rows.start } else { 0 });
            let values = (first..first + count).flat_map(|row| {
                let rng = StdRng::seed_from_u64((number << 32 | row) as u64);
                rng.random_iter::<f32>().take(var.elem_count() / count).map(|u| u - 0.5)
            });
            var.set(&Tensor::from_iter(values, &Device::Cpu)?.to_dtype(dtype)?.reshape(var.shape())?)?;
            let zeros = || Var::zeros(var.shape(), dtype, &Device::Cpu);
            parameters.insert(name, [zeros()?, zeros()?, var]);
        }
        Ok(Model { embedding, lstm, head, parameters })
    }

    /// Computes the mean loss of texts. `each` is called with the loss of every window.
    fn read(&self, texts: &Tensor, options: &LossOptions, each: impl Fn(usize, &Loss) -> Result<()>) -> Result<f64> {
        let (mut sum, mut count, mut state) = (0.0, 0.0, self.lstm.zero_state(STREAMS)?);
        for (window, start) in (0..texts.dim(1)? - 1).step_by(STEPS).enumerate() {
            let words = |start| texts.narrow(1, start, STEPS)?.contiguous();
            let states = self.lstm.seq_init(&self.embedding.forward(&words(start)?)?, &state)?;
            let last = &states[states.len() - 1];
            state = LSTMState::new(last.h.detach(), last.c.detach());
            let hidden = self.lstm.states_to_tensor(&states)?;
            let loss = self.head.loss(&hidden, &words(start + 1)?, options)?;
            let (more, targets) = loss.sum_and_count()?;
            (sum, count) = (sum + more, count + targets);
            each(window, &loss)?;
        }
        Ok(sum / count)
    }

    /// Takes a step of Adam, whose moments candle's `AdamW` does not give to a checkpoint. Each rank takes its step
    /// alone: it has the gradient of its own rows, and for all other parameters the same gradient as the other ranks.
    fn step(&self, gradients: &GradStore, step: f64) -> Result<()> {
        let rate = LEARNING_RATE * DECAY.powf(step / WINDOWS as f64);
        let (first, second) = (1.0 - 0.9f64.powf(step), 1.0 - 0.999f64.powf(step));
        for [mean, square, var] in self.parameters.values() {
            let Some(gradient) = gradients.get(var) else { continue };
            mean.set(&(mean.affine(0.9, 0.0)? + (gradient * 0.1)?)?)?;
            square.set(&(square.affine(0.999, 0.0)? + (gradient.sqr()? * 0.001)?)?)?;
            let update = (mean.affine(rate / first, 0.0)? / ((square.as_tensor() / second)?.sqrt()? + 1e-8)?)?;
            var.set(&(var.as_tensor() - update)?)?;
        }
        Ok(())
    }

    /// Returns the tensors of a checkpoint, by name.
    fn tensors(&self) -> impl Iterator<Item = (String, &Var)> {
        self.parameters.iter().flat_map(|(name, vars)| {
            [".mean", ".square", ""].iter().zip(vars).map(move |(end, var)| (format!("{name}{end}"), var))
        })
    }

    /// Writes a checkpoint together with the other ranks.
    fn save(&self, index: &Path, epoch: u32) -> Result<()> {
        let tensors = self.tensors().map(|(name, var)| (name, var.as_tensor().clone()));
        let (rows, mut replicated): (HashMap<_, _>, HashMap<_, _>) = tensors.partition(|(name, _)| is_cut(name));
        replicated.insert("epoch".to_owned(), Tensor::new(epoch, &Device::Cpu)?);
        Ok(save_sharded(self.head.shard(), index, &rows, &replicated)?)
    }

    /// Reads a checkpoint of any number of ranks. Returns its epoch.
    fn load(&self, index: &Path) -> Result<u32> {
        let checkpoint = ShardedCheckpoint::open(index)?;
        for (name, var) in self.tensors() {
            let saved = checkpoint.var_builder(self.head.shard(), var.dtype(), var.device());
            var.set(&saved.get(var.shape(), &name)?)?;
        }
        Ok(checkpoint.load("epoch", DType::U32, &Device::Cpu)?.to_scalar()?)
    }
}

fn train(args: &Args, ranks: Arc<dyn Collectives>) -> Result<()> {
    let is_first = ranks.rank() == 0;
    let dtype = if args.double { DType::F64 } else { DType::F32 };
    let language = language()?;
    let ((train, _), (valid, entropy)) = (texts(&language, WINDOWS * STEPS, 1)?, texts(&language, 400, 2)?);
    let model = Model::new(VocabShard::new(ranks.clone(), VOCAB)?, dtype)?;
    std::fs::create_dir_all(&args.dir)?;
    let index = args.dir.join("model.safetensors.index.json");
    let evaluate = || Ok::<_, Box<dyn Error>>(model.read(&valid, &LossOptions::evaluation(), |_, _| Ok(()))?.exp());

    let done = if args.resume { model.load(&index)? } else { 0 };
    let mut perplexity = evaluate()?;
    for epoch in done..args.epochs {
        let nll = model.read(&train, &LossOptions::new(), |window, loss| {
            model.step(&loss.backward()?, (epoch as usize * WINDOWS + window + 1) as f64)
        })?;
        perplexity = evaluate()?;
        model.save(&index, epoch + 1)?;
        if is_first {
            println!("epoch {}  perplexity: train {:.9}  valid {perplexity:.9}", epoch + 1, nll.exp());
        }
    }

    if is_first {
        let rows = model.head.shard().range().len();
        let (ranks, entropy) = (ranks.ranks(), entropy.exp());
        println!("{ranks} processes: valid perplexity {perplexity:.9}, the language has {entropy:.9}");
        println!("the decoder of the first: {rows} rows, {} bytes", rows * (CONTEXT + 1) * dtype.size_in_bytes());
    }
    Ok(())
}

fn main() -> Result<ExitCode> {
    // Between operations candle's threads spin, which keeps other processes from working.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let args = Args::parse();
    let ranks = Arc::new(Mpi::with_time_limit(Duration::from_secs(args.time_limit))?);
    let Err(error) = train(&args, ranks.clone()) else { return Ok(ExitCode::SUCCESS) };
    // The error is printed before `ranks` waits for the others to end, because one of them may end this process.
    eprintln!("rank {}: {error}", ranks.rank());
    Ok(ExitCode::FAILURE)
}
