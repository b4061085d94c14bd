//! Stacked LSTM layers with locked dropout.

use super::recurrence::recurrence;
use super::Result;
use candle_core::Tensor;
use candle_nn::rnn::LSTMState;
use candle_nn::VarBuilder;
use rand::{rngs::StdRng, Rng};

pub(crate) struct Lstm {
    layers: Vec<Layer>,
    dropout: f64,
}

impl Lstm {
    /// Variables `0.weight_ih_l0`, .., `1.weight_ih_l0`, ..: names and shapes of candle_nn's LSTM.
    pub(crate) fn new(inputs: usize, hidden: usize, layers: usize, dropout: f64, vb: VarBuilder) -> Result<Self> {
        let layer = |i: usize| Layer::new(if i == 0 { inputs } else { hidden }, hidden, vb.pp(i));
        Ok(Self { layers: (0..layers).map(layer).collect::<Result<_>>()?, dropout })
    }

    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The state before the first input.
    pub(crate) fn start(&self, batch: usize) -> Result<Vec<LSTMState>> {
        self.layers.iter().map(|layer| layer.start(batch)).collect()
    }

    /// inputs [batch, seq, width] -> hidden states [batch, seq, hidden]; advances `states`. Dropout is applied to the
    /// inputs and outputs of every layer if a generator for its masks is given.
    pub(crate) fn forward(
        &self,
        inputs: &Tensor,
        states: &mut [LSTMState],
        mut rng: Option<&mut StdRng>,
    ) -> Result<Tensor> {
        let mut outputs = inputs.clone();
        for (layer, state) in self.layers.iter().zip(states) {
            outputs = locked_dropout(outputs, self.dropout, rng.as_deref_mut())?;
            outputs = layer.forward(&outputs, state)?;
        }
        locked_dropout(outputs, self.dropout, rng)
    }
}

struct Layer {
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
}

impl Layer {
    fn new(inputs: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight_ih: vb.get((4 * hidden, inputs), "weight_ih_l0")?,
            weight_hh: vb.get((4 * hidden, hidden), "weight_hh_l0")?,
            bias_ih: vb.get(4 * hidden, "bias_ih_l0")?,
            bias_hh: vb.get(4 * hidden, "bias_hh_l0")?,
        })
    }

    fn start(&self, batch: usize) -> Result<LSTMState> {
        let (dtype, device) = (self.weight_hh.dtype(), self.weight_hh.device());
        let zeros = Tensor::zeros((batch, self.weight_hh.dim(1)?), dtype, device)?;
        Ok(LSTMState::new(zeros.clone(), zeros))
    }

    /// One product for the inputs of all steps; each step adds only the recurrent one.
    fn forward(&self, inputs: &Tensor, state: &mut LSTMState) -> Result<Tensor> {
        let (batch, steps, _) = inputs.dims3()?;
        let inputs = inputs.transpose(0, 1)?.contiguous()?.flatten_to(1)?;
        let sums = inputs.matmul(&self.weight_ih.t()?)?.broadcast_add(&(&self.bias_ih + &self.bias_hh)?)?;
        let start = Tensor::stack(&[&state.h, &state.c], 0)?;
        let both = recurrence(&sums.reshape((steps, batch, ()))?, &self.weight_hh, &start)?;
        let (hidden, cells) = (both.get(0)?, both.get(1)?);
        *state = LSTMState::new(hidden.get(steps - 1)?, cells.get(steps - 1)?);
        Ok(hidden.transpose(0, 1)?.contiguous()?)
    }
}

/// One mask per sequence, shared by its time steps; none without a generator.
pub(crate) fn locked_dropout(values: Tensor, dropout: f64, rng: Option<&mut StdRng>) -> Result<Tensor> {
    let Some(rng) = rng.filter(|_| dropout > 0.0) else { return Ok(values) };
    let (batch, _, width) = values.dims3()?;
    let keep = 1.0 - dropout;
    let mask: Vec<f32> =
        (0..batch * width).map(|_| if rng.random::<f64>() < keep { 1.0 / keep as f32 } else { 0.0 }).collect();
    Ok(values.broadcast_mul(&Tensor::from_vec(mask, (batch, 1, width), values.device())?)?)
}

/// Detaches the states from the graph.
pub(crate) fn detach(states: &mut [LSTMState]) {
    for state in states {
        *state = LSTMState::new(state.h.detach(), state.c.detach());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{device::DeviceKind, init};
    use candle_core::{DType, Device};
    use candle_nn::rnn::{LSTMConfig, RNN};
    use candle_nn::VarMap;

    #[test]
    fn values_and_gradients_equal_those_of_candles_lstm() {
        compare(&Device::Cpu, 1e-5);
        for device in DeviceKind::gpus() {
            compare(&device, 1e-3);
        }
    }

    fn compare(device: &Device, tolerance: f32) {
        let (batch, steps, width, hidden) = (3, 5, 4, 6);
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let ours = Lstm::new(width, hidden, 1, 0.0, vb.clone()).unwrap();
        let theirs = candle_nn::lstm(width, hidden, LSTMConfig::default(), vb.pp("0")).unwrap();
        init::uniform(&varmap, 1, |_| 0.7).unwrap();
        let random = |shape: (usize, usize, usize)| candle_core::Var::randn(0f32, 1.0, shape, device).unwrap();
        let (inputs, start, weight) =
            (random((batch, steps, width)), random((2, batch, hidden)), random((batch, steps, hidden)));
        let state = LSTMState::new(start.get(0).unwrap(), start.get(1).unwrap());

        let mut states = vec![state.clone()];
        let outputs = ours.forward(&inputs, &mut states, None).unwrap();
        let (last_hidden, last_cell) = (states[0].h.clone(), states[0].c.clone());
        let all = theirs.seq_init(&inputs, &state).unwrap();
        let expected = Tensor::stack(&all.iter().map(|state| &state.h).collect::<Vec<_>>(), 1).unwrap();
        let last = all.last().unwrap();

        let objective = |outputs: &Tensor, hidden: &Tensor, cell: &Tensor| {
            let outputs = (outputs * weight.as_tensor()).unwrap().sum_all().unwrap();
            (outputs + (hidden.sqr().unwrap() + cell.sqr().unwrap()).unwrap().sum_all().unwrap()).unwrap()
        };
        let found = objective(&outputs, &last_hidden, &last_cell).backward().unwrap();
        let wanted = objective(&expected, &last.h, &last.c).backward().unwrap();
        let same = |a: &Tensor, b: &Tensor, what: &str| {
            let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(difference < tolerance, "{device:?} {what}: {difference}");
        };
        same(&outputs, &expected, "hidden states");
        same(&last_cell, &last.c, "cells");
        same(found.get(&inputs).unwrap(), wanted.get(&inputs).unwrap(), "inputs");
        same(found.get(&start).unwrap(), wanted.get(&start).unwrap(), "start");
        for (name, var) in init::sorted(&varmap) {
            same(found.get(&var).unwrap(), wanted.get(&var).unwrap(), &name);
        }
    }
}
