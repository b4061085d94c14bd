//! The recurrent encoder-decoder: a bidirectional LSTM over the source, an LSTM over the target, and attention.

use crate::batches::Sources;
use crate::setting::Setting;
use candle_core::{Module, Tensor, D};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, Linear, VarBuilder};
use lab::attention::{Attention, Memory};
use lab::dropout::locked_dropout;
use lab::head::{HeadKind, HeadSizes};
use lab::recurrent::{Lstm, LstmDropout};
use lab::{recipe::Recipe, Result};
use rand::rngs::StdRng;

pub(crate) struct Recurrent {
    source_embedding: Embedding,
    forwards: Lstm,
    backwards: Lstm,
    bridge: Linear,
    target_embedding: Embedding,
    decoder: Lstm,
    attention: Attention,
    dropout: f64,
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

impl Recurrent {
    pub(crate) fn new(setting: &Setting, recipe: &Recipe, vb: VarBuilder) -> Result<Self> {
        let Recipe { hidden, layers, dropout, .. } = *recipe;
        if hidden % 2 != 0 {
            return Err(format!("--hidden is {hidden}, expected an even number: half for each direction").into());
        }
        let embedding = recipe.embedding();
        let lstm = |units, name| Lstm::new(embedding, &vec![units; layers], LstmDropout::locked(dropout), vb.pp(name));
        let encoder = |name| lstm(hidden / 2, name);
        Ok(Self {
            source_embedding: candle_nn::embedding(setting.source.len(), embedding, vb.pp("source"))?,
            forwards: encoder("forwards")?,
            backwards: encoder("backwards")?,
            bridge: candle_nn::linear(hidden, layers * hidden, vb.pp("bridge"))?,
            target_embedding: candle_nn::embedding(setting.target.len(), embedding, vb.pp("target"))?,
            decoder: lstm(hidden, "decoder")?,
            attention: Attention::new(hidden, vb.pp("attention"))?,
            dropout,
        })
    }

    /// The bound of a variable's initial values. They keep their scale from the embeddings to the logits. With smaller
    /// initial values all positions of the source look alike, and attention takes epochs to form, more of them the smaller
    /// the contexts are.
    pub(crate) fn bound(kind: HeadKind, sizes: HeadSizes, name: &str) -> f64 {
        let width = if kind == HeadKind::Softmax { sizes.hidden } else { sizes.context };
        let linear = 1.0 / (sizes.hidden as f64).sqrt();
        match name {
            "source.weight" | "target.weight" => 1.0,
            "attention.score.weight" | "attention.combine.weight" | "head.latent.weight" => 3.0 * linear,
            "head.decoder.weight" => (3.0 / width as f64).sqrt(),
            "head.decoder.bias" => 0.0,
            _ => linear,
        }
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
}
