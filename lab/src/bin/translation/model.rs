//! The encoder-decoder: a bidirectional LSTM over the source, an LSTM over the target, attention, and an output layer.

use crate::batches::{shuffled, shuffled_evenly, sorted, Batch, Sources};
use crate::corpus::Encoded;
use crate::setting::Setting;
use crate::task::Task;
use crate::vocabulary::PAD;
use candle_core::{DType, Device, Module, Tensor, D};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, Linear, VarBuilder, VarMap};
use lab::attention::{Attention, Memory};
use lab::head::{HeadKind, HeadSizes};
use lab::model::{Forward, Model, Pass};
use lab::recurrent::{locked_dropout, Lstm, LstmDropout};
use lab::{init, recipe::Recipe, Result};
use mos_head::OutputLayer;
use rand::rngs::StdRng;

pub(crate) struct Seq2Seq {
    pub(crate) setting: Setting,
    kind: HeadKind,
    sizes: HeadSizes,
    source_embedding: Embedding,
    forwards: Lstm,
    backwards: Lstm,
    bridge: Linear,
    target_embedding: Embedding,
    decoder: Lstm,
    attention: Attention,
    head: Box<dyn OutputLayer>,
    dropout: f64,
    varmap: VarMap,
    device: Device,
}

/// The state of a decoder; its rows are sentences, or hypotheses of a beam.
pub(crate) struct State {
    memory: Memory,
    lstm: Vec<LSTMState>,
}

impl State {
    /// The states of these rows.
    pub(crate) fn select(&self, rows: &Tensor) -> Result<Self> {
        let select =
            |state: &LSTMState| Ok(LSTMState::new(state.h.index_select(rows, 0)?, state.c.index_select(rows, 0)?));
        Ok(Self { memory: self.memory.select(rows)?, lstm: self.lstm.iter().map(select).collect::<Result<_>>()? })
    }
}

impl Seq2Seq {
    pub(crate) fn new(kind: HeadKind, setting: Setting, recipe: &Recipe, device: &Device) -> Result<Self> {
        let sizes = recipe.head(setting.target.len());
        let (HeadSizes { vocab, hidden, .. }, embedding) = (sizes, recipe.embedding());
        let Recipe { layers, dropout, seed, .. } = *recipe;
        if hidden % 2 != 0 {
            return Err(format!("--hidden is {hidden}, expected an even number: half for each direction").into());
        }
        let context_dropout = recipe.awd.context_dropout.unwrap_or(setting.task.context_dropout(dropout));
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let lstm = |units, name| Lstm::new(embedding, &vec![units; layers], LstmDropout::locked(dropout), vb.pp(name));
        let encoder = |name| lstm(hidden / 2, name);
        let (forwards, backwards) = (encoder("forwards")?, encoder("backwards")?);
        let model = Self {
            kind,
            sizes,
            source_embedding: candle_nn::embedding(setting.source.len(), embedding, vb.pp("source"))?,
            forwards,
            backwards,
            bridge: candle_nn::linear(hidden, layers * hidden, vb.pp("bridge"))?,
            target_embedding: candle_nn::embedding(vocab, embedding, vb.pp("target"))?,
            decoder: lstm(hidden, "decoder")?,
            attention: Attention::new(hidden, vb.pp("attention"))?,
            head: sizes.build(kind, context_dropout, None, vb.pp("head"))?,
            dropout,
            device: device.clone(),
            varmap,
            setting,
        };
        // Values keep their scale from the embeddings to the logits. With smaller initial values all positions of the
        // source look alike, and attention takes epochs to form, more of them the smaller the contexts are.
        let width = if kind == HeadKind::Softmax { hidden } else { sizes.context };
        let linear = 1.0 / (hidden as f64).sqrt();
        init::uniform(&model.varmap, seed, |name| match name {
            "source.weight" | "target.weight" => 1.0,
            "attention.score.weight" | "attention.combine.weight" | "head.latent.weight" => 3.0 * linear,
            "head.decoder.weight" => (3.0 / width as f64).sqrt(),
            "head.decoder.bias" => 0.0,
            _ => linear,
        })?;
        sizes.start_alike(&model.varmap, recipe.spread)?;
        Ok(model)
    }

    /// The decoder's initial state, from the mean of the encoder's outputs without the padding.
    pub(crate) fn encode(&self, sources: &Sources, mut rng: Option<&mut StdRng>) -> Result<State> {
        let mut read = |lstm: &Lstm, ids: &Tensor| {
            let inputs = self.source_embedding.forward(ids)?;
            lstm.forward(&inputs, &mut lstm.start(ids.dim(0)?)?, rng.as_deref_mut())
        };
        let forwards = read(&self.forwards, &sources.tokens)?;
        let backwards = read(&self.backwards, &sources.reversed)?;
        let backwards = backwards.flatten_to(1)?.index_select(&sources.back, 0)?.reshape(forwards.shape())?;
        let outputs = Tensor::cat(&[forwards, backwards], D::Minus1)?;

        let mean = sources.average.matmul(&outputs)?.squeeze(1)?;
        let hidden = self.bridge.forward(&mean)?.tanh()?.chunk(self.decoder.layers(), 1)?;
        let start = |hidden: Tensor| Ok(LSTMState::new(hidden.contiguous()?, hidden.zeros_like()?));
        let lstm = hidden.into_iter().map(start).collect::<Result<_>>()?;
        Ok(State { memory: self.attention.memory(outputs, sources.mask.clone())?, lstm })
    }

    /// Token ids [batch, steps] -> the head's hidden states for the next ids, [batch, steps, hidden]; advances `state`.
    /// Dropout is applied if a generator for its masks is given.
    pub(crate) fn decode(&self, ids: &Tensor, state: &mut State, mut rng: Option<&mut StdRng>) -> Result<Tensor> {
        let inputs = self.target_embedding.forward(ids)?;
        let hidden = self.decoder.forward(&inputs, &mut state.lstm, rng.as_deref_mut())?;
        locked_dropout(self.attention.forward(&hidden, &state.memory)?, self.dropout, rng)
    }

    /// Hidden states for all targets of a batch.
    pub(crate) fn hidden(&self, batch: &Batch, mut rng: Option<&mut StdRng>) -> Result<Tensor> {
        let mut state = self.encode(&batch.sources, rng.as_deref_mut())?;
        self.decode(&batch.inputs, &mut state, rng)
    }
}

/// Pairs per batch of an evaluation.
const EVALUATION_BATCH: usize = 64;

impl Model for Seq2Seq {
    type Item = Encoded;
    type Batch = Vec<usize>;
    type State = ();
    const IGNORED: i64 = PAD as i64;

    fn head(&self) -> &dyn OutputLayer {
        self.head.as_ref()
    }

    fn varmap(&self) -> &VarMap {
        &self.varmap
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.sizes.settings(self.kind);
        settings.push(("embedding", self.target_embedding.hidden_size().to_string()));
        settings.push(("layers", self.decoder.layers().to_string()));
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
        let batch = Batch::new(pairs, chosen, &self.device)?;
        Ok(Forward { hidden: self.hidden(&batch, rng)?, targets: batch.targets, penalty: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::Vocabulary;

    fn model(kind: HeadKind) -> Seq2Seq {
        model_of(Task::Toy, kind)
    }

    fn model_of(task: Task, kind: HeadKind) -> Seq2Seq {
        let (embedding, context) = (Some(8), Some(12));
        let recipe = Recipe { hidden: 16, embedding, context, layers: 2, dropout: 0.3, ..Recipe::BASE };
        let words: String = (0..46).map(|i| format!("word{i} ")).collect();
        let vocabulary = Vocabulary::words([words.as_str()].into_iter(), 1, &[]);
        let setting = Setting { task, source: vocabulary.clone(), target: vocabulary, turns: 1 };
        Seq2Seq::new(kind, setting, &recipe, &Device::Cpu).unwrap()
    }

    #[test]
    fn padding_changes_nothing() {
        let model = model(HeadKind::Mos);
        let sentences: [&[u32]; 2] = [&[5, 6, 7, 8], &[9, 10]];
        let ids = Tensor::new(&[[1u32, 4, 5], [1, 6, 7]], &Device::Cpu).unwrap();
        let hidden = |positions| {
            let sources = Sources::new(&sentences, positions, &Device::Cpu).unwrap();
            let mut state = model.encode(&sources, None).unwrap();
            model.decode(&ids, &mut state, None).unwrap()
        };
        let (tight, wide) = (hidden(0), hidden(11));
        let difference = (tight - wide).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(difference < 1e-6, "{difference}");
    }

    #[test]
    fn step_by_step_equals_all_at_once() {
        let model = model(HeadKind::Softmax);
        let sources = Sources::new(&[&[5, 6, 7], &[9, 10]], 0, &Device::Cpu).unwrap();
        let ids = Tensor::new(&[[1u32, 4, 5], [1, 6, 7]], &Device::Cpu).unwrap();
        let all = model.decode(&ids, &mut model.encode(&sources, None).unwrap(), None).unwrap();
        let mut state = model.encode(&sources, None).unwrap();
        let swap = Tensor::new(&[1u32, 0], &Device::Cpu).unwrap();
        for step in 0..3 {
            // Rows are swapped at every step, as in a beam.
            let column = ids.narrow(1, step, 1).unwrap();
            let column =
                if step % 2 == 0 { column } else { column.contiguous().unwrap().index_select(&swap, 0).unwrap() };
            let one = model.decode(&column.contiguous().unwrap(), &mut state, None).unwrap();
            let one = if step % 2 == 0 { one } else { one.contiguous().unwrap().index_select(&swap, 0).unwrap() };
            let difference = (one - all.narrow(1, step, 1).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() < 1e-5);
            state = state.select(&swap).unwrap();
        }
    }

    #[test]
    fn contexts_have_dropout_in_dialogues_alone() {
        use mos_head::{DropoutMasks, LossOptions};
        let hidden = Tensor::ones((2, 3, 16), DType::F32, &Device::Cpu).unwrap();
        let targets = Tensor::new(&[[4u32, 5, 6], [7, 8, 9]], &Device::Cpu).unwrap();
        for (task, has_dropout) in [(Task::Dialogue, true), (Task::Translation, false), (Task::Toy, false)] {
            let model = model_of(task, HeadKind::Mos);
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
        for kind in HeadKind::ALL {
            let model = model(kind);
            let pairs =
                [Encoded { source: vec![5, 6, 7], target: vec![8, 9] }, Encoded { source: vec![9], target: vec![4] }];
            let batch = Batch::new(&pairs, &[0, 1], &Device::Cpu).unwrap();
            let hidden = model.hidden(&batch, None).unwrap();
            let options = LossOptions::new().with_ignore_index(0);
            let gradients = model.head().loss(&hidden, &batch.targets, &options).unwrap().backward().unwrap();
            for (name, var) in init::sorted(model.varmap()) {
                let gradient = gradients.get(&var).unwrap_or_else(|| panic!("{kind:?} {name} has no gradient"));
                let sum = gradient.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(sum > 0.0, "{kind:?} {name}");
            }
        }
    }
}
