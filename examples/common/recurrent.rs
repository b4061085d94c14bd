//! Layers of LSTMs, one on another, with locked dropout.

use super::Result;
use candle_core::Tensor;
use candle_nn::rnn::{LSTMConfig, LSTMState, LSTM, RNN};
use candle_nn::VarBuilder;
use rand::{rngs::StdRng, Rng};

pub(crate) struct Lstm {
    layers: Vec<LSTM>,
    dropout: f64,
}

impl Lstm {
    /// Variables `0.weight_ih_l0`, .., `1.weight_ih_l0`, ..
    pub(crate) fn new(inputs: usize, hidden: usize, layers: usize, dropout: f64, vb: VarBuilder) -> Result<Self> {
        let layer = |i: usize| {
            let inputs = if i == 0 { inputs } else { hidden };
            candle_nn::lstm(inputs, hidden, LSTMConfig::default(), vb.pp(i))
        };
        Ok(Self { layers: (0..layers).map(layer).collect::<candle_core::Result<_>>()?, dropout })
    }

    /// The state before the first input.
    pub(crate) fn start(&self, batch: usize) -> Result<Vec<LSTMState>> {
        Ok(self.layers.iter().map(|layer| layer.zero_state(batch)).collect::<candle_core::Result<_>>()?)
    }

    /// inputs [batch, seq, width] -> hidden [batch, seq, hidden]; `states` moves on. Dropout is applied to the inputs and
    /// outputs of every layer where a generator for its masks is given.
    pub(crate) fn forward(
        &self,
        inputs: &Tensor,
        states: &mut [LSTMState],
        mut rng: Option<&mut StdRng>,
    ) -> Result<Tensor> {
        let mut outputs = inputs.clone();
        for (layer, state) in self.layers.iter().zip(states) {
            outputs = self.locked_dropout(outputs, rng.as_deref_mut())?;
            let steps = layer.seq_init(&outputs, state)?;
            if let Some(last) = steps.last() {
                *state = last.clone();
            }
            outputs = layer.states_to_tensor(&steps)?;
        }
        self.locked_dropout(outputs, rng)
    }

    /// One mask per sequence, shared by its time steps.
    fn locked_dropout(&self, values: Tensor, rng: Option<&mut StdRng>) -> Result<Tensor> {
        let Some(rng) = rng.filter(|_| self.dropout > 0.0) else { return Ok(values) };
        let (batch, _, width) = values.dims3()?;
        let keep = 1.0 - self.dropout;
        let mask: Vec<f32> =
            (0..batch * width).map(|_| if rng.random::<f64>() < keep { 1.0 / keep as f32 } else { 0.0 }).collect();
        Ok(values.broadcast_mul(&Tensor::from_vec(mask, (batch, 1, width), values.device())?)?)
    }
}

/// The states without the history that a backward pass would follow.
pub(crate) fn detach(states: &mut [LSTMState]) {
    for state in states {
        *state = LSTMState::new(state.h.detach(), state.c.detach());
    }
}
