//! The training of one head, from the start or a checkpoint to the last epoch.

use super::batches::Batches;
use super::language_model::{LanguageModel, Sizes};
use super::train::{evaluate, train_epoch, Recipe};
use super::{checkpoint::Checkpoint, head::HeadKind, optimizer::Optimizer, plot::Curve, progress, Result};
use candle_core::Device;
use std::path::Path;
use std::time::Instant;

pub(crate) struct Session {
    pub(crate) kind: HeadKind,
    pub(crate) model: LanguageModel,
    /// Mean NLL of each epoch on the training text (during the epoch) and on the validation text (after it).
    pub(crate) history: Vec<[f64; 2]>,
    sizes: Sizes,
    recipe: Recipe,
    optimizer: Optimizer,
    tokens: usize,
    seconds: f64,
}

impl Session {
    pub(crate) fn new(kind: HeadKind, sizes: Sizes, recipe: &Recipe, device: &Device) -> Result<Self> {
        let model = LanguageModel::new(kind, sizes, recipe.dropout, recipe.start, device)?;
        let optimizer = Optimizer::new(recipe.optimizer, model.varmap())?;
        let recipe = recipe.clone();
        Ok(Self { kind, model, history: vec![], sizes, recipe, optimizer, tokens: 0, seconds: 0.0 })
    }

    /// Trains the remaining epochs; prints a line and saves after each.
    pub(crate) fn run(&mut self, train: &[u32], valid: &[u32], save: Option<&Path>) -> Result<()> {
        let (name, measure) = (self.kind.name(), self.recipe.measure);
        while self.history.len() < self.recipe.epochs {
            let epoch = self.history.len();
            let steps = Batches::new(train, self.recipe.batch, self.recipe.bptt).windows();
            let bar = progress::bar(steps, format!("{name} epoch {}", epoch + 1));
            let start = Instant::now();
            let train_nll = train_epoch(&self.model, &mut self.optimizer, train, epoch, &self.recipe, &bar)?;
            let seconds = start.elapsed().as_secs_f64();
            bar.finish_and_clear();
            self.seconds += seconds;
            self.tokens += train.len() - 1;
            let valid_nll = evaluate(&self.model, valid, self.recipe.bptt)?;
            self.history.push([train_nll, valid_nll]);
            println!(
                "{name:<7}  epoch {:>2}  {measure}: train {:8.3}  valid {:8.3}  ({seconds:.1} s)",
                epoch + 1,
                measure.of(train_nll),
                measure.of(valid_nll),
            );
            if let Some(path) = save {
                self.checkpoint()?.save(path)?;
            }
        }
        Ok(())
    }

    /// NLL on the validation text after the last epoch.
    pub(crate) fn valid_nll(&self, valid: &[u32]) -> Result<f64> {
        match self.history.last() {
            Some([_, valid]) => Ok(*valid),
            None => self.evaluate(valid),
        }
    }

    /// NLL on any text with the current variables.
    pub(crate) fn evaluate(&self, text: &[u32]) -> Result<f64> {
        evaluate(&self.model, text, self.recipe.bptt)
    }

    /// Training speed; `None` if this run trained no epoch.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.seconds)
    }

    /// The validation NLL after each epoch, converted by `value`.
    pub(crate) fn curve(&self, value: impl Fn(f64) -> f64) -> Curve {
        let points = self.history.iter().enumerate();
        Curve {
            name: self.kind.name().into(),
            points: points.map(|(i, [_, valid])| ((i + 1) as f64, value(*valid))).collect(),
        }
    }

    fn shape(&self) -> Vec<(&'static str, String)> {
        let mut shape = self.sizes.head.describe(self.kind);
        shape.extend([
            ("embedding", self.sizes.embedding.to_string()),
            ("layers", self.sizes.layers.to_string()),
            ("optimizer", self.recipe.optimizer.to_string()),
        ]);
        shape
    }

    /// Variables and optimizer state, with all that is needed to resume.
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.model.varmap(), &self.optimizer);
        let mut metadata = self.shape();
        metadata.extend([
            ("epoch", self.history.len().to_string()),
            ("seed", self.recipe.start.seed.to_string()),
            ("lr", self.recipe.lr.to_string()),
            ("decay", self.recipe.decay.to_string()),
            ("history", serde_json::to_string(&self.history)?),
        ]);
        checkpoint.metadata.extend(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)));
        Ok(checkpoint)
    }

    /// Restores the state of the checkpoint, which must have the same head, sizes and optimizer.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        for (key, value) in self.shape() {
            checkpoint.require(key, value)?;
        }
        checkpoint.restore_variables(self.model.varmap())?;
        checkpoint.restore_optimizer(&mut self.optimizer)?;
        let history: String = checkpoint.get("history")?;
        self.history = serde_json::from_str(&history)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::head::{ActivationKind, HeadSizes};
    use super::super::language_model::{InitialValues, Start};
    use super::super::{measure::Measure, optimizer::OptimizerKind};
    use super::*;

    /// The squares modulo 23: the next id depends on the last two.
    fn text(targets: usize) -> Vec<u32> {
        (0..=targets).map(|i| (i * i % 23) as u32).collect()
    }

    fn session(epochs: usize, optimizer: OptimizerKind, components: usize) -> Session {
        let lr = if optimizer == OptimizerKind::Adam { 0.01 } else { 1.0 };
        let start = Start { seed: 3, values: InitialValues::Small };
        let recipe = Recipe {
            epochs,
            batch: 4,
            bptt: 8,
            lr,
            warmup: 10,
            decay: 0.5,
            clip: 0.5,
            optimizer,
            measure: Measure::Perplexity,
            dropout: 0.0,
            start,
        };
        let head = HeadSizes { vocab: 23, hidden: 6, context: 5, components, activation: ActivationKind::Tanh };
        let sizes = Sizes { head, embedding: 6, layers: 2 };
        Session::new(HeadKind::Mos, sizes, &recipe, &Device::Cpu).expect("valid sizes")
    }

    #[test]
    fn resumed_training_equals_uninterrupted_training() {
        let (train, valid) = (text(999), text(111));
        for optimizer in [OptimizerKind::Sgd, OptimizerKind::Adam] {
            let mut whole = session(2, optimizer, 2);
            whole.run(&train, &valid, None).expect("trains");

            let folder = std::env::temp_dir().join(format!("session_{optimizer}_{}", std::process::id()));
            let path = folder.join("mos.safetensors");
            session(1, optimizer, 2).run(&train, &valid, Some(&path)).expect("trains and saves");
            let mut second = session(2, optimizer, 2);
            second.restore(&Checkpoint::load(&path, &Device::Cpu).expect("loads")).expect("fits");
            assert_eq!(second.history.len(), 1);
            second.run(&train, &valid, None).expect("trains");
            assert_eq!(second.history, whole.history, "{optimizer}");

            let error = session(2, optimizer, 3).restore(&Checkpoint::load(&path, &Device::Cpu).expect("loads"));
            let error = error.expect_err("another number of components").to_string();
            assert!(error.contains("components 2") && error.contains("components 3"), "{error}");
            std::fs::remove_dir_all(folder).expect("was just written");
        }
    }

    #[test]
    fn training_lowers_the_loss() {
        let (train, valid) = (text(9999), text(999));
        let mut session = session(2, OptimizerKind::Adam, 2);
        let before = session.valid_nll(&valid).expect("evaluates");
        session.run(&train, &valid, None).expect("trains");
        let after = session.valid_nll(&valid).expect("evaluates");
        assert!(after < before - 0.3, "{before} -> {after}");
    }
}
