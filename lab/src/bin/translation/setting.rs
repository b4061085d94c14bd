//! The task and vocabularies of a model. Every checkpoint has them, so that it is enough to use the model.

use crate::kinds::{Architecture, Task, VocabularyKind};
use crate::vocabulary::Vocabulary;
use lab::show::values::name;
use lab::{layers::Checkpoint, Result};

#[derive(Clone)]
pub(crate) struct Setting {
    pub(crate) task: Task,
    pub(crate) architecture: Architecture,
    pub(crate) source: Vocabulary,
    pub(crate) target: Vocabulary,
    /// The number of utterances in a context.
    pub(crate) turns: usize,
}

impl Setting {
    pub(crate) fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let vocabulary = |key| Vocabulary::from_json(&checkpoint.get::<String>(key)?);
        Ok(Self {
            task: Task::from_name(&checkpoint.get::<String>("task")?)?,
            architecture: Architecture::from_checkpoint(checkpoint)?,
            source: vocabulary("source_vocabulary")?,
            target: vocabulary("target_vocabulary")?,
            turns: checkpoint.get("turns")?,
        })
    }

    /// Fails unless the model below the output layer is of this kind and shape.
    pub(crate) fn require_architecture(self, architecture: Architecture) -> Result<Self> {
        let flags = |architecture: Architecture| {
            let settings = architecture.settings().into_iter().map(|(flag, value)| format!("--{flag} {value}"));
            settings.collect::<Vec<_>>().join(" ")
        };
        let (stored, wanted) = (flags(self.architecture), flags(architecture));
        if stored == wanted {
            Ok(self)
        } else {
            Err(format!("the checkpoint has {stored}, but this run has {wanted}").into())
        }
    }

    /// Fails unless the target's vocabulary is of this kind, if one is given.
    pub(crate) fn require_vocabulary(self, kind: Option<VocabularyKind>) -> Result<Self> {
        let Some(kind) = kind else { return Ok(self) };
        let (stored, wanted) = (self.target.kind(), if kind.shape().is_some() { "code".into() } else { name(&kind) });
        if stored == wanted {
            Ok(self)
        } else {
            Err(format!("the target tokens of the checkpoint are of kind {stored}, but those of this run {wanted}")
                .into())
        }
    }

    /// Returns the metadata of a checkpoint.
    pub(crate) fn notes(&self) -> Result<Vec<(&'static str, String)>> {
        let mut notes = self.architecture.settings();
        notes.extend([
            ("task", self.task.name()),
            ("source_vocabulary", self.source.to_json()?),
            ("target_vocabulary", self.target.to_json()?),
            ("turns", self.turns.to_string()),
        ]);
        Ok(notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::{encode, Corpus, Encoded};
    use crate::kinds::{TableShape, TransformerShape};
    use crate::model::{load_model, Seq2Seq};
    use crate::table::tests::{random, vocabularies};
    use crate::{score::score, search::Beam, toy};
    use candle_core::Device;
    use lab::layers::HeadKind;
    use lab::training::Recipe;
    use lab::{data::Data, training::Session};

    fn setting(corpus: &Corpus) -> Setting {
        let source = Vocabulary::words(corpus.train.iter().map(|pair| pair.source.as_str()), 1, &[]);
        let target = Vocabulary::words(corpus.train.iter().map(|pair| pair.target.as_str()), 1, &[]);
        Setting { task: Task::Toy, architecture: Architecture::Lstm, source, target, turns: 1 }
    }

    fn data(corpus: &Corpus, setting: &Setting) -> Data<Encoded> {
        encode(corpus, &setting.source, &setting.target).unwrap()
    }

    fn session(
        kind: HeadKind,
        corpus: &Corpus,
        setting: &Setting,
        epochs: usize,
        hidden: usize,
        dropout: f64,
    ) -> Session<Seq2Seq> {
        let recipe =
            Recipe { components: 2, batch: 16, lr: 0.005, decay: 0.8, label_smoothing: 0.1, seed: 3, ..Recipe::BASE };
        let recipe = Recipe { hidden, epochs, dropout, ..recipe };
        let model = Seq2Seq::new(kind, setting.clone(), &recipe, &Device::Cpu).unwrap();
        Session::new(kind, model, data(corpus, setting), &recipe).unwrap()
    }

    #[test]
    fn resumed_training_equals_uninterrupted_training() {
        let corpus = toy::corpus(300, 40, 7);
        for architecture in [Architecture::Lstm, TRANSFORMER] {
            check_resumed(&corpus, &Setting { architecture, ..setting(&corpus) });
        }
    }

    fn check_resumed(corpus: &Corpus, setting: &Setting) {
        let mut whole = session(HeadKind::Mos, corpus, setting, 2, 16, 0.2);
        whole.run(None, None, None).unwrap();

        let path = std::env::temp_dir().join(format!("translation_{}.safetensors", std::process::id()));
        session(HeadKind::Mos, corpus, setting, 1, 16, 0.2).run(Some(&path), None, None).unwrap();
        let checkpoint = Checkpoint::load(&path, &Device::Cpu).unwrap();
        let again = Setting::from_checkpoint(&checkpoint).unwrap();
        let mut second = session(HeadKind::Mos, corpus, &again, 2, 16, 0.2);
        second.restore(&checkpoint).unwrap();
        assert_eq!(second.history.len(), 1);
        second.run(Some(&path), None, None).unwrap();
        assert_eq!(second.history, whole.history);

        let checkpoint = Checkpoint::load(&path, &Device::Cpu).unwrap();
        let model = load_model(&checkpoint, &Device::Cpu).unwrap();
        let alone = Session::new(HeadKind::Mos, model, data(corpus, setting), &Recipe::BASE).unwrap();
        assert!((alone.valid_nll().unwrap() - whole.history[1][1]).abs() < 1e-6);

        let mut other = session(HeadKind::Mos, corpus, setting, 1, 8, 0.0);
        let error = other.restore(&checkpoint).unwrap_err().to_string();
        assert!(error.contains("--hidden 16") && error.contains("--hidden 8"), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_checkpoint_has_the_table_of_codes() {
        let corpus = toy::corpus(300, 40, 7);
        let [_, target] = vocabularies(TableShape::Hybrid, &random()).unwrap();
        let setting = Setting { target, ..setting(&corpus) };
        let path = std::env::temp_dir().join(format!("translation_codes_{}.safetensors", std::process::id()));
        let mut session = session(HeadKind::Mos, &corpus, &setting, 1, 16, 0.0);
        session.run(Some(&path), None, None).unwrap();
        let model = load_model(&Checkpoint::load(&path, &Device::Cpu).unwrap(), &Device::Cpu).unwrap();
        std::fs::remove_file(path).unwrap();
        let [saved, loaded] = [&session.model, &model].map(|model| model.setting.target.codes().unwrap().table());
        assert_eq!(saved, loaded);
        let beam = Beam { width: 2, n_best: 1, max_length: 20, length_penalty: 0.0, diversity: 0.0 };
        let scores = |model| score(Task::Toy, model, &corpus.valid, &session.data.valid, beam).unwrap().found;
        assert_eq!(scores(&session.model), scores(&model));
        let alone = Session::new(HeadKind::Mos, model, data(&corpus, &setting), &Recipe::BASE).unwrap();
        assert!((alone.valid_nll().unwrap() - session.history[0][1]).abs() < 1e-6);
    }

    #[test]
    fn a_checkpoint_of_another_corpus_is_an_error() {
        let corpora = [toy::corpus(300, 40, 7), toy::corpus(300, 40, 8)];
        let setting = setting(&corpora[0]);
        let [first, mut other] = corpora.each_ref().map(|corpus| session(HeadKind::Moc, corpus, &setting, 1, 8, 0.0));
        let error = other.restore(&first.checkpoint().unwrap()).unwrap_err().to_string();
        assert!(error.contains("a built-in language") && error.contains("--seed"), "{error}");
    }

    const TRANSFORMER: Architecture = Architecture::Transformer(TransformerShape { heads: 4, inner: 96 });

    #[test]
    fn a_checkpoint_has_the_architecture() {
        let corpus = toy::corpus(300, 40, 7);
        let setting = Setting { architecture: TRANSFORMER, ..setting(&corpus) };
        let mut session = session(HeadKind::Mos, &corpus, &setting, 1, 16, 0.1);
        session.run(None, None, None).unwrap();
        let mut checkpoint = session.checkpoint().unwrap();
        let again = Setting::from_checkpoint(&checkpoint).unwrap();
        assert_eq!(again.architecture, TRANSFORMER);
        let model = load_model(&checkpoint, &Device::Cpu).unwrap();
        let alone = Session::new(HeadKind::Mos, model, data(&corpus, &setting), &Recipe::BASE);
        assert!((alone.unwrap().valid_nll().unwrap() - session.history[0][1]).abs() < 1e-6);

        assert!(again.clone().require_architecture(TRANSFORMER).is_ok());
        let error = again.require_architecture(Architecture::Lstm).err().unwrap().to_string();
        assert!(error.contains("--architecture transformer --attention-heads 4 --inner 96"), "{error}");
        assert!(error.ends_with("this run has --architecture lstm"), "{error}");
        // The checkpoint names no architecture, as before there were others.
        checkpoint.metadata.remove("architecture");
        assert_eq!(Setting::from_checkpoint(&checkpoint).unwrap().architecture, Architecture::Lstm);
        checkpoint.metadata.insert("architecture".into(), "rnn".into());
        assert!(Setting::from_checkpoint(&checkpoint).err().unwrap().to_string().contains("rnn"));
    }

    #[test]
    fn every_model_learns_the_built_in_task() {
        let corpus = toy::corpus(3000, 50, 7);
        let setting = setting(&corpus);
        let recurrent = HeadKind::ALL.map(|kind| (Architecture::Lstm, kind));
        let models = recurrent.into_iter().chain([(TRANSFORMER, HeadKind::Softmax), (TRANSFORMER, HeadKind::Mos)]);
        for (architecture, kind) in models {
            let setting = Setting { architecture, ..setting.clone() };
            let mut session = session(kind, &corpus, &setting, 4, 48, 0.0);
            session.run(None, None, None).unwrap();
            let beam = Beam { width: 2, n_best: 1, max_length: 20, length_penalty: 0.0, diversity: 0.0 };
            let valid = &session.data.valid;
            let scores = score(Task::Toy, &session.model, &corpus.valid, valid, beam).unwrap();
            let (name, exact) = scores.measures[0];
            assert!(name == "exact match" && exact > 60.0, "{architecture:?} {kind:?}: {exact}");
        }
    }
}
