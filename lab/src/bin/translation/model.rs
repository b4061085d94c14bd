//! An encoder-decoder, recurrent or a Transformer, and an output layer.

use crate::batches::{shuffled, shuffled_evenly, sorted, Batch, Sources};
use crate::kinds::{Architecture, Task};
use crate::{corpus::Encoded, recurrent::Recurrent, setting::Setting, transformer::Transformer};
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use lab::data::words::PAD;
use lab::layers::{init, recurrent_decoder, transformer::DecoderState, Checkpoint, HeadKind, HeadSizes};
use lab::training::{Base, Forward, Model, Pass, Recipe};
use lab::Result;
use rand::rngs::StdRng;

pub(crate) struct Seq2Seq {
    pub(crate) setting: Setting,
    kind: HeadKind,
    sizes: HeadSizes,
    embedding: usize,
    layers: usize,
    body: Body,
    base: Base,
}

/// The model below the output layer.
enum Body {
    Recurrent(Recurrent),
    Transformer(Transformer),
}

/// The state of a decoder; its rows are sentences, or hypotheses of a beam.
pub(crate) enum State {
    Recurrent(recurrent_decoder::State),
    Transformer(DecoderState),
}

impl State {
    /// Returns the states of these rows.
    pub(crate) fn select(&self, rows: &Tensor) -> Result<Self> {
        Ok(match self {
            State::Recurrent(state) => State::Recurrent(state.select(rows)?),
            State::Transformer(state) => State::Transformer(state.select(rows)?),
        })
    }
}

impl Seq2Seq {
    pub(crate) fn new(kind: HeadKind, setting: Setting, recipe: &Recipe, device: &Device) -> Result<Self> {
        let sizes = recipe.head(setting.target.len());
        let Recipe { layers, dropout, seed, .. } = *recipe;
        let context_dropout = recipe.awd.context_dropout.unwrap_or(setting.task.context_dropout(dropout));
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let body = match setting.architecture {
            Architecture::Lstm => Body::Recurrent(Recurrent::new(&setting, recipe, vb.clone())?),
            Architecture::Transformer(shape) => {
                Body::Transformer(Transformer::new(&setting, shape, recipe, vb.clone())?)
            }
        };
        let head = sizes.build(kind, context_dropout, None, vb.pp("head"))?;
        init::uniform(&varmap, seed, |name| match setting.architecture {
            Architecture::Lstm => Recurrent::bound(kind, sizes, name),
            Architecture::Transformer(shape) => Transformer::bound(shape, kind, sizes, name),
        })?;
        init::ones(&varmap, |name| name.ends_with("norm.weight"))?;
        sizes.start_alike(&varmap, recipe.spread)?;
        let base = Base { head, varmap, device: device.clone() };
        Ok(Self { setting, kind, sizes, embedding: recipe.embedding(), layers, body, base })
    }

    /// Returns the decoder's initial state.
    pub(crate) fn encode(&self, sources: &Sources, rng: Option<&mut StdRng>) -> Result<State> {
        Ok(match &self.body {
            Body::Recurrent(body) => State::Recurrent(body.encode(sources, rng)?),
            Body::Transformer(body) => State::Transformer(body.encode(sources, rng)?),
        })
    }

    /// Computes the head's hidden states `[batch, steps, hidden]` for the ids after token ids `[batch, steps]`, and
    /// advances `state`. Dropout is applied if a generator for its masks is given.
    pub(crate) fn decode(&self, ids: &Tensor, state: &mut State, rng: Option<&mut StdRng>) -> Result<Tensor> {
        match (&self.body, state) {
            (Body::Recurrent(body), State::Recurrent(state)) => body.decoder.decode(ids, state, rng),
            (Body::Transformer(body), State::Transformer(state)) => body.decode(ids, state, rng),
            _ => Err("the state is another model's".into()),
        }
    }

    /// Returns the hidden states for all targets of a batch.
    pub(crate) fn hidden(&self, batch: &Batch, mut rng: Option<&mut StdRng>) -> Result<Tensor> {
        let mut state = self.encode(&batch.sources, rng.as_deref_mut())?;
        self.decode(&batch.inputs, &mut state, rng)
    }
}

/// Returns the model of a checkpoint, without the state of training.
pub(crate) fn load_model(checkpoint: &Checkpoint, device: &Device) -> Result<Seq2Seq> {
    let setting = Setting::from_checkpoint(checkpoint)?;
    let kind = HeadKind::from_checkpoint(checkpoint)?;
    let recipe = Recipe::from_checkpoint(kind, checkpoint)?;
    let model = Seq2Seq::new(kind, setting, &recipe, device)?;
    checkpoint.restore_variables(model.varmap())?;
    Ok(model)
}

/// The number of pairs of a batch in an evaluation.
const EVALUATION_BATCH: usize = 64;

impl Model for Seq2Seq {
    type Item = Encoded;
    type Batch = Vec<usize>;
    type State = ();
    const IGNORED: i64 = PAD as i64;

    fn base(&self) -> &Base {
        &self.base
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.sizes.settings(self.kind);
        settings.push(("embedding", self.embedding.to_string()));
        settings.push(("layers", self.layers.to_string()));
        settings
    }

    fn notes(&self) -> Result<Vec<(&'static str, String)>> {
        self.setting.notes()
    }

    fn batches(&self, pairs: &[Encoded], recipe: &Recipe, pass: Pass) -> Vec<Vec<usize>> {
        match pass {
            Pass::Training { epoch } => {
                let seed = recipe.seed ^ (epoch as u64) << 32;
                match self.setting.task {
                    Task::Dialogue => shuffled_evenly(pairs, recipe.batch, seed),
                    Task::Toy | Task::Translation => shuffled(pairs, recipe.batch, seed),
                }
            }
            Pass::Evaluation { .. } => sorted(pairs, EVALUATION_BATCH),
        }
    }

    fn start(&self, _: &Recipe, _: Pass) -> Result<()> {
        Ok(())
    }

    fn forward(&self, pairs: &[Encoded], chosen: &Vec<usize>, _: &mut (), rng: Option<&mut StdRng>) -> Result<Forward> {
        let batch = Batch::new(pairs, chosen, self.device())?;
        Ok(Forward { hidden: self.hidden(&batch, rng)?, targets: batch.targets, penalty: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kinds::TransformerShape, vocabulary::Vocabulary};

    const ARCHITECTURES: [Architecture; 2] =
        [Architecture::Lstm, Architecture::Transformer(TransformerShape { heads: 2, inner: 24 })];

    fn model(architecture: Architecture, kind: HeadKind) -> Seq2Seq {
        model_for(Task::Toy, architecture, kind)
    }

    fn model_for(task: Task, architecture: Architecture, kind: HeadKind) -> Seq2Seq {
        let (embedding, context) = (if architecture == Architecture::Lstm { Some(8) } else { None }, Some(12));
        let recipe = Recipe { hidden: 16, embedding, context, layers: 2, dropout: 0.3, ..Recipe::BASE };
        let words: String = (0..46).map(|i| format!("word{i} ")).collect();
        let vocabulary = Vocabulary::words([words.as_str()].into_iter(), 1, &[]);
        let setting = Setting { task, architecture, source: vocabulary.clone(), target: vocabulary, turns: 1 };
        Seq2Seq::new(kind, setting, &recipe, &Device::Cpu).unwrap()
    }

    #[test]
    fn padding_changes_nothing() {
        for architecture in ARCHITECTURES {
            let model = model(architecture, HeadKind::Mos);
            let sentences: [&[u32]; 2] = [&[5, 6, 7, 8], &[9, 10]];
            let ids = Tensor::new(&[[1u32, 4, 5], [1, 6, 7]], &Device::Cpu).unwrap();
            let hidden = |positions| {
                let sources = Sources::new(&sentences, positions, &Device::Cpu).unwrap();
                let mut state = model.encode(&sources, None).unwrap();
                model.decode(&ids, &mut state, None).unwrap()
            };
            let difference = (hidden(0) - hidden(11)).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() < 2e-6, "{architecture:?} {difference}");
        }
    }

    #[test]
    fn step_by_step_equals_all_at_once() {
        let swap = Tensor::new(&[1u32, 0], &Device::Cpu).unwrap();
        for architecture in ARCHITECTURES {
            let model = model(architecture, HeadKind::Softmax);
            let sources = Sources::new(&[&[5, 6, 7], &[9, 10]], 0, &Device::Cpu).unwrap();
            let ids = Tensor::new(&[[1u32, 4, 5], [1, 6, 7]], &Device::Cpu).unwrap();
            let all = model.decode(&ids, &mut model.encode(&sources, None).unwrap(), None).unwrap();
            let mut state = model.encode(&sources, None).unwrap();
            for step in 0..3 {
                // Rows are swapped at every step, as in a beam.
                let swapped = |rows: Tensor| {
                    let rows = rows.contiguous().unwrap();
                    if step % 2 == 0 {
                        rows
                    } else {
                        rows.index_select(&swap, 0).unwrap()
                    }
                };
                let one = model.decode(&swapped(ids.narrow(1, step, 1).unwrap()), &mut state, None).unwrap();
                let difference = (swapped(one) - all.narrow(1, step, 1).unwrap()).unwrap().abs().unwrap();
                let difference = difference.max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(difference < 1e-5, "{architecture:?} {step}");
                state = state.select(&swap).unwrap();
            }
        }
    }

    #[test]
    fn contexts_have_dropout_in_dialogues_alone() {
        use mos_head::{DropoutMasks, LossOptions};
        let hidden = Tensor::ones((2, 3, 16), DType::F32, &Device::Cpu).unwrap();
        let targets = Tensor::new(&[[4u32, 5, 6], [7, 8, 9]], &Device::Cpu).unwrap();
        for (task, has_dropout) in [(Task::Dialogue, true), (Task::Translation, false), (Task::Toy, false)] {
            let model = model_for(task, Architecture::Lstm, HeadKind::Mos);
            let sum = |seed| {
                let options = LossOptions::new().with_dropout(DropoutMasks::Seeded(seed));
                model.head().loss(&hidden, &targets, &options).unwrap().sum_and_count().unwrap().0
            };
            assert_eq!(sum(1) != sum(2), has_dropout, "{task:?}");
        }
    }

    #[test]
    fn every_variable_gets_a_gradient() {
        use mos_head::LossOptions;
        for (architecture, kind) in
            ARCHITECTURES.into_iter().flat_map(|architecture| HeadKind::ALL.map(|kind| (architecture, kind)))
        {
            let model = model(architecture, kind);
            let pairs =
                [Encoded { source: vec![5, 6, 7], target: vec![8, 9] }, Encoded { source: vec![9], target: vec![4] }];
            let batch = Batch::new(&pairs, &[0, 1], &Device::Cpu).unwrap();
            let hidden = model.hidden(&batch, None).unwrap();
            let options = LossOptions::new().with_ignore_index(0);
            let gradients = model.head().loss(&hidden, &batch.targets, &options).unwrap().backward().unwrap();
            for (name, var) in init::sorted(model.varmap()) {
                let gradient =
                    gradients.get(&var).unwrap_or_else(|| panic!("{architecture:?} {kind:?} {name} has no gradient"));
                let sum = gradient.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(sum > 0.0, "{architecture:?} {kind:?} {name}");
            }
        }
    }
}
