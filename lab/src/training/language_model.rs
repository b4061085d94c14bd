//! The language model: embedding, LSTM layers, and one of the output layers.

use super::model::{Base, Forward, Model, Part, Pass};
use super::sizes::{InitialValues, Sizes};
use super::{awd::Awd, ranks::Ranks, recipe::Recipe};
use crate::data::{insert_table, Streams, Window, IGNORED};
use crate::layers::mixtape::{by_frequency, counts_in_order, ORDER};
use crate::layers::recurrent::{self, Lstm, LstmDropout, Outputs};
use crate::layers::{dropout, init, spelled::Inputs, Checkpoint, Entries, HeadKind, Output};
use crate::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::rnn::LSTMState;
use candle_nn::{VarBuilder, VarMap};
use mos_codes::CodeTable;
use mos_head::sampled::NoiseDistribution;
use mos_head::LossOptions;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::HashMap;

/// A model of the next token.
pub struct LanguageModel {
    kind: HeadKind,
    sizes: Sizes,
    inputs: Inputs,
    /// Dropout of whole rows of the embedding.
    embedding_dropout: f64,
    lstm: Lstm,
    output: Output,
    /// The distribution from which negatives are drawn, if any are.
    noise: Option<NoiseDistribution>,
    /// The ids in descending order of their frequency, if the head is a Mixtape.
    order: Option<Tensor>,
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
        let lstm = Lstm::with_cells(sizes.embedding, &sizes.units(), sizes.cells, dropout, vb.pp("lstm"))?;
        let output = recipe.output;
        let inputs = output.inputs(sizes.head.vocab, sizes.embedding, entries, &vb)?;
        let tied = match &inputs {
            Inputs::Table(embedding) => sizes.tied.then_some(embedding),
            Inputs::Spelled(_) if sizes.tied => return Err("--tied needs an embedding: not --spelled-inputs".into()),
            Inputs::Spelled(_) => None,
        };
        let head = output.build(kind, sizes.head, or_all(context_dropout), tied, entries, vb.pp("head"))?;
        init::uniform(&varmap, recipe.seed, |name| values.bound(name, kind, sizes))?;
        sizes.head.start_alike(&varmap, recipe.spread)?;
        let order = (kind == HeadKind::Mixtape).then(|| Tensor::new(by_frequency(&entries.counts), device));
        Ok(Self {
            kind,
            sizes,
            inputs,
            embedding_dropout: recipe.awd.embedding_dropout.unwrap_or(0.0),
            lstm,
            output,
            noise: output.noise(entries)?,
            order: order.transpose()?,
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
        if let Some(output) = special_output(checkpoint)? {
            return Err(format!("the checkpoint has --output {output}, which can be resumed but not evaluated").into());
        }
        if checkpoint.optional::<String>("spelled-inputs")?.is_some() {
            return Err("the checkpoint has --spelled-inputs, which can be resumed but not evaluated".into());
        }
        let awd = Awd { inner: checkpoint.optional("inner")?, tied: checkpoint.optional("tied")?, ..Awd::NONE };
        let recipe = Recipe { awd, ..Recipe::from_checkpoint(kind, checkpoint)? };
        let mut entries = Entries::default();
        if kind == HeadKind::Mixtape {
            let order = checkpoint.tensors.get(ORDER).ok_or_else(|| format!("the checkpoint has no tensor {ORDER}"))?;
            entries.counts = counts_in_order(&order.to_vec1()?).map_err(|error| format!("{ORDER}: {error}"))?;
        }
        let sizes = Sizes::new(kind, &recipe, vocab);
        let model = Self::with_entries(kind, sizes, InitialValues::Small, &recipe, &entries, device)?;
        checkpoint.restore_variables(model.varmap())?;
        Ok((kind, model))
    }

    /// Returns the variables and settings.
    pub fn checkpoint(&self) -> Checkpoint {
        let mut checkpoint = Checkpoint::default();
        checkpoint.insert_variables(self.varmap());
        self.insert_order(&mut checkpoint);
        checkpoint.metadata.extend(self.settings().into_iter().map(|(key, value)| (key.to_owned(), value)));
        checkpoint
    }

    /// Returns the sizes.
    pub(crate) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Adds the order of the ids, if the head needs it.
    fn insert_order(&self, checkpoint: &mut Checkpoint) {
        checkpoint.tensors.extend(self.order.iter().map(|order| (ORDER.to_owned(), order.clone())));
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
        let mut inputs = self.inputs.forward(ids)?;
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

/// Returns the output of a checkpoint whose head is not over rows of the whole vocabulary: a sample makes no difference
/// once the model is trained.
pub(super) fn special_output(checkpoint: &Checkpoint) -> Result<Option<String>> {
    Ok(checkpoint.optional::<String>("output")?.filter(|name| name != "sampled" && name != "nce"))
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
        settings.extend(self.output.settings());
        settings
    }

    fn add_constants(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        self.insert_order(checkpoint);
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
mod tests;
