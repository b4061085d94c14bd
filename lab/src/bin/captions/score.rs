//! The captions that a beam search finds, and their scores.

use crate::data::{pairs, Dataset, Example};
use crate::model::Captioner;
use candle_core::Tensor;
use lab::data::words::{END, START};
use lab::scores::{bleu, cider};
use lab::training::{Model, Session};
use lab::{show::progress, Result};
use mos_head::decode::BeamSearch;

/// A trained model reaches these scores.
pub(crate) struct Scores {
    /// Mean NLL per word, in nats.
    pub(crate) nll: f64,
    /// The same for the images that show a shape in a colour that no image for training has.
    pub(crate) new_nll: Option<f64>,
    pub(crate) bleu: f64,
    pub(crate) cider: f64,
    /// The share of captions that the grammar has for their image, in percent; `None` if the images are not drawn.
    pub(crate) right: Option<f64>,
    /// The caption found for each image.
    pub(crate) found: Vec<String>,
}

/// The number of images that are described together.
const BATCH: usize = 50;

/// Scores the captions of these examples.
pub(crate) fn score(
    session: &Session<Captioner>,
    dataset: &Dataset,
    examples: &[Example],
    search: &BeamSearch,
) -> Result<Scores> {
    let found = describe(&session.model, examples, search)?;
    let captions = || found.iter().zip(examples);
    let with_references: Vec<(&str, Vec<&str>)> = captions()
        .map(|(text, example)| (text.as_str(), example.captions.iter().map(String::as_str).collect()))
        .collect();
    let is_right = |(text, example): (&String, &Example)| Some(dataset.grammar(example.image)?.probability(text) > 0.0);
    let right: Option<Vec<bool>> = captions().map(is_right).collect();
    let percent =
        |right: Vec<bool>| 100.0 * right.iter().filter(|&&is_right| is_right).count() as f64 / right.len() as f64;
    let is_new = |example: &&Example| dataset.scenes.as_ref().is_some_and(|scenes| scenes[example.image].is_new());
    let new: Vec<Example> = examples.iter().filter(is_new).cloned().collect();
    let words = &session.model.setting.words;
    Ok(Scores {
        new_nll: (!new.is_empty()).then(|| session.evaluate(&pairs(&new, words))).transpose()?,
        nll: session.evaluate(&pairs(examples, words))?,
        cider: 100.0 * cider::cider_d(&with_references),
        bleu: bleu::corpus_bleu(with_references.iter().map(|(text, references)| (*text, references.iter().copied()))),
        right: right.map(percent),
        found,
    })
}

/// Returns the caption of each image.
fn describe(model: &Captioner, examples: &[Example], search: &BeamSearch) -> Result<Vec<String>> {
    let bar = progress::bar(examples.len(), "beam search".into());
    let mut found = vec![];
    for examples in examples.chunks(BATCH) {
        let images: Vec<usize> = examples.iter().map(|example| example.image).collect();
        let mut state = model.encode(&images)?;
        let start = Tensor::full(START, images.len(), model.device())?;
        let hypotheses = search.run(model.head(), &start, |tokens: &Tensor, parents: &Tensor| -> Result<Tensor> {
            state = state.select(parents)?;
            Ok(model.decoder.decode(&tokens.unsqueeze(1)?, &mut state, None)?.squeeze(1)?)
        })?;
        for hypotheses in hypotheses {
            let ids = hypotheses.into_iter().next().map(|hypothesis| hypothesis.token_ids).unwrap_or_default();
            let ids: Vec<u32> = ids.into_iter().filter(|&id| id != END).collect();
            found.push(model.setting.words.decode(&ids)?);
        }
        bar.inc(examples.len() as u64);
    }
    bar.finish_and_clear();
    Ok(found)
}
