//! One epoch of training, and the evaluation that counts every target once.

use super::model::{Model, Part, Pass};
use super::{optimizer::Optimizer, recipe::Recipe, Result};
use indicatif::ProgressBar;
use mos_head::{DropoutMasks, LossOptions, Precision};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::time::Instant;

/// Where training is within an epoch.
pub(crate) struct Progress<S> {
    /// Number of batches that are done.
    pub(crate) batches: usize,
    /// Sum of the NLLs of their targets, in nats.
    pub(crate) sum: f64,
    /// The sum of the targets' weights.
    pub(crate) count: f64,
    /// Seconds of training.
    pub(crate) seconds: f64,
    /// What passes to the next batch.
    pub(crate) state: S,
}

/// Why training stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The epoch is over.
    Epoch,
    /// A part of the epoch is over, and is to be evaluated.
    Part {
        /// The number of batches of the whole epoch.
        of: usize,
    },
    /// The time is up.
    Paused,
    /// The NLL or a gradient is not finite.
    Diverged,
}

/// Trains on the batches of `items` that are left, or to the next evaluation, or until the time is up. `progress` sums
/// the NLL during the epoch, without label smoothing.
pub(crate) fn train_epoch<M: Model>(
    model: &M,
    optimizer: &mut Optimizer,
    items: &[M::Item],
    (epoch, recipe): (usize, &Recipe),
    progress: &mut Progress<M::State>,
    until: Option<Instant>,
    bar: &ProgressBar,
) -> Result<End> {
    let precision = if recipe.bf16_products { Precision::Bf16Products } else { Precision::Full };
    let options = LossOptions::new().with_ignore_index(M::IGNORED).with_label_smoothing(recipe.label_smoothing);
    let options = options.with_precision(precision);
    let batches = model.batches(items, recipe, Pass::Training { epoch });
    bar.set_length(batches.len() as u64);
    let (mut gradients, mut first) = (None, progress.batches);
    for (i, batch) in batches.iter().enumerate().skip(progress.batches) {
        let Part { share, is_last, lr_factor } = model.part(batch);
        let mut rng = masks(recipe.seed, epoch, i);
        let forward = model.forward(items, batch, &mut progress.state, Some(&mut rng))?;
        let options = options.clone().with_dropout(DropoutMasks::Seeded(rng.random()));
        let options = model.options(options, &mut rng)?;
        let loss = model.head().loss(&forward.hidden, &forward.targets, &options)?;
        let (sum_of_batch, count_of_batch) = loss.sum_and_count()?;
        progress.sum += match recipe.label_smoothing > 0.0 {
            true => f64::from(loss.nll.sum_all()?.to_scalar::<f32>()?),
            false => sum_of_batch,
        };
        progress.count += count_of_batch;
        if !progress.sum.is_finite() {
            return Ok(End::Diverged);
        }
        let of_batch = match &forward.penalty {
            Some(penalty) => loss.backward_with(penalty)?,
            None => loss.backward()?,
        };
        gradients = Some(optimizer.accumulate(gradients, of_batch, share)?);
        progress.batches = i + 1;
        bar.set_position(progress.batches as u64);
        let Some(of_step) = gradients.take_if(|_| is_last) else { continue };
        let lr = recipe.lr_at(optimizer.steps(), epoch as f64 + first as f64 / batches.len() as f64) * lr_factor;
        let part = |batches_done: usize| batches_done * recipe.evaluations / batches.len();
        let is_part = progress.batches < batches.len() && part(progress.batches) > part(first);
        first = progress.batches;
        if !optimizer.step(&of_step, lr, recipe.clip)? {
            return Ok(End::Diverged);
        }
        let mean = recipe.measure.of(progress.sum / progress.count);
        bar.set_message(format!("{} {mean:.2}", recipe.measure));
        if is_part {
            return Ok(End::Part { of: batches.len() });
        }
        if progress.batches < batches.len() && until.is_some_and(|until| Instant::now() >= until) {
            return Ok(End::Paused);
        }
    }
    Ok(End::Epoch)
}

/// The generator of the masks of one batch, so that training can resume anywhere.
fn masks(seed: u64, epoch: usize, batch: usize) -> StdRng {
    let mut bytes = [0; 32];
    for (bytes, number) in bytes.chunks_mut(8).zip([seed, epoch as u64, batch as u64]) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    StdRng::from_seed(bytes)
}

/// Mean NLL of all targets of `items`, in nats.
pub fn evaluate<M: Model>(model: &M, items: &[M::Item], recipe: &Recipe) -> Result<f64> {
    let options = LossOptions::evaluation().with_ignore_index(M::IGNORED);
    let head = model.head().frozen()?;
    let (mut sum, mut count) = (0.0, 0.0);
    let mut state = model.start(recipe, Pass::Evaluation)?;
    for batch in model.batches(items, recipe, Pass::Evaluation) {
        let forward = model.forward(items, &batch, &mut state, None)?;
        let loss = head.loss(&forward.hidden, &forward.targets, &options)?;
        let (sum_of_batch, count_of_batch) = loss.sum_and_count()?;
        sum += sum_of_batch;
        count += count_of_batch;
    }
    Ok(sum / count)
}
