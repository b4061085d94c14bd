//! The language model: embedding, LSTM layers, and one of the three output layers.

use super::model::{Base, Forward, Model, Part, Pass};
use super::sizes::{InitialValues, Sizes};
use super::{awd::Awd, ranks::Ranks, recipe::Recipe};
use crate::data::{insert_table, Streams, Window, IGNORED};
use crate::layers::recurrent::{self, Lstm, LstmDropout, Outputs};
use crate::layers::{dropout, init, Checkpoint, Entries, HeadKind, Output};
use crate::Result;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, VarBuilder, VarMap};
use mos_codes::CodeTable;
use mos_head::sampled::NoiseDistribution;
use mos_head::LossOptions;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::HashMap;

/// A model of the next token.
pub struct LanguageModel {
    kind: HeadKind,
    sizes: Sizes,
    embedding: Embedding,
    /// Dropout of whole rows of the embedding.
    embedding_dropout: f64,
    lstm: Lstm,
    output: Output,
    /// The distribution from which negatives are drawn, if any are.
    noise: Option<NoiseDistribution>,
    /// The table of the codes, if this is a model of codes.
    table: Option<CodeTable>,
    /// Factors of activation regularisation and temporal activation regularisation.
    regularization: [f64; 2],
    base: Base,
}

impl LanguageModel {
    /// Returns a model of `vocab` token ids with new variables.
    pub fn new(kind: HeadKind, vocab: usize, values: InitialValues, recipe: &Recipe, device: &Device) -> Result<Self> {
        Self::with_entries(kind, Sizes::new(kind, recipe, vocab), values, recipe, &Entries::default(), device)
    }

    /// Returns a model whose output may depend on the entries of the vocabulary.
    pub fn with_entries(
        kind: HeadKind,
        sizes: Sizes,
        values: InitialValues,
        recipe: &Recipe,
        entries: &Entries,
        device: &Device,
    ) -> Result<Self> {
        let (varmap, Awd { input_dropout, hidden_dropout, output_dropout, context_dropout, .. }) =
            (VarMap::new(), recipe.awd);
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let or_all = |dropout: Option<f64>| dropout.unwrap_or(recipe.dropout);
        let dropout = LstmDropout {
            input: or_all(input_dropout),
            between: or_all(hidden_dropout),
            output: or_all(output_dropout),
            weight: recipe.awd.weight_dropout.unwrap_or(0.0),
        };
        let lstm = Lstm::new(sizes.embedding, &sizes.units(), dropout, vb.pp("lstm"))?;
        let embedding = candle_nn::embedding(sizes.head.vocab, sizes.embedding, vb.pp("embedding"))?;
        let tied = sizes.tied.then_some(&embedding);
        let output = recipe.output;
        let head = output.build(kind, sizes.head, or_all(context_dropout), tied, entries, vb.pp("head"))?;
        init::uniform(&varmap, recipe.seed, |name| values.bound(name, kind, sizes))?;
        sizes.head.start_alike(&varmap, recipe.spread)?;
        Ok(Self {
            kind,
            sizes,
            embedding,
            embedding_dropout: recipe.awd.embedding_dropout.unwrap_or(0.0),
            lstm,
            output,
            noise: output.noise(entries)?,
            table: None,
            regularization: [recipe.awd.ar.unwrap_or(0.0), recipe.awd.tar.unwrap_or(0.0)],
            base: Base { head, varmap, device: device.clone() },
        })
    }

    /// Returns the model of the codes of this table, which its checkpoints then hold.
    pub fn with_table(self, table: Option<&CodeTable>) -> Self {
        LanguageModel { table: table.cloned(), ..self }
    }

    /// Sets the decoder's bias to the logarithm of each id's frequency in a text, with one more occurrence of each, so
    /// that what is left to learn is how a context changes it.
    pub fn start_at_frequencies(&self, text: &[u32]) -> Result<()> {
        let vocab = self.sizes.head.vocab;
        let mut counts = vec![1f64; vocab];
        text.iter().for_each(|&id| counts[id as usize] += 1.0);
        let total = (text.len() + vocab) as f64;
        let bias: Vec<f32> = counts.iter().map(|count| (count / total).ln() as f32).collect();
        let variables = self.varmap().data().lock().expect("no thread panicked while it held the variables");
        let variable = variables.get("head.decoder.bias").ok_or("the head has no decoder.bias")?;
        Ok(variable.set(&Tensor::from_vec(bias, vocab, self.device())?)?)
    }

    /// Returns the model of a checkpoint, without the state of training.
    pub fn from_checkpoint(checkpoint: &Checkpoint, vocab: usize, device: &Device) -> Result<(HeadKind, Self)> {
        let kind = HeadKind::from_checkpoint(checkpoint)?;
        // A sample makes no difference to an evaluation.
        if let Some(output) = checkpoint.optional::<String>("output")?.filter(|name| name != "sampled" && name != "nce")
        {
            return Err(format!("the checkpoint has --output {output}, which can be resumed but not evaluated").into());
        }
        let awd = Awd { inner: checkpoint.optional("inner")?, tied: checkpoint.optional("tied")?, ..Awd::NONE };
        let recipe = Recipe { awd, ..Recipe::from_checkpoint(kind, checkpoint)? };
        let model = Self::new(kind, vocab, InitialValues::Small, &recipe, device)?;
        checkpoint.restore_variables(model.varmap())?;
        Ok((kind, model))
    }

    /// Returns the variables and settings.
    pub fn checkpoint(&self) -> Checkpoint {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.varmap());
        checkpoint.metadata.extend(self.settings().into_iter().map(|(key, value)| (key.to_owned(), value)));
        checkpoint
    }

    /// Sets the variables from the checkpoint of a model with the same settings.
    pub fn restore(&self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.require_flags(&self.settings())?;
        checkpoint.restore_variables(self.varmap())
    }

    /// Returns what another text has at the targets of a batch, one after the other; `None` past the end.
    pub(crate) fn targets_of(
        &self,
        text: &[u32],
        TextBatch { streams, window }: &TextBatch,
    ) -> Result<Vec<Option<u32>>> {
        let (_, targets) = streams.tensors(text, window, &Device::Cpu)?;
        let targets = targets.flatten_all()?.to_vec1::<i64>()?;
        Ok(targets.into_iter().map(|target| u32::try_from(target).ok()).collect())
    }

    /// Returns the state before the first id of a text.
    pub fn state(&self, batch: usize) -> Result<Vec<LSTMState>> {
        self.lstm.start(batch)
    }

    /// Computes the hidden states `[batch, seq, hidden]` of token ids `[batch, seq]` without dropout. Advances
    /// `states`, which are detached from the graph.
    pub fn hidden(&self, ids: &Tensor, states: &mut [LSTMState]) -> Result<Tensor> {
        Ok(self.outputs(ids, states, None)?.dropped)
    }

    /// Computes the hidden states as `hidden` does, before and after the last dropout. Dropout is applied if a
    /// generator for its masks is given.
    fn outputs(&self, ids: &Tensor, states: &mut [LSTMState], mut rng: Option<&mut StdRng>) -> Result<Outputs> {
        let mut inputs = self.embedding.forward(ids)?;
        // The mask of the vocabulary's rows, at the rows that occur.
        let vocab = self.sizes.head.vocab;
        if let Some(mask) = dropout::mask(&[vocab], self.embedding_dropout, self.device(), rng.as_deref_mut())? {
            let mask = mask.index_select(&ids.flatten_all()?, 0)?;
            inputs = inputs.broadcast_mul(&mask.reshape((ids.dim(0)?, ids.dim(1)?, 1))?)?;
        }
        let outputs = self.lstm.outputs(&inputs, states, rng)?;
        recurrent::detach(states);
        Ok(outputs)
    }

    /// Computes the activation regularisation of the outputs that the head sees, and temporal activation regularisation
    /// of the outputs before dropout (Merity et al., 2017).
    fn penalty(&self, outputs: &Outputs) -> Result<Option<Tensor>> {
        let [ar, tar] = self.regularization;
        let mut penalty = None;
        if ar > 0.0 {
            penalty = Some((outputs.dropped.sqr()?.mean_all()? * ar)?);
        }
        let steps = outputs.raw.dim(1)?;
        if tar > 0.0 && steps > 1 {
            let difference = (outputs.raw.narrow(1, 1, steps - 1)? - outputs.raw.narrow(1, 0, steps - 1)?)?;
            let temporal = (difference.sqr()?.mean_all()? * tar)?;
            penalty = Some(match penalty {
                Some(penalty) => (penalty + temporal)?,
                None => temporal,
            });
        }
        Ok(penalty)
    }
}

/// The number of parallel streams in an evaluation.
const STREAMS: usize = 10;

/// A window of a text in parallel streams.
pub struct TextBatch {
    streams: Streams,
    window: Window,
}

impl Model for LanguageModel {
    type Item = u32;
    type Batch = TextBatch;
    type State = Vec<Vec<LSTMState>>;
    const IGNORED: i64 = IGNORED;

    fn base(&self) -> &Base {
        &self.base
    }

    fn options(&self, options: LossOptions, rng: &mut StdRng) -> Result<LossOptions> {
        match &self.noise {
            Some(noise) => self.output.options(options, noise, rng.random()),
            None => Ok(options),
        }
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.sizes.settings(self.kind);
        if self.output != Output::FULL {
            settings.push(("output", self.output.name()));
        }
        settings
    }

    fn add_constants(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        self.table.iter().try_for_each(|table| insert_table(checkpoint, "codes", table))
    }

    fn batches(&self, text: &[u32], recipe: &Recipe, pass: Pass) -> Vec<TextBatch> {
        let (streams, windows) = match pass {
            Pass::Training { epoch } => {
                let streams = Streams::new(text, recipe.batch);
                let mut rng = StdRng::seed_from_u64(recipe.seed ^ (epoch as u64) << 32);
                let (bptt, part) = (recipe.bptt, recipe.awd.part(streams.count));
                let windows = match recipe.awd.random_bptt {
                    None => streams.windows_in_parts(bptt, part),
                    Some(most) => streams.random_windows(bptt, most, part, &mut rng),
                };
                (streams, windows)
            }
            Pass::Evaluation { parts } => {
                let streams = Streams::new(text, STREAMS);
                (streams, streams.windows_in_parts(recipe.bptt, STREAMS.div_ceil(parts)))
            }
        };
        windows.into_iter().map(|window| TextBatch { streams, window }).collect()
    }

    fn part(&self, TextBatch { window, .. }: &TextBatch) -> Part {
        Part { share: window.share, is_last: window.is_last_part, lr_factor: window.lr_factor }
    }

    /// Returns the state of each part of the streams.
    fn start(&self, recipe: &Recipe, pass: Pass) -> Result<Vec<Vec<LSTMState>>> {
        let (streams, part) = match pass {
            Pass::Training { .. } => (recipe.batch, recipe.awd.part(recipe.batch)),
            Pass::Evaluation { parts } => (STREAMS, STREAMS.div_ceil(parts)),
        };
        (0..streams).step_by(part).map(|first| self.lstm.start(part.min(streams - first))).collect()
    }

    /// The state passes from window to window.
    fn forward(
        &self,
        text: &[u32],
        TextBatch { streams, window }: &TextBatch,
        states: &mut Vec<Vec<LSTMState>>,
        rng: Option<&mut StdRng>,
    ) -> Result<Forward> {
        let (inputs, targets) = streams.tensors(text, window, self.device())?;
        let is_training = rng.is_some();
        let outputs = self.outputs(&inputs, &mut states[window.part], rng)?;
        let penalty = if is_training { self.penalty(&outputs)? } else { None };
        Ok(Forward { hidden: outputs.dropped, targets, penalty })
    }

    fn save_state(&self, states: &Vec<Vec<LSTMState>>) -> Vec<(String, Tensor)> {
        let names = states.iter().enumerate().flat_map(|(part, layers)| {
            layers.iter().enumerate().flat_map(move |(layer, state)| {
                let name = |which| format!("state.{part}.{layer}.{which}");
                [(name("h"), state.h.clone()), (name("c"), state.c.clone())]
            })
        });
        names.collect()
    }

    fn share_state(&self, states: &mut Vec<Vec<LSTMState>>, ranks: &Ranks) -> Result<()> {
        let mut parts: Vec<Vec<&mut Tensor>> = vec![];
        for layers in states {
            parts.push(layers.iter_mut().flat_map(|state| [&mut state.h, &mut state.c]).collect());
        }
        ranks.share(&mut parts)
    }

    fn load_state(&self, states: &mut Vec<Vec<LSTMState>>, tensors: &HashMap<String, Tensor>) -> Result<()> {
        for (part, layers) in states.iter_mut().enumerate() {
            for (layer, state) in layers.iter_mut().enumerate() {
                let get = |which, like: &Tensor| {
                    let name = format!("state.{part}.{layer}.{which}");
                    let tensor = tensors.get(&name).filter(|tensor| tensor.dims() == like.dims());
                    tensor.cloned().ok_or_else(|| format!("the checkpoint has no {name} of shape {:?}", like.dims()))
                };
                *state = LSTMState::new(get("h", &state.h)?, get("c", &state.c)?);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(components: usize) -> Recipe {
        Recipe { components, hidden: 4, embedding: Some(3), context: Some(5), ..Recipe::BASE }
    }

    fn model(kind: HeadKind, vocab: usize, recipe: Recipe) -> LanguageModel {
        LanguageModel::new(kind, vocab, InitialValues::Small, &recipe, &Device::Cpu).expect("valid sizes")
    }

    #[test]
    fn the_heads_have_equal_parameter_counts_within_one_percent() {
        for (vocab, embedding, hidden, components) in [(512, 32, 6, 8), (10_000, 220, 220, 5), (10_000, 220, 220, 15)] {
            let recipe = Recipe { hidden, components, embedding: Some(embedding), ..Recipe::BASE };
            let parameters = |kind| model(kind, vocab, recipe).parameters() as f64;
            for kind in [HeadKind::Moc, HeadKind::Mos] {
                let ratio = parameters(kind) / parameters(HeadKind::Softmax);
                assert!((ratio - 1.0).abs() < 0.01, "{kind:?} {recipe:?}: {ratio}");
            }
        }
    }

    #[test]
    fn sizes_know_the_number_of_parameters() {
        for (kind, layers) in [(HeadKind::Softmax, 1), (HeadKind::Moc, 2), (HeadKind::Mos, 3)] {
            let recipe = Recipe { layers, ..recipe(2) };
            let sizes = Sizes::new(kind, &recipe, 11);
            let parameters = sizes.parameters(kind);
            assert_eq!(model(kind, 11, recipe).parameters(), parameters, "{kind:?}");
            for parameters in parameters - 1..=parameters + 1 {
                assert_eq!(sizes.with_parameters(kind, parameters), sizes);
            }
        }
    }

    #[test]
    fn a_seed_fixes_the_initial_values() {
        let sum = |seed| -> f32 {
            let model = model(HeadKind::Mos, 11, Recipe { seed, ..recipe(2) });
            let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).expect("ids");
            let hidden = model.hidden(&ids, &mut model.state(1).expect("state")).expect("hidden");
            hidden.sum_all().and_then(|sum| sum.to_scalar()).expect("sum")
        };
        assert_eq!(sum(1), sum(1));
        assert_ne!(sum(1), sum(2));
    }

    #[test]
    fn a_bias_at_frequencies_is_a_unigram_model() {
        for kind in HeadKind::ALL {
            let model = model(kind, 5, recipe(2));
            model.start_at_frequencies(&[0, 0, 3, 1, 3]).expect("every head has a bias");
            let bias = init::sorted(model.varmap()).into_iter().find(|(name, _)| name == "head.decoder.bias");
            let frequencies = bias.expect("found").1.exp().unwrap().to_vec1::<f32>().unwrap();
            for (found, expected) in frequencies.into_iter().zip([0.3f32, 0.2, 0.1, 0.3, 0.1]) {
                assert!((found - expected).abs() < 1e-6, "{kind:?}: {found} {expected}");
            }
        }
    }

    /// Computes the hidden states, before and after dropout, of some ids with the embedding's mask of this seed.
    fn outputs(awd: Awd, seed: Option<u64>) -> Outputs {
        let model = model(HeadKind::Mos, 50, Recipe { awd, ..recipe(2) });
        let ids: Vec<u32> = (0..50).chain(0..50).collect();
        let ids = Tensor::from_vec(ids, (2, 50), &Device::Cpu).unwrap();
        let mut rng = seed.map(StdRng::seed_from_u64);
        model.outputs(&ids, &mut model.state(2).unwrap(), rng.as_mut()).unwrap()
    }

    #[test]
    fn the_embedding_drops_the_same_rows_everywhere() {
        let awd = Awd { embedding_dropout: Some(0.4), ..Awd::NONE };
        let first = |outputs: Outputs, stream| outputs.raw.get(stream).unwrap().to_vec2::<f32>().unwrap();
        // Both streams read the same ids: only a mask of rows of the vocabulary is the same for both.
        assert_eq!(first(outputs(awd, Some(1)), 0), first(outputs(awd, Some(1)), 1));
        assert_ne!(first(outputs(awd, Some(1)), 0), first(outputs(awd, Some(2)), 0));
        assert_ne!(first(outputs(awd, Some(1)), 0), first(outputs(awd, None), 0));
        assert_eq!(first(outputs(awd, None), 0), first(outputs(Awd::NONE, Some(1)), 0));
    }

    #[test]
    fn penalties_are_those_of_the_papers() {
        let awd = Awd { output_dropout: Some(0.5), ar: Some(2.0), ..Awd::NONE };
        let recipe = Recipe { awd: Awd { tar: Some(3.0), ..awd }, ..recipe(2) };
        let model = |awd| model(HeadKind::Mos, 50, Recipe { awd, ..recipe });
        let outputs = outputs(awd, Some(1));
        let (raw, dropped) = (outputs.raw.to_vec3::<f32>().unwrap(), outputs.dropped.to_vec3::<f32>().unwrap());
        let mean = |values: Vec<f64>| values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        let activations = mean(dropped.iter().flatten().flatten().map(|&x| f64::from(x)).collect());
        let differences = raw
            .iter()
            .flat_map(|steps| steps.windows(2))
            .flat_map(|pair| pair[0].iter().zip(&pair[1]).map(|(a, b)| f64::from(b - a)).collect::<Vec<_>>());
        let temporal = mean(differences.collect());
        let found = |awd| model(awd).penalty(&outputs).unwrap().map(|p| f64::from(p.to_scalar::<f32>().unwrap()));
        assert!((found(awd).unwrap() - 2.0 * activations).abs() < 1e-5);
        assert!((found(recipe.awd).unwrap() - 2.0 * activations - 3.0 * temporal).abs() < 1e-5);
        assert!((found(Awd { ar: None, ..recipe.awd }).unwrap() - 3.0 * temporal).abs() < 1e-5);
        assert_eq!(found(Awd::NONE), None);
    }

    #[test]
    fn a_tied_decoder_is_the_embedding() {
        for kind in HeadKind::ALL {
            let recipe = Recipe { awd: Awd { tied: Some(true), inner: Some(6), ..Awd::NONE }, layers: 2, ..recipe(2) };
            let (sizes, model) = (Sizes::new(kind, &recipe, 11), model(kind, 11, recipe));
            let names: Vec<String> = init::sorted(model.varmap()).into_iter().map(|(name, _)| name).collect();
            assert!(!names.iter().any(|name| name == "head.decoder.weight"), "{names:?}");
            assert_eq!(model.parameters(), sizes.parameters(kind), "{kind:?}");
        }
    }
}
