//! Where log-probabilities come from: the head and the hidden states of a language model's checkpoint, or of two files.

use crate::args::Args;
use crate::common::batches::{Batches, IGNORED};
use crate::common::checkpoint::Checkpoint;
use crate::common::head::HeadKind;
use crate::common::language_model::LanguageModel;
use crate::common::{model::Model, progress, recipe::Recipe, Result};
use crate::corpus::Corpus;
use crate::language;
use candle_core::{DType, Device, Tensor};
use mos_head::{Mixture, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, MixtureTensors, SoftmaxHead};
use std::path::Path;

pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) kind: HeadKind,
    pub(crate) head: Box<dyn MixtureLayer>,
    /// The decoder of the head, `[vocab, d]` and `[vocab]`.
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    /// `[K, hidden]`
    pub(crate) prior_weight: Option<Tensor>,
    /// `[contexts, hidden]`
    pub(crate) hidden: Tensor,
    pub(crate) targets: Option<Vec<u32>>,
    pub(crate) text: Option<Text>,
}

/// The text that the contexts are of.
pub(crate) struct Text {
    pub(crate) corpus: Corpus,
    /// The place of each context's target in the validation text.
    pub(crate) places: Vec<usize>,
}

/// The sources of all checkpoints.
pub(crate) fn open(args: &Args) -> Result<Vec<Source>> {
    if args.compare && args.checkpoints.len() != 2 {
        return Err(format!("--compare needs two checkpoints, got {}", args.checkpoints.len()).into());
    }
    args.checkpoints
        .iter()
        .map(|path| match (&args.weight, &args.hidden) {
            (Some(key), Some(hidden)) => of_weight(path, key, args.bias.as_deref(), hidden, args),
            _ => of_checkpoint(path, args),
        })
        .collect()
}

impl Source {
    /// The mixture of some contexts.
    pub(crate) fn mixture(&self, start: usize, count: usize) -> Result<Mixture> {
        Ok(self.head.mixture(&self.hidden.narrow(0, start, count)?, false)?)
    }

    pub(crate) fn contexts(&self) -> usize {
        self.hidden.dims()[0]
    }
}

fn of_checkpoint(path: &Path, args: &Args) -> Result<Source> {
    let failed = |error: Box<dyn std::error::Error>| format!("{}: {error}", path.display());
    let checkpoint = Checkpoint::load(path, &Device::Cpu)?;
    let corpus = corpus(&checkpoint, args.data.as_deref()).map_err(failed)?;
    let (kind, model) =
        LanguageModel::from_checkpoint(&checkpoint, corpus.words.len(), &Device::Cpu).map_err(failed)?;
    let activation = Recipe::of_checkpoint(kind, &checkpoint)?.activation;
    let (hidden, places) = hidden_states(&model, &corpus.data.valid, args.contexts)?;
    let dtype = args.dtype.dtype();
    let tensor = |name: &str| -> Result<Tensor> { Ok(named(&checkpoint, path, name)?.to_dtype(dtype)?) };
    let (weight, bias) = (tensor("head.decoder.weight")?, Some(tensor("head.decoder.bias")?));
    let (head, prior_weight): (Box<dyn MixtureLayer>, _) = match kind {
        HeadKind::Softmax => (Box::new(SoftmaxHead::from_tensors(weight.clone(), bias.clone())?), None),
        HeadKind::Moc | HeadKind::Mos => {
            let prior_weight = tensor("head.prior.weight")?;
            let tensors = MixtureTensors {
                prior_weight: prior_weight.clone(),
                prior_bias: None,
                latent_weight: tensor("head.latent.weight")?,
                latent_bias: tensor("head.latent.bias")?,
                decoder_weight: weight.clone(),
                decoder_bias: bias.clone(),
            };
            let head: Box<dyn MixtureLayer> = match kind {
                HeadKind::Mos => Box::new(MixtureOfSoftmaxes::from_tensors(tensors, activation)?),
                _ => Box::new(MixtureOfContexts::from_tensors(tensors, activation)?),
            };
            (head, Some(prior_weight))
        }
    };
    let targets = Some(places.iter().map(|&place| corpus.data.valid[place]).collect());
    let (name, hidden) = (path.display().to_string(), hidden.to_dtype(dtype)?);
    let text = Some(Text { corpus, places });
    Ok(Source { name, kind, head, weight, bias, prior_weight, hidden, targets, text })
}

/// The corpus that a checkpoint was made on, read again.
fn corpus(checkpoint: &Checkpoint, folder: Option<&Path>) -> Result<Corpus> {
    let name: String = checkpoint.get("corpus")?;
    let corpus = match folder {
        None if name == language::NAME => language::Teacher::new().built_in(checkpoint.get("seed")?),
        None => Corpus::from_folder(Path::new(&name))
            .map_err(|error| format!("{error} (--data DIR names another folder of the same corpus)"))?,
        Some(folder) => Corpus::from_folder(folder)?,
    };
    checkpoint.require_corpus(&corpus.data.name, &corpus.data.digest)?;
    Ok(corpus)
}

/// Parallel streams, and steps of each at a time.
const STREAMS: usize = 10;
const STEPS: usize = 35;

/// The hidden states before `count` evenly spaced targets of a text, [count, hidden], and the places of the targets.
fn hidden_states(model: &LanguageModel, text: &[u32], count: usize) -> Result<(Tensor, Vec<usize>)> {
    let targets = text.len() - 1;
    let count = count.min(targets);
    let wanted = |place: usize| (place * count) / targets != ((place - 1) * count) / targets;
    let windows = Batches::new(text, STREAMS, STEPS);
    let stream = targets.div_ceil(STREAMS);
    let bar = progress::bar(windows.len(), "hidden states".into());
    let mut states = model.start(STREAMS)?;
    let (mut found, mut places) = (vec![], vec![]);
    let mut before = 0;
    for window in windows {
        let (ids, _) = window.tensors(model.device())?;
        let hidden = model.hidden(&ids, &mut states, None)?.flatten_to(1)?;
        let place = |row: usize| (row / window.steps) * stream + before + row % window.steps + 1;
        let rows = 0..window.targets.len();
        let rows: Vec<usize> = rows.filter(|&row| window.targets[row] != IGNORED && wanted(place(row))).collect();
        if !rows.is_empty() {
            let chosen: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
            found.push(hidden.index_select(&Tensor::new(chosen, model.device())?, 0)?);
            places.extend(rows.into_iter().map(place));
        }
        before += window.steps;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((Tensor::cat(&found, 0)?, places))
}

/// A softmax of two files: a matrix, and hidden states.
fn of_weight(path: &Path, weight: &str, bias: Option<&str>, hidden: &Path, args: &Args) -> Result<Source> {
    let file = Checkpoint::load(path, &Device::Cpu)?;
    let states = Checkpoint::load(hidden, &Device::Cpu)?;
    let dtype = args.dtype.dtype();
    let weight_tensor = named(&file, path, weight)?;
    let &[vocab, width] = weight_tensor.dims() else {
        let dims = weight_tensor.dims();
        return Err(format!("{}: {weight} is {dims:?}, expected a matrix [vocab, d]", path.display()).into());
    };
    let bias_tensor = bias.map(|key| named(&file, path, key)).transpose()?;
    if let (Some(tensor), Some(key)) = (bias_tensor, bias) {
        if tensor.dims() != [vocab] {
            return Err(format!("{}: {key} is {:?}, expected [{vocab}]", path.display(), tensor.dims()).into());
        }
    }
    let all = named(&states, hidden, "hidden")?;
    if all.dims().last() != Some(&width) || all.elem_count() == 0 {
        let dims = all.dims();
        return Err(format!("{}: hidden is {dims:?}, expected [.., {width}], not empty", hidden.display()).into());
    }
    let all = all.reshape(((), width))?;
    let positions = all.dim(0)?;
    let count = args.contexts.min(positions);
    let chosen: Vec<u32> = (0..count).map(|i| (i * positions / count) as u32).collect();
    let chosen = Tensor::new(chosen, &Device::Cpu)?;
    let targets = match states.tensors.get("targets") {
        None => None,
        Some(targets) if targets.elem_count() != positions => {
            let dims = targets.dims();
            return Err(format!("{}: targets is {dims:?}, expected {positions}", hidden.display()).into());
        }
        Some(targets) => {
            let targets = targets.flatten_all()?.index_select(&chosen, 0)?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
            let id = |&id: &i64| u32::try_from(id).ok().filter(|&id| (id as usize) < vocab).ok_or(id);
            let ids: std::result::Result<Vec<u32>, i64> = targets.iter().map(id).collect();
            Some(ids.map_err(|id| format!("{}: target {id} is not below vocab {vocab}", hidden.display()))?)
        }
    };
    let (weight, bias) = (weight_tensor.to_dtype(dtype)?, bias_tensor.map(|bias| bias.to_dtype(dtype)).transpose()?);
    let head = Box::new(SoftmaxHead::from_tensors(weight.clone(), bias.clone())?);
    let (name, hidden) = (path.display().to_string(), all.index_select(&chosen, 0)?.to_dtype(dtype)?);
    let kind = HeadKind::Softmax;
    Ok(Source { name, kind, head, weight, bias, prior_weight: None, hidden, targets, text: None })
}

/// A tensor of a file, or an error that lists those it has.
fn named<'a>(file: &'a Checkpoint, path: &Path, key: &str) -> Result<&'a Tensor> {
    file.tensors.get(key).ok_or_else(|| {
        let mut names: Vec<&str> = file.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        let more = if names.len() > 12 { ", .." } else { "" };
        names.truncate(12);
        let names = if names.is_empty() { "none".into() } else { names.join(", ") };
        format!("{} has no tensor {key}; its tensors: {names}{more}", path.display()).into()
    })
}
