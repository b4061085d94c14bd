//! The perplexity of a trained model on a text: with its parameters fixed or adapted by dynamic evaluation, each with
//! and without a continuous cache.

use crate::cache::{Cache, CacheSettings};
use crate::dynamic::{gradient_rms, Adaptation, DynamicSettings};
use crate::released;
use candle_core::{Device, Tensor};
use clap::ValueEnum;
use lab::layers::{Checkpoint, OutputKind};
use lab::show::report::{self, number};
use lab::training::{LanguageModel, Model};
use lab::{data::Corpus, show::progress, Result};
use mos_head::{DropoutMasks, LossOptions, Reduction};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A checkpoint is evaluated with these settings.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    pub(crate) file: PathBuf,
    /// The file to which the model is written with the names of the released code.
    pub(crate) export: Option<PathBuf>,
    /// The number of steps of a segment of dynamic evaluation.
    pub(crate) steps: usize,
    pub(crate) dynamic: Option<DynamicSettings>,
    pub(crate) cache: Option<CacheSettings>,
    pub(crate) floor: f64,
    pub(crate) json: bool,
}

/// The number of steps of a window without dynamic evaluation.
const STEPS: usize = 70;

/// Prints the perplexities of the corpus' validation and test texts.
pub(crate) fn run(evaluation: &Evaluation, corpus: &Corpus, device: &Device) -> Result<()> {
    let Evaluation { file, export, steps, dynamic, cache, floor, json } = evaluation;
    let checkpoint = readable(file, corpus, device)?;
    let model = LanguageModel::from_checkpoint(&checkpoint, corpus.words.len(), device);
    let (kind, model) = model.map_err(|error| in_file(file, error))?;
    if let Some(path) = export {
        released::write(&model.checkpoint()).map_err(|error| in_file(file, error))?.save(path)?;
    }
    println!("{} of {} parameters: {}", kind.name(), model.parameters(), file.display());
    let rms = match dynamic {
        Some(_) => gradient_rms(&model, &corpus.data.train, *steps)?,
        None => vec![],
    };
    let (mut rows, mut lines) = (vec![], vec![]);
    let texts = [("valid", Some(&corpus.data.valid)), ("test", corpus.test.as_ref())];
    for (name, text) in texts.into_iter().filter_map(|(name, text)| Some((name, text?))) {
        for dynamic in [None].into_iter().chain(dynamic.map(Some)) {
            let (method, steps) = if dynamic.is_some() { ("dynamic", *steps) } else { ("fixed", STEPS) };
            let dynamic = dynamic.map(|settings| (settings, rms.as_slice()));
            let start = Instant::now();
            let method_of_pass = Method { steps, dynamic, cache: *cache, floor: *floor };
            let Nlls { plain, cached } = nlls(&model, text, method_of_pass, &format!("{name}, {method}"))?;
            let seconds = start.elapsed().as_secs_f64();
            let (plain, cached) = (perplexity(&plain), cached.as_deref().map(perplexity));
            rows.push(vec![name.into(), method.into(), number(plain, 2), number(cached, 2), number(seconds, 1)]);
            lines.push(json!({
                "text": name, "parameters": method, "perplexity": plain, "perplexity_with_cache": cached,
                "seconds": seconds,
            }));
        }
    }
    println!("\n{}", report::table(&["text", "parameters", "perplexity", "with cache", "seconds"], &rows));
    if *json {
        println!("{}", json!({ "head": kind.name(), "parameters": model.parameters(), "evaluations": lines }));
    }
    Ok(())
}

/// Returns a checkpoint of this program or of the released code, if it is for the vocabulary of this corpus.
pub(crate) fn readable(file: &Path, corpus: &Corpus, device: &Device) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::load(file, device)?;
    let read = || {
        let output: Option<String> = checkpoint.optional("output")?;
        let is_coded = |name: &String| OutputKind::from_str(name, false).is_ok_and(OutputKind::is_coded);
        if let Some(name) = output.filter(is_coded) {
            return Err(format!("a model of codes (--output {name}) can be resumed, but not evaluated").into());
        }
        if !released::is_released(&checkpoint) {
            checkpoint.require_corpus(&corpus.data.name, &corpus.data.digest)?;
            if checkpoint.metadata.contains_key("spell") {
                return Err("this is no word model but one that spells: --spell WORD_MODEL --resume takes it".into());
            }
            return Ok(None);
        }
        let checkpoint = released::read(&checkpoint)?;
        let (vocab, words) = (checkpoint.get::<usize>("vocab")?, corpus.words.len());
        if vocab != words {
            let name = &corpus.data.name;
            return Err(format!("the checkpoint has a vocabulary of {vocab}, but that of {name} is {words}").into());
        }
        Ok(Some(checkpoint))
    };
    let released: Result<_> = read();
    Ok(released.map_err(|error| in_file(file, error))?.unwrap_or(checkpoint))
}

fn in_file(file: &Path, error: Box<dyn std::error::Error>) -> String {
    format!("{}: {error}", file.display())
}

/// A model is evaluated in this way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Method<'a> {
    /// The number of steps of a window; dynamic evaluation learns after each.
    pub(crate) steps: usize,
    /// Dynamic evaluation, with the statistics of the gradients.
    pub(crate) dynamic: Option<(DynamicSettings, &'a [Tensor])>,
    pub(crate) cache: Option<CacheSettings>,
    /// The number that the released code adds to every probability: 1e-8.
    pub(crate) floor: f64,
}

/// The negative log-likelihood of every target of a text.
pub(crate) struct Nlls {
    pub(crate) plain: Vec<f64>,
    /// The same in the mixture with the cache.
    pub(crate) cached: Option<Vec<f64>>,
}

/// Reads a text as one stream. Dynamic evaluation learns from the loss without the cache.
pub(crate) fn nlls(model: &LanguageModel, text: &[u32], method: Method, name: &str) -> Result<Nlls> {
    let adaptation = method.dynamic.map(|(settings, rms)| Adaptation::new(model, rms, settings)).transpose()?;
    let mut cache = method.cache.map(Cache::new);
    let options = match adaptation {
        // A loss of each position, and the gradient of their mean.
        Some(_) => LossOptions::new().with_dropout(DropoutMasks::Off),
        None => LossOptions::evaluation().with_reduction(Reduction::None),
    };
    let mut states = model.state(1)?;
    let mut plain = Vec::with_capacity(text.len());
    let mut cached = cache.is_some().then(Vec::new);
    let targets = &text[1..];
    let bar = progress::bar(targets.len(), name.to_owned());
    for (i, window) in targets.chunks(method.steps).enumerate() {
        let inputs = &text[i * method.steps..i * method.steps + window.len()];
        let inputs = Tensor::from_slice(inputs, (1, window.len()), model.device())?;
        let ids = Tensor::from_slice(window, (1, window.len()), model.device())?;
        let hidden = model.hidden(&inputs, &mut states)?;
        let loss = model.head().loss(&hidden, &ids, &options)?;
        let mut nll = loss.nll.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from).collect::<Vec<_>>();
        if method.floor > 0.0 {
            nll.iter_mut().for_each(|nll| *nll = -((-*nll).exp() + method.floor).ln());
        }
        if let Some((cache, cached)) = cache.as_mut().zip(cached.as_mut()) {
            cached.extend(cache.mix(&hidden.flatten_to(1)?.detach(), window, &nll)?);
        }
        if let Some(adaptation) = &adaptation {
            adaptation.step(&loss)?;
        }
        plain.extend(nll);
        bar.inc(window.len() as u64);
    }
    bar.finish_and_clear();
    Ok(Nlls { plain, cached })
}

pub(crate) fn perplexity(nlls: &[f64]) -> f64 {
    (nlls.iter().sum::<f64>() / nlls.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab::layers::{init::sorted, HeadKind};
    use lab::training::{Awd, InitialValues, Recipe};

    fn model(kind: HeadKind) -> LanguageModel {
        let awd = Awd { tied: Some(true), weight_dropout: Some(0.5), ..Awd::NONE };
        let recipe = Recipe { hidden: 6, components: 2, context: Some(6), dropout: 0.3, awd, ..Recipe::BASE };
        LanguageModel::new(kind, 23, InitialValues::Even, &recipe, &Device::Cpu).unwrap()
    }

    fn text() -> Vec<u32> {
        (0..300).map(|i| i * i % 23).collect()
    }

    const STATIC: Method = Method { steps: 5, dynamic: None, cache: None, floor: 0.0 };
    const CACHE: CacheSettings = CacheSettings { window: 50, theta: 1.0, lambda: 0.1 };
    const DYNAMIC: DynamicSettings = DynamicSettings { lr: 0.01, decay: 0.1, epsilon: 0.01 };

    fn parameters(model: &LanguageModel) -> Vec<Vec<f32>> {
        sorted(model.varmap()).iter().map(|(_, var)| var.flatten_all().unwrap().to_vec1().unwrap()).collect()
    }

    #[test]
    fn windows_of_any_length_give_the_same() {
        let model = model(HeadKind::Mos);
        let short = nlls(&model, &text(), STATIC, "").unwrap().plain;
        let long = nlls(&model, &text(), Method { steps: 70, ..STATIC }, "").unwrap().plain;
        assert_eq!((short.len(), long.len()), (299, 299));
        assert!(short.iter().zip(&long).all(|(a, b)| (a - b).abs() < 1e-4));
    }

    #[test]
    fn a_learning_rate_of_zero_changes_nothing() {
        for kind in HeadKind::ALL {
            let model = model(kind);
            let rms = gradient_rms(&model, &text(), 5).unwrap();
            let settings = DynamicSettings { lr: 0.0, ..DYNAMIC };
            let found = nlls(&model, &text(), Method { dynamic: Some((settings, &rms)), ..STATIC }, "").unwrap();
            for (a, b) in found.plain.iter().zip(nlls(&model, &text(), STATIC, "").unwrap().plain) {
                assert!((a - b).abs() < 1e-5, "{kind:?}: {a} {b}");
            }
        }
    }

    #[test]
    fn parameters_are_the_same_to_the_bit_afterwards() {
        let model = model(HeadKind::Moc);
        let before = parameters(&model);
        let rms = gradient_rms(&model, &text(), 5).unwrap();
        let adaptation = Adaptation::new(&model, &rms, DYNAMIC).unwrap();
        drop(adaptation);
        let method = Method { dynamic: Some((DYNAMIC, &rms)), cache: Some(CACHE), ..STATIC };
        nlls(&model, &text(), method, "").unwrap();
        assert_eq!(parameters(&model), before);
    }

    #[test]
    fn every_method_learns_a_text_that_repeats() {
        for kind in HeadKind::ALL {
            let model = model(kind);
            let rms = gradient_rms(&model, &text(), 5).unwrap();
            let found = |dynamic: Option<DynamicSettings>, cache| {
                let dynamic = dynamic.map(|settings| (settings, rms.as_slice()));
                let Nlls { plain, cached } =
                    nlls(&model, &text(), Method { dynamic, cache: Some(cache), ..STATIC }, "").unwrap();
                (perplexity(&plain), perplexity(&cached.unwrap()))
            };
            let (plain, cached) = found(None, CACHE);
            let (dynamic, both) = found(Some(DYNAMIC), CACHE);
            let all = [plain, cached, dynamic, both];
            assert!(cached < 0.95 * plain && dynamic < 0.8 * plain && both < dynamic, "{kind:?} {all:?}");
            let (same, without_weight) = found(None, CacheSettings { lambda: 0.0, ..CACHE });
            assert_eq!([same, without_weight], [plain; 2], "{kind:?}: a cache without weight changes nothing");
        }
    }

    #[test]
    fn a_step_is_that_of_the_formula() {
        let model = model(HeadKind::Softmax);
        let rms = gradient_rms(&model, &text(), 5).unwrap();
        let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).unwrap();
        let loss = || {
            let hidden = model.hidden(&ids, &mut model.state(1).unwrap()).unwrap();
            model.head().loss(&hidden, &ids, &LossOptions::new().with_dropout(DropoutMasks::Off)).unwrap()
        };
        let start = parameters(&model);
        let adaptation = Adaptation::new(&model, &rms, DYNAMIC).unwrap();
        let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let total: f64 = rms
            .iter()
            .map(|rms| numbers(rms).iter().map(|x| f64::from(*x)).sum::<f64>() / rms.elem_count() as f64)
            .sum();
        let mut expected = start.clone();
        for _ in 0..2 {
            let loss = loss();
            let gradients = loss.backward().unwrap();
            for (i, (_, var)) in sorted(model.varmap()).iter().enumerate() {
                let (gradient, rms) = (numbers(gradients.get(var).unwrap()), numbers(&rms[i]));
                for (j, value) in expected[i].iter_mut().enumerate() {
                    let (old, rms) = (f64::from(*value), f64::from(rms[j]));
                    let back = (DYNAMIC.decay * rms / total).min(1.0) * (f64::from(start[i][j]) - old);
                    *value = (old + back - DYNAMIC.lr * f64::from(gradient[j]) / (rms + DYNAMIC.epsilon)) as f32;
                }
            }
            adaptation.step(&loss).unwrap();
            for (found, expected) in parameters(&model).iter().flatten().zip(expected.iter().flatten()) {
                assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
        drop(adaptation);
        assert_eq!(parameters(&model), start);
    }
}
