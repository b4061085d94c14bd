//! The training of one head, from the start or a checkpoint to the last epoch.

use super::model::{Data, Model};
use super::train::{evaluate, train_epoch};
use super::{checkpoint::Checkpoint, head::HeadKind, optimizer::Optimizer, progress, recipe::Recipe, results, Result};
use std::path::Path;
use std::time::Instant;

pub(crate) struct Session<M: Model> {
    pub(crate) kind: HeadKind,
    pub(crate) model: M,
    pub(crate) data: Data<M::Item>,
    /// Mean NLL of each epoch on the training data (during the epoch) and on the validation data (after it).
    pub(crate) history: Vec<[f64; 2]>,
    /// The epoch in which training diverged: the perplexity or a gradient was not finite.
    pub(crate) diverged: Option<usize>,
    recipe: Recipe,
    optimizer: Optimizer,
    /// Mean NLL on the validation data with the current variables, once it is known.
    valid_nll: Option<f64>,
    targets: f64,
    seconds: f64,
}

impl<M: Model> Session<M> {
    pub(crate) fn new(kind: HeadKind, model: M, data: Data<M::Item>, recipe: &Recipe) -> Result<Self> {
        let optimizer = Optimizer::new(recipe.optimizer, model.varmap())?;
        Ok(Self {
            kind,
            model,
            data,
            history: vec![],
            diverged: None,
            recipe: *recipe,
            optimizer,
            valid_nll: None,
            targets: 0.0,
            seconds: 0.0,
        })
    }

    /// Trains the remaining epochs; prints a line for each and appends it to `results`. The file `save` has the epoch
    /// with the lowest validation NLL.
    pub(crate) fn run(&mut self, save: Option<&Path>, results: Option<&Path>) -> Result<()> {
        let mut best = self.history.iter().map(|[_, valid]| *valid).fold(f64::INFINITY, f64::min);
        while self.history.len() < self.recipe.epochs && self.diverged.is_none() {
            let epoch = self.history.len() + 1;
            let before = self.seconds;
            let (train_nll, valid_nll) = self.epoch()?;
            let seconds = self.seconds - before;
            let (name, measure) = (self.kind.name(), self.recipe.measure);
            if let Some(path) = results {
                let nlls = [train_nll, valid_nll];
                results::append(path, name, epoch, nlls, seconds, self.model.parameters(), &self.recipe)?;
            }
            if self.diverged.is_some() {
                println!("{name:<7}  epoch {epoch:>2}  diverged: the perplexity or a gradient is not finite");
                break;
            }
            println!(
                "{name:<7}  epoch {epoch:>2}  {measure}: train {:8.3}  valid {:8.3}  ({seconds:.1} s)",
                measure.of(train_nll),
                measure.of(valid_nll),
            );
            if valid_nll < best {
                best = valid_nll;
                if let Some(path) = save {
                    self.checkpoint()?.save(path)?;
                }
            }
        }
        Ok(())
    }

    /// Trains one epoch and returns its NLLs on the training and the validation data.
    fn epoch(&mut self) -> Result<(f64, f64)> {
        let epoch = self.history.len();
        let bar = progress::bar(0, format!("{} epoch {}", self.kind.name(), epoch + 1));
        let start = Instant::now();
        let (model, recipe) = (&self.model, &self.recipe);
        let (train_nll, targets) = train_epoch(model, &mut self.optimizer, &self.data.train, epoch, recipe, &bar)?;
        self.seconds += start.elapsed().as_secs_f64();
        self.targets += targets;
        bar.finish_and_clear();
        let valid_nll = if train_nll.is_finite() { self.evaluate(&self.data.valid)? } else { f64::NAN };
        let valid_nll = if valid_nll.exp().is_finite() { valid_nll } else { f64::NAN };
        self.valid_nll = Some(valid_nll);
        match valid_nll.is_nan() {
            true => self.diverged = Some(epoch + 1),
            false => self.history.push([train_nll, valid_nll]),
        }
        Ok((train_nll, valid_nll))
    }

    /// NLL on the validation data with the current variables; NaN after divergence.
    pub(crate) fn valid_nll(&self) -> Result<f64> {
        self.valid_nll.map_or_else(|| self.evaluate(&self.data.valid), Ok)
    }

    /// NLL on any data with the current variables.
    pub(crate) fn evaluate(&self, items: &[M::Item]) -> Result<f64> {
        evaluate(&self.model, items, &self.recipe)
    }

    /// Targets per second of training; `None` if this run trained no epoch.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        (self.targets > 0.0).then(|| self.targets / self.seconds)
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.model.settings();
        settings.push(("optimizer", format!("{:?}", self.recipe.optimizer).to_lowercase()));
        settings
    }

    /// Variables and optimizer state, with all that is needed to resume.
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.model.varmap(), &self.optimizer);
        let mut metadata = self.settings();
        metadata.extend(self.model.notes()?);
        metadata.extend([
            ("corpus", self.data.name.clone()),
            ("digest", self.data.digest.clone()),
            ("epoch", self.history.len().to_string()),
            ("seed", self.recipe.seed.to_string()),
            ("lr", self.recipe.lr.to_string()),
            ("decay", self.recipe.decay.to_string()),
            ("history", serde_json::to_string(&self.history)?),
        ]);
        checkpoint.metadata.extend(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)));
        Ok(checkpoint)
    }

    /// Restores the state of the checkpoint, which must have the same corpus, head, sizes and optimizer, and evaluates
    /// it.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.require_corpus(&self.data.name, &self.data.digest)?;
        for (flag, value) in self.settings() {
            checkpoint.require_flag(flag, &value)?;
        }
        checkpoint.restore_variables(self.model.varmap())?;
        checkpoint.restore_optimizer(&mut self.optimizer)?;
        self.history = serde_json::from_str(&checkpoint.get::<String>("history")?)?;
        let valid_nll = self.evaluate(&self.data.valid)?;
        self.valid_nll = Some(valid_nll);
        let (name, measure) = (self.kind.name(), self.recipe.measure);
        let epoch = self.history.len();
        println!("{name:<7}  resumed after epoch {epoch}  {measure}: valid {:8.3}", measure.of(valid_nll));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::language_model::LanguageModel;
    use super::super::optimizer::OptimizerKind;
    use super::super::sizes::{InitialValues, Sizes};
    use super::*;
    use candle_core::Device;
    use std::path::PathBuf;

    /// The squares modulo 23: the next id depends on the last two.
    fn data(targets: usize) -> Data<u32> {
        let text = |targets| (0..=targets).map(|i| (i * i % 23) as u32).collect();
        Data::new("squares".into(), ["a", "b"], text(targets), text(targets / 9))
    }

    fn session(epochs: usize, optimizer: OptimizerKind, components: usize) -> Session<LanguageModel> {
        let lr = if optimizer == OptimizerKind::Adam { 0.01 } else { 1.0 };
        let (hidden, context, batch, bptt) = (6, Some(5), 4, 8);
        let recipe = Recipe {
            epochs,
            optimizer,
            components,
            lr,
            hidden,
            context,
            batch,
            bptt,
            warmup: 10,
            clip: 0.5,
            layers: 2,
            seed: 3,
            ..Recipe::BASE
        };
        with_recipe(recipe)
    }

    fn with_recipe(recipe: Recipe) -> Session<LanguageModel> {
        let (sizes, values) = (Sizes::new(&recipe, 23), InitialValues::Small);
        let model = LanguageModel::new(HeadKind::Mos, sizes, values, &recipe, &Device::Cpu).expect("valid sizes");
        Session::new(HeadKind::Mos, model, data(999), &recipe).expect("valid sizes")
    }

    fn temporary(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("session_{name}_{}.safetensors", std::process::id()))
    }

    fn load(path: &Path) -> Checkpoint {
        Checkpoint::load(path, &Device::Cpu).expect("loads")
    }

    #[test]
    fn resumed_training_equals_uninterrupted_training() {
        for optimizer in [OptimizerKind::Sgd, OptimizerKind::Adam] {
            let mut whole = session(2, optimizer, 2);
            whole.run(None, None).expect("trains");

            let path = temporary(&format!("{optimizer:?}"));
            session(1, optimizer, 2).run(Some(&path), None).expect("trains and saves");
            let mut second = session(2, optimizer, 2);
            second.restore(&load(&path)).expect("fits");
            assert_eq!(second.history.len(), 1);
            second.run(None, None).expect("trains");
            assert_eq!(second.history, whole.history, "{optimizer:?}");
            std::fs::remove_file(path).expect("was just written");
        }
    }

    #[test]
    fn a_checkpoint_of_other_components_is_an_error_that_names_the_flag() {
        let checkpoint = session(1, OptimizerKind::Adam, 2).checkpoint().expect("copies");
        let error = session(1, OptimizerKind::Adam, 3).restore(&checkpoint).expect_err("must fail").to_string();
        assert!(error.contains("--components 2") && error.contains("--components 3"), "{error}");
    }

    #[test]
    fn a_checkpoint_of_another_corpus_is_an_error_that_names_both() {
        let checkpoint = session(1, OptimizerKind::Adam, 2).checkpoint().expect("copies");
        let mut other = session(1, OptimizerKind::Adam, 2);
        other.data = Data::new("others".into(), ["a", "b"], other.data.train.clone(), vec![1, 2, 3]);
        let error = other.restore(&checkpoint).expect_err("must fail").to_string();
        assert!(error.contains("squares") && error.contains("others"), "{error}");
    }

    #[test]
    fn a_resumed_model_is_evaluated_anew() {
        let mut first = session(1, OptimizerKind::Adam, 2);
        first.run(None, None).expect("trains");
        let mut checkpoint = first.checkpoint().expect("copies");
        checkpoint.metadata.insert("history".into(), "[[0.1, 0.1]]".into());
        let mut second = session(1, OptimizerKind::Adam, 2);
        second.restore(&checkpoint).expect("fits");
        second.run(None, None).expect("nothing to train");
        assert_eq!(second.valid_nll().expect("known"), first.valid_nll().expect("known"));
    }

    #[test]
    fn a_diverged_model_leaves_the_last_good_checkpoint() {
        let path = temporary("diverged");
        let mut session = session(1, OptimizerKind::Sgd, 2);
        session.run(Some(&path), None).expect("trains and saves");
        let good = std::fs::read(&path).expect("was just written");
        session.recipe = Recipe { epochs: 5, lr: 1e30, clip: 0.0, ..session.recipe };
        session.run(Some(&path), None).expect("divergence is no error here");
        assert_eq!((session.diverged, session.history.len()), (Some(2), 1));
        assert!(session.valid_nll().expect("known").is_nan());
        assert_eq!(std::fs::read(&path).expect("still exists"), good);
        std::fs::remove_file(path).expect("was just written");
    }

    #[test]
    fn a_worse_epoch_leaves_the_best_checkpoint() {
        let path = temporary("worse");
        let mut session = session(3, OptimizerKind::Adam, 2);
        session.run(Some(&path), None).expect("trains and saves");
        let good = std::fs::read(&path).expect("was just written");
        // Steps that are far too long, but finite.
        session.recipe = Recipe { epochs: 4, lr: 3.0, decay: 1.0, ..session.recipe };
        session.run(Some(&path), None).expect("trains");
        assert_eq!(session.history.len(), 4);
        assert!(session.history[3][1] > session.history[2][1], "{:?}", session.history);
        assert_eq!(std::fs::read(&path).expect("still exists"), good);
        std::fs::remove_file(path).expect("was just written");
    }

    #[test]
    fn training_lowers_the_loss() {
        let mut session = session(2, OptimizerKind::Adam, 2);
        session.data = data(9999);
        let before = session.valid_nll().expect("evaluates");
        session.run(None, None).expect("trains");
        let after = session.valid_nll().expect("evaluates");
        assert!(after < before - 0.3, "{before} -> {after}");
    }
}
