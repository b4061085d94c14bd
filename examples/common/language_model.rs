//! The language model: embedding, LSTM layers, and one of the three output layers.

use super::batches::{Batches, IGNORED};
use super::head::HeadKind;
use super::model::{self, Model, Pass};
use super::sizes::{InitialValues, Sizes};
use super::{checkpoint::Checkpoint, init, recipe::Recipe, recurrent, recurrent::Lstm, Result};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, VarBuilder, VarMap};
use mos_head::OutputLayer;
use rand::{rngs::StdRng, SeedableRng};

pub(crate) struct LanguageModel {
    kind: HeadKind,
    sizes: Sizes,
    embedding: Embedding,
    lstm: Lstm,
    head: Box<dyn OutputLayer>,
    varmap: VarMap,
    device: Device,
}

impl LanguageModel {
    pub(crate) fn new(
        kind: HeadKind,
        sizes: Sizes,
        values: InitialValues,
        recipe: &Recipe,
        device: &Device,
    ) -> Result<Self> {
        let Sizes { head, embedding, layers } = sizes;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let lstm = Lstm::new(embedding, head.hidden, layers, recipe.dropout, vb.pp("lstm"))?;
        let embedding = candle_nn::embedding(head.vocab, embedding, vb.pp("embedding"))?;
        let head = head.build(kind, recipe.dropout, vb.pp("head"))?;
        init::uniform(&varmap, recipe.seed, |name| values.bound(name, kind, sizes))?;
        sizes.head.start_alike(&varmap, recipe.spread)?;
        Ok(Self { kind, sizes, embedding, lstm, head, varmap, device: device.clone() })
    }

    /// The model of a checkpoint, without the state of training.
    pub(crate) fn from_checkpoint(checkpoint: &Checkpoint, vocab: usize, device: &Device) -> Result<(HeadKind, Self)> {
        let kind = HeadKind::of_checkpoint(checkpoint)?;
        let recipe = Recipe::of_checkpoint(kind, checkpoint)?;
        let model = Self::new(kind, Sizes::new(&recipe, vocab), InitialValues::Small, &recipe, device)?;
        checkpoint.restore_variables(model.varmap())?;
        Ok((kind, model))
    }

    /// The state before the first id of a text.
    pub(crate) fn start(&self, batch: usize) -> Result<Vec<LSTMState>> {
        self.lstm.start(batch)
    }

    /// Token ids [batch, seq] -> hidden states [batch, seq, hidden]; advances `states`, detached from the graph.
    /// Dropout is applied if a generator for its masks is given.
    pub(crate) fn hidden(&self, ids: &Tensor, states: &mut [LSTMState], rng: Option<&mut StdRng>) -> Result<Tensor> {
        let hidden = self.lstm.forward(&self.embedding.forward(ids)?, states, rng)?;
        recurrent::detach(states);
        Ok(hidden)
    }
}

/// Parallel streams of an evaluation.
const STREAMS: usize = 10;

impl Model for LanguageModel {
    type Item = u32;
    const IGNORED: i64 = IGNORED;

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
        let mut settings = self.sizes.head.settings(self.kind);
        let Sizes { embedding, layers, .. } = self.sizes;
        settings.extend([("embedding", embedding.to_string()), ("layers", layers.to_string())]);
        settings
    }

    /// The state passes from window to window.
    fn batches<'a>(&'a self, text: &'a [u32], recipe: &'a Recipe, pass: Pass) -> Result<model::Batches<'a>> {
        let (streams, mut rng) = match pass {
            Pass::Training { epoch } => (recipe.batch, Some(StdRng::seed_from_u64(recipe.seed ^ (epoch as u64) << 32))),
            Pass::Evaluation => (STREAMS, None),
        };
        let mut states = self.start(streams)?;
        Ok(Box::new(Batches::new(text, streams, recipe.bptt).map(move |window| {
            let (inputs, targets) = window.tensors(&self.device)?;
            Ok((self.hidden(&inputs, &mut states, rng.as_mut())?, targets))
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(components: usize) -> Recipe {
        Recipe { components, hidden: 4, embedding: Some(3), context: Some(5), ..Recipe::BASE }
    }

    fn model(kind: HeadKind, sizes: Sizes, seed: u64) -> LanguageModel {
        let recipe = Recipe { seed, ..Recipe::BASE };
        LanguageModel::new(kind, sizes, InitialValues::Small, &recipe, &Device::Cpu).expect("valid sizes")
    }

    #[test]
    fn the_heads_have_equal_parameter_counts_within_one_percent() {
        for (vocab, embedding, hidden, components) in [(512, 32, 6, 8), (10_000, 220, 220, 5), (10_000, 220, 220, 15)] {
            let recipe = Recipe { hidden, components, embedding: Some(embedding), ..Recipe::BASE };
            let parameters = |kind| model(kind, Sizes::new(&recipe, vocab), 0).parameters() as f64;
            for kind in [HeadKind::Moc, HeadKind::Mos] {
                let ratio = parameters(kind) / parameters(HeadKind::Softmax);
                assert!((ratio - 1.0).abs() < 0.01, "{kind:?} {recipe:?}: {ratio}");
            }
        }
    }

    #[test]
    fn sizes_know_the_number_of_parameters() {
        for (kind, layers) in [(HeadKind::Softmax, 1), (HeadKind::Moc, 2), (HeadKind::Mos, 3)] {
            let sizes = Sizes::new(&Recipe { layers, ..recipe(2) }, 11);
            let parameters = sizes.parameters(kind);
            assert_eq!(model(kind, sizes, 0).parameters(), parameters, "{kind:?}");
            for parameters in parameters - 1..=parameters + 1 {
                assert_eq!(sizes.with_parameters(kind, parameters), sizes);
            }
        }
    }

    #[test]
    fn a_seed_fixes_the_initial_values() {
        let sum = |seed| -> f32 {
            let model = model(HeadKind::Mos, Sizes::new(&recipe(2), 11), seed);
            let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).expect("ids");
            let hidden = model.hidden(&ids, &mut model.start(1).expect("state"), None).expect("hidden");
            hidden.sum_all().and_then(|sum| sum.to_scalar()).expect("sum")
        };
        assert_eq!(sum(1), sum(1));
        assert_ne!(sum(1), sum(2));
    }
}
