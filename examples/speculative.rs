//! In this example of speculative decoding, a small model drafts characters, and a larger one verifies them: the texts
//! are those of the larger model alone, character by character.
//!
//!     cargo run --release --example speculative
//!
//! Both are feed-forward language models (Bengio et al., 2003), trained on a text of a small grammar. A hidden state is
//! the embeddings of the last characters side by side, and the layer of tanh units is the projection of the head. The
//! drafter draws with a clone of the request, and so with the noise that the larger model will draw with. Beside it,
//! the same drafter draws with noise of its own, and the larger model decodes without drafts. All texts are equal. With
//! shared noise seven of ten drafts are accepted, with other noise half of them. The example takes a minute on 2 cores.
//!
//! Nothing here multiplies matrices but the heads, whose results do not depend on the batch. A model with layers of
//! candle's has hidden states that differ by rounding when several positions are computed at once, and then texts may
//! part where two characters are nearly equally probable. Both are samples of the model all the same.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9, without features.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Embedding, Init, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use mos_head::decode::{Sampling, TokenRequest};
use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// The expansions of clauses, of noun and verb phrases in the singular and in the plural, of adjectives, nouns and
/// verbs.
const GRAMMAR: &str = "S=I.\n|I, and I.\n|if I, I.\n;I=X V|Y W;X=the AN|every AN|my AN|the AN that V;\
    Y=the ANs|many ANs|my ANs|the ANs that W;V=Zs|Ts X|Ts Y;W=Z|T X|T Y;A=|old |small |quiet ;\
    N=dog|bird|girl|king|doctor|teacher|river|garden;Z=sleep|sing|wait|work|dream|laugh;\
    T=see|find|follow|love|hear|know";
const CHARACTERS: usize = 200_000;
/// The number of characters of a training step.
const BATCH: usize = 256;
const STEPS: usize = 2000;
const LEARNING_RATE: f64 = 0.003;

/// The number of drafts that are verified at once.
const DRAFTS: usize = 4;
const TEXTS: u64 = 40;
const LENGTH: usize = 200;

/// Appends an expansion of a symbol.
fn expand(symbol: char, text: &mut String, rng: &mut StdRng) {
    match GRAMMAR.split(';').find_map(|rule| rule.strip_prefix(symbol)?.strip_prefix('=')) {
        None => text.push(symbol),
        Some(rule) => {
            let expansions: Vec<&str> = rule.split('|').collect();
            expansions[rng.random_range(0..expansions.len())].chars().for_each(|symbol| expand(symbol, text, rng));
        }
    }
}

/// A language model of the next character after the last few.
struct Model {
    /// The number of characters that it reads.
    order: usize,
    embedding: Embedding,
    head: MixtureOfSoftmaxes,
}

/// The sizes of a model.
struct Size {
    order: usize,
    embedding: usize,
    components: usize,
    units: usize,
}

impl Model {
    /// Trains a model on a text.
    fn train(size: Size, vocab: usize, text: &[u32]) -> Result<Self> {
        let Size { order, embedding, components, units } = size;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let vectors = vb.get_with_hints((vocab, embedding), "embedding.weight", Init::Const(0.0))?;
        let config = MixtureConfig::new(order * embedding, vocab, components).with_context_dim(units);
        let head = MixtureOfSoftmaxes::new(&config, vb.pp("head"))?;
        let model = Model { order, embedding: Embedding::new(vectors, embedding), head };

        // The values come from a seed, which candle's generator on the CPU does not take.
        let mut rng = StdRng::seed_from_u64(3);
        for (name, var) in vars.data().lock().expect("the variables").iter().collect::<BTreeMap<_, _>>() {
            let columns = var.dims().last().map_or(1.0, |columns| *columns as f32);
            let bound = if name.starts_with("embedding") { 1.0 } else { columns.sqrt().recip() };
            let values = (0..var.elem_count()).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        }
        let settings = ParamsAdamW { lr: LEARNING_RATE, weight_decay: 0.0, ..Default::default() };
        let mut optimizer = AdamW::new(vars.all_vars(), settings)?;
        for step in 0..STEPS {
            let places: Vec<usize> = (0..BATCH).map(|_| rng.random_range(order..text.len())).collect();
            let hidden = model.hidden(places.iter().map(|&place| &text[..place]))?;
            let next = Tensor::from_iter(places.iter().map(|&place| text[place]), &Device::Cpu)?;
            optimizer.set_learning_rate(LEARNING_RATE * (1.0 - step as f64 / STEPS as f64));
            let loss = model.head.loss(&hidden, &next, &LossOptions::default())?;
            optimizer.step(&loss.backward()?)?;
            if step % 500 == 499 {
                eprintln!("step {}: {:.3} nats", step + 1, loss.value.to_scalar::<f32>()?);
            }
        }
        Ok(model)
    }

    /// Computes the hidden states `[texts, order * embedding]` after some texts. A text begins after zeros.
    fn hidden<'a>(&self, texts: impl IntoIterator<Item = &'a [u32]>) -> Result<Tensor> {
        let mut ids = Vec::new();
        let mut count = 0;
        for text in texts {
            let last = &text[text.len().saturating_sub(self.order)..];
            ids.resize(ids.len() + self.order - last.len(), 0);
            ids.extend(last);
            count += 1;
        }
        let vectors = self.embedding.forward(&Tensor::from_vec(ids, count * self.order, &Device::Cpu)?)?;
        Ok(vectors.reshape((count, ()))?)
    }

    /// Draws the next characters of a text one by one.
    fn draw(&self, text: &mut Vec<u32>, request: &mut TokenRequest, count: usize) -> Result<()> {
        for _ in 0..count {
            let token = self.head.next_tokens(&self.hidden([&text[..]])?, &[request])?[0].token_id;
            request.push(token);
            text.push(token);
        }
        Ok(())
    }
}

/// What is counted while texts are drawn.
#[derive(Default)]
struct Counts {
    drafted: usize,
    accepted: usize,
}

/// Draws a text from drafts that the model verifies. The drafter draws with the request's noise, or with that of
/// another seed.
fn speculate(
    model: &Model,
    drafter: &Model,
    mut request: TokenRequest,
    other_seed: Option<u64>,
    counts: &mut Counts,
) -> Result<Vec<u32>> {
    let mut text = Vec::new();
    while text.len() < LENGTH {
        let mut drafting = match other_seed {
            None => request.clone(),
            Some(seed) => TokenRequest::new(request.sampling().clone(), seed + text.len() as u64)?,
        };
        let mut drafted = text.clone();
        drafter.draw(&mut drafted, &mut drafting, DRAFTS)?;
        let hidden = model.hidden((text.len()..=drafted.len()).map(|end| &drafted[..end]))?;
        let verified = model.head.verify(&hidden, &[&drafted[text.len()..]], &mut [&mut request])?;
        counts.drafted += DRAFTS;
        counts.accepted += verified[0].accepted;
        text.extend(verified[0].tokens.iter().map(|token| token.token_id));
    }
    text.truncate(LENGTH);
    Ok(text)
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let mut rng = StdRng::seed_from_u64(1);
    let mut text = String::new();
    while text.len() < CHARACTERS {
        expand('S', &mut text, &mut rng);
    }
    let characters: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
    let id = |c: char| characters.iter().position(|other| *other == c).unwrap_or(0) as u32;
    let ids: Vec<u32> = text.chars().map(id).collect();

    eprintln!("the larger model");
    let model = Model::train(Size { order: 16, embedding: 24, components: 2, units: 160 }, characters.len(), &ids)?;
    eprintln!("the drafter");
    let drafter = Model::train(Size { order: 12, embedding: 8, components: 1, units: 64 }, characters.len(), &ids)?;

    let request = |seed| TokenRequest::new(Sampling::new().with_temperature(0.9), seed);
    let mut rows = Vec::new();
    let mut plain = Vec::new();
    let start = Instant::now();
    for seed in 0..TEXTS {
        let mut text = Vec::new();
        model.draw(&mut text, &mut request(seed)?, LENGTH)?;
        plain.push(text);
    }
    rows.push(("no drafts", "-".to_string(), "-", start.elapsed()));
    for (name, first_seed) in [("shared noise", None), ("other noise", Some(1_000_000))] {
        let (mut counts, mut texts, start) = (Counts::default(), Vec::new(), Instant::now());
        for seed in 0..TEXTS {
            let other_seed = first_seed.map(|first| first + seed * LENGTH as u64);
            texts.push(speculate(&model, &drafter, request(seed)?, other_seed, &mut counts)?);
        }
        let accepted = format!("{:.2}", counts.accepted as f64 / counts.drafted as f64);
        rows.push((name, accepted, if texts == plain { "yes" } else { "no" }, start.elapsed()));
    }

    let written: String = plain[0].iter().map(|&id| characters[id as usize]).collect();
    println!("{}\n", written.trim_end());
    println!("{:<14} {:>8} {:>11} {:>16}", "drafts", "accepted", "same texts", "characters/s");
    for (name, accepted, are_same, time) in rows {
        let speed = (TEXTS as usize * LENGTH) as f64 / time.as_secs_f64();
        println!("{name:<14} {accepted:>8} {are_same:>11} {speed:>16.0}");
    }
    Ok(())
}
