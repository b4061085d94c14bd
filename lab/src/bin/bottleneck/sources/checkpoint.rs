//! The head and the hidden states of a checkpoint of `language_model`.

use crate::args::Args;
use crate::source::{named, Decoder, Head, Origin, Source, Text};
use candle_core::{Device, Tensor};
use candle_nn::{Embedding, VarBuilder};
use lab::data::{language, Corpus, Streams, IGNORED};
use lab::layers::mixtape::{counts_in_order, Mixtape, ORDER};
use lab::layers::{Checkpoint, HeadKind};
use lab::training::{LanguageModel, Model, Recipe};
use lab::{show::progress, Result};
use mos_head::{MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, MixtureTensors, SoftmaxHead};
use std::path::Path;

/// Returns the head of a checkpoint, and its hidden states for a text.
pub(super) fn open(path: &Path, args: &Args) -> Result<Source> {
    let failed = |error: Box<dyn std::error::Error>| format!("{}: {error}", path.display());
    let checkpoint = Checkpoint::load(path, &Device::Cpu)?;
    let corpus = corpus(&checkpoint, args.data.as_deref()).map_err(failed)?;
    let (kind, model) =
        LanguageModel::from_checkpoint(&checkpoint, corpus.words.len(), &Device::Cpu).map_err(failed)?;
    let recipe = Recipe::from_checkpoint(kind, &checkpoint)?;
    let (activation, function) = (recipe.activation, recipe.logit_function);
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
    let decoder = Decoder { weight: tensor(decoder)?, bias: Some(tensor("head.decoder.bias")?), function };
    let (weight, bias) = (decoder.weight.clone(), decoder.bias.clone());
    let width = weight.dim(1)?;
    let hidden = hidden.to_dtype(dtype)?;
    let model =
        |layer, prior_weight| Origin::Model { layer, decoder: decoder.clone(), hidden: hidden.clone(), prior_weight };
    let origin = match kind {
        HeadKind::Mixtape => {
            let counts = counts_in_order(&named(&checkpoint, path, ORDER)?.to_vec1()?)?;
            let config = recipe.head(corpus.words.len()).mixtape();
            let vb = VarBuilder::from_tensors(checkpoint.tensors.clone(), dtype, &Device::Cpu).pp("head");
            let head = if tied {
                Mixtape::tied(config, &counts, &Embedding::new(weight, width), vb)?
            } else {
                Mixtape::new(config, &counts, vb)?
            };
            Origin::Mixtape { layer: Box::new(head), decoder, hidden }
        }
        HeadKind::Softmax => {
            model(Box::new(SoftmaxHead::from_tensors(weight, bias)?.with_logit_function(function)?), None)
        }
        HeadKind::Moc | HeadKind::Mos => {
            let prior_weight = tensor("head.prior.weight")?;
            let tensors = MixtureTensors {
                prior_weight: prior_weight.clone(),
                prior_bias: None,
                latent_weight: tensor("head.latent.weight")?,
                latent_bias: tensor("head.latent.bias")?,
                decoder_weight: weight,
                decoder_bias: bias,
            };
            let layer: Box<dyn MixtureLayer> = match kind {
                HeadKind::Mos => {
                    Box::new(MixtureOfSoftmaxes::from_tensors(tensors, activation)?.with_logit_function(function)?)
                }
                _ => Box::new(MixtureOfContexts::from_tensors(tensors, activation)?.with_logit_function(function)?),
            };
            model(layer, Some(prior_weight))
        }
    };
    let targets = Some(places.iter().map(|&place| ids[place]).collect());
    Ok(Source {
        name: path.display().to_string(),
        head: Some(Head { kind, width }),
        origin,
        targets,
        text: Some(Text { corpus, ids, places }),
        epsilon: args.dtype.epsilon(),
    })
}

/// Returns the corpus that a checkpoint was made on, read again.
fn corpus(checkpoint: &Checkpoint, folder: Option<&Path>) -> Result<Corpus> {
    let name: String = checkpoint.get("corpus")?;
    let vocab = checkpoint.tensors.get("embedding.weight").map_or(usize::MAX, |weight| weight.dims()[0]);
    // With --words the words are numbered by their frequency, and the model has as many of them, or all.
    let read = |folder: &Path| match Corpus::from_folder(folder, None) {
        Ok(corpus) if checkpoint.require_corpus(&corpus.data.name, &corpus.data.digest).is_err() => {
            Corpus::from_folder(folder, Some(vocab))
        }
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sources::open;
    use clap::Parser;
    use lab::layers::Entries;
    use lab::training::{Awd, InitialValues, Session, Sizes};
    use mos_head::parts::LogitFunction;
    use mos_head::{LossOptions, Reduction};
    use std::collections::HashMap;
    use std::ops::Deref;
    use std::path::PathBuf;

    /// A file or a folder that is removed at the end of a test.
    pub(crate) struct Temporary(PathBuf);

    impl Deref for Temporary {
        type Target = Path;

        fn deref(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let removed = if self.is_dir() { std::fs::remove_dir_all(&self.0) } else { std::fs::remove_file(&self.0) };
            removed.unwrap_or_else(|error| eprintln!("{}: {error}", self.display()));
        }
    }

    fn temporary(name: &str) -> Temporary {
        let name = format!("bottleneck_{name}_{}.safetensors", std::process::id());
        Temporary(std::env::temp_dir().join(name))
    }

    /// Writes these tensors as a file.
    pub(crate) fn file(name: &str, tensors: &[(&str, &Tensor)]) -> Temporary {
        let path = temporary(name);
        let tensors: HashMap<&str, Tensor> = tensors.iter().map(|&(key, tensor)| (key, tensor.clone())).collect();
        candle_core::safetensors::save(&tensors, &*path).expect("writes");
        path
    }

    /// Returns an untrained model of six units, whose mixtures have contexts of size 5.
    pub(crate) fn saved(name: &str, kind: HeadKind, corpus: Corpus) -> Temporary {
        let recipe = Recipe { hidden: 6, embedding: Some(8), context: Some(5), seed: 1, ..Recipe::BASE };
        saved_with(name, kind, corpus, &recipe)
    }

    pub(crate) fn saved_with(name: &str, kind: HeadKind, corpus: Corpus, recipe: &Recipe) -> Temporary {
        let (vocab, values) = (corpus.words.len(), InitialValues::Even);
        let (sizes, entries) = (Sizes::new(kind, recipe, vocab), Entries::count(&corpus.words, &corpus.data.train));
        let model = LanguageModel::with_entries(kind, sizes, values, recipe, &entries, &Device::Cpu);
        let model = model.expect("valid sizes");
        let session = Session::new(kind, model, corpus.data, recipe).expect("valid sizes");
        let path = temporary(name);
        session.checkpoint().expect("copies").save(&path).expect("writes");
        path
    }

    /// Makes a folder with this text for training and validation.
    pub(crate) fn folder(name: &str, text: &str) -> Temporary {
        let folder = std::env::temp_dir().join(format!("bottleneck_{name}_{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("creates");
        for file in ["train.txt", "valid.txt"] {
            std::fs::write(folder.join(file), text).expect("writes");
        }
        Temporary(folder)
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
        // The same position has the same distribution and target.
        for (i, place) in places(&few).into_iter().enumerate() {
            let same = places(&all).iter().position(|&other| other == place).expect("all places");
            let row = |source: &Source, i: usize| source.log_probs(i, 1).expect("a row").to_vec2::<f64>();
            assert_eq!(row(&few, i).expect("numbers"), row(&all, same).expect("numbers"));
            assert_eq!(few.targets.as_ref().expect("known")[i], all.targets.as_ref().expect("known")[same]);
        }
    }

    #[test]
    fn the_contexts_of_the_test_text_are_those_of_test_txt() {
        let folder = folder("test_text", "a b c d a c\n");
        let path = saved("test_text", HeadKind::Softmax, Corpus::from_folder(&folder, None).expect("a corpus"));
        let error = open(&args(&["--test"], &[&path])).err().expect("must fail").to_string();
        assert!(error.contains("--test") && error.contains("test.txt"), "{error}");
        std::fs::write(folder.join("test.txt"), "d d d\n").expect("writes");
        let source = open(&args(&["--test"], &[&path])).expect("opens").remove(0);
        let mut targets = source.targets.expect("known");
        targets.sort_unstable();
        assert_eq!(targets, [3, 3, 3, 4]);
    }

    #[test]
    fn a_tied_decoder_is_the_embedding() {
        let folder = folder("tied", &"a b c d e f g h\n".repeat(40));
        let awd = Awd { tied: Some(true), inner: Some(7), ..Awd::NONE };
        for kind in HeadKind::ALL.into_iter().chain([HeadKind::Mixtape]) {
            let recipe = Recipe { hidden: 6, context: Some(5), layers: 2, awd, ..Recipe::BASE };
            let path = saved_with("tied", kind, Corpus::from_folder(&folder, None).expect("a corpus"), &recipe);
            let source = open(&args(&["--contexts", "20"], &[&path])).expect("opens").remove(0);
            let width = if kind == HeadKind::Softmax { 6 } else { 5 };
            let head = source.head.expect("a checkpoint has one");
            assert_eq!((source.vocab(), head.width, source.contexts()), (9, width, 20), "{kind:?}");
        }
    }

    #[test]
    fn log_probabilities_are_those_of_the_model_with_its_head_and_function() {
        let folder = folder("functions", &"a b a d c f g e h\n".repeat(40));
        let function = LogitFunction::Sigsoftmax;
        let plain = Recipe { hidden: 6, embedding: Some(8), context: Some(5), ..Recipe::BASE };
        let all = HeadKind::ALL.map(|kind| (kind, Recipe { logit_function: function, ..plain }));
        for (kind, recipe) in all.into_iter().chain([(HeadKind::Mixtape, plain)]) {
            let path = saved_with("functions", kind, Corpus::from_folder(&folder, None).expect("a corpus"), &recipe);
            let source = open(&args(&["--contexts", "20"], &[&path])).expect("opens").remove(0);
            let checkpoint = Checkpoint::load(&path, &Device::Cpu).expect("reads");
            let (_, model) = LanguageModel::from_checkpoint(&checkpoint, 9, &Device::Cpu).expect("a model");
            let hidden = match &source.origin {
                Origin::Model { hidden, .. } | Origin::Mixtape { hidden, .. } => hidden.narrow(0, 3, 9).expect("rows"),
                _ => panic!("a checkpoint has hidden states"),
            };
            // The likelihood of id i at position i.
            let (hidden, ids) =
                (hidden.to_dtype(candle_core::DType::F32).unwrap(), Tensor::arange(0u32, 9, &Device::Cpu));
            let options = LossOptions::evaluation().with_reduction(Reduction::None);
            let nll =
                model.head().loss(&hidden, &ids.unwrap(), &options).expect("a loss").nll.to_vec1::<f32>().unwrap();
            let found = source.log_probs(3, 9).expect("rows").to_vec2::<f64>().expect("f64");
            for (i, nll) in nll.into_iter().enumerate() {
                assert!((found[i][i] + f64::from(nll)).abs() < 1e-5, "{kind:?} {i}: {} {nll}", found[i][i]);
            }
            assert_eq!(source.label(), kind.name());
        }
    }

    #[test]
    fn another_corpus_than_the_checkpoints_is_an_error_that_names_both() {
        let (own, other) = (folder("own", "a b a b a\n"), folder("other", "b a b\n"));
        let path = saved("own", HeadKind::Softmax, Corpus::from_folder(&own, None).expect("a corpus"));
        let error =
            open(&args(&["--data", other.to_str().expect("a text")], &[&path])).err().expect("must fail").to_string();
        assert!(error.contains("bottleneck_own") && error.contains("bottleneck_other"), "{error}");
        drop(own);
        let error = open(&args(&[], &[&path])).err().expect("must fail").to_string();
        assert!(error.contains("train.txt") && error.contains("--data DIR"), "{error}");
    }
}
