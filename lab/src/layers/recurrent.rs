//! Stacked LSTM layers with locked dropout, whose states may be projections of their cells' outputs.

use super::dropout::{locked_dropout, mask};
use super::recurrence::recurrence;
use crate::Result;
use candle_core::Tensor;
use candle_nn::rnn::LSTMState;
use candle_nn::{ops::sigmoid, VarBuilder};
use rand::rngs::StdRng;

/// The dropout of stacked LSTM layers.
#[derive(Clone, Copy, Debug, Default)]
pub struct LstmDropout {
    /// Locked dropout of the inputs of the first layer.
    pub input: f64,
    /// Locked dropout between layers.
    pub between: f64,
    /// Locked dropout of the outputs of the last layer.
    pub output: f64,
    /// Dropout of the recurrent weights, with one mask for all steps (Wan et al., 2013; Merity et al., 2018).
    pub weight: f64,
}

impl LstmDropout {
    /// Returns the same locked dropout everywhere.
    pub fn locked(dropout: f64) -> Self {
        Self { input: dropout, between: dropout, output: dropout, weight: 0.0 }
    }
}

/// These are stacked LSTM layers.
pub struct Lstm {
    layers: Vec<Layer>,
    dropout: LstmDropout,
}

/// The hidden states of the last layer, `[batch, seq, hidden]`, before and after dropout.
pub(crate) struct Outputs {
    /// The hidden states before dropout.
    pub(crate) raw: Tensor,
    /// The hidden states after dropout.
    pub(crate) dropped: Tensor,
}

impl Lstm {
    /// Makes layers with these numbers of units, and variables `0.weight_ih_l0`, .., `1.weight_ih_l0`, .., with the
    /// names and shapes of candle_nn's LSTM.
    pub fn new(inputs: usize, units: &[usize], dropout: LstmDropout, vb: VarBuilder) -> Result<Self> {
        Self::with_cells(inputs, units, None, dropout, vb)
    }

    /// Makes layers with this number of cells each, whose outputs are projected to the layer's units: what the next
    /// step and the next layer see (Sak et al.: Long Short-Term Memory Recurrent Neural Network Architectures for Large
    /// Scale Acoustic Modeling. 2014). The projections are `0.weight_hr_l0`, .., as in PyTorch. Without a number, the
    /// cells' outputs are the units.
    pub fn with_cells(
        inputs: usize,
        units: &[usize],
        cells: Option<usize>,
        dropout: LstmDropout,
        vb: VarBuilder,
    ) -> Result<Self> {
        let widths = [&[inputs], units].concat();
        let layer = |i: usize| Layer::new(widths[i], widths[i + 1], cells, vb.pp(i));
        Ok(Self { layers: (0..units.len()).map(layer).collect::<Result<_>>()?, dropout })
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the state before the first input.
    pub fn start(&self, batch: usize) -> Result<Vec<LSTMState>> {
        self.layers.iter().map(|layer| layer.start(batch)).collect()
    }

    /// Computes the hidden states `[batch, seq, hidden]` of inputs `[batch, seq, width]`, and advances `states`.
    /// Dropout is applied if a generator for its masks is given.
    pub fn forward(&self, inputs: &Tensor, states: &mut [LSTMState], rng: Option<&mut StdRng>) -> Result<Tensor> {
        Ok(self.outputs(inputs, states, rng)?.dropped)
    }

    /// Computes the hidden states as `forward` does, with the hidden states before the last dropout.
    pub(crate) fn outputs(
        &self,
        inputs: &Tensor,
        states: &mut [LSTMState],
        mut rng: Option<&mut StdRng>,
    ) -> Result<Outputs> {
        let LstmDropout { input, between, output, weight } = self.dropout;
        let mut raw = inputs.clone();
        for (i, (layer, state)) in self.layers.iter().zip(states).enumerate() {
            let dropout = if i == 0 { input } else { between };
            raw = locked_dropout(raw, dropout, rng.as_deref_mut())?;
            raw = layer.forward(&raw, state, weight, rng.as_deref_mut())?;
        }
        Ok(Outputs { dropped: locked_dropout(raw.clone(), output, rng)?, raw })
    }
}

struct Layer {
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    /// `[units, cells]`
    projection: Option<Tensor>,
}

impl Layer {
    fn new(inputs: usize, units: usize, cells: Option<usize>, vb: VarBuilder) -> Result<Self> {
        let projection = cells.map(|cells| vb.get((units, cells), "weight_hr_l0")).transpose()?;
        let cells = cells.unwrap_or(units);
        Ok(Self {
            weight_ih: vb.get((4 * cells, inputs), "weight_ih_l0")?,
            weight_hh: vb.get((4 * cells, units), "weight_hh_l0")?,
            bias_ih: vb.get(4 * cells, "bias_ih_l0")?,
            bias_hh: vb.get(4 * cells, "bias_hh_l0")?,
            projection,
        })
    }

    fn start(&self, batch: usize) -> Result<LSTMState> {
        let (dtype, device) = (self.weight_hh.dtype(), self.weight_hh.device());
        let zeros = |width| Tensor::zeros((batch, width), dtype, device);
        Ok(LSTMState::new(zeros(self.weight_hh.dim(1)?)?, zeros(self.weight_hh.dim(0)? / 4)?))
    }

    /// `dropout` drops recurrent weights.
    fn forward(
        &self,
        inputs: &Tensor,
        state: &mut LSTMState,
        dropout: f64,
        rng: Option<&mut StdRng>,
    ) -> Result<Tensor> {
        let steps = inputs.dim(1)?;
        let weight_hh = match mask(self.weight_hh.dims(), dropout, self.weight_hh.device(), rng)? {
            Some(mask) => (&self.weight_hh * mask)?,
            None => self.weight_hh.clone(),
        };
        let bias = (&self.bias_ih + &self.bias_hh)?;
        if let Some(projection) = &self.projection {
            return self.projected(inputs, state, &weight_hh, &bias, projection);
        }
        let bias = bias.unsqueeze(1)?;
        let weight = Tensor::cat(&[&self.weight_ih, &weight_hh, &bias], 1)?;
        let outputs = recurrence(inputs, &weight, &Tensor::stack(&[&state.h, &state.c], 0)?)?;
        *state = LSTMState::new(outputs.get(steps - 1)?, outputs.get(steps)?);
        Ok(outputs.narrow(0, 0, steps)?.transpose(0, 1)?.contiguous()?)
    }

    /// Computes the projected outputs `[batch, steps, units]`, step by step.
    fn projected(
        &self,
        inputs: &Tensor,
        state: &mut LSTMState,
        weight_hh: &Tensor,
        bias: &Tensor,
        projection: &Tensor,
    ) -> Result<Tensor> {
        let (batch, steps, width) = inputs.dims3()?;
        let by_step = inputs.transpose(0, 1)?.reshape((steps * batch, width))?;
        let from_inputs = by_step.matmul(&self.weight_ih.t()?)?.broadcast_add(bias)?;
        let from_inputs = from_inputs.reshape((steps, batch, ()))?;
        let (weight_hh, projection) = (weight_hh.t()?, projection.t()?);
        let (mut units, mut cells) = (state.h.clone(), state.c.clone());
        let mut outputs = vec![];
        for step in 0..steps {
            let gates = (from_inputs.get(step)? + units.matmul(&weight_hh)?)?.chunk(4, 1)?;
            let [input, forget, output] = [&gates[0], &gates[1], &gates[3]].map(sigmoid);
            cells = ((forget? * cells)? + (input? * gates[2].tanh()?)?)?;
            units = (output? * cells.tanh()?)?.matmul(&projection)?;
            outputs.push(units.clone());
        }
        *state = LSTMState::new(units, cells);
        Ok(Tensor::stack(&outputs, 1)?)
    }
}

/// Detaches the states from the graph.
pub fn detach(states: &mut [LSTMState]) {
    for state in states {
        *state = LSTMState::new(state.h.detach(), state.c.detach());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{layers::init, show::DeviceKind};
    use candle_core::{DType, Device};
    use candle_nn::rnn::{LSTMConfig, RNN};
    use candle_nn::VarMap;
    use clap::ValueEnum;
    use rand::{Rng, SeedableRng};
    use std::collections::HashMap;

    #[test]
    fn values_and_gradients_equal_those_of_candles_lstm() {
        // Several parts of unequal sizes; one sequence; a weight that does not fit into a cache.
        for sizes in [[13, 5, 4, 6], [1, 1, 3, 2], [7, 2, 3, 520]] {
            compare(&Device::Cpu, DType::F32, sizes, 1e-5);
        }
        compare(&Device::Cpu, DType::F64, [3, 5, 4, 6], 1e-12);
        for device in DeviceKind::value_variants().iter().filter_map(|kind| kind.open().ok()) {
            compare(&device, DType::F32, [3, 5, 4, 6], 1e-3);
        }
    }

    fn compare(device: &Device, dtype: DType, [batch, steps, width, hidden]: [usize; 4], tolerance: f64) {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, dtype, device);
        let ours = Lstm::new(width, &[hidden], LstmDropout::default(), vb.clone()).unwrap();
        let theirs = candle_nn::lstm(width, hidden, LSTMConfig::default(), vb.pp("0")).unwrap();
        let mut rng = StdRng::seed_from_u64(2);
        let mut random = |shape: &[usize]| {
            let values = (0..shape.iter().product()).map(|_| 4.0 * rng.random::<f64>() - 2.0).collect();
            let values = Tensor::from_vec::<_, f64>(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            candle_core::Var::from_tensor(&values.to_device(device).unwrap()).unwrap()
        };
        init::uniform(&varmap, 1, |_| 1.7 / (hidden as f64).sqrt()).unwrap();
        let (inputs, start, weight) =
            (random(&[batch, steps, width]), random(&[2, batch, hidden]), random(&[batch, steps, hidden]));
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
            let values = |tensor: &Tensor| -> Vec<f64> {
                tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
            };
            let (a, b) = (values(a), values(b));
            let largest = b.iter().fold(1f64, |largest, b| largest.max(b.abs()));
            for (a, b) in a.iter().zip(&b) {
                assert!((a - b).abs() <= tolerance * largest, "{device:?} {dtype:?} {hidden} {what}: {a} {b}");
            }
        };
        same(&outputs, &expected, "hidden states");
        same(&last_cell, &last.c, "cells");
        same(found.get(&inputs).unwrap(), wanted.get(&inputs).unwrap(), "inputs");
        same(found.get(&start).unwrap(), wanted.get(&start).unwrap(), "start");
        for (name, var) in init::sorted(&varmap) {
            same(found.get(&var).unwrap(), wanted.get(&var).unwrap(), &name);
        }
    }

    #[test]
    fn projected_values_and_gradients_follow_the_equations() {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu);
        let lstm = Lstm::with_cells(3, &[2], Some(5), LstmDropout::default(), vb).unwrap();
        init::uniform(&varmap, 1, |_| 0.9).unwrap();
        let variables: HashMap<String, candle_core::Var> = init::sorted(&varmap).into_iter().collect();
        let inputs = Tensor::rand(-1f64, 1.0, (1, 4, 3), &Device::Cpu).unwrap();
        // The sum of all outputs and of the last cells, by the equations.
        let plain = || {
            let matrix = |name: &str| variables[&format!("0.{name}_l0")].to_vec2::<f64>().unwrap();
            let vector = |name: &str| variables[&format!("0.{name}_l0")].to_vec1::<f64>().unwrap();
            let (ih, hh, hr) = (matrix("weight_ih"), matrix("weight_hh"), matrix("weight_hr"));
            let (bias_ih, bias_hh) = (vector("bias_ih"), vector("bias_hh"));
            let dot = |row: &[f64], x: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>();
            let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
            let (mut units, mut cells, mut sum) = (vec![0.0; 2], vec![0.0; 5], 0.0);
            for x in &inputs.to_vec3::<f64>().unwrap()[0] {
                let gate = |i: usize| dot(&ih[i], x) + dot(&hh[i], &units) + bias_ih[i] + bias_hh[i];
                cells = (0..5).map(|i| sigma(gate(5 + i)) * cells[i] + sigma(gate(i)) * gate(10 + i).tanh()).collect();
                let outputs: Vec<f64> = (0..5).map(|i| sigma(gate(15 + i)) * cells[i].tanh()).collect();
                units = hr.iter().map(|row| dot(row, &outputs)).collect();
                sum += units.iter().sum::<f64>();
            }
            sum + cells.iter().sum::<f64>()
        };
        let mut states = lstm.start(1).unwrap();
        let outputs = lstm.forward(&inputs, &mut states, None).unwrap();
        assert_eq!(
            (outputs.dims(), states[0].h.dims(), states[0].c.dims()),
            (&[1, 4, 2][..], &[1, 2][..], &[1, 5][..])
        );
        let value = (outputs.sum_all().unwrap() + states[0].c.sum_all().unwrap()).unwrap();
        assert!((value.to_scalar::<f64>().unwrap() - plain()).abs() < 1e-12);
        let gradients = value.backward().unwrap();
        for (name, variable) in &variables {
            let gradient = gradients.get(variable).expect(name).flatten_all().unwrap().to_vec1::<f64>().unwrap();
            let start = variable.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            for i in (0..start.len()).step_by(2) {
                let at = |step: f64| {
                    let mut values = start.clone();
                    values[i] += step;
                    variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu).unwrap()).unwrap();
                    plain()
                };
                let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
                at(0.0);
                assert!((difference - gradient[i]).abs() < 1e-8, "{name} {i}: {difference} {}", gradient[i]);
            }
        }
    }

    /// Returns the outputs of two layers of ones and the inputs' dropout, in training with this seed or in evaluation.
    fn outputs(dropout: LstmDropout, seed: Option<u64>) -> Outputs {
        let varmap = VarMap::new();
        let lstm = Lstm::new(40, &[30, 50], dropout, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu));
        init::uniform(&varmap, 1, |_| 0.7).unwrap();
        let (lstm, inputs) = (lstm.unwrap(), Tensor::ones((60, 4, 40), DType::F32, &Device::Cpu).unwrap());
        let mut rng = seed.map(StdRng::seed_from_u64);
        lstm.outputs(&inputs, &mut lstm.start(60).unwrap(), rng.as_mut()).unwrap()
    }

    fn numbers(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn every_dropout_acts_in_training_alone_and_where_it_says() {
        let none = outputs(LstmDropout::default(), Some(1));
        for (name, dropout) in [
            ("input", LstmDropout { input: 0.5, ..LstmDropout::default() }),
            ("between", LstmDropout { between: 0.5, ..LstmDropout::default() }),
            ("weight", LstmDropout { weight: 0.5, ..LstmDropout::default() }),
            ("output", LstmDropout { output: 0.5, ..LstmDropout::default() }),
        ] {
            let (training, again, other) =
                (outputs(dropout, Some(1)), outputs(dropout, Some(1)), outputs(dropout, Some(2)));
            assert_eq!(numbers(&training.dropped), numbers(&again.dropped), "{name}: a seed fixes the masks");
            assert_ne!(numbers(&training.dropped), numbers(&other.dropped), "{name}");
            assert_eq!(numbers(&training.raw) == numbers(&none.raw), name == "output", "{name}");
            assert_eq!(numbers(&outputs(dropout, None).dropped), numbers(&none.dropped), "{name} is off in evaluation");
        }
        // Inputs are ones: a locked mask of the output has its zeros in the same places at every step.
        let masked = outputs(LstmDropout { output: 0.5, ..LstmDropout::default() }, Some(1)).dropped;
        let zeros = |step| numbers(&masked.narrow(1, step, 1).unwrap()).iter().map(|x| *x == 0.0).collect::<Vec<_>>();
        assert!(zeros(0) == zeros(3) && zeros(0).contains(&true));
        // One mask of the recurrent weights for all sequences and steps: equal sequences stay equal.
        let equal = outputs(LstmDropout { weight: 0.5, ..LstmDropout::default() }, Some(1)).raw;
        assert_eq!(numbers(&equal.narrow(0, 0, 1).unwrap()), numbers(&equal.narrow(0, 59, 1).unwrap()));
    }
}
