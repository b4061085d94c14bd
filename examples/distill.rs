//! In this example of distillation, a head learns from another one that has seen sixteen times as much text.
//!
//!     cargo run --release --example distill
//!
//! The text is of a built-in language of 512 words, whose entropy is known. Its next word depends on the last one
//! alone. A mixture of softmaxes teaches a softmax, then a softmax teaches a mixture, with the whole distribution, or
//! with the 1, 8 or 64 most probable words and the probability that is left. The last column is the share of the
//! teacher's lead over a student without a teacher that the student gains. With all words it gains half of a mixture's
//! lead and all of a softmax's, and with a single word next to nothing. The example takes two minutes on 2 cores.
//!
//!     cargo run --release --example distill -- --divergence lk-hybrid
//!
//! With this flag, a softmax learns to draft for the mixture in speculative decoding: once by the forward divergence
//! and once by this one (`total-variation`, `neg-log-acceptance`, `lk-hybrid`, `reverse-kl`, `jensen-shannon`), for
//! equal numbers of steps and without other targets. The share of its drafts that the mixture accepts is `1 - TV`, with
//! the total variation of both distributions. `--seed` sets the initial values.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, clap 4.5 with `derive`, mos-head 0.6, rand 0.9.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{embedding, AdamW, Embedding, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use clap::{Parser, ValueEnum};
use mos_head::{
    distill::{DistillOptions, Divergence, MissingIds, Teacher},
    ContextActivation, DropoutMasks, LossOptions, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes, Result,
    SoftmaxConfig, SoftmaxHead,
};
use rand::{rngs::StdRng, Rng, SeedableRng};

const VOCAB: usize = 512;
const HIDDEN: usize = 8;
const COMPONENTS: usize = 4;
/// The number of words of a training step.
const BATCH: usize = 512;
/// The numbers of words that teachers, students and the evaluation read.
const TEACHER_WORDS: usize = 256_000;
const STUDENT_WORDS: usize = TEACHER_WORDS / 16;
const EVALUATION_WORDS: usize = 50_000;
const STEPS: usize = 1500;
const LEARNING_RATE: f64 = 0.02;
/// The weight of the words that come next, in a student's loss.
const HARD_WEIGHT: f64 = 0.3;

#[derive(Parser)]
struct Args {
    /// The divergence by which a drafter learns, beside the forward one
    #[arg(long)]
    divergence: Option<DrafterDivergence>,
    /// The seed of initial values
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The divergences have the names of [`Divergence`].
#[derive(Clone, Copy, ValueEnum)]
enum DrafterDivergence {
    ReverseKl,
    JensenShannon,
    TotalVariation,
    NegLogAcceptance,
    LkHybrid,
}

impl DrafterDivergence {
    fn divergence(self) -> Divergence {
        match self {
            DrafterDivergence::ReverseKl => Divergence::ReverseKl,
            DrafterDivergence::JensenShannon => Divergence::JensenShannon(0.5),
            DrafterDivergence::TotalVariation => Divergence::TotalVariation,
            DrafterDivergence::NegLogAcceptance => Divergence::NegLogAcceptance,
            DrafterDivergence::LkHybrid => Divergence::LkHybrid(3.0),
        }
    }
}

/// A text is given as pairs of a word and the next one.
struct Text {
    words: Vec<u32>,
    next: Vec<u32>,
}

impl Text {
    /// Returns the first `n` pairs.
    fn first(&self, n: usize) -> Self {
        Text { words: self.words[..n].to_vec(), next: self.next[..n].to_vec() }
    }

    /// Returns the pairs of a training step. The steps read the text in a circle.
    fn batch(&self, step: usize) -> Result<(Tensor, Tensor)> {
        let places = (0..BATCH).map(|i| (step * BATCH + i) % self.words.len());
        let select = |words: &[u32]| places.clone().map(|i| words[i]).collect::<Vec<_>>();
        Ok((Tensor::new(select(&self.words), &Device::Cpu)?, Tensor::new(select(&self.next), &Device::Cpu)?))
    }
}

/// A language gives texts for training and evaluation.
struct Language {
    train: Text,
    valid: Text,
    /// The entropy of `valid`, in nats for each word.
    entropy: f64,
}

/// Writes texts of a language in which P(next | current) is a mixture of 4 softmaxes over 8 dimensions.
fn language() -> Language {
    let mut rng = StdRng::seed_from_u64(1711);
    let mut normals = |count: usize, scale: f64| -> Vec<f64> {
        let mut normal = || {
            let (u, v): (f64, f64) = (rng.random(), rng.random());
            (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        (0..count).map(|_| scale * normal()).collect()
    };
    let softmax = |logits: Vec<f64>| {
        let sum: f64 = logits.iter().map(|z| z.exp()).sum();
        logits.into_iter().map(move |z| z.exp() / sum)
    };
    let words = normals(VOCAB * 8, 1.0);
    let mut rows = vec![vec![0.0; VOCAB]; VOCAB];
    for row in &mut rows {
        for prior in softmax(normals(4, 3.0)) {
            let context = normals(8, 2.5);
            let logits = words.chunks(8).map(|word| word.iter().zip(&context).map(|(w, c)| w * c).sum());
            row.iter_mut().zip(softmax(logits.collect())).for_each(|(p, component)| *p += prior * component);
        }
    }
    let mut rng = StdRng::seed_from_u64(1);
    let mut text = |length: usize| {
        let (mut words, mut next) = (vec![0u32], Vec::new());
        for t in 0..length {
            let mut left = rng.random::<f64>();
            let row = &rows[words[t] as usize];
            let id = row.iter().position(|p| {
                left -= p;
                left < 0.0
            });
            next.push(id.unwrap_or(VOCAB - 1) as u32);
            words.push(next[t]);
        }
        words.pop();
        Text { words, next }
    };
    let (train, valid) = (text(TEACHER_WORDS), text(EVALUATION_WORDS));
    let entropy_after = |&word: &u32| rows[word as usize].iter().map(|p| -p * p.ln()).sum::<f64>();
    let entropy = valid.words.iter().map(entropy_after).sum::<f64>() / EVALUATION_WORDS as f64;
    Language { train, valid, entropy }
}

/// In this model, the embedding of a word is the hidden state after it.
struct Model<H> {
    vars: VarMap,
    embedding: Embedding,
    head: H,
}

impl<H: MixtureLayer> Model<H> {
    fn new(seed: u64, head: impl Fn(VarBuilder) -> Result<H>) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let (embedding, head) = (embedding(VOCAB, HIDDEN, vb.pp("embedding"))?, head(vb.pp("head"))?);
        // The values come from a seed, which candle's generator on the CPU does not take.
        let mut rng = StdRng::seed_from_u64(seed);
        for (name, var) in vars.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>() {
            let bound = if name.ends_with("bias") { 0.0 } else { 1.0 / (HIDDEN as f32).sqrt() };
            let values = (0..var.elem_count()).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        }
        Ok(Model { embedding, head, vars })
    }

    fn hidden(&self, words: &Tensor) -> Result<Tensor> {
        Ok(self.embedding.forward(words)?)
    }

    /// Trains with the loss of each step's hidden states, words and next words. Returns the seconds.
    fn train(&self, text: &Text, loss: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<mos_head::Loss>) -> Result<f64> {
        let settings = ParamsAdamW { lr: LEARNING_RATE, weight_decay: 0.0, ..Default::default() };
        let (mut optimizer, start) = (AdamW::new(self.vars.all_vars(), settings)?, Instant::now());
        for step in 0..STEPS {
            let (words, next) = text.batch(step)?;
            optimizer.set_learning_rate(LEARNING_RATE * (1.0 - step as f64 / STEPS as f64));
            optimizer.step(&loss(&self.hidden(&words)?, &words, &next)?.backward()?)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Trains on the words that come next.
    fn train_alone(&self, text: &Text) -> Result<f64> {
        self.train(text, |hidden, _, next| self.head.loss(hidden, next, &LossOptions::default()))
    }

    /// Trains on the teacher's distributions: on all words, or on the `k` most probable ones.
    fn train_with_teacher<T: MixtureLayer>(&self, text: &Text, teacher: &Model<T>, k: Option<usize>) -> Result<f64> {
        self.train(text, |hidden, words, next| {
            let options = DistillOptions::new(Divergence::ForwardKl).with_targets(next.clone());
            let options = options.with_hard_weight(HARD_WEIGHT);
            let teacher = match k {
                None => teacher.distributions(words)?,
                Some(k) => {
                    let top = teacher.head.top_k(&teacher.hidden(words)?, k)?;
                    Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail)
                }
            };
            self.head.distill(hidden, &teacher, &options)
        })
    }

    /// Trains on the distributions of a teacher for which this model drafts.
    fn train_to_draft<T: MixtureLayer>(&self, text: &Text, teacher: &Model<T>, divergence: Divergence) -> Result<f64> {
        self.train(text, |hidden, words, _| {
            self.head.distill(hidden, &teacher.distributions(words)?, &DistillOptions::new(divergence))
        })
    }

    /// Returns the distributions after these words, for a student.
    fn distributions(&self, words: &Tensor) -> Result<Teacher> {
        Ok(Teacher::from_mixture(&self.head.mixture(&self.hidden(words)?, DropoutMasks::Off)?))
    }

    /// Computes the mean probability with which the teacher accepts a draft, and the mean forward divergence.
    fn acceptance<T: MixtureLayer>(&self, text: &Text, teacher: &Model<T>) -> Result<(f64, f64)> {
        let words = Tensor::new(&*text.words, &Device::Cpu)?;
        let (hidden, teacher) = (self.hidden(&words)?, teacher.distributions(&words)?);
        let mean = |divergence| {
            let loss = self.head.distill(&hidden.detach(), &teacher, &DistillOptions::new(divergence))?;
            let (sum, count) = loss.sum_and_count()?;
            Ok::<_, mos_head::Error>(sum / count)
        };
        Ok((1.0 - mean(Divergence::TotalVariation)?, mean(Divergence::ForwardKl)?))
    }

    /// Computes the mean negative log-likelihood of the next words, in nats.
    fn evaluate(&self, text: &Text) -> Result<f64> {
        let (words, next) = (Tensor::new(&*text.words, &Device::Cpu)?, Tensor::new(&*text.next, &Device::Cpu)?);
        let (sum, count) = self.head.loss(&self.hidden(&words)?, &next, &LossOptions::evaluation())?.sum_and_count()?;
        Ok(sum / count)
    }
}

/// Prints what students reach without a teacher, and with the teacher's distributions or lists.
fn compare<T: MixtureLayer, S: MixtureLayer>(
    names: (&str, &str),
    teacher: Model<T>,
    student: impl Fn() -> Result<Model<S>>,
    Language { train, valid, entropy }: &Language,
) -> Result<()> {
    let seconds = teacher.train_alone(train)?;
    let teacher_nll = teacher.evaluate(valid)?;
    println!("\nA {} teaches a {}.", names.0, names.1);
    println!("                          above entropy  seconds  share of the lead");
    println!("teacher                   {:>13.4}  {seconds:>7.1}", teacher_nll - entropy);
    let text = train.first(STUDENT_WORDS);
    let alone = student()?;
    let seconds = alone.train_alone(&text)?;
    let alone_nll = alone.evaluate(valid)?;
    println!("student without a teacher {:>13.4}  {seconds:>7.1}", alone_nll - entropy);
    for k in [None, Some(64), Some(8), Some(1)] {
        let student = student()?;
        let seconds = student.train_with_teacher(&text, &teacher, k)?;
        let nll = student.evaluate(valid)?;
        let list = k.map_or("all words".into(), |k| format!("{k} of {VOCAB} words"));
        let share = 100.0 * (alone_nll - nll) / (alone_nll - teacher_nll);
        println!("  of {list:<21}  {:>13.4}  {seconds:>7.1}  {share:>16.0}%", nll - entropy);
    }
    Ok(())
}

/// Prints how many drafts of two students the teacher accepts: of one that learns by the forward divergence, and of one
/// that learns by another.
fn compare_drafters<T: MixtureLayer, S: MixtureLayer>(
    teacher: Model<T>,
    student: impl Fn() -> Result<Model<S>>,
    divergence: Divergence,
    Language { train, valid, .. }: &Language,
) -> Result<()> {
    teacher.train_alone(train)?;
    println!("\nA softmax drafts for a mixture of softmaxes.");
    println!("learns by              accepted  forward divergence  seconds");
    for divergence in [Divergence::ForwardKl, divergence] {
        let student = student()?;
        let seconds = student.train_to_draft(train, &teacher, divergence)?;
        let (acceptance, kl) = student.acceptance(valid, &teacher)?;
        println!("{:<22} {acceptance:>8.4}  {kl:>18.4}  {seconds:>7.1}", format!("{divergence:?}"));
    }
    Ok(())
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let Args { divergence, seed } = Args::parse();
    let language = language();
    println!("The entropy is {:.4} nats.", language.entropy);
    let softmax = || Model::new(seed, |vb| SoftmaxHead::new(&SoftmaxConfig::new(HIDDEN, VOCAB), vb));
    let config = MixtureConfig::new(HIDDEN, VOCAB, COMPONENTS)
        .with_context_dim(HIDDEN)
        .with_activation(ContextActivation::Identity);
    let mixture = || Model::new(seed, |vb| MixtureOfSoftmaxes::new(&config, vb));
    if let Some(divergence) = divergence {
        return compare_drafters(mixture()?, softmax, divergence.divergence(), &language);
    }
    compare(("mixture of softmaxes", "softmax"), mixture()?, softmax, &language)?;
    compare(("softmax", "mixture of softmaxes"), softmax()?, mixture, &language)
}
