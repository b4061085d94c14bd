//! One epoch of training, and the evaluation that counts every target once.

use super::model::{Model, Pass};
use super::{optimizer::Optimizer, recipe::Recipe, Result};
use indicatif::ProgressBar;
use mos_head::LossOptions;

/// Trains on all of `items` and returns the mean NLL during the epoch, without label smoothing, and the number of
/// targets. The NLL is not finite if training diverged; the epoch ends there.
pub(crate) fn train_epoch<M: Model>(
    model: &M,
    optimizer: &mut Optimizer,
    items: &[M::Item],
    epoch: usize,
    recipe: &Recipe,
    bar: &ProgressBar,
) -> Result<(f64, f64)> {
    let options = LossOptions::new().with_ignore_index(M::IGNORED).with_label_smoothing(recipe.label_smoothing);
    let batches = model.batches(items, recipe, Pass::Training { epoch })?;
    let steps = batches.len();
    bar.set_length(steps as u64);
    let (mut sum, mut count) = (0.0, 0.0);
    for (i, batch) in batches.enumerate() {
        let (hidden, targets) = batch?;
        let loss = model.head().loss(&hidden, &targets, &options)?;
        let (sum_of_batch, count_of_batch) = loss.sum_and_count()?;
        sum += match recipe.label_smoothing > 0.0 {
            true => f64::from(loss.nll.sum_all()?.to_scalar::<f32>()?),
            false => sum_of_batch,
        };
        count += count_of_batch;
        let lr = recipe.lr_at(optimizer.steps(), epoch as f64 + i as f64 / steps as f64);
        if !sum.is_finite() || !optimizer.step(&loss.backward()?, lr, recipe.clip)? {
            return Ok((f64::NAN, count));
        }
        bar.set_message(format!("{} {:.2}", recipe.measure, recipe.measure.of(sum / count)));
        bar.inc(1);
    }
    Ok((sum / count, count))
}

/// Mean NLL of all targets of `items`.
pub(crate) fn evaluate<M: Model>(model: &M, items: &[M::Item], recipe: &Recipe) -> Result<f64> {
    let options = LossOptions::evaluation().with_ignore_index(M::IGNORED);
    let (mut sum, mut count) = (0.0, 0.0);
    for batch in model.batches(items, recipe, Pass::Evaluation)? {
        let (hidden, targets) = batch?;
        let (sum_of_batch, count_of_batch) = model.head().loss(&hidden, &targets, &options)?.sum_and_count()?;
        sum += sum_of_batch;
        count += count_of_batch;
    }
    Ok(sum / count)
}
