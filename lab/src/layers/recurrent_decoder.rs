//! The decoder of an encoder-decoder: an LSTM over the target, with attention over the encoder's outputs.

use super::attention::{Attention, Memory};
use super::dropout::locked_dropout;
use super::recurrent::{Lstm, LstmDropout};
use crate::Result;
use candle_core::{Module, Tensor};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, Linear, VarBuilder};
use rand::rngs::StdRng;

/// An LSTM with attention.
pub struct RecurrentDecoder {
    bridge: Linear,
    embedding: Embedding,
    lstm: Lstm,
    attention: Attention,
    dropout: f64,
}

/// The state of a decoder; its rows are sources, or hypotheses of a beam.
pub struct State {
    memory: Memory,
    lstm: Vec<LSTMState>,
}

impl State {
    /// Returns the states of these rows: `[rows]`, u32.
    pub fn select(&self, rows: &Tensor) -> Result<Self> {
        let select =
            |state: &LSTMState| Ok(LSTMState::new(state.h.index_select(rows, 0)?, state.c.index_select(rows, 0)?));
        Ok(Self { memory: self.memory.select(rows)?, lstm: self.lstm.iter().map(select).collect::<Result<_>>()? })
    }
}

/// The sizes of a decoder, and its dropout.
#[derive(Clone, Copy, Debug)]
pub struct DecoderSizes {
    /// The number of token ids.
    pub vocab: usize,
    /// The embedding's size.
    pub embedding: usize,
    /// The number of units of an LSTM layer.
    pub hidden: usize,
    /// The number of LSTM layers.
    pub layers: usize,
    /// Locked dropout.
    pub dropout: f64,
}

impl RecurrentDecoder {
    /// Returns a decoder with the variables `bridge.weight`, `decoder.0.weight_ih_l0`, `attention.score.weight`, ..,
    /// and `weight` of the embedding `name`.
    pub fn new(sizes: DecoderSizes, name: &str, vb: VarBuilder) -> Result<Self> {
        let DecoderSizes { vocab, embedding, hidden, layers, dropout } = sizes;
        Ok(Self {
            bridge: candle_nn::linear(hidden, layers * hidden, vb.pp("bridge"))?,
            embedding: candle_nn::embedding(vocab, embedding, vb.pp(name))?,
            lstm: Lstm::new(embedding, &vec![hidden; layers], LstmDropout::locked(dropout), vb.pp("decoder"))?,
            attention: Attention::new(hidden, vb.pp("attention"))?,
            dropout,
        })
    }

    /// Returns the state before the first token, after the encoder's outputs `[batch, positions, hidden]` and their
    /// mean `[batch, hidden]`. The mask `[batch, 1, positions]` is added to the scores of attention.
    pub fn start(&self, outputs: Tensor, mean: &Tensor, mask: Tensor) -> Result<State> {
        let hidden = self.bridge.forward(mean)?.tanh()?.chunk(self.lstm.layers(), 1)?;
        let start = |hidden: Tensor| Ok(LSTMState::new(hidden.contiguous()?, hidden.zeros_like()?));
        let lstm = hidden.into_iter().map(start).collect::<Result<_>>()?;
        Ok(State { memory: self.attention.memory(outputs, mask)?, lstm })
    }

    /// Computes the head's hidden states `[batch, steps, hidden]` for the ids after token ids `[batch, steps]`, and
    /// advances `state`. Dropout is applied if a generator for its masks is given.
    pub fn decode(&self, ids: &Tensor, state: &mut State, mut rng: Option<&mut StdRng>) -> Result<Tensor> {
        let inputs = self.embedding.forward(ids)?;
        let hidden = self.lstm.forward(&inputs, &mut state.lstm, rng.as_deref_mut())?;
        locked_dropout(self.attention.forward(&hidden, &state.memory)?, self.dropout, rng)
    }
}
