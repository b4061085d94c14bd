//! The character LSTM: from the hidden state of a frozen word model to the characters of the next word.

use super::spellings::{Group, Spellings};
use super::word::Word;
use candle_core::{DType, Module, Tensor};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, Linear, VarBuilder, VarMap};
use lab::layers::recurrent::{self, Lstm, LstmDropout};
use lab::layers::{init, HeadKind};
use lab::training::{Base, Forward, InitialValues, Model, Part, Pass, Recipe, Sizes, TextBatch};
use lab::{data::IGNORED, Result};
use rand::rngs::StdRng;
use std::collections::HashMap;
use std::rc::Rc;

/// P(word | text) is the product of the probabilities of its characters and its end, each given the characters before
/// and the word model's hidden state. The input of a step is the embedding of the last character and a projection of
/// the hidden state to as many dimensions as the LSTM has units.
pub(crate) struct Speller {
    kind: HeadKind,
    sizes: Sizes,
    word: Rc<Word>,
    spellings: Rc<Spellings>,
    embedding: Embedding,
    condition: Linear,
    lstm: Lstm,
    base: Base,
}

impl Speller {
    pub(crate) fn new(kind: HeadKind, word: Rc<Word>, spellings: Rc<Spellings>, recipe: &Recipe) -> Result<Self> {
        recipe.require_no_cells()?;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, word.model.device());
        let sizes = Sizes::new(kind, recipe, spellings.characters());
        let (hidden, units) = (word.model.head().hidden_size(), recipe.hidden);
        let embedding = candle_nn::embedding(sizes.head.vocab, sizes.embedding, vb.pp("embedding"))?;
        let condition = candle_nn::linear_no_bias(hidden, units, vb.pp("condition"))?;
        let dropout = LstmDropout::locked(recipe.dropout);
        let lstm = Lstm::new(sizes.embedding + units, &sizes.units(), dropout, vb.pp("lstm"))?;
        let head = sizes.head.build(kind, recipe.dropout, None, vb.pp("head"))?;
        init::uniform(&varmap, recipe.seed, |name| match name {
            "condition.weight" => (3.0 / hidden as f64).sqrt(),
            name => InitialValues::Even.bound(name, kind, sizes),
        })?;
        sizes.head.start_alike(&varmap, recipe.spread)?;
        let base = Base { head, varmap, device: word.model.device().clone() };
        Ok(Self { kind, sizes, word, spellings, embedding, condition, lstm, base })
    }

    /// Returns the number of parameters of a character LSTM of these sizes for hidden states of this size.
    pub(crate) fn parameters(kind: HeadKind, sizes: Sizes, recipe: &Recipe, hidden: usize) -> usize {
        // The first layer sees the condition beside the character.
        sizes.parameters(kind) + 4 * sizes.units()[0] * recipe.hidden + hidden * recipe.hidden
    }

    /// Computes projections `[n, units]` of hidden states `[n, hidden]` of the word model.
    pub(crate) fn conditions(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.condition.forward(hidden)?)
    }

    /// Returns the hidden states [.., units] and targets of all characters of `words`, given the hidden states [n,
    /// hidden] of the word model. Padding is ignored.
    pub(crate) fn characters(
        &self,
        hidden: &Tensor,
        words: &[u32],
        mut rng: Option<&mut StdRng>,
    ) -> Result<(Tensor, Tensor)> {
        let conditions = self.conditions(hidden)?;
        let (mut outputs, mut targets) = (vec![], vec![]);
        for Group { rows, steps } in self.spellings.groups(words) {
            let sequences = rows.iter().flat_map(|&row| self.spellings.sequence(words[row as usize], steps, IGNORED));
            let (inputs, group_targets): (Vec<u32>, Vec<i64>) = sequences.unzip();
            let inputs = Tensor::from_vec(inputs, (rows.len(), steps), hidden.device())?;
            let rows = Tensor::new(rows, hidden.device())?;
            let mut states = self.start(rows.dim(0)?)?;
            let conditions = conditions.index_select(&rows, 0)?;
            outputs.push(self.outputs(&inputs, &conditions, &mut states, rng.as_deref_mut())?.flatten_to(1)?);
            targets.extend(group_targets);
        }
        Ok((Tensor::cat(&outputs, 0)?, Tensor::new(targets, hidden.device())?))
    }

    /// Returns the state before the first character of `words` words.
    pub(crate) fn start(&self, words: usize) -> Result<Vec<LSTMState>> {
        self.lstm.start(words)
    }

    /// Returns the log-probabilities `[n, characters]` of what follows the characters `[n]`, without gradients.
    pub(crate) fn step(&self, last: &Tensor, conditions: &Tensor, states: &mut [LSTMState]) -> Result<Tensor> {
        let outputs = self.outputs(&last.unsqueeze(1)?, conditions, states, None)?;
        recurrent::detach(states);
        Ok(self.head().log_probs(&outputs.squeeze(1)?.detach())?.detach())
    }

    /// Computes hidden states `[n, steps, units]` from characters `[n, steps]` and conditions `[n, units]`.
    fn outputs(
        &self,
        characters: &Tensor,
        conditions: &Tensor,
        states: &mut [LSTMState],
        rng: Option<&mut StdRng>,
    ) -> Result<Tensor> {
        let (words, steps) = characters.dims2()?;
        let conditions = conditions.unsqueeze(1)?.broadcast_as((words, steps, conditions.dim(1)?))?;
        let inputs = Tensor::cat(&[&self.embedding.forward(characters)?, &conditions], 2)?;
        self.lstm.forward(&inputs, states, rng)
    }
}

impl Model for Speller {
    type Item = u32;
    type Batch = TextBatch;
    /// The state of the word model.
    type State = Vec<Vec<LSTMState>>;
    const IGNORED: i64 = IGNORED;

    fn base(&self) -> &Base {
        &self.base
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let word = ("spell", format!("(digest {})", self.word.digest));
        [vec![word], self.sizes.settings(self.kind)].concat()
    }

    fn batches(&self, text: &[u32], recipe: &Recipe, pass: Pass) -> Vec<TextBatch> {
        self.word.model.batches(text, recipe, pass)
    }

    fn part(&self, batch: &TextBatch) -> Part {
        self.word.model.part(batch)
    }

    fn start(&self, recipe: &Recipe, pass: Pass) -> Result<Self::State> {
        self.word.model.start(recipe, pass)
    }

    /// The word model reads a window, in evaluation; the batch has the characters of all its targets.
    fn forward(
        &self,
        text: &[u32],
        batch: &TextBatch,
        states: &mut Self::State,
        rng: Option<&mut StdRng>,
    ) -> Result<Forward> {
        let (hidden, words) = self.word.hidden(text, batch, states)?;
        let (hidden, targets) = self.characters(&hidden, &words, rng)?;
        Ok(Forward { hidden, targets, penalty: None })
    }

    fn save_state(&self, states: &Self::State) -> Vec<(String, Tensor)> {
        self.word.model.save_state(states)
    }

    fn load_state(&self, states: &mut Self::State, tensors: &HashMap<String, Tensor>) -> Result<()> {
        self.word.model.load_state(states, tensors)
    }
}
