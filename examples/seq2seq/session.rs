//! The training of one head, from the start or a checkpoint to the last epoch.

use crate::common::head::{ActivationKind, HeadKind, HeadSizes};
use crate::common::{checkpoint::Checkpoint, optimizer::Optimizer, progress, Result};
use crate::corpus::Encoded;
use crate::model::{Seq2Seq, Sizes};
use crate::task::Task;
use crate::train::{evaluate, train_epoch, Recipe};
use crate::vocabulary::Vocabulary;
use candle_core::Device;
use std::path::Path;
use std::time::Instant;

/// The task and vocabularies of a model. Every checkpoint has them, so that it is enough to use the model.
#[derive(Clone)]
pub(crate) struct Setting {
    pub(crate) task: Task,
    pub(crate) source: Vocabulary,
    pub(crate) target: Vocabulary,
    /// Number of utterances in a context.
    pub(crate) turns: usize,
}

impl Setting {
    pub(crate) fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let vocabulary = |key| Vocabulary::from_json(&checkpoint.get::<String>(key)?);
        Ok(Self {
            task: Task::from_name(&checkpoint.get::<String>("task")?)?,
            source: vocabulary("source_vocabulary")?,
            target: vocabulary("target_vocabulary")?,
            turns: checkpoint.get("turns")?,
        })
    }
}

pub(crate) struct Session {
    pub(crate) kind: HeadKind,
    pub(crate) model: Seq2Seq,
    /// Mean NLL of each epoch on the training pairs (during the epoch) and on the validation pairs (after it).
    pub(crate) history: Vec<[f64; 2]>,
    setting: Setting,
    sizes: Sizes,
    recipe: Recipe,
    optimizer: Optimizer,
    tokens: usize,
    seconds: f64,
}

/// Pairs per batch of an evaluation.
const EVALUATION_BATCH: usize = 64;

impl Session {
    pub(crate) fn new(
        kind: HeadKind,
        sizes: Sizes,
        setting: &Setting,
        recipe: &Recipe,
        device: &Device,
    ) -> Result<Self> {
        let model = Seq2Seq::new(kind, sizes, recipe.dropout, recipe.seed, device)?;
        let optimizer = Optimizer::new(recipe.optimizer, model.varmap())?;
        let (setting, recipe) = (setting.clone(), recipe.clone());
        Ok(Self { kind, model, history: vec![], setting, sizes, recipe, optimizer, tokens: 0, seconds: 0.0 })
    }

    /// Trains the remaining epochs; prints a line and saves after each.
    pub(crate) fn run(&mut self, train: &[Encoded], valid: &[Encoded], save: Option<&Path>) -> Result<()> {
        while self.history.len() < self.recipe.epochs {
            let epoch = self.history.len();
            let name = self.kind.name();
            let bar = progress::bar(train.len().div_ceil(self.recipe.batch), format!("{name} epoch {}", epoch + 1));
            let start = Instant::now();
            let train_nll = train_epoch(&self.model, &mut self.optimizer, train, epoch, &self.recipe, &bar)?;
            let seconds = start.elapsed().as_secs_f64();
            bar.finish_and_clear();
            self.seconds += seconds;
            self.tokens += train.iter().map(|pair| pair.target.len() + 1).sum::<usize>();
            let valid_nll = evaluate(&self.model, valid, EVALUATION_BATCH)?;
            self.history.push([train_nll, valid_nll]);
            println!(
                "{name:<7}  epoch {:>2}  perplexity: train {:8.3}  valid {:8.3}  ({seconds:.1} s)",
                epoch + 1,
                train_nll.exp(),
                valid_nll.exp(),
            );
            if let Some(path) = save {
                self.checkpoint()?.save(path)?;
            }
        }
        Ok(())
    }

    /// NLL on the validation pairs after the last epoch.
    pub(crate) fn valid_nll(&self, valid: &[Encoded]) -> Result<f64> {
        match self.history.last() {
            Some([_, nll]) => Ok(*nll),
            None => evaluate(&self.model, valid, EVALUATION_BATCH),
        }
    }

    /// Target tokens per second of training; `None` if this run trained no epoch.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.seconds)
    }

    fn shape(&self) -> Vec<(&'static str, String)> {
        let mut shape = self.sizes.head.describe(self.kind);
        shape.extend([
            ("task", self.setting.task.name().to_owned()),
            ("source_vocab", self.sizes.source_vocab.to_string()),
            ("embedding", self.sizes.embedding.to_string()),
            ("layers", self.sizes.layers.to_string()),
            ("optimizer", self.recipe.optimizer.to_string()),
        ]);
        shape
    }

    /// Variables and optimizer state, with all that is needed to resume, or to use the model without its data.
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.model.varmap(), &self.optimizer);
        let mut metadata = self.shape();
        metadata.extend([
            ("source_vocabulary", self.setting.source.to_json()?),
            ("target_vocabulary", self.setting.target.to_json()?),
            ("turns", self.setting.turns.to_string()),
            ("epoch", self.history.len().to_string()),
            ("seed", self.recipe.seed.to_string()),
            ("lr", self.recipe.lr.to_string()),
            ("decay", self.recipe.decay.to_string()),
            ("history", serde_json::to_string(&self.history)?),
        ]);
        checkpoint.metadata.extend(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)));
        Ok(checkpoint)
    }

    /// Restores the state of the checkpoint, which must have the same task, head, sizes and optimizer.
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

/// The model of a checkpoint, without the state of training.
pub(crate) fn load_model(checkpoint: &Checkpoint, device: &Device) -> Result<Seq2Seq> {
    let name: String = checkpoint.get("head")?;
    let kind = HeadKind::ALL.into_iter().find(|kind| kind.name() == name);
    let kind = kind.ok_or_else(|| format!("the checkpoint's head is {name:?}, which is unknown"))?;
    // A softmax has no contexts.
    let of_mixture = |key| if kind == HeadKind::Softmax { Ok(1) } else { checkpoint.get(key) };
    let head = HeadSizes {
        vocab: checkpoint.get("vocab")?,
        hidden: checkpoint.get("hidden")?,
        context: of_mixture("context")?,
        components: of_mixture("components")?,
        activation: ActivationKind::Tanh,
    };
    let sizes = Sizes {
        head,
        source_vocab: checkpoint.get("source_vocab")?,
        embedding: checkpoint.get("embedding")?,
        layers: checkpoint.get("layers")?,
    };
    let model = Seq2Seq::new(kind, sizes, 0.0, 0, device)?;
    checkpoint.restore_variables(model.varmap())?;
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::optimizer::OptimizerKind;
    use crate::corpus::{encode, Corpus};
    use crate::score::score;
    use crate::search::Beam;
    use crate::toy;

    fn setting(corpus: &Corpus) -> Setting {
        let source = Vocabulary::words(corpus.train.iter().map(|pair| pair.source.as_str()), 1, &[]);
        let target = Vocabulary::words(corpus.train.iter().map(|pair| pair.target.as_str()), 1, &[]);
        Setting { task: Task::Toy, source, target, turns: 1 }
    }

    fn session(kind: HeadKind, epochs: usize, hidden: usize, setting: &Setting, dropout: f64) -> Session {
        let vocab = setting.target.len();
        let context = HeadSizes::equal_context(vocab, hidden, 2);
        let head = HeadSizes { vocab, hidden, context, components: 2, activation: ActivationKind::Tanh };
        let sizes = Sizes { head, source_vocab: setting.source.len(), embedding: hidden, layers: 1 };
        let recipe = Recipe {
            epochs,
            batch: 16,
            lr: 0.005,
            decay: 0.8,
            dropout,
            clip: 1.0,
            label_smoothing: 0.1,
            optimizer: OptimizerKind::Adam,
            seed: 3,
        };
        Session::new(kind, sizes, setting, &recipe, &Device::Cpu).unwrap()
    }

    #[test]
    fn resumed_training_equals_uninterrupted_training() {
        let corpus = toy::corpus(300, 40, 7);
        let setting = setting(&corpus);
        let encoded = |pairs| encode(pairs, &setting.source, &setting.target).unwrap();
        let (train, valid) = (encoded(&corpus.train), encoded(&corpus.valid));
        let mut whole = session(HeadKind::Mos, 2, 16, &setting, 0.2);
        whole.run(&train, &valid, None).unwrap();

        let folder = std::env::temp_dir().join(format!("seq2seq_{}", std::process::id()));
        let path = folder.join("mos.safetensors");
        session(HeadKind::Mos, 1, 16, &setting, 0.2).run(&train, &valid, Some(&path)).unwrap();
        let checkpoint = Checkpoint::load(&path, &Device::Cpu).unwrap();
        let again = Setting::from_checkpoint(&checkpoint).unwrap();
        let mut second = session(HeadKind::Mos, 2, 16, &again, 0.2);
        second.restore(&checkpoint).unwrap();
        assert_eq!(second.history.len(), 1);
        second.run(&train, &valid, Some(&path)).unwrap();
        assert_eq!(second.history, whole.history);

        let checkpoint = Checkpoint::load(&path, &Device::Cpu).unwrap();
        let model = load_model(&checkpoint, &Device::Cpu).unwrap();
        assert_eq!(evaluate(&model, &valid, EVALUATION_BATCH).unwrap(), whole.history[1][1]);

        let error = session(HeadKind::Mos, 1, 8, &setting, 0.0).restore(&checkpoint).unwrap_err().to_string();
        assert!(error.contains("hidden 16") && error.contains("hidden 8"), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn every_head_learns_the_built_in_task() {
        let corpus = toy::corpus(3000, 50, 7);
        let setting = setting(&corpus);
        let encoded = |pairs| encode(pairs, &setting.source, &setting.target).unwrap();
        let (train, valid) = (encoded(&corpus.train), encoded(&corpus.valid));
        for kind in HeadKind::ALL {
            let mut session = session(kind, 4, 48, &setting, 0.0);
            session.run(&train, &valid, None).unwrap();
            let beam = Beam { width: 2, n_best: 1, max_length: 20, length_penalty: 0.0 };
            let scores = score(Task::Toy, &session.model, &setting.target, &corpus.valid, &valid, beam).unwrap();
            let (name, exact) = scores.measures[0];
            assert!(name == "exact match" && exact > 60.0, "{kind:?}: {exact}");
        }
    }
}
