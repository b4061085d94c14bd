//! One epoch of training, and the evaluation that counts every target once.

use crate::batches::{by_length, shuffled, Batch};
use crate::common::{optimizer::Optimizer, optimizer::OptimizerKind, Result};
use crate::corpus::Encoded;
use crate::model::Seq2Seq;
use crate::vocabulary::PAD;
use indicatif::ProgressBar;
use mos_head::LossOptions;
use rand::{rngs::StdRng, SeedableRng};

/// How to train: `lr` falls by the factor `decay` per epoch, smoothly over its steps.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) epochs: usize,
    pub(crate) batch: usize,
    pub(crate) lr: f64,
    pub(crate) decay: f64,
    pub(crate) dropout: f64,
    pub(crate) clip: f64,
    pub(crate) label_smoothing: f64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) seed: u64,
}

/// Trains on all pairs and returns the mean NLL of the epoch.
pub(crate) fn train_epoch(
    model: &Seq2Seq,
    optimizer: &mut Optimizer,
    pairs: &[Encoded],
    epoch: usize,
    recipe: &Recipe,
    bar: &ProgressBar,
) -> Result<f64> {
    let options = LossOptions::new().with_ignore_index(i64::from(PAD)).with_label_smoothing(recipe.label_smoothing);
    let seed = recipe.seed ^ (epoch as u64) << 32;
    let mut rng = StdRng::seed_from_u64(seed);
    let batches = shuffled(pairs, recipe.batch, seed);
    let (mut sum, mut count) = (0.0, 0.0);
    for (i, chosen) in batches.iter().enumerate() {
        let batch = Batch::new(pairs, chosen, model.device())?;
        let hidden = model.hidden(&batch, Some(&mut rng))?;
        let loss = model.head().loss(&hidden, &batch.targets, &options)?;
        let lr = recipe.lr * recipe.decay.powf(epoch as f64 + i as f64 / batches.len() as f64);
        optimizer.step(&loss.backward()?, lr, recipe.clip)?;
        sum += f64::from(loss.nll.sum_all()?.to_scalar::<f32>()?); // without the smoothing
        count += loss.sum_and_count()?.1;
        bar.set_message(format!("perplexity {:.1}", (sum / count).exp()));
        bar.inc(1);
    }
    Ok(sum / count)
}

/// Mean NLL of all targets, including the ends of the sentences.
pub(crate) fn evaluate(model: &Seq2Seq, pairs: &[Encoded], batch: usize) -> Result<f64> {
    let options = LossOptions::evaluation().with_ignore_index(i64::from(PAD));
    let (mut sum, mut count) = (0.0, 0.0);
    for chosen in by_length((0..pairs.len()).collect(), batch, |i| (pairs[i].target.len(), pairs[i].source.len())) {
        let batch = Batch::new(pairs, &chosen, model.device())?;
        let hidden = model.hidden(&batch, None)?;
        let (sum_of_batch, count_of_batch) = model.head().loss(&hidden, &batch.targets, &options)?.sum_and_count()?;
        sum += sum_of_batch;
        count += count_of_batch;
    }
    Ok(sum / count)
}
