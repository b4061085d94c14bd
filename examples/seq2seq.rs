//! Trains an LSTM encoder-decoder with attention with a softmax, a mixture of contexts and a mixture of softmaxes, at equal
//! size, and translates with a beam search.
//!
//!     cargo run --release --example seq2seq
//!
//! Without data, it learns to translate 8000 sentences of a small English into an invented language with another word
//! order, genders and agreement. Every head gets over 95% of 500 new sentences exactly right, in some minutes on 2 cores.
//!
//!     cargo run --release --example seq2seq -- --data DIR --source de --target en
//!
//! `DIR` has train.de, train.en, valid.de and valid.en, with one sentence per line and words between spaces. The BLEU of
//! the beam search equals sacrebleu's on the same tokens.
//!
//! Dependencies of a copy: candle-core 0.11, candle-nn 0.11, clap 4.5 (feature `derive`), mos-head 0.3, rand 0.9.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor, D};
use candle_nn::rnn::{LSTMState, LSTM, RNN};
use candle_nn::{embedding, linear_no_bias, lstm, ops, AdamW, Dropout, Embedding, LSTMConfig, Linear};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use clap::Parser;
use mos_head::{
    BeamSearch, ContextActivation, HeadConfig, Loss, LossOptions, MixtureConfig, OutputLayer, SoftmaxConfig,
};
use rand::{rngs::StdRng, seq::SliceRandom, Rng, SeedableRng};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Parser)]
struct Args {
    /// Folder with train.SOURCE, train.TARGET, valid.SOURCE and valid.TARGET; without it, a built-in language
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    #[arg(long, default_value = "de")]
    source: String,
    #[arg(long, default_value = "en")]
    target: String,
    #[arg(long, default_value_t = 4)]
    epochs: usize,
}

/// The sizes of a model, with K components of the mixtures, and how it is trained.
#[derive(Clone, Copy)]
struct Recipe {
    hidden: usize,
    k: usize,
    batch: usize,
    /// Falls by the factor 0.6 per epoch.
    lr: f64,
    dropout: f32,
}

const BUILT_IN: Recipe = Recipe { hidden: 64, k: 3, batch: 32, lr: 0.005, dropout: 0.0 };
const TEXT: Recipe = Recipe { hidden: 256, k: 5, batch: 64, lr: 0.0037, dropout: 0.16 };

const DETERMINERS: &str = "the l o,the l os,a un o,two dos -s,my mi o,my mi os";
const NOUNS: &str = "dog kan o,cat gat a,girl fil a,boy filk o,king reg o,queen regin a,tree arb o,house dom a,\
    horse kaval o,flower flor a,teacher instru a,doctor medik o,bird pas o,star stel a,river riv o,book libr a";
const ADJECTIVES: &str = "big grand,small pequ,old viej,young yun,red rus,green verd,good bon,quiet kalm,happy felic,\
    strange stran,rich rik,tired lac";
const VERBS: &str = "sees see vid,loves love am,finds find trov,follows follow sekv,draws draw desen,hears hear aud,\
    likes like plac,knows know kon,paints paint pint,remembers remember memor,wants want vol,meets meet renkont";
const ADVERBS: &str = "today hodi,often oft,tomorrow morgi,again denov,here tie,now nun, , , , , , ";

/// "the big dog sees two old cats today" and "hodi lo kano grando dos gatas viejas vidat".
fn sentence(rng: &mut StdRng) -> [String; 2] {
    let mut pick = |list: &'static str| -> Vec<&str> {
        let entries: Vec<&str> = list.split(',').collect();
        entries[rng.random_range(0..entries.len())].split(' ').collect()
    };
    // A noun phrase in both languages, whose articles and adjectives agree with the noun, and whether it is plural.
    let mut phrase = || {
        let (determiner, noun) = (pick(DETERMINERS), pick(NOUNS));
        let plural = if determiner[2].ends_with('s') { "s" } else { "" };
        let ending = format!("{}{plural}", noun[2]);
        let article = if determiner[0] == "two" { "dos".into() } else { format!("{}{ending}", determiner[1]) };
        let (mut source, mut target) = (determiner[0].to_owned(), format!("{article} {}{ending}", noun[1]));
        for _ in 0..pick("0,1 1,2 2 2")[1..].len() {
            let adjective = pick(ADJECTIVES);
            source += &format!(" {}", adjective[0]);
            target += &format!(" {}{ending}", adjective[1]);
        }
        (format!("{source} {}{plural}", noun[0]), target, !plural.is_empty())
    };
    let ((subject, new_subject, plural), (object, new_object, _)) = (phrase(), phrase());
    let (verb, adverb) = (pick(VERBS), pick(ADVERBS));
    let (old_verb, ending) = if plural { (verb[1], "ant") } else { (verb[0], "at") };
    let source = format!("{subject} {old_verb} {object} {}", adverb[0]);
    let target = format!("{} {new_subject} {new_object} {}{ending}", adverb[1], verb[2]);
    [source.trim().to_owned(), target.trim().to_owned()]
}

/// The pairs for training, and others for validation.
fn pairs(args: &Args) -> Result<[Vec<[String; 2]>; 2]> {
    let Some(folder) = &args.data else {
        let (mut rng, mut seen) = (StdRng::seed_from_u64(1), HashSet::new());
        let new = std::iter::repeat_with(|| sentence(&mut rng)).filter(|pair| seen.insert(pair[0].clone()));
        let mut train: Vec<_> = new.take(8500).collect();
        let valid = train.split_off(8000);
        return Ok([train, valid]);
    };
    let read = |name: &str| -> Result<Vec<_>> {
        let read = |language| {
            let path = folder.join(format!("{name}.{language}"));
            std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let [sources, targets] = [read(&args.source)?, read(&args.target)?];
        Ok(sources.lines().zip(targets.lines()).map(|(source, target)| [source.into(), target.into()]).collect())
    };
    Ok([read("train")?, read("valid")?])
}

const PAD: u32 = 0;
const START: u32 = 1;
const END: u32 = 2;
const UNKNOWN: u32 = 3;

/// Four special tokens, then the words that occur at least twice in one side of the pairs, sorted.
fn vocabulary(pairs: &[[String; 2]], side: usize) -> Vec<String> {
    let mut counts = BTreeMap::<&str, usize>::new();
    pairs.iter().flat_map(|pair| pair[side].split_whitespace()).for_each(|word| *counts.entry(word).or_default() += 1);
    let words = counts.into_iter().filter(|(_, count)| *count > 1).map(|(word, _)| word);
    ["<pad>", "<s>", "</s>", "<unk>"].into_iter().chain(words).map(String::from).collect()
}

/// Source and target as token ids, with END at the end.
type Encoded = [Vec<u32>; 2];

fn encode(pair: &[String; 2], words: &[Vec<String>; 2]) -> Encoded {
    [0, 1].map(|side| {
        let known = &words[side][4..];
        let find = |word: &str| known.binary_search_by(|known| known.as_str().cmp(word));
        let ids = pair[side].split_whitespace().map(|word| find(word).map_or(UNKNOWN, |i| i as u32 + 4));
        ids.chain([END]).collect()
    })
}

/// Batches of pairs in `order`, by their numbers. The sources of a batch have one length: the encoder needs no mask.
fn batches(pairs: &[Encoded], mut order: Vec<usize>, size: usize) -> Vec<Vec<usize>> {
    order.sort_by_key(|&i| [pairs[i][0].len(), pairs[i][1].len()]);
    let of_one_length = order.chunk_by(|&a, &b| pairs[a][0].len() == pairs[b][0].len());
    of_one_length.flat_map(|group| group.chunks(size).map(<[usize]>::to_vec)).collect()
}

fn padded<'a>(rows: impl Iterator<Item = &'a Vec<u32>> + Clone) -> Result<Tensor> {
    let width = rows.clone().map(Vec::len).max().unwrap_or(0);
    let ids = rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat(PAD)).take(width));
    Ok(Tensor::from_iter(ids, &Device::Cpu)?.reshape(((), width))?)
}

struct Model {
    source: Embedding,
    forwards: LSTM,
    backwards: LSTM,
    target: Embedding,
    decoder: LSTM,
    score: Linear,
    combine: Linear,
    dropout: Dropout,
    head: Box<dyn OutputLayer>,
}

/// A decoder's state and what it attends to. The rows are sentences, or hypotheses of a beam.
struct State {
    lstm: LSTMState,
    values: Tensor,
    keys: Tensor,
}

impl Model {
    fn new(head: &HeadConfig, sizes: [usize; 2], recipe: Recipe, vb: VarBuilder) -> Result<Self> {
        let hidden = recipe.hidden;
        let layer = |units, name| lstm(hidden, units, LSTMConfig::default(), vb.pp(name));
        Ok(Model {
            source: embedding(sizes[0], hidden, vb.pp("source"))?,
            forwards: layer(hidden / 2, "forwards")?,
            backwards: layer(hidden / 2, "backwards")?,
            target: embedding(sizes[1], hidden, vb.pp("target"))?,
            decoder: layer(hidden, "decoder")?,
            score: linear_no_bias(hidden, hidden, vb.pp("score"))?,
            combine: linear_no_bias(2 * hidden, hidden, vb.pp("combine"))?,
            dropout: Dropout::new(recipe.dropout),
            head: head.build(vb.pp("head"))?,
        })
    }

    /// Sources [batch, positions] -> the state before the first target.
    fn encode(&self, sources: &Tensor, training: bool) -> Result<State> {
        let read = |lstm: &LSTM, ids: &Tensor| -> Result<Tensor> {
            let inputs = self.dropout.forward(&self.source.forward(ids)?, training)?;
            Ok(self.dropout.forward(&lstm.states_to_tensor(&lstm.seq(&inputs)?)?, training)?)
        };
        let backwards = read(&self.backwards, &sources.flip(&[1])?)?.flip(&[1])?;
        let values = Tensor::cat(&[read(&self.forwards, sources)?, backwards], D::Minus1)?;
        let h = values.mean(1)?;
        Ok(State { lstm: LSTMState::new(h.clone(), h.zeros_like()?), keys: self.score.forward(&values)?, values })
    }

    /// Token ids [batch, steps] -> hidden states for the next ids [batch, steps, hidden], by the attention of Luong et al.
    /// (2015); advances the state.
    fn decode(&self, ids: &Tensor, state: &mut State, training: bool) -> Result<Tensor> {
        let inputs = self.dropout.forward(&self.target.forward(ids)?, training)?;
        let states = self.decoder.seq_init(&inputs, &state.lstm)?;
        state.lstm = states[states.len() - 1].clone();
        let hidden = self.dropout.forward(&self.decoder.states_to_tensor(&states)?, training)?;
        let weights = ops::softmax(&hidden.matmul(&state.keys.t()?)?, D::Minus1)?;
        let attended = Tensor::cat(&[weights.matmul(&state.values)?, hidden], D::Minus1)?;
        Ok(self.dropout.forward(&self.combine.forward(&attended)?.tanh()?, training)?)
    }

    fn loss(&self, pairs: &[Encoded], batch: &[usize], options: LossOptions, training: bool) -> Result<Loss> {
        let targets: Vec<Vec<u32>> = batch.iter().map(|&i| [&[START], &pairs[i][1][..]].concat()).collect();
        let (ids, sources) = (padded(targets.iter())?, padded(batch.iter().map(|&i| &pairs[i][0]))?);
        let steps = ids.dim(1)? - 1;
        let hidden = self.decode(&ids.narrow(1, 0, steps)?, &mut self.encode(&sources, training)?, training)?;
        Ok(self.head.loss(&hidden, &ids.narrow(1, 1, steps)?, &options.with_ignore_index(PAD.into()))?)
    }

    /// Trains one epoch; returns the number of targets.
    fn train(&self, pairs: &[Encoded], recipe: Recipe, optimizer: &mut AdamW, epoch: usize) -> Result<f64> {
        let (mut order, mut rng) = ((0..pairs.len()).collect::<Vec<_>>(), StdRng::seed_from_u64(epoch as u64));
        order.shuffle(&mut rng);
        let mut batches = batches(pairs, order, recipe.batch);
        batches.shuffle(&mut rng);
        let mut targets = 0.0;
        for (i, batch) in batches.iter().enumerate() {
            let loss = self.loss(pairs, batch, LossOptions::default(), recipe.dropout > 0.0)?;
            optimizer.set_learning_rate(recipe.lr * 0.6f64.powf(epoch as f64 + i as f64 / batches.len() as f64));
            optimizer.step(&loss.backward()?)?;
            targets += loss.sum_and_count()?.1;
        }
        Ok(targets)
    }

    /// The mean negative log-likelihood of the targets, in nats.
    fn nll(&self, pairs: &[Encoded]) -> Result<f64> {
        let (mut sum, mut count) = (0.0, 0.0);
        for batch in batches(pairs, (0..pairs.len()).collect(), 64) {
            let (more, targets) = self.loss(pairs, &batch, LossOptions::evaluation(), false)?.sum_and_count()?;
            (sum, count) = (sum + more, count + targets);
        }
        Ok(sum / count)
    }

    /// The best target of each source by a beam search.
    fn translate(&self, pairs: &[Encoded]) -> Result<Vec<Vec<u32>>> {
        let search = BeamSearch::new(END).with_width(5).with_max_length(60).with_length_penalty(0.6);
        let mut found = vec![vec![]; pairs.len()];
        for batch in batches(pairs, (0..pairs.len()).collect(), 32) {
            let mut state = self.encode(&padded(batch.iter().map(|&i| &pairs[i][0]))?, false)?;
            let start = Tensor::full(START, batch.len(), &Device::Cpu)?;
            let hypotheses = search.run(self.head.as_ref(), &start, |tokens, parents| -> Result<Tensor> {
                let select = |tensor: &Tensor| tensor.index_select(parents, 0);
                let lstm = LSTMState::new(select(&state.lstm.h)?, select(&state.lstm.c)?);
                state = State { lstm, values: select(&state.values)?, keys: select(&state.keys)? };
                Ok(self.decode(&tokens.unsqueeze(1)?, &mut state, false)?.squeeze(1)?)
            })?;
            batch.into_iter().zip(hypotheses).for_each(|(i, best)| found[i] = best[0].token_ids.clone());
        }
        Ok(found)
    }
}

/// BLEU-4 in percent (Papineni et al., 2002), without smoothing.
fn bleu<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> f64 {
    let (mut matches, mut totals, mut lengths) = ([0.0; 4], [0.0; 4], [0.0; 2]);
    for (found, reference) in pairs {
        let words = [found, reference].map(|text| text.split_whitespace().collect::<Vec<_>>());
        (0..2).for_each(|i| lengths[i] += words[i].len() as f64);
        for n in 1..=4 {
            let mut left = HashMap::new();
            words[1].windows(n).for_each(|gram| *left.entry(gram).or_insert(0) += 1);
            for gram in words[0].windows(n) {
                totals[n - 1] += 1.0;
                if let Some(count) = left.get_mut(gram).filter(|count| **count > 0) {
                    (*count, matches[n - 1]) = (*count - 1, matches[n - 1] + 1.0);
                }
            }
        }
    }
    let logs: f64 = (0..4).map(|i| f64::ln(matches[i] / totals[i])).sum();
    100.0 * (logs / 4.0 + (1.0 - lengths[1] / lengths[0]).min(0.0)).exp()
}

fn main() -> Result<()> {
    // Between operations candle's threads spin, which on few cores keeps other threads from working.
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let args = Args::parse();
    let (recipe, [train_texts, valid_texts]) = (if args.data.is_some() { TEXT } else { BUILT_IN }, pairs(&args)?);
    let words = [0, 1].map(|side| vocabulary(&train_texts, side));
    let [train, valid] =
        [&train_texts, &valid_texts].map(|texts| texts.iter().map(|pair| encode(pair, &words)).collect::<Vec<_>>());
    let (sizes, Recipe { hidden, k, .. }) = (words.each_ref().map(Vec::len), recipe);
    // With this context size the mixtures have as many parameters as the softmax.
    let context = ((sizes[1] - k) * hidden) as f64 / (sizes[1] + k * (hidden + 1)) as f64;
    let mixture = MixtureConfig::new(hidden, sizes[1], k)
        .with_context_dim(context.round() as usize)
        .with_activation(ContextActivation::Identity);
    let heads = [
        ("softmax", HeadConfig::Softmax(SoftmaxConfig::new(hidden, sizes[1]))),
        ("moc", HeadConfig::MixtureOfContexts(mixture.clone())),
        ("mos", HeadConfig::MixtureOfSoftmaxes(mixture.clone())),
    ];
    let mut table = "head     parameters  valid NLL  valid ppl  exact match    BLEU  tokens/s\n".to_owned();
    for (name, head) in heads {
        let mut map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let (model, vars) = (Model::new(&head, sizes, recipe, vb)?, map.all_vars());
        if name != "softmax" {
            let latent = map.data().lock().unwrap()["head.latent.weight"].as_tensor().clone();
            map.set_one("head.latent.weight", mixture.similar_components(&latent, 0.3)?)?;
        }
        let parameters: usize = vars.iter().map(|var| var.elem_count()).sum();
        let mut optimizer = AdamW::new(vars, ParamsAdamW { weight_decay: 0.0, ..Default::default() })?;
        let (mut targets, mut seconds) = (0.0, 0.0);
        for epoch in 0..args.epochs {
            let start = Instant::now();
            targets += model.train(&train, recipe, &mut optimizer, epoch)?;
            seconds += start.elapsed().as_secs_f64();
            eprintln!("{name:<7}  epoch {}  valid ppl {:.3}  ({seconds:.1} s)", epoch + 1, model.nll(&valid)?.exp());
        }
        let decode = |ids: Vec<u32>| ids.iter().map(|&id| &words[1][id as usize][..]).collect::<Vec<_>>().join(" ");
        let found: Vec<String> = model.translate(&valid)?.into_iter().map(decode).collect();
        for i in [0, 1, 2].map(|i| (2 * i + 1) * found.len() / 6) {
            let [source, reference] = &valid_texts[i];
            println!("  source     {source}\n  reference  {reference}\n  {name:<9}  {}\n", found[i]);
        }
        let together = || found.iter().map(String::as_str).zip(valid_texts.iter().map(|pair| pair[1].as_str()));
        let exact = 100.0 * together().filter(|(found, text)| found == text).count() as f64 / found.len() as f64;
        let (nll, bleu, speed) = (model.nll(&valid)?, bleu(together()), targets / seconds);
        table += &format!("{name:<7}  {parameters:>10}  {nll:>9.4}  {:>9.3}  ", nll.exp());
        table += &format!("{exact:>11.2}  {bleu:>6.2}  {speed:>8.0}\n");
    }
    print!("{table}");
    Ok(())
}
