//! Log-probabilities come from one of two sources: the head and the hidden states of a language model's checkpoint, or
//! of two files.

use crate::args::Args;
use candle_core::{DType, Device, Tensor};
use lab::batches::{Streams, IGNORED};
use lab::checkpoint::Checkpoint;
use lab::head::HeadKind;
use lab::language;
use lab::language_model::LanguageModel;
use lab::text::Corpus;
use lab::{model::Model, progress, recipe::Recipe, Result};
use mos_head::{
    DropoutMasks, Mixture, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, MixtureTensors, SoftmaxHead,
};
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

/// The text to which the contexts belong.
pub(crate) struct Text {
    pub(crate) corpus: Corpus,
    /// The validation text, or the test text.
    pub(crate) ids: Vec<u32>,
    /// The place of each context's target in the text.
    pub(crate) places: Vec<usize>,
}

/// Returns the sources of all checkpoints.
pub(crate) fn open(args: &Args) -> Result<Vec<Source>> {
    if args.compare && args.checkpoints.len() != 2 {
        return Err(format!("--compare needs two checkpoints, got {}", args.checkpoints.len()).into());
    }
    args.checkpoints
        .iter()
        .map(|path| match (&args.weight, &args.hidden) {
            (Some(key), Some(hidden)) => softmax_from_files(path, key, args.bias.as_deref(), hidden, args),
            _ => model_from_checkpoint(path, args),
        })
        .collect()
}

impl Source {
    /// Returns the mixture of some contexts.
    pub(crate) fn mixture(&self, start: usize, count: usize) -> Result<Mixture> {
        Ok(self.head.mixture(&self.hidden.narrow(0, start, count)?, DropoutMasks::Off)?)
    }

    pub(crate) fn contexts(&self) -> usize {
        self.hidden.dims()[0]
    }
}

fn model_from_checkpoint(path: &Path, args: &Args) -> Result<Source> {
    let failed = |error: Box<dyn std::error::Error>| format!("{}: {error}", path.display());
    let checkpoint = Checkpoint::load(path, &Device::Cpu)?;
    let corpus = corpus(&checkpoint, args.data.as_deref()).map_err(failed)?;
    let (kind, model) =
        LanguageModel::from_checkpoint(&checkpoint, corpus.words.len(), &Device::Cpu).map_err(failed)?;
    let activation = Recipe::from_checkpoint(kind, &checkpoint)?.activation;
    let ids = match &corpus.test {
        _ if !args.test => corpus.data.valid.clone(),
        Some(test) => test.clone(),
        None => return Err(failed("--test needs a corpus with a test.txt".into()).into()),
    };
    let (hidden, places) = hidden_states(&model, &ids, args.contexts)?;
    let dtype = args.dtype.dtype();
    let tensor = |name: &str| -> Result<Tensor> { Ok(named(&checkpoint, path, name)?.to_dtype(dtype)?) };
    let tied = checkpoint.optional("tied")?.unwrap_or(false);
    let decoder = if tied { "embedding.weight" } else { "head.decoder.weight" };
    let (weight, bias) = (tensor(decoder)?, Some(tensor("head.decoder.bias")?));
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
    let targets = Some(places.iter().map(|&place| ids[place]).collect());
    let (name, hidden) = (path.display().to_string(), hidden.to_dtype(dtype)?);
    let text = Some(Text { corpus, ids, places });
    Ok(Source { name, kind, head, weight, bias, prior_weight, hidden, targets, text })
}

/// Returns the corpus that a checkpoint was made on, read again.
fn corpus(checkpoint: &Checkpoint, folder: Option<&Path>) -> Result<Corpus> {
    let name: String = checkpoint.get("corpus")?;
    let vocab = checkpoint.tensors.get("embedding.weight").map_or(usize::MAX, |weight| weight.dims()[0]);
    // With more words than the model has, it was trained with as many of the most frequent ones.
    let read = |folder: &Path| match Corpus::from_folder(folder, None) {
        Ok(corpus) if corpus.words.len() > vocab => Corpus::from_folder(folder, Some(vocab)),
        result => result,
    };
    let corpus = match folder {
        None if name == language::NAME => language::Teacher::default().built_in(checkpoint.get("seed")?),
        None => read(Path::new(&name))
            .map_err(|error| format!("{error} (--data DIR names another folder of the same corpus)"))?,
        Some(folder) => read(folder)?,
    };
    checkpoint.require_corpus(&corpus.data.name, &corpus.data.digest)?;
    Ok(corpus)
}

/// Parallel streams, and steps of each at a time.
const STREAMS: usize = 10;
const STEPS: usize = 35;

/// Returns the hidden states before `count` evenly spaced targets of a text, [count, hidden], and the places of the
/// targets.
fn hidden_states(model: &LanguageModel, text: &[u32], count: usize) -> Result<(Tensor, Vec<usize>)> {
    let targets = text.len() - 1;
    let count = count.min(targets);
    let wanted = |place: usize| (place * count) / targets != ((place - 1) * count) / targets;
    let streams = Streams::new(text, STREAMS);
    let stream = targets.div_ceil(STREAMS);
    let windows = streams.windows(STEPS);
    let bar = progress::bar(windows.len(), "hidden states".into());
    let mut states = model.state(STREAMS)?;
    let (mut found, mut places) = (vec![], vec![]);
    for window in windows {
        let (ids, targets) = streams.tensors(text, &window, model.device())?;
        let targets = targets.flatten_all()?.to_vec1::<i64>()?;
        let hidden = model.hidden(&ids, &mut states)?.flatten_to(1)?;
        let place = |row: usize| (row / window.steps) * stream + window.at + row % window.steps + 1;
        let rows = 0..targets.len();
        let rows: Vec<usize> = rows.filter(|&row| targets[row] != IGNORED && wanted(place(row))).collect();
        if !rows.is_empty() {
            let chosen: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
            found.push(hidden.index_select(&Tensor::new(chosen, model.device())?, 0)?);
            places.extend(rows.into_iter().map(place));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((Tensor::cat(&found, 0)?, places))
}

/// Returns a softmax of two files: a matrix, and hidden states.
fn softmax_from_files(path: &Path, weight: &str, bias: Option<&str>, hidden: &Path, args: &Args) -> Result<Source> {
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

/// Returns a tensor of a file, or an error that lists those it has.
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use clap::Parser;
    use lab::awd::Awd;
    use lab::session::Session;
    use lab::sizes::{InitialValues, Sizes};
    use std::path::PathBuf;

    pub(crate) fn temporary(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("bottleneck_{name}_{}.safetensors", std::process::id()))
    }

    /// Returns an untrained model of six units, whose mixtures have contexts of size 5.
    pub(crate) fn saved(name: &str, kind: HeadKind, corpus: Corpus) -> PathBuf {
        let recipe = Recipe { hidden: 6, embedding: Some(8), context: Some(5), seed: 1, ..Recipe::BASE };
        saved_with(name, kind, corpus, &recipe)
    }

    fn saved_with(name: &str, kind: HeadKind, corpus: Corpus, recipe: &Recipe) -> PathBuf {
        let sizes = Sizes::new(kind, recipe, corpus.words.len());
        let model = LanguageModel::new(kind, sizes, InitialValues::Even, recipe, &Device::Cpu).expect("valid sizes");
        let session = Session::new(kind, model, corpus.data, recipe).expect("valid sizes");
        let path = temporary(name);
        session.checkpoint().expect("copies").save(&path).expect("writes");
        path
    }

    /// Makes a folder with this text for training and validation.
    pub(crate) fn folder(name: &str, text: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("bottleneck_{name}_{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("creates");
        for file in ["train.txt", "valid.txt"] {
            std::fs::write(folder.join(file), text).expect("writes");
        }
        folder
    }

    pub(crate) fn args(flags: &[&str], paths: &[&Path]) -> Args {
        let paths = paths.iter().map(|path| path.to_str().expect("a text"));
        Args::try_parse_from(["bottleneck"].into_iter().chain(flags.iter().copied()).chain(paths)).expect("valid flags")
    }

    #[test]
    fn contexts_are_spread_over_the_text_and_belong_to_their_targets() {
        let text = "a b c d e f g h\n".repeat(40);
        let folder = folder("spread", &text);
        let path = saved("spread", HeadKind::Mos, Corpus::from_folder(&folder, None).expect("a corpus"));
        let open = |contexts: &str| open(&args(&["--contexts", contexts], &[&path])).expect("opens").remove(0);
        let (all, few) = (open("100000"), open("40"));
        let places = |source: &Source| source.text.as_ref().expect("a text").places.clone();
        let mut every = places(&all);
        every.sort_unstable();
        assert_eq!(every, (1..=360).collect::<Vec<_>>());
        let mut some = places(&few);
        some.sort_unstable();
        assert_eq!(some, (1..=40).map(|i| 9 * i).collect::<Vec<_>>());
        // The same position has the same hidden state and target.
        for (i, place) in places(&few).into_iter().enumerate() {
            let same = places(&all).iter().position(|&other| other == place).expect("all places");
            let row = |source: &Source, i: usize| source.hidden.get(i).and_then(|row| row.to_vec1::<f64>());
            assert_eq!(row(&few, i).expect("a row"), row(&all, same).expect("a row"));
            assert_eq!(few.targets.as_ref().expect("known")[i], all.targets.as_ref().expect("known")[same]);
        }
        std::fs::remove_file(path).expect("was just written");
        std::fs::remove_dir_all(folder).expect("was just written");
    }

    #[test]
    fn the_contexts_of_the_test_text_are_those_of_test_txt() {
        let folder = folder("test_text", "a b c d a c\n");
        let path = saved("test_text", HeadKind::Softmax, Corpus::from_folder(&folder, None).expect("a corpus"));
        let error = match open(&args(&["--test"], &[&path])) {
            Ok(_) => panic!("must fail"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains("--test") && error.contains("test.txt"), "{error}");
        std::fs::write(folder.join("test.txt"), "d d d\n").expect("writes");
        let source = open(&args(&["--test"], &[&path])).expect("opens").remove(0);
        let mut targets = source.targets.expect("known");
        targets.sort_unstable();
        assert_eq!(targets, [3, 3, 3, 4]);
        std::fs::remove_file(path).expect("was just written");
        std::fs::remove_dir_all(folder).expect("was just written");
    }

    #[test]
    fn a_tied_decoder_is_the_embedding() {
        let folder = folder("tied", &"a b c d e f g h\n".repeat(40));
        let awd = Awd { tied: Some(true), inner: Some(7), ..Awd::NONE };
        for kind in HeadKind::ALL {
            let recipe = Recipe { hidden: 6, context: Some(5), layers: 2, awd, ..Recipe::BASE };
            let path = saved_with("tied", kind, Corpus::from_folder(&folder, None).expect("a corpus"), &recipe);
            let source = open(&args(&["--contexts", "20"], &[&path])).expect("opens").remove(0);
            let width = if kind == HeadKind::Softmax { 6 } else { 5 };
            assert_eq!((source.weight.dims(), source.contexts()), (&[9, width][..], 20), "{kind:?}");
            std::fs::remove_file(path).expect("was just written");
        }
        std::fs::remove_dir_all(folder).expect("was just written");
    }

    #[test]
    fn another_corpus_than_the_checkpoints_is_an_error_that_names_both() {
        let (own, other) = (folder("own", "a b a b a\n"), folder("other", "b a b\n"));
        let path = saved("own", HeadKind::Softmax, Corpus::from_folder(&own, None).expect("a corpus"));
        let error = match open(&args(&["--data", other.to_str().expect("a text")], &[&path])) {
            Ok(_) => panic!("must fail"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains("bottleneck_own") && error.contains("bottleneck_other"), "{error}");
        std::fs::remove_dir_all(&own).expect("was just written");
        let error = match open(&args(&[], &[&path])) {
            Ok(_) => panic!("must fail"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains("train.txt") && error.contains("--data DIR"), "{error}");
        std::fs::remove_file(path).expect("was just written");
        std::fs::remove_dir_all(other).expect("was just written");
    }
}
