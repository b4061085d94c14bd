//! This example trains an LSTM encoder-decoder with attention for each of the three heads, at equal size, and
//! translates by beam search.
//!
//!     cargo run --release --example seq2seq
//!
//! Without data, the model learns to translate 8000 sentences of a small English into an invented language with another
//! word order, genders and agreement. Every head gets over 99% of 500 new sentences exactly right, in a minute on 2
//! cores.
//!
//!     cargo run --release --example seq2seq -- --data DIR --languages de en
//!
//! `DIR` has train.de, train.en, valid.de and valid.en, with one sentence per line and spaces between the words.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, clap 4.5 (feature `derive`), mos-head 0.6, rand 0.9.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor, D};
use candle_nn::rnn::{LSTMState, LSTM, RNN};
use candle_nn::{embedding, linear_no_bias, lstm, ops, AdamW, Dropout, Embedding, LSTMConfig, Linear};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use clap::Parser;
use mos_head::{
    decode::BeamSearch, ContextActivation, HeadConfig, LossOptions, MixtureConfig, OutputLayer, SoftmaxConfig,
};
use rand::seq::{IteratorRandom, SliceRandom};
use rand::{rngs::StdRng, Rng, SeedableRng};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Parser)]
struct Args {
    /// Folder with train and valid in both languages; without it, a built-in language.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    #[arg(long, num_args = 2, default_values = ["de", "en"])]
    languages: Vec<String>,
    #[arg(long, default_value_t = 4)]
    epochs: usize,
}

/// Each entry is a word and its stem, in which `_` stands for gender and number, then the plural's ending or the noun's
/// gender.
const DETERMINERS: &str = "the l_ ,the l_ s,a un_ ,two dos s,my mi_ ,my mi_ s";
const ADJECTIVES: &str = "big grand_,small pequ_,old viej_,young yun_,red rus_,green verd_,good bon_,quiet kalm_,\
    happy felic_,strange stran_,rich rik_,tired lac_, , , , , , ";
const ADVERBS: &str = "today hodi,often oft,tomorrow morgi,again denov,here tie,now nun, , , , , , ";
const NOUNS: &str = "dog kan o,cat gat a,girl fil a,boy filk o,king reg o,queen regin a,tree arb o,house dom a,\
    horse kaval o,flower flor a,teacher instru a,doctor medik o,bird pas o,star stel a,river riv o,book libr a";
const VERBS: &str = "sees see vid,loves love am,finds find trov,follows follow sekv,draws draw desen,hears hear aud,\
    likes like plac,knows know kon,paints paint pint,remembers remember memor,wants want vol,meets meet renkont";

/// Makes a sentence in both languages, such as "the big dog sees two old cats today" and "hodi lo kano grando dos gatas
/// viejas vidat".
fn sentence(rng: &mut StdRng) -> [String; 2] {
    let mut pick = |list: &'static str| list.split(',').choose(rng).unwrap().split(' ').collect::<Vec<_>>();
    let mut phrase = || {
        let (determiner, noun, first, second) = (pick(DETERMINERS), pick(NOUNS), pick(ADJECTIVES), pick(ADJECTIVES));
        let source = format!("{} {} {} {}{}", determiner[0], first[0], second[0], noun[0], determiner[2]);
        let target = format!("{} {}_ {} {}", determiner[1], noun[1], first[1], second[1]);
        (source, target.replace('_', &[noun[2], determiner[2]].concat()), determiner[2] == "s")
    };
    let ((subject, target_subject, is_plural), (object, target_object, _)) = (phrase(), phrase());
    let (verb, adverb) = (pick(VERBS), pick(ADVERBS));
    let (source_verb, ending) = if is_plural { (verb[1], "ant") } else { (verb[0], "at") };
    let source = format!("{subject} {source_verb} {object} {}", adverb[0]);
    let target = format!("{} {target_subject} {target_object} {}{ending}", adverb[1], verb[2]);
    [source, target].map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Makes or reads the pairs for training, and those for validation.
fn pairs(args: &Args) -> Result<[Vec<[String; 2]>; 2]> {
    let Some(folder) = &args.data else {
        let (mut rng, mut seen) = (StdRng::seed_from_u64(1), HashSet::new());
        let mut new_pairs = std::iter::repeat_with(|| sentence(&mut rng)).filter(|pair| seen.insert(pair[0].clone()));
        return Ok([8000, 500].map(|count| new_pairs.by_ref().take(count).collect()));
    };
    let read = |file: String| std::fs::read_to_string(folder.join(&file)).map_err(|error| format!("{file}: {error}"));
    let pairs = |name: &str| -> Result<Vec<_>> {
        let [sources, targets] = [0, 1].map(|side| read(format!("{name}.{}", args.languages[side])));
        let (sources, targets) = (sources?, targets?);
        let counts = [sources.lines().count(), targets.lines().count()];
        if counts[0] != counts[1] || counts[0] == 0 {
            return Err(format!("the files {name}.* have {counts:?} lines, expected as many, and one at least").into());
        }
        Ok(sources.lines().zip(targets.lines()).map(|(source, target)| [source.into(), target.into()]).collect())
    };
    Ok([pairs("train")?, pairs("valid")?])
}

const PAD: u32 = 0;
const START: u32 = 1;
const END: u32 = 2;
const UNKNOWN: u32 = 3;

/// Returns four special tokens, then the words that occur at least twice in one side of the pairs, sorted.
fn vocabulary(pairs: &[[String; 2]], side: usize) -> Vec<String> {
    let mut counts = BTreeMap::<&str, usize>::new();
    pairs.iter().flat_map(|pair| pair[side].split_whitespace()).for_each(|word| *counts.entry(word).or_default() += 1);
    let words = counts.into_iter().filter(|(_, count)| *count > 1).map(|(word, _)| word);
    ["<pad>", "<s>", "</s>", "<unk>"].into_iter().chain(words).map(String::from).collect()
}

/// Returns sources and targets as token ids, with `END` at the end.
fn encode(pairs: &[[String; 2]], words: &[Vec<String>; 2]) -> Vec<[Vec<u32>; 2]> {
    let find = |side: usize, word: &str| words[side][4..].binary_search_by(|known| known.as_str().cmp(word));
    let id = |side, word: &str| find(side, word).map_or(UNKNOWN, |i| i as u32 + 4);
    let encode = |side, text: &str| text.split_whitespace().map(|word| id(side, word)).chain([END]).collect();
    pairs.iter().map(|[source, target]| [encode(0, source), encode(1, target)]).collect()
}

/// Makes random batches of pairs, by their numbers. The sources of a batch have one length, so that the encoder needs
/// no mask.
fn batches(pairs: &[[Vec<u32>; 2]], size: usize, rng: &mut StdRng) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.shuffle(rng);
    order.sort_by_key(|&i| [pairs[i][0].len(), pairs[i][1].len()]);
    let equal_lengths = order.chunk_by(|&a, &b| pairs[a][0].len() == pairs[b][0].len());
    let mut batches: Vec<_> = equal_lengths.flat_map(|group| group.chunks(size).map(<[usize]>::to_vec)).collect();
    batches.shuffle(rng);
    batches
}

/// Makes a tensor of token ids `[rows, longest row]`, with `PAD` after shorter rows.
fn padded<'a>(rows: impl Iterator<Item = &'a Vec<u32>> + Clone) -> Result<Tensor> {
    let width = rows.clone().map(Vec::len).max().unwrap_or(0);
    let ids = rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat(PAD)).take(width));
    Ok(Tensor::from_iter(ids, &Device::Cpu)?.reshape(((), width))?)
}

struct Model {
    embeddings: [Embedding; 2],
    encoder: [LSTM; 2],
    decoder: LSTM,
    score: Linear,
    combine: Linear,
    dropout: Dropout,
    head: Box<dyn OutputLayer>,
}

/// This is a decoder's state, and the values and keys that it attends to. The rows are sentences, or hypotheses of a
/// beam.
type State = (LSTMState, [Tensor; 2]);

impl Model {
    fn new(head: &HeadConfig, sizes: [usize; 2], hidden: usize, dropout: f32, vb: VarBuilder) -> Result<Self> {
        let layer = |units, name| lstm(hidden, units, LSTMConfig::default(), vb.pp(name));
        Ok(Model {
            embeddings: [embedding(sizes[0], hidden, vb.pp("source"))?, embedding(sizes[1], hidden, vb.pp("target"))?],
            encoder: [layer(hidden / 2, "forwards")?, layer(hidden / 2, "backwards")?],
            decoder: layer(hidden, "decoder")?,
            score: linear_no_bias(hidden, hidden, vb.pp("score"))?,
            combine: linear_no_bias(2 * hidden, hidden, vb.pp("combine"))?,
            dropout: Dropout::new(dropout),
            head: head.build(vb.pp("head"))?,
        })
    }

    /// Computes the state before the first target from sources `[batch, positions]`.
    fn encode(&self, sources: &Tensor, training: bool) -> Result<State> {
        let read = |lstm: &LSTM, ids: &Tensor| -> Result<Tensor> {
            let inputs = self.dropout.forward(&self.embeddings[0].forward(ids)?, training)?;
            Ok(self.dropout.forward(&lstm.states_to_tensor(&lstm.seq(&inputs)?)?, training)?)
        };
        let backwards = read(&self.encoder[1], &sources.flip(&[1])?)?.flip(&[1])?;
        let values = Tensor::cat(&[read(&self.encoder[0], sources)?, backwards], D::Minus1)?;
        let h = values.narrow(1, values.dim(1)? - 1, 1)?.squeeze(1)?.contiguous()?;
        Ok((LSTMState::new(h.clone(), h.zeros_like()?), [values.clone(), self.score.forward(&values)?]))
    }

    /// Computes the hidden states `[batch, steps, hidden]` of token ids `[batch, steps]`, with the attention of Luong
    /// et al. (2015).
    fn decode(&self, ids: &Tensor, (state, [values, keys]): &mut State, training: bool) -> Result<Tensor> {
        let inputs = self.dropout.forward(&self.embeddings[1].forward(ids)?, training)?;
        let states = self.decoder.seq_init(&inputs, state)?;
        *state = states[states.len() - 1].clone();
        let hidden = self.dropout.forward(&self.decoder.states_to_tensor(&states)?, training)?;
        let weights = ops::softmax(&hidden.matmul(&keys.t()?)?, D::Minus1)?;
        let attended = Tensor::cat(&[weights.matmul(values)?, hidden], D::Minus1)?;
        Ok(self.dropout.forward(&self.combine.forward(&attended)?.tanh()?, training)?)
    }

    /// Returns the mean NLL and the number of the targets. Trains if there is an optimizer, and else evaluates.
    fn read(
        &self,
        pairs: &[[Vec<u32>; 2]],
        size: usize,
        rng: &mut StdRng,
        mut adam: Option<&mut AdamW>,
    ) -> Result<[f64; 2]> {
        let (mut sum, mut count, batches) = (0.0, 0.0, batches(pairs, size, rng));
        let options = if adam.is_some() { LossOptions::default() } else { LossOptions::evaluation() };
        let options = options.with_ignore_index(PAD.into());
        for (i, batch) in batches.iter().enumerate() {
            let targets: Vec<Vec<u32>> = batch.iter().map(|&i| [&[START], &pairs[i][1][..]].concat()).collect();
            let (ids, sources) = (padded(targets.iter())?, padded(batch.iter().map(|&i| &pairs[i][0]))?);
            let (inputs, targets) = (ids.narrow(1, 0, ids.dim(1)? - 1)?, ids.narrow(1, 1, ids.dim(1)? - 1)?);
            let mut state = self.encode(&sources, adam.is_some())?;
            let loss = self.head.loss(&self.decode(&inputs, &mut state, adam.is_some())?, &targets, &options)?;
            if let Some(adam) = &mut adam {
                adam.step(&loss.backward()?)?;
                eprint!("\rbatch {} of {}  ", i + 1, batches.len());
                // The learning rate falls by the factor 0.6 per epoch.
                adam.set_learning_rate(adam.learning_rate() * 0.6f64.powf(1.0 / batches.len() as f64));
            }
            let (more, targets) = loss.sum_and_count()?;
            (sum, count) = (sum + more, count + targets);
        }
        Ok([sum / count, count])
    }

    /// Finds the best target of each source by a beam search.
    fn translate(&self, pairs: &[[Vec<u32>; 2]]) -> Result<Vec<Vec<u32>>> {
        let search = BeamSearch::new(END).with_width(5).with_max_length(60).with_length_penalty(0.6);
        let mut found = vec![vec![]; pairs.len()];
        for batch in batches(pairs, 32, &mut StdRng::seed_from_u64(1)) {
            let mut state = self.encode(&padded(batch.iter().map(|&i| &pairs[i][0]))?, false)?;
            let start = Tensor::full(START, batch.len(), &Device::Cpu)?;
            let hypotheses = search.run(self.head.as_ref(), &start, |tokens, parents| -> Result<Tensor> {
                let select = |tensor: &Tensor| tensor.index_select(parents, 0);
                state.0 = LSTMState::new(select(&state.0.h)?, select(&state.0.c)?);
                state.1 = [select(&state.1[0])?, select(&state.1[1])?];
                Ok(self.decode(&tokens.unsqueeze(1)?, &mut state, false)?.squeeze(1)?)
            })?;
            batch.into_iter().zip(hypotheses).for_each(|(i, best)| found[i] = best[0].token_ids.clone());
        }
        Ok(found)
    }
}

/// Computes BLEU-4 in percent (Papineni et al., 2002), without smoothing.
fn bleu(found: &[String], pairs: &[[String; 2]]) -> f64 {
    let (mut matches, mut totals, mut lengths) = ([0.0; 4], [0.0; 4], [0.0; 2]);
    for (found, [_, reference]) in found.iter().zip(pairs) {
        let words = [found, reference].map(|text| text.split_whitespace().collect::<Vec<_>>());
        (0..2).for_each(|i| lengths[i] += words[i].len() as f64);
        for n in 1..=4 {
            let mut left = HashMap::new();
            words[1].windows(n).for_each(|gram| *left.entry(gram).or_insert(0) += 1);
            for gram in words[0].windows(n) {
                let count = left.entry(gram).or_insert(0);
                matches[n - 1] += f64::from(*count > 0);
                totals[n - 1] += 1.0;
                *count -= 1;
            }
        }
    }
    // Where nothing is as long as n words, nothing matches.
    let logs: f64 = (0..4).map(|i| f64::ln(matches[i] / f64::max(totals[i], 1.0))).sum();
    100.0 * (logs / 4.0 + (1.0 - lengths[1] / lengths[0]).min(0.0)).exp()
}

/// Draws uniform initial values from a seed, which candle does not take. With smaller values attention forms late.
fn draw_initial_values(map: &VarMap, mixture: &MixtureConfig, rng: &mut StdRng) -> Result<()> {
    let hidden = mixture.hidden_size as f32;
    for (name, var) in map.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>() {
        let bound = match (name.as_str(), var.dims()) {
            ("source.weight" | "target.weight", _) => 1.0,
            ("head.decoder.weight", [_, width]) => (3.0 / *width as f32).sqrt(),
            ("score.weight" | "combine.weight" | "head.latent.weight", _) => 3.0 / hidden.sqrt(),
            _ => 1.0 / hidden.sqrt(),
        };
        let values = (0..var.elem_count()).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
        let values = Tensor::from_vec(values, var.shape(), &Device::Cpu)?;
        // The components of the latent weight learn faster if they start alike.
        let is_latent = name == "head.latent.weight";
        var.set(&if is_latent { mixture.similar_components(&values, 0.3)? } else { values })?;
    }
    Ok(())
}

/// A recipe has the sizes of a model, and says how it is trained.
struct Recipe {
    hidden: usize,
    /// The number of components of the mixtures.
    components: usize,
    /// The number of pairs of a batch.
    batch_size: usize,
    learning_rate: f64,
    dropout: f32,
}

const BUILT_IN: Recipe = Recipe { hidden: 64, components: 3, batch_size: 32, learning_rate: 0.005, dropout: 0.0 };
const TEXT: Recipe = Recipe { hidden: 256, components: 5, batch_size: 64, learning_rate: 0.0037, dropout: 0.16 };

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let args = Args::parse();
    let recipe = if args.data.is_some() { TEXT } else { BUILT_IN };
    let Recipe { hidden, components, batch_size, learning_rate, dropout } = recipe;
    let [train_texts, valid_texts] = pairs(&args)?;
    let words = [0, 1].map(|side| vocabulary(&train_texts, side));
    let [train, valid] = [&train_texts, &valid_texts].map(|texts| encode(texts, &words));
    let sizes = words.each_ref().map(Vec::len);
    if sizes[1] <= components {
        return Err("no word occurs twice in the targets for training".into());
    }
    // With this context size the mixtures have as many parameters as the softmax.
    let context = ((sizes[1] - components) * hidden) as f64 / (sizes[1] + components * (hidden + 1)) as f64;
    let mixture = MixtureConfig::new(hidden, sizes[1], components).with_context_dim(context.round() as usize);
    let mixture = mixture.with_activation(ContextActivation::Identity);
    let heads = [
        ("softmax", HeadConfig::Softmax(SoftmaxConfig::new(hidden, sizes[1]))),
        ("moc", HeadConfig::MixtureOfContexts(mixture.clone())),
        ("mos", HeadConfig::MixtureOfSoftmaxes(mixture.clone())),
    ];
    let mut table = "head     parameters  valid NLL  valid ppl  exact match    BLEU  tokens/s\n".to_owned();
    for (name, head) in heads {
        let map = VarMap::new();
        let model = Model::new(&head, sizes, hidden, dropout, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
        let mut rng = StdRng::seed_from_u64(1);
        draw_initial_values(&map, &mixture, &mut rng)?;
        let parameters: usize = map.all_vars().iter().map(|var| var.elem_count()).sum();
        let mut adam =
            AdamW::new(map.all_vars(), ParamsAdamW { lr: learning_rate, weight_decay: 0.0, ..Default::default() })?;
        let (mut targets, mut seconds, mut nll) = (0.0, 0.0, f64::NAN);
        for epoch in 1..=args.epochs {
            let start = Instant::now();
            targets += model.read(&train, batch_size, &mut rng, Some(&mut adam))?[1];
            seconds += start.elapsed().as_secs_f64();
            nll = model.read(&valid, batch_size, &mut rng, None)?[0];
            eprintln!("\r{name:<7}  epoch {epoch}  valid ppl {:.3}  ({seconds:.1} s)", nll.exp());
        }
        let decode = |ids: Vec<u32>| ids.iter().map(|&id| &words[1][id as usize][..]).collect::<Vec<_>>().join(" ");
        let found: Vec<String> = model.translate(&valid)?.into_iter().map(decode).collect();
        for ([source, reference], found) in valid_texts.iter().zip(&found).step_by(found.len().div_ceil(3)) {
            println!("  source     {source}\n  reference  {reference}\n  {name:<9}  {found}\n");
        }
        let right = found.iter().zip(&valid_texts).filter(|(found, pair)| **found == pair[1]).count() as f64;
        let (exact, bleu) = (100.0 * right / found.len() as f64, bleu(&found, &valid_texts));
        table += &format!("{name:<7}  {parameters:>10}  {nll:>9.4}  {:>9.3}  {exact:>11.2}  ", nll.exp());
        table += &format!("{bleu:>6.2}  {:>8.0}\n", targets / seconds);
    }
    print!("{table}");
    Ok(())
}
