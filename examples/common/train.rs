//! One epoch of training of a language model, and the evaluation that counts every target once.

use super::batches::{Batches, IGNORED};
use super::language_model::{LanguageModel, Start};
use super::optimizer::{Optimizer, OptimizerKind};
use super::{measure::Measure, Result};
use indicatif::ProgressBar;
use mos_head::LossOptions;
use rand::{rngs::StdRng, SeedableRng};

/// How to train: `lr` rises for `warmup` steps and falls by the factor `decay` per epoch, smoothly over its steps.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) epochs: usize,
    pub(crate) batch: usize,
    pub(crate) bptt: usize,
    pub(crate) lr: f64,
    pub(crate) warmup: usize,
    pub(crate) decay: f64,
    pub(crate) clip: f64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) measure: Measure,
    pub(crate) dropout: f64,
    pub(crate) start: Start,
}

/// Trains on all of `text`, passing the state from window to window, and returns the mean NLL of the epoch.
pub(crate) fn train_epoch(
    model: &LanguageModel,
    optimizer: &mut Optimizer,
    text: &[u32],
    epoch: usize,
    recipe: &Recipe,
    bar: &ProgressBar,
) -> Result<f64> {
    let options = LossOptions::new().with_ignore_index(IGNORED);
    let mut rng = StdRng::seed_from_u64(recipe.start.seed ^ (epoch as u64) << 32);
    let mut states = model.start(recipe.batch)?;
    let batches = Batches::new(text, recipe.batch, recipe.bptt);
    let windows = batches.windows();
    let (mut sum, mut count) = (0.0, 0.0);
    for (i, window) in batches.enumerate() {
        let (inputs, targets) = window.tensors(model.device())?;
        let hidden = model.hidden(&inputs, &mut states, Some(&mut rng))?;
        let loss = model.head().loss(&hidden, &targets, &options)?;
        let rise = ((optimizer.steps() + 1) as f64 / recipe.warmup.max(1) as f64).min(1.0);
        let lr = rise * recipe.lr * recipe.decay.powf(epoch as f64 + i as f64 / windows as f64);
        optimizer.step(&loss.backward()?, lr, recipe.clip)?;
        let (sum_of_window, count_of_window) = loss.sum_and_count()?;
        sum += sum_of_window;
        count += count_of_window;
        bar.set_message(format!("{} {:.2}", recipe.measure, recipe.measure.of(sum / count)));
        bar.inc(1);
    }
    Ok(sum / count)
}

/// Mean NLL of the targets of `text`, in 10 parallel streams.
pub(crate) fn evaluate(model: &LanguageModel, text: &[u32], bptt: usize) -> Result<f64> {
    const STREAMS: usize = 10;
    let options = LossOptions::evaluation().with_ignore_index(IGNORED);
    let mut states = model.start(STREAMS)?;
    let (mut sum, mut count) = (0.0, 0.0);
    for window in Batches::new(text, STREAMS, bptt) {
        let (inputs, targets) = window.tensors(model.device())?;
        let hidden = model.hidden(&inputs, &mut states, None)?;
        let loss = model.head().loss(&hidden, &targets, &options)?;
        let (sum_of_window, count_of_window) = loss.sum_and_count()?;
        sum += sum_of_window;
        count += count_of_window;
    }
    Ok(sum / count)
}
