//! The frozen word model.

use crate::evaluate::readable;
use candle_core::{Device, Tensor};
use candle_nn::rnn::LSTMState;
use lab::data::{Corpus, Digest, IGNORED};
use lab::layers::{init, HeadKind};
use lab::training::{LanguageModel, Model, Pass, Recipe, TextBatch};
use lab::Result;
use mos_head::LossOptions;
use rand::{rngs::StdRng, seq::index, SeedableRng};
use std::path::Path;

/// A word model whose hidden states are inputs: no gradient reaches its variables, and its dropout is off.
pub(crate) struct Word {
    pub(crate) kind: HeadKind,
    pub(crate) model: LanguageModel,
    /// The digest of its variables.
    pub(crate) digest: String,
}

/// Positions of a text, as the word model sees them.
pub(crate) struct Sample {
    /// [positions, hidden]
    pub(crate) hidden: Tensor,
    /// The words that follow.
    pub(crate) words: Vec<u32>,
    /// Their mean NLL under the word model.
    pub(crate) nll: f64,
}

/// Steps of a window that a sample is drawn from.
const STEPS: usize = 70;

impl Word {
    /// Returns the model of a checkpoint, if it is for this corpus.
    pub(crate) fn load(file: &Path, corpus: &Corpus, device: &Device) -> Result<Self> {
        let load = || {
            let checkpoint = readable(file, corpus, device)?;
            LanguageModel::from_checkpoint(&checkpoint, corpus.words.len(), device)
        };
        let name = file.display().to_string();
        let (kind, model) = load().map_err(|error| match error.to_string() {
            error if error.contains(&name) => format!("--spell: {error}"),
            error => format!("--spell: {name}: {error}"),
        })?;
        Self::new(kind, model)
    }

    pub(crate) fn new(kind: HeadKind, model: LanguageModel) -> Result<Self> {
        let mut digest = Digest::default();
        for (name, var) in init::sorted(model.varmap()) {
            let values = var.flatten_all()?.to_vec1::<f32>()?;
            digest = digest.texts([name]).ids(&values.into_iter().map(f32::to_bits).collect::<Vec<_>>());
        }
        Ok(Self { kind, model, digest: digest.to_string() })
    }

    /// Returns the hidden states [n, hidden] before the words of a batch, and these words; advances `states`.
    pub(crate) fn hidden(
        &self,
        text: &[u32],
        batch: &TextBatch,
        states: &mut Vec<Vec<LSTMState>>,
    ) -> Result<(Tensor, Vec<u32>)> {
        let forward = self.model.forward(text, batch, states, None)?;
        let hidden = forward.hidden.detach().flatten_to(1)?;
        let targets = forward.targets.flatten_all()?.to_vec1::<i64>()?;
        if !targets.contains(&IGNORED) {
            return Ok((hidden, targets.into_iter().map(|target| target as u32).collect()));
        }
        let words = targets.into_iter().zip(0u32..).filter(|(target, _)| *target != IGNORED);
        let (words, rows): (Vec<u32>, Vec<u32>) = words.map(|(target, row)| (target as u32, row)).unzip();
        Ok((hidden.index_select(&Tensor::new(rows, hidden.device())?, 0)?, words))
    }

    /// Returns random positions of a text, all of them if it has no more. They depend on the seed alone.
    pub(crate) fn sample(&self, text: &[u32], positions: usize, recipe: &Recipe) -> Result<Sample> {
        let recipe = &Recipe { bptt: STEPS, ..*recipe };
        let (all, mut rng) = (text.len() - 1, StdRng::seed_from_u64(recipe.seed));
        let mut chosen = index::sample(&mut rng, all, positions.clamp(1, all)).into_vec();
        chosen.sort_unstable();
        let mut chosen = chosen.into_iter().peekable();
        let (mut hidden, mut words, mut seen) = (vec![], vec![], 0);
        let mut states = self.model.start(recipe, Pass::Evaluation { parts: 1 })?;
        for batch in self.model.batches(text, recipe, Pass::Evaluation { parts: 1 }) {
            let (batch_hidden, targets) = self.hidden(text, &batch, &mut states)?;
            let mut rows = vec![];
            while let Some(position) = chosen.next_if(|position| *position < seen + targets.len()) {
                rows.push((position - seen) as u32);
                words.push(targets[position - seen]);
            }
            seen += targets.len();
            if !rows.is_empty() {
                hidden.push(batch_hidden.index_select(&Tensor::new(rows, batch_hidden.device())?, 0)?);
            }
        }
        let hidden = Tensor::cat(&hidden, 0)?;
        let targets = Tensor::new(words.as_slice(), hidden.device())?;
        let loss = self.model.head().loss(&hidden, &targets, &LossOptions::evaluation())?;
        let (sum, count) = loss.sum_and_count()?;
        Ok(Sample { hidden, words, nll: sum / count })
    }
}
