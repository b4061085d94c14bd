//! This example trains an LSTM language model with a softmax, a mixture of contexts and a mixture of softmaxes, at
//! equal size.
//!
//!     cargo run --release --example lstm_lm
//!
//! Without data, the text is 256,000 tokens of a built-in language of 512 words, whose entropy is known. The softmax
//! gets within 0.66 nats of it, the mixture of contexts within 0.59 and the mixture of softmaxes within 0.41, in half a
//! minute on 2 cores. The language is itself a mixture of softmaxes, with sizes at which the softmax bottleneck binds.
//!
//!     cargo run --release --example lstm_lm -- --data DIR
//!
//! `DIR` has train.txt, valid.txt and optionally test.txt, with one sentence per line, such as Penn Treebank. An epoch
//! of a million words takes minutes.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, clap 4.5 (feature `derive`), mos-head 0.6, rand 0.9. For
//! `--device cuda` or `metal`, mos-head has the feature of that name.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{backprop::GradStore, DType, Device, Module, Tensor};
use candle_nn::rnn::{LSTMState, LSTM, RNN};
use candle_nn::{embedding, lstm, AdamW, Embedding, LSTMConfig, Optimizer, ParamsAdamW, VarBuilder, VarMap, SGD};
use clap::Parser;
use mos_head::{ContextActivation, HeadConfig, Loss, LossOptions, MixtureConfig, OutputLayer, SoftmaxConfig};
use rand::{rngs::StdRng, Rng, SeedableRng};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Parser)]
struct Args {
    /// Folder with train.txt, valid.txt and optionally test.txt; without it, a built-in language.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Number of epochs [default: 6; with --data: 3]
    #[arg(long)]
    epochs: Option<usize>,
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda", "metal"])]
    device: String,
}

/// A recipe has the sizes of a model, and says how it is trained.
#[derive(Clone, Copy)]
struct Recipe {
    hidden: usize,
    embedding: usize,
    /// The number of components of the mixtures.
    components: usize,
    epochs: usize,
    /// The number of parts of the text that are read in parallel.
    streams: usize,
    /// The number of steps of backpropagation through time.
    steps: usize,
    lr: f64,
    /// The factor of the learning rate per epoch.
    decay: f64,
    /// Whether the optimizer is Adam and the contexts are linear. Otherwise they are SGD with clipping and tanh, as in
    /// the paper.
    adam: bool,
}

const BUILT_IN: Recipe = Recipe {
    hidden: 6,
    embedding: 32,
    components: 8,
    epochs: 6,
    streams: 128,
    steps: 4,
    lr: 0.03,
    decay: 0.6,
    adam: true,
};
const TEXT: Recipe = Recipe {
    hidden: 220,
    embedding: 220,
    components: 5,
    epochs: 3,
    streams: 20,
    steps: 35,
    lr: 20.0,
    decay: 0.5,
    adam: false,
};
/// The largest norm of the gradients with SGD.
const CLIP: f64 = 0.25;

/// The texts are token ids. The first token of each is an input only.
struct Corpus {
    train: Vec<u32>,
    valid: Vec<u32>,
    test: Option<Vec<u32>>,
    vocab: usize,
    /// The mean entropy of the tokens of `valid`, in nats, if it is known.
    entropy: Option<f64>,
}

/// Writes texts with P(next | current) = sum_k pi_k(current) softmax(E c_k(current)), 4 components and d = 8. The
/// logarithm of a mixture is no matrix of low rank, so that one softmax over few dimensions cannot reach the entropy.
fn built_in() -> Corpus {
    const VOCAB: usize = 512;
    fn softmax(logits: Vec<f64>) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|z| z.exp()).sum();
        logits.into_iter().map(|z| z.exp() / sum).collect()
    }
    let mut rng = StdRng::seed_from_u64(1711);
    let mut normals = |count: usize, scale: f64| -> Vec<f64> {
        let mut normal = || {
            let (u, v): (f64, f64) = (rng.random(), rng.random());
            (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        (0..count).map(|_| scale * normal()).collect()
    };
    let embedding = normals(VOCAB * 8, 1.0);
    let mut rows = vec![vec![0.0; VOCAB]; VOCAB];
    for row in &mut rows {
        for prior in softmax(normals(4, 3.0)) {
            let context = normals(8, 2.5);
            let logits = embedding.chunks(8).map(|word| word.iter().zip(&context).map(|(e, c)| e * c).sum());
            row.iter_mut().zip(softmax(logits.collect())).for_each(|(p, component)| *p += prior * component);
        }
    }
    let entropies: Vec<f64> = rows.iter().map(|row| -row.iter().map(|p| p * p.ln()).sum::<f64>()).collect();
    for row in &mut rows {
        (1..VOCAB).for_each(|id| row[id] += row[id - 1]); // the row is cumulative from here on
    }
    let mut rng = StdRng::seed_from_u64(1);
    let mut text = |targets: usize| {
        let mut text = vec![0];
        for i in 0..targets {
            let row = &rows[text[i] as usize];
            let u = rng.random::<f64>() * row[VOCAB - 1];
            text.push(row.partition_point(|&p| p <= u).min(VOCAB - 1) as u32);
        }
        text
    };
    let (train, valid) = (text(256_000), text(50_000));
    let inputs = &valid[..valid.len() - 1];
    let entropy = inputs.iter().map(|&id| entropies[id as usize]).sum::<f64>() / inputs.len() as f64;
    Corpus { train, valid, test: None, vocab: VOCAB, entropy: Some(entropy) }
}

/// Reads the words of a folder's files, with `<eos>` after each line. Words that train.txt lacks are `<unk>`, if
/// train.txt has this word.
fn from_folder(folder: &Path) -> Result<Corpus> {
    let mut ids = HashMap::from([("<eos>".to_owned(), 0)]);
    let mut read = |name: &str| -> Result<Vec<u32>> {
        let path = folder.join(name);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let unknown = ids.get("<unk>").copied();
        let words = text.lines().flat_map(|line| line.split_whitespace().chain(["<eos>"]));
        let words = words.map(|word| match (unknown, ids.len() as u32) {
            (Some(unknown), _) => *ids.get(word).unwrap_or(&unknown),
            (None, new) => *ids.entry(word.to_owned()).or_insert(new),
        });
        let text: Vec<u32> = [0].into_iter().chain(words).collect();
        match text.len() {
            1 => Err(format!("{}: a text without words", path.display()).into()),
            _ => Ok(text),
        }
    };
    let (train, valid) = (read("train.txt")?, read("valid.txt")?);
    let test = if folder.join("test.txt").exists() { Some(read("test.txt")?) } else { None };
    Ok(Corpus { train, valid, test, vocab: ids.len(), entropy: None })
}

/// The target of positions past the end of a text, which the loss ignores.
const IGNORED: i64 = -1;

struct Model {
    name: &'static str,
    recipe: Recipe,
    embedding: Embedding,
    lstm: LSTM,
    head: Box<dyn OutputLayer>,
    vars: VarMap,
}

impl Model {
    fn new(name: &'static str, head: &HeadConfig, vocab: usize, recipe: Recipe, device: &Device) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
        let embedding = embedding(vocab, recipe.embedding, vb.pp("embedding"))?;
        let lstm = lstm(recipe.embedding, recipe.hidden, LSTMConfig::default(), vb.pp("lstm"))?;
        let head = head.build(vb.pp("head"))?;
        // The values are uniform and come from a seed, which candle's generator on the CPU does not take.
        let mut rng = StdRng::seed_from_u64(1);
        for (name, var) in vars.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>() {
            let bound = match name.as_str() {
                "head.decoder.bias" => 0.0,
                "embedding.weight" | "head.decoder.weight" => 0.1,
                _ => 1.0 / (recipe.hidden as f32).sqrt(),
            };
            let values = (0..var.elem_count()).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
            var.set(&Tensor::from_vec(values, var.shape(), device)?)?;
        }
        Ok(Model { name, recipe, embedding, lstm, head, vars })
    }

    /// Computes the hidden states `[streams, steps, hidden]` of token ids `[streams, steps]`, and advances the state,
    /// which is cut from the graph.
    fn hidden(&self, tokens: &Tensor, state: &mut LSTMState) -> Result<Tensor> {
        let states = self.lstm.seq_init(&self.embedding.forward(tokens)?, state)?;
        let last = &states[states.len() - 1];
        *state = LSTMState::new(last.h.detach(), last.c.detach());
        Ok(self.lstm.states_to_tensor(&states)?)
    }

    /// Computes the mean NLL of a text, which is read once in parallel streams. `each` is called with the loss of each
    /// window and the share of the text that was read before.
    fn read(&self, text: &[u32], options: LossOptions, mut each: impl FnMut(&Loss, f64) -> Result<()>) -> Result<f64> {
        let (Recipe { streams, steps, .. }, device) = (self.recipe, self.embedding.embeddings().device());
        let length = (text.len() - 1).div_ceil(streams);
        let (mut sum, mut count, mut state) = (0.0, 0.0, self.lstm.zero_state(streams)?);
        let options = options.with_ignore_index(IGNORED);
        for start in (0..length).step_by(steps) {
            let steps = steps.min(length - start);
            let places = (0..streams).flat_map(|stream| (stream * length + start..).take(steps));
            let tokens: Vec<u32> = places.clone().map(|i| text.get(i).copied().unwrap_or(0)).collect();
            let targets: Vec<i64> = places.map(|i| text.get(i + 1).map_or(IGNORED, |&id| id.into())).collect();
            let hidden = self.hidden(&Tensor::from_vec(tokens, (streams, steps), device)?, &mut state)?;
            let targets = Tensor::from_vec(targets, (streams, steps), device)?;
            let loss = self.head.loss(&hidden, &targets, &options)?;
            let (more, targets) = loss.sum_and_count()?;
            (sum, count) = (sum + more, count + targets);
            each(&loss, start as f64 / length as f64)?;
        }
        Ok(sum / count)
    }

    fn evaluate(&self, text: &[u32]) -> Result<f64> {
        self.read(text, LossOptions::evaluation(), |_, _| Ok(()))
    }

    /// Trains all epochs. Returns the targets per second, without the time of the evaluations.
    fn train(&self, mut optimizer: impl Optimizer, corpus: &Corpus) -> Result<f64> {
        let (name, recipe, mut seconds) = (self.name, self.recipe, 0.0);
        for epoch in 1..=recipe.epochs {
            let start = Instant::now();
            let nll = self.read(&corpus.train, LossOptions::default(), |loss, done| {
                let gradients = loss.backward()?;
                let clip = if recipe.adam { 1.0 } else { (CLIP / self.norm(&gradients)?).min(1.0) };
                let epochs = (epoch - 1) as f64 + done;
                optimizer.set_learning_rate(recipe.lr * recipe.decay.powf(epochs) * clip);
                if std::io::stderr().is_terminal() {
                    eprint!("\r{name:<7}  epoch {epoch:>2}  {:.0}%", 100.0 * done);
                }
                Ok(optimizer.step(&gradients)?)
            })?;
            seconds += start.elapsed().as_secs_f64();
            let (train, valid) = (nll.exp(), self.evaluate(&corpus.valid)?.exp());
            eprintln!("\r{name:<7}  epoch {epoch:>2}  perplexity: train {train:.3}  valid {valid:.3}");
        }
        Ok((recipe.epochs * (corpus.train.len() - 1)) as f64 / seconds)
    }

    /// Computes the norm of all gradients together.
    fn norm(&self, gradients: &GradStore) -> Result<f64> {
        let mut sum = 0.0;
        for gradient in self.vars.all_vars().iter().filter_map(|var| gradients.get(var)) {
            sum += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
        Ok(sum.sqrt())
    }
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let args = Args::parse();
    let device = match args.device.as_str() {
        "cuda" => Device::new_cuda(0)?,
        "metal" => Device::new_metal(0)?,
        _ => Device::Cpu,
    };
    let (corpus, recipe) = match &args.data {
        Some(folder) => (from_folder(folder)?, TEXT),
        None => (built_in(), BUILT_IN),
    };
    let recipe = Recipe { epochs: args.epochs.unwrap_or(recipe.epochs), ..recipe };

    let (vocab, Recipe { hidden, components, adam, .. }) = (corpus.vocab, recipe);
    if vocab <= components {
        return Err("the text has too few words".into());
    }
    // With this context size the mixtures have as many parameters as the softmax.
    let context = ((vocab - components) * hidden) as f64 / (vocab + components * (hidden + 1)) as f64;
    let mixture = MixtureConfig::new(hidden, vocab, components)
        .with_context_dim(context.round() as usize)
        .with_activation(if adam { ContextActivation::Identity } else { ContextActivation::Tanh });
    let heads = [
        ("softmax", HeadConfig::Softmax(SoftmaxConfig::new(hidden, vocab))),
        ("moc", HeadConfig::MixtureOfContexts(mixture.clone())),
        ("mos", HeadConfig::MixtureOfSoftmaxes(mixture)),
    ];
    let (mut table, mut softmax_speed) = (String::new(), None);
    for (name, head) in heads {
        let model = Model::new(name, &head, vocab, recipe, &device)?;
        let vars = model.vars.all_vars();
        let parameters: usize = vars.iter().map(|var| var.elem_count()).sum();
        let speed = if adam {
            let settings = ParamsAdamW { weight_decay: 0.0, ..Default::default() };
            model.train(AdamW::new(vars, settings)?, &corpus)?
        } else {
            model.train(SGD::new(vars, recipe.lr)?, &corpus)?
        };
        let slowdown = *softmax_speed.get_or_insert(speed) / speed;
        let nll = model.evaluate(&corpus.valid)?;
        let test = corpus.test.as_ref().map(|text| model.evaluate(text)).transpose()?;
        let test = test.map_or("-".into(), |nll| format!("{:.3}", nll.exp()));
        let above = corpus.entropy.map_or("-".into(), |entropy| format!("{:.4}", nll - entropy));
        table += &format!("{name:<7}  {parameters:>10}  {nll:>9.4}  {:>9.3}  {test:>8}  ", nll.exp());
        table += &format!("{above:>13}  {speed:>8.0}  {slowdown:>8.2}\n");
    }
    println!("head     parameters  valid NLL  valid ppl  test ppl  above entropy  tokens/s  slowdown\n{table}");
    println!("NLL and what is above the entropy in nats; slowdown of training, over the softmax.");
    if let Some(entropy) = corpus.entropy {
        println!("True entropy: {entropy:.4} nats, perplexity {:.3}.", entropy.exp());
        println!("The language is a mixture of softmaxes, at sizes where a softmax falls short: it is no benchmark.");
    }
    Ok(())
}
