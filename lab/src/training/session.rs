//! The training of one head, from the start or a checkpoint to the last epoch.

use super::model::{Model, Pass};
use super::optimizer::{Optimizer, OptimizerKind};
use super::train::{evaluate_on, train_epoch, End, Epoch, Progress};
use super::{leg::Leg, ranks::Ranks, recipe::Recipe, results};
use crate::layers::{init::sorted, Checkpoint, HeadKind};
use crate::{data::Data, show::progress, Result};
use indicatif::ProgressBar;
use std::path::Path;
use std::time::Instant;

/// A session is the training of one head.
pub struct Session<M: Model> {
    /// The head.
    pub kind: HeadKind,
    /// The model. Once the optimizer averages, the variables are its average.
    pub model: M,
    /// The data.
    pub data: Data<M::Item>,
    /// Mean NLL of each epoch on the training data (during the epoch) and on the validation data (after it), in nats.
    pub history: Vec<[f64; 2]>,
    /// The epoch in which training diverged: the perplexity or a gradient was not finite.
    pub diverged: Option<usize>,
    recipe: Recipe,
    ranks: Ranks,
    optimizer: Optimizer,
    /// An epoch that is not over.
    progress: Option<Progress<M::State>>,
    /// Mean NLL on the validation data with the current variables, once it is known.
    valid_nll: Option<f64>,
    /// Mean NLL on the validation data of the model that finetuning starts from.
    start_nll: Option<f64>,
    /// Whether finetuning has come to its end.
    is_finetuned: bool,
    targets: f64,
    seconds: f64,
    /// The seconds of training by this process.
    leg_seconds: f64,
}

/// The results of one epoch.
struct EpochResults {
    train_nll: f64,
    valid_nll: f64,
    seconds: f64,
}

impl<M: Model> Session<M> {
    /// Begins training from the start.
    pub fn new(kind: HeadKind, model: M, data: Data<M::Item>, recipe: &Recipe) -> Result<Self> {
        for (flag, is_set) in [("--finetune", recipe.finetune), ("--nonmono", recipe.awd.nonmono.is_some())] {
            if is_set && recipe.optimizer != OptimizerKind::Sgd {
                return Err(format!("{flag} averages the parameters of SGD: it needs --optimizer sgd").into());
            }
        }
        let weight_decay = recipe.awd.weight_decay.unwrap_or(0.0);
        let clipped = if recipe.clip_lstm { "lstm." } else { "" };
        if !sorted(model.varmap()).iter().any(|(name, _)| name.starts_with(clipped)) {
            return Err("--clip-lstm is for a model whose LSTM has variables `lstm.*`, as language models have".into());
        }
        let mut optimizer = Optimizer::new(recipe.optimizer, weight_decay, model.varmap())?.with_clipped(clipped);
        if recipe.average > 0 && (recipe.finetune || recipe.awd.nonmono.is_some()) {
            return Err("--average is another average than that of --finetune and --nonmono".into());
        }
        if recipe.finetune {
            optimizer.start_averaging()?;
        } else if recipe.average > 0 {
            optimizer.start_polynomial_averaging(recipe.average)?;
        }
        Ok(Self {
            kind,
            model,
            data,
            history: vec![],
            diverged: None,
            recipe: *recipe,
            ranks: Ranks::default(),
            optimizer,
            progress: None,
            valid_nll: None,
            start_nll: None,
            is_finetuned: false,
            targets: 0.0,
            seconds: 0.0,
            leg_seconds: 0.0,
        })
    }

    /// Trains by several processes, of which the first writes the files.
    pub fn with_ranks(self, ranks: &Ranks) -> Self {
        Self { ranks: ranks.clone(), ..self }
    }

    /// Trains the remaining epochs; prints a line for each and appends it to `results`. The file `save` has the epoch
    /// with the lowest validation NLL, and training ends with its model. The file of `leg` has the state after each
    /// epoch, and when its time is up. Returns whether training has come to its end.
    pub fn run(&mut self, save: Option<&Path>, results: Option<&Path>, leg: Option<&Leg>) -> Result<bool> {
        if self.recipe.finetune && self.start_nll.is_none() {
            self.start_nll = Some(self.valid_nll()?);
            if let Some(path) = save {
                // The model that finetuning starts from is the best so far.
                self.save(path)?;
            }
        }
        let earlier = self.history.iter().map(|[_, valid]| *valid).chain(self.start_nll);
        let mut best = earlier.fold(f64::INFINITY, f64::min);
        let first = self.optimizer.steps();
        while self.history.len() < self.recipe.epochs && self.diverged.is_none() && !self.is_over() {
            let epoch = self.history.len() + 1;
            let (name, measure) = (self.kind.name(), self.recipe.measure);
            let Some(EpochResults { train_nll, valid_nll, seconds }) = self.epoch(leg.map(|leg| leg.until), results)?
            else {
                self.save(&leg.ok_or("a pause without a leg")?.path)?;
                let steps = self.optimizer.steps() - first;
                let each = self.leg_seconds / steps.max(1) as f64;
                self.ranks
                    .print(format_args!("{name:<7}  epoch {epoch:>2}  paused after {steps} steps of {each:.4} s"));
                return Ok(false);
            };
            self.append(results, epoch as f64, [train_nll, valid_nll], seconds)?;
            if self.diverged.is_some() {
                let why = "the perplexity or a gradient is not finite";
                self.ranks.print(format_args!("{name:<7}  epoch {epoch:>2}  diverged: {why}"));
                return Ok(true);
            }
            self.ranks.print(format_args!(
                "{name:<7}  epoch {epoch:>2}  {measure}: train {:8.3}  valid {:8.3}  ({seconds:.1} s)",
                measure.shown(train_nll),
                measure.shown(valid_nll),
            ));
            if valid_nll < best {
                best = valid_nll;
                if let Some(path) = save {
                    self.save(path)?;
                }
            }
            // The file of the leg is written after all else that belongs to the epoch.
            if let Some(leg) = leg {
                self.save(&leg.path)?;
            }
        }
        let is_argmax = self.diverged.is_some() || self.valid_nll()? <= best;
        let is_saved = self.ranks.first_finds(save.is_some_and(Path::exists))?;
        if let Some(path) = save.filter(|_| !is_argmax && is_saved) {
            Checkpoint::load(path, self.model.device())?.restore_variables(self.model.varmap())?;
            self.valid_nll = None;
        }
        Ok(true)
    }

    /// Returns whether training has come to an end before its last epoch: finetuning no longer improves, or no epoch
    /// has for as many as the recipe has patience.
    fn is_over(&self) -> bool {
        let lowest = |nlls: &[[f64; 2]]| nlls.iter().fold(f64::INFINITY, |least, [_, valid]| least.min(*valid));
        let (before, last) = self.history.split_at(self.history.len().saturating_sub(self.recipe.patience));
        self.is_finetuned || self.recipe.patience > 0 && !before.is_empty() && lowest(last) >= lowest(before)
    }

    /// Appends the line of an evaluation to the file of `--results`.
    fn append(&self, path: Option<&Path>, epochs: f64, nlls: [f64; 2], seconds: f64) -> Result<()> {
        let Some(path) = path.filter(|_| self.ranks.is_first()) else { return Ok(()) };
        let at = results::At { epochs, steps: self.optimizer.steps(), seconds };
        results::append(path, self.kind.name(), at, nlls, self.model.parameters(), &self.recipe)
    }

    /// Trains the rest of an epoch, or `None` if the time is up. Evaluations within the epoch are appended to
    /// `results`.
    fn epoch(&mut self, until: Option<Instant>, results: Option<&Path>) -> Result<Option<EpochResults>> {
        let epoch = self.history.len();
        let bar = if self.ranks.is_first() {
            progress::bar(0, format!("{} epoch {}", self.kind.name(), epoch + 1))
        } else {
            ProgressBar::hidden()
        };
        let mut progress = match self.progress.take() {
            Some(progress) => progress,
            None => self.begin(epoch)?,
        };
        let end = loop {
            let start = Instant::now();
            let (model, recipe) = (&self.model, &self.recipe);
            self.optimizer.swap()?;
            let (items, ranks) = (&self.data.train[..], &self.ranks);
            let this = Epoch { number: epoch, items, ranks, recipe, until };
            let end = train_epoch(model, &mut self.optimizer, &this, &mut progress, &bar)?;
            self.optimizer.swap()?;
            let seconds = start.elapsed().as_secs_f64();
            progress.seconds += seconds;
            self.leg_seconds += seconds;
            self.valid_nll = None;
            let End::Part { batches } = end else { break end };
            let nlls = [self.data.per_word[0] * progress.sum / progress.count, self.evaluate_valid()?];
            let epochs = epoch as f64 + progress.batches as f64 / batches as f64;
            self.append(results, epochs, nlls, progress.seconds)?;
        };
        bar.finish_and_clear();
        if end == End::Paused {
            self.model.share_state(&mut progress.state, &self.ranks)?;
            self.progress = Some(progress);
            return Ok(None);
        }
        let Progress { sum, count, seconds, .. } = progress;
        self.seconds += seconds;
        let [per_word, _] = self.data.per_word;
        self.targets += count / per_word;
        let valid_nll = if end == End::Epoch { self.evaluate_valid()? } else { f64::NAN };
        let valid_nll = if valid_nll.exp().is_finite() { valid_nll } else { f64::NAN };
        self.valid_nll = Some(valid_nll);
        if valid_nll.is_nan() {
            self.diverged = Some(epoch + 1);
            return Ok(Some(EpochResults { train_nll: f64::NAN, valid_nll, seconds }));
        }
        if self.no_longer_improves(valid_nll) {
            if self.recipe.finetune {
                self.is_finetuned = true;
            } else if !self.optimizer.is_averaging() {
                self.optimizer.start_averaging()?;
                let (name, next) = (self.kind.name(), epoch + 2);
                self.ranks.print(format_args!("{name:<7}  the parameters are averaged from epoch {next} on"));
            }
        }
        let train_nll = per_word * sum / count;
        self.history.push([train_nll, valid_nll]);
        Ok(Some(EpochResults { train_nll, valid_nll, seconds }))
    }

    /// Returns the progress of an epoch before its first batch.
    fn begin(&self, epoch: usize) -> Result<Progress<M::State>> {
        let state = self.model.start(&self.recipe, Pass::Training { epoch })?;
        Ok(Progress { batches: 0, sum: 0.0, count: 0.0, seconds: 0.0, state })
    }

    /// Returns whether the non-monotonic criterion (Merity et al., 2018) holds: the NLL is above the lowest of those
    /// more than `nonmono` epochs before.
    fn no_longer_improves(&self, valid_nll: f64) -> bool {
        let Some(nonmono) = self.recipe.awd.nonmono else { return false };
        let before = self.history.len().saturating_sub(nonmono);
        self.recipe.optimizer == OptimizerKind::Sgd && self.history[..before].iter().any(|[_, v]| valid_nll > *v)
    }

    /// Returns the mean NLL per word on the validation data with the current variables; NaN after divergence.
    pub fn valid_nll(&self) -> Result<f64> {
        self.valid_nll.map_or_else(|| self.evaluate_valid(), Ok)
    }

    fn evaluate_valid(&self) -> Result<f64> {
        let [_, per_word] = self.data.per_word;
        Ok(per_word * self.evaluate(&self.data.valid)?)
    }

    /// Returns the mean NLL of the targets of any data with the current variables.
    pub fn evaluate(&self, items: &[M::Item]) -> Result<f64> {
        evaluate_on(&self.ranks, &self.model, items, &self.recipe)
    }

    /// Returns the words per second of training, also before it was resumed; `None` if there was none.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.targets > 0.0).then(|| self.targets / self.seconds)
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.model.settings();
        settings.push(("optimizer", format!("{:?}", self.recipe.optimizer).to_lowercase()));
        settings
    }

    /// Returns variables and optimizer state, with all that is needed to resume.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.model.varmap());
        checkpoint.tensors.extend(self.optimizer.state());
        checkpoint.metadata.extend(self.optimizer.counters());
        self.model.add_constants(&mut checkpoint)?;
        let mut metadata = self.settings();
        metadata.extend(self.model.notes()?);
        metadata.extend([
            ("corpus", self.data.name.clone()),
            ("digest", self.data.digest.clone()),
            ("epoch", self.history.len().to_string()),
            ("seed", self.recipe.seed.to_string()),
            ("lr", self.recipe.lr.to_string()),
            ("decay", self.recipe.decay.to_string()),
            ("training", self.recipe.training_flags().join("\n")),
            ("history", serde_json::to_string(&self.history)?),
            ("targets", self.targets.to_string()),
            ("seconds", self.seconds.to_string()),
        ]);
        checkpoint.metadata.extend(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)));
        if let Some(nll) = self.start_nll {
            checkpoint.metadata.insert("start_nll".into(), nll.to_string());
            checkpoint.metadata.insert("finetuned".into(), self.is_finetuned.to_string());
        }
        if let Some(Progress { batches, sum, count, seconds, state }) = &self.progress {
            let numbers = [("sum", sum), ("count", count), ("seconds", seconds)];
            let numbers = numbers.map(|(key, value)| (format!("progress.{key}"), value.to_string()));
            checkpoint.metadata.extend(numbers);
            checkpoint.metadata.insert("progress.batches".into(), batches.to_string());
            checkpoint.metadata.insert("progress.recipe".into(), self.recipe.course());
            checkpoint.tensors.extend(self.model.save_state(state));
        }
        Ok(checkpoint)
    }

    /// Writes the checkpoint, once; every rank finds the file afterwards.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        if self.ranks.is_first() {
            self.checkpoint()?.save(path)?;
        }
        self.ranks.wait()
    }

    /// Checks that a leg goes on with the flags of training of the legs before it. Otherwise a finished training would
    /// answer for another one.
    pub(crate) fn require_course(&self, checkpoint: &Checkpoint, path: &Path) -> Result<()> {
        let (stored, here) = (checkpoint.get::<String>("training")?, self.recipe.training_flags());
        let (stored, here): (Vec<&str>, Vec<&str>) =
            (stored.lines().collect(), here.iter().map(|flag| &**flag).collect());
        let only = |flags: &[&str], others: &[&str]| {
            let found: Vec<_> = flags.iter().filter(|flag| !others.contains(flag)).copied().collect();
            found.join(" ")
        };
        if stored == here {
            return Ok(());
        }
        let (path, stored, here) = (path.display(), only(&stored, &here), only(&here, &stored));
        Err(format!("{path} has the state of a training with {stored}, but this run has {here}: remove it").into())
    }

    /// Restores the state of the checkpoint, which must have the same corpus, head, sizes and optimizer, and evaluates
    /// it.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.require_corpus(&self.data.name, &self.data.digest)?;
        checkpoint.require_flags(&self.settings())?;
        checkpoint.restore_variables(self.model.varmap())?;
        self.optimizer.load_state(checkpoint)?;
        self.history = serde_json::from_str(&checkpoint.get::<String>("history")?)?;
        self.targets = checkpoint.optional("targets")?.unwrap_or(0.0);
        self.seconds = checkpoint.optional("seconds")?.unwrap_or(0.0);
        self.start_nll = checkpoint.optional("start_nll")?;
        if self.start_nll.is_some() != self.recipe.finetune {
            let with = |finetune| if finetune { "with" } else { "without" };
            let (stored, here) = (with(!self.recipe.finetune), with(self.recipe.finetune));
            return Err(format!("the checkpoint was trained {stored} --finetune, but this run is {here} it").into());
        }
        let (stored, here) = (self.optimizer.polynomial_power().unwrap_or(0), self.recipe.average);
        if stored != here {
            return Err(format!("the checkpoint was trained with --average {stored}, but this run has {here}").into());
        }
        self.is_finetuned = checkpoint.optional("finetuned")?.unwrap_or(false);
        let epoch = self.history.len();
        self.progress = None;
        if let Some(batches) = checkpoint.optional("progress.batches")? {
            let (stored, course) = (checkpoint.get::<String>("progress.recipe")?, self.recipe.course());
            if stored != course {
                return Err(format!("the checkpoint was paused with {stored}, but this run has {course}").into());
            }
            let mut progress = self.begin(epoch)?;
            progress.batches = batches;
            (progress.sum, progress.count) = (checkpoint.get("progress.sum")?, checkpoint.get("progress.count")?);
            progress.seconds = checkpoint.get("progress.seconds")?;
            self.model.load_state(&mut progress.state, &checkpoint.tensors)?;
            self.progress = Some(progress);
        }
        let valid_nll = self.evaluate_valid()?;
        self.valid_nll = Some(valid_nll);
        let (name, measure) = (self.kind.name(), self.recipe.measure);
        let within = if self.progress.is_some() { format!(", in epoch {}", epoch + 1) } else { String::new() };
        let valid = measure.shown(valid_nll);
        self.ranks.print(format_args!("{name:<7}  resumed after epoch {epoch}{within}  {measure}: valid {valid:8.3}"));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
