//! This example trains an LSTM on characters with each of the three heads, at equal size. On this task a mixture cannot
//! help.
//!
//!     cargo run --release --example char_lm
//!
//! With no more characters than dimensions one softmax has no bottleneck (Yang et al., 2018, appendix C.2). Without
//! data, the text is 210,000 characters of a small grammar with an entropy of 0.52 bits per character. The heads end at
//! 0.58 to 0.61, in about two minutes on 2 cores. With `-- --data FILE`, the text is that of the file.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, clap 4.5 (feature `derive`), mos-head 0.6, rand 0.9.

use std::collections::BTreeSet;
use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::rnn::{LSTMState, LSTM, RNN};
use candle_nn::{embedding, lstm, AdamW, Embedding, LSTMConfig, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use clap::Parser;
use mos_head::{
    decode::{Sampler, Sampling},
    ContextActivation, HeadConfig, LossOptions, MixtureConfig, OutputLayer, SoftmaxConfig,
};
use rand::{rngs::StdRng, Rng, SeedableRng};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Parser)]
struct Args {
    /// A text file, whose last tenth is for validation; without it, a text of a small grammar.
    #[arg(long, value_name = "FILE")]
    data: Option<std::path::PathBuf>,
    #[arg(long, default_value_t = 3)]
    epochs: usize,
}

/// The expansions of clauses, of noun and verb phrases in the singular and in the plural, of adjectives, nouns and
/// verbs.
const GRAMMAR: &str = "S=I.\n|I, and I.\n|if I, I.\n;I=X V|Y W;X=the AN|every AN|my AN|the AN that V;\
    Y=the ANs|many ANs|my ANs|the ANs that W;V=Zs|Ts X|Ts Y;W=Z|T X|T Y;A=|old |small |quiet ;\
    N=dog|bird|girl|king|doctor|teacher|river|garden;Z=sleep|sing|wait|work|dream|laugh;\
    T=see|find|follow|love|hear|know";

/// Appends an expansion of a symbol and returns its information in bits. Every text has one derivation.
fn expand(symbol: char, text: &mut String, rng: &mut StdRng) -> f64 {
    let Some(rule) = GRAMMAR.split(';').find_map(|rule| rule.strip_prefix(symbol)?.strip_prefix('=')) else {
        text.push(symbol);
        return 0.0;
    };
    let expansions: Vec<&str> = rule.split('|').collect();
    let chosen = expansions[rng.random_range(0..expansions.len())];
    (expansions.len() as f64).log2() + chosen.chars().map(|symbol| expand(symbol, text, rng)).sum::<f64>()
}

/// The number of parts of a text that are read in parallel.
const STREAMS: usize = 16;
/// The number of steps of backpropagation through time.
const STEPS: usize = 32;

struct Model {
    embedding: Embedding,
    lstm: LSTM,
    head: Box<dyn OutputLayer>,
}

impl Model {
    /// Computes the hidden states `[streams, steps, hidden]` of characters `[streams, steps]`, and advances the state,
    /// which is cut from the graph.
    fn hidden(&self, ids: &Tensor, state: &mut LSTMState) -> Result<Tensor> {
        let states = self.lstm.seq_init(&self.embedding.forward(ids)?, state)?;
        let last = &states[states.len() - 1];
        *state = LSTMState::new(last.h.detach(), last.c.detach());
        Ok(self.lstm.states_to_tensor(&states)?)
    }

    /// Reads a text in parallel streams and returns its bits per character. Trains if there is an optimizer.
    fn read(&self, text: &[u32], mut adam: Option<&mut AdamW>) -> Result<f64> {
        let length = text.len().saturating_sub(1) / STREAMS / STEPS * STEPS;
        if length == 0 {
            return Err(format!("a text of {} characters, expected more than {}", text.len(), STREAMS * STEPS).into());
        }
        let tensor =
            |first| Tensor::from_slice(&text[first..first + STREAMS * length], (STREAMS, length), &Device::Cpu);
        let (inputs, targets) = (tensor(0)?, tensor(1)?);
        let options = if adam.is_some() { LossOptions::default() } else { LossOptions::evaluation() };
        let (mut nats, mut state) = (0.0, self.lstm.zero_state(STREAMS)?);
        for start in (0..length).step_by(STEPS) {
            let hidden = self.hidden(&inputs.narrow(1, start, STEPS)?, &mut state)?;
            let loss = self.head.loss(&hidden, &targets.narrow(1, start, STEPS)?, &options)?;
            nats += loss.sum_and_count()?.0;
            if let Some(adam) = &mut adam {
                adam.step(&loss.backward()?)?;
                // The learning rate falls by the factor 0.5 per epoch.
                adam.set_learning_rate(adam.learning_rate() * 0.5f64.powf(STEPS as f64 / length as f64));
            }
        }
        Ok(nats / (STREAMS * length) as f64 / std::f64::consts::LN_2)
    }

    /// Samples a text of `count` characters.
    fn write(&self, count: usize, alphabet: &[char]) -> Result<String> {
        let mut sampler = Sampler::new(Sampling::new().with_temperature(0.8), 1)?;
        let start = alphabet.binary_search(&'\n').unwrap_or(0) as u32;
        let (mut last, mut state) = (Tensor::new(&[[start]], &Device::Cpu)?, self.lstm.zero_state(1)?);
        let mut next = || {
            last = self.head.sample(&self.hidden(&last, &mut state)?, &mut sampler)?;
            Ok(alphabet[last.to_vec2::<u32>()?[0][0] as usize])
        };
        (0..count).map(|_| next()).collect()
    }
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let args = Args::parse();
    let (mut text, mut bits, mut rng) = (String::new(), 0.0, StdRng::seed_from_u64(1));
    match &args.data {
        Some(file) => text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?,
        None => (0..3000).for_each(|_| bits += expand('S', &mut text, &mut rng)),
    }
    let alphabet: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
    let ids: Vec<u32> = text.chars().filter_map(|c| Some(alphabet.binary_search(&c).ok()? as u32)).collect();
    let (train, valid) = ids.split_at(ids.len() / 10 * 9);
    let (vocab, hidden) = (alphabet.len(), if args.data.is_some() { 256 } else { 128 });

    // With this number of LSTM units, a mixture of 3 contexts that are as wide as the alphabet has as many parameters
    // as the softmax.
    let size = |units: usize, head: usize| vocab * 64 + 4 * units * (64 + units + 2) + vocab + head;
    let mixture_size = |units: usize| size(units, vocab * vocab + 3 * (vocab + 1) * (units + 1) - 3);
    let units = (1..=hidden).min_by_key(|&units| mixture_size(units).abs_diff(size(hidden, vocab * hidden))).unwrap();
    let mixture =
        MixtureConfig::new(units, vocab, 3).with_context_dim(vocab).with_activation(ContextActivation::Identity);
    let heads = [
        ("softmax", hidden, HeadConfig::Softmax(SoftmaxConfig::new(hidden, vocab))),
        ("moc", units, HeadConfig::MixtureOfContexts(mixture.clone())),
        ("mos", units, HeadConfig::MixtureOfSoftmaxes(mixture)),
    ];
    let mut table = "head     LSTM units  parameters  valid BPC  seconds\n".to_owned();
    for (name, units, head) in heads {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let lstm = lstm(64, units, LSTMConfig::default(), vb.pp("lstm"))?;
        let model = Model { embedding: embedding(vocab, 64, vb.pp("chars"))?, lstm, head: head.build(vb.pp("head"))? };
        let parameters: usize = map.all_vars().iter().map(|var| var.elem_count()).sum();
        let mut adam = AdamW::new(map.all_vars(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
        let (mut seconds, mut bpc) = (0.0, f64::NAN);
        for epoch in 1..=args.epochs {
            let start = Instant::now();
            let train_bpc = model.read(train, Some(&mut adam))?;
            seconds += start.elapsed().as_secs_f64();
            bpc = model.read(valid, None)?;
            eprintln!("{name:<7}  epoch {epoch}  BPC: train {train_bpc:.3}  valid {bpc:.3}  ({seconds:.1} s)");
        }
        println!("{name} writes:\n{}\n", model.write(300, &alphabet)?);
        table += &format!("{name:<7}  {units:>10}  {parameters:>10}  {bpc:>9.4}  {seconds:>7.1}\n");
    }
    print!("{table}");
    if bits > 0.0 {
        println!("Entropy of the grammar: {:.4} bits per character.", bits / ids.len() as f64);
    }
    Ok(())
}
