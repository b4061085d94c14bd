//! One head's training from the start or from a checkpoint to the last epoch.

use crate::batches::Batches;
use crate::common::{checkpoint::Checkpoint, head::HeadKind, optimizer::Optimizer, progress, Result};
use crate::corpus::Corpus;
use crate::model::{LanguageModel, Sizes};
use crate::train::{evaluate, train_epoch, Recipe};
use candle_core::Device;
use std::path::Path;
use std::time::Instant;

pub(crate) struct Session {
    pub(crate) kind: HeadKind,
    pub(crate) model: LanguageModel,
    /// Mean NLL of each epoch on the training text (while it was learnt) and on the validation text (after it).
    pub(crate) history: Vec<[f64; 2]>,
    sizes: Sizes,
    recipe: Recipe,
    optimizer: Optimizer,
    tokens: usize,
    seconds: f64,
}

impl Session {
    pub(crate) fn new(kind: HeadKind, sizes: Sizes, dropout: f64, recipe: &Recipe, device: &Device) -> Result<Self> {
        let model = LanguageModel::new(kind, sizes, dropout, recipe.seed, device)?;
        let optimizer = Optimizer::new(recipe.optimizer, model.varmap())?;
        let recipe = recipe.clone();
        Ok(Self { kind, model, history: vec![], sizes, recipe, optimizer, tokens: 0, seconds: 0.0 })
    }

    /// Trains the epochs that are left, printing a line for each, and saves after each.
    pub(crate) fn run(&mut self, corpus: &Corpus, save: Option<&Path>) -> Result<()> {
        while self.history.len() < self.recipe.epochs {
            let epoch = self.history.len();
            let name = self.kind.name();
            let steps = Batches::new(&corpus.train, self.recipe.batch, self.recipe.bptt).windows();
            let bar = progress::bar(steps, format!("{name} epoch {}", epoch + 1));
            let start = Instant::now();
            let train = train_epoch(&self.model, &mut self.optimizer, &corpus.train, epoch, &self.recipe, &bar)?;
            let seconds = start.elapsed().as_secs_f64();
            bar.finish_and_clear();
            self.seconds += seconds;
            self.tokens += corpus.train.len() - 1;
            let valid = evaluate(&self.model, &corpus.valid, self.recipe.bptt)?;
            self.history.push([train, valid]);
            println!(
                "{name:<7}  epoch {:>2}  perplexity: train {:8.3}  valid {:8.3}  ({seconds:.1} s)",
                epoch + 1,
                train.exp(),
                valid.exp(),
            );
            if let Some(path) = save {
                self.checkpoint()?.save(path)?;
            }
        }
        Ok(())
    }

    /// NLL on the validation text after the last epoch.
    pub(crate) fn valid_nll(&self, corpus: &Corpus) -> Result<f64> {
        match self.history.last() {
            Some([_, valid]) => Ok(*valid),
            None => evaluate(&self.model, &corpus.valid, self.recipe.bptt),
        }
    }

    /// Training speed, unless nothing was trained in this run.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.seconds)
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

    /// Variables and optimiser state, with what is needed to go on.
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.model.varmap(), &self.optimizer);
        let mut metadata = self.shape();
        metadata.extend([
            ("epoch", self.history.len().to_string()),
            ("seed", self.recipe.seed.to_string()),
            ("lr", self.recipe.lr.to_string()),
            ("decay", self.recipe.decay.to_string()),
            ("history", serde_json::to_string(&self.history)?),
        ]);
        checkpoint.metadata.extend(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)));
        Ok(checkpoint)
    }

    /// Goes back to where the checkpoint was written; it must be of the same head, sizes and optimiser.
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
    use super::*;
    use crate::common::head::{ActivationKind, HeadSizes};
    use crate::common::optimizer::OptimizerKind;
    use crate::language::Teacher;

    fn session(epochs: usize, optimizer: OptimizerKind, components: usize) -> Session {
        let lr = if optimizer == OptimizerKind::Adam { 0.01 } else { 1.0 };
        let recipe = Recipe { epochs, batch: 4, bptt: 8, lr, decay: 0.5, clip: 0.5, optimizer, seed: 3 };
        let head = HeadSizes { vocab: 512, hidden: 6, context: 5, components, activation: ActivationKind::Tanh };
        let sizes = Sizes { head, embedding: 6, layers: 2 };
        Session::new(HeadKind::Mos, sizes, 0.0, &recipe, &Device::Cpu).expect("valid sizes")
    }

    #[test]
    fn resumed_training_equals_uninterrupted_training() {
        let corpus = Teacher::new().corpus(999, 111, 7);
        for optimizer in [OptimizerKind::Sgd, OptimizerKind::Adam] {
            let mut whole = session(2, optimizer, 2);
            whole.run(&corpus, None).expect("trains");

            let folder = std::env::temp_dir().join(format!("lstm_lm_{optimizer}_{}", std::process::id()));
            let path = folder.join("mos.safetensors");
            session(1, optimizer, 2).run(&corpus, Some(&path)).expect("trains and saves");
            let mut second = session(2, optimizer, 2);
            second.restore(&Checkpoint::load(&path, &Device::Cpu).expect("loads")).expect("fits");
            assert_eq!(second.history.len(), 1);
            second.run(&corpus, None).expect("trains");
            assert_eq!(second.history, whole.history, "{optimizer}");

            let error = session(2, optimizer, 3).restore(&Checkpoint::load(&path, &Device::Cpu).expect("loads"));
            let error = error.expect_err("another number of components").to_string();
            assert!(error.contains("components 2") && error.contains("components 3"), "{error}");
            std::fs::remove_dir_all(folder).expect("was just written");
        }
    }

    #[test]
    fn training_lowers_the_loss() {
        let corpus = Teacher::new().corpus(9999, 999, 7);
        let mut session = session(2, OptimizerKind::Adam, 2);
        let before = session.valid_nll(&corpus).expect("evaluates");
        session.run(&corpus, None).expect("trains");
        let after = session.valid_nll(&corpus).expect("evaluates");
        assert!(after < before - 0.3, "{before} -> {after}");
    }
}
