//! One epoch of training, and the evaluation that counts every target once.

use super::model::{Model, Pass};
use super::{optimizer::Optimizer, ranks::Ranks, recipe::Recipe};
use crate::Result;
use indicatif::ProgressBar;
use mos_head::{DropoutMasks, LossOptions, Precision};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::time::Instant;

/// Training is at this place within an epoch.
pub(crate) struct Progress<S> {
    /// The number of batches that are done.
    pub(crate) batches: usize,
    /// The sum of the NLLs of their targets, in nats.
    pub(crate) sum: f64,
    /// The sum of the targets' weights.
    pub(crate) count: f64,
    /// The seconds of training.
    pub(crate) seconds: f64,
    /// The state that passes to the next batch.
    pub(crate) state: S,
}

/// Training stopped for one of these reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The epoch is over.
    Epoch,
    /// A part of the epoch is over, and is to be evaluated.
    Part {
        /// The number of batches of the whole epoch.
        batches: usize,
    },
    /// The time is up.
    Paused,
    /// The NLL or a gradient is not finite.
    Diverged,
}

/// An epoch of training on some data by some ranks.
pub(crate) struct Epoch<'a, T> {
    /// The number of the epoch.
    pub number: usize,
    /// The data.
    pub items: &'a [T],
    /// The ranks that train.
    pub ranks: &'a Ranks,
    /// The recipe.
    pub recipe: &'a Recipe,
    /// The time at which training stops, if it is limited.
    pub until: Option<Instant>,
}

/// Trains on the batches of the epoch that are left, or to the next evaluation, or until the time of the first rank is
/// up. A rank computes its own parts of each step. `progress` sums the NLL during the epoch, without label smoothing;
/// its state is the one of the rank's own parts.
pub(crate) fn train_epoch<M: Model>(
    model: &M,
    optimizer: &mut Optimizer,
    epoch: &Epoch<M::Item>,
    progress: &mut Progress<M::State>,
    bar: &ProgressBar,
) -> Result<End> {
    let Epoch { number, items, ranks, recipe, until } = *epoch;
    let precision = if recipe.bf16_products { Precision::Bf16Products } else { Precision::Full };
    let options = LossOptions::new().with_ignore_index(M::IGNORED).with_label_smoothing(recipe.label_smoothing);
    let options = options.with_precision(precision);
    let batches = model.batches(items, recipe, Pass::Training { epoch: number });
    bar.set_length(batches.len() as u64);
    for step in batches[progress.batches..].split_inclusive(|batch| model.part(batch).is_last) {
        let first = progress.batches;
        // What was added up before counts once, at the first rank.
        let [mut sum, mut count] = if ranks.is_first() { [progress.sum, progress.count] } else { [0.0; 2] };
        let mut gradients = None;
        for part in ranks.own(step.len()) {
            let batch = &step[part];
            let mut rng = masks(recipe.seed, number, first + part);
            let forward = model.forward(items, batch, &mut progress.state, Some(&mut rng))?;
            let options = options.clone().with_dropout(DropoutMasks::Seeded(rng.random()));
            let options = model.options(options, &mut rng)?;
            let loss = model.head().loss(&forward.hidden, &forward.targets, &options)?;
            let (batch_sum, batch_count) = loss.sum_and_count()?;
            sum += if recipe.label_smoothing > 0.0 {
                f64::from(loss.nll.sum_all()?.to_scalar::<f32>()?)
            } else {
                batch_sum
            };
            count += batch_count;
            if !sum.is_finite() {
                break;
            }
            let batch_gradients = match &forward.penalty {
                Some(penalty) => loss.backward_with(penalty)?,
                None => loss.backward()?,
            };
            gradients = Some(optimizer.accumulate(gradients, batch_gradients, model.part(batch).share)?);
            bar.set_position((first + part + 1) as u64);
        }
        let is_time_up = ranks.is_first() && until.is_some_and(|until| Instant::now() >= until);
        let sums = ranks.sums([sum, count, f64::from(u8::from(is_time_up))])?;
        (progress.sum, progress.count) = (sums[0], sums[1]);
        if !progress.sum.is_finite() {
            return Ok(End::Diverged);
        }
        let mut gradients = gradients.ok_or("a step has fewer parts than there are processes")?;
        optimizer.all_reduce(&mut gradients, ranks)?;
        progress.batches = first + step.len();
        let lr = recipe.lr_at(optimizer.steps(), number as f64 + first as f64 / batches.len() as f64);
        let lr = lr * model.part(&step[0]).lr_factor;
        if !optimizer.step(&gradients, lr, recipe.clip)? {
            return Ok(End::Diverged);
        }
        let mean = recipe.measure.shown(progress.sum / progress.count);
        bar.set_message(format!("{} {mean:.2}", recipe.measure));
        let part = |batches_done: usize| batches_done * recipe.evaluations / batches.len();
        if progress.batches < batches.len() && part(progress.batches) > part(first) {
            return Ok(End::Part { batches: batches.len() });
        }
        if progress.batches < batches.len() && sums[2] > 0.0 {
            return Ok(End::Paused);
        }
    }
    Ok(End::Epoch)
}

/// Returns the generator of the masks of one batch, so that training can resume anywhere.
fn masks(seed: u64, epoch: usize, batch: usize) -> StdRng {
    let mut bytes = [0; 32];
    for (bytes, number) in bytes.chunks_mut(8).zip([seed, epoch as u64, batch as u64]) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    StdRng::from_seed(bytes)
}

/// Returns the mean NLL of all targets of `items`, in nats.
pub fn evaluate<M: Model>(model: &M, items: &[M::Item], recipe: &Recipe) -> Result<f64> {
    evaluate_on(&Ranks::default(), model, items, recipe)
}

/// Computes the same as `evaluate`, where each rank computes its own parts.
pub(crate) fn evaluate_on<M: Model>(ranks: &Ranks, model: &M, items: &[M::Item], recipe: &Recipe) -> Result<f64> {
    let options = LossOptions::evaluation().with_ignore_index(M::IGNORED);
    let head = model.head().frozen()?;
    let (mut sum, mut count) = (0.0, 0.0);
    let pass = Pass::Evaluation { parts: ranks.count() };
    let mut state = model.start(recipe, pass)?;
    for parts in model.batches(items, recipe, pass).split_inclusive(|batch| model.part(batch).is_last) {
        for batch in &parts[ranks.own(parts.len())] {
            let forward = model.forward(items, batch, &mut state, None)?;
            let loss = head.loss(&forward.hidden, &forward.targets, &options)?;
            let (batch_sum, batch_count) = loss.sum_and_count()?;
            sum += batch_sum;
            count += batch_count;
        }
    }
    let [sum, count] = ranks.sums([sum, count])?;
    Ok(sum / count)
}
