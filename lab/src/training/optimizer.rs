//! SGD, averaged SGD and Adam behind one `step`, with weight decay, clipping by the global gradient norm, and a state
//! that can be saved.

use super::ranks::Ranks;
use crate::layers::inplace::{self, Decay, Descend};
use crate::layers::{init::sorted, Checkpoint};
use crate::Result;
use candle_core::{backprop::GradStore, DType, Tensor, Var};
use candle_nn::VarMap;
use clap::ValueEnum;
use std::collections::HashMap;

/// The choice of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerKind {
    /// Adam, with PyTorch's defaults.
    Adam,
    /// SGD, averaged where the recipe says so.
    Sgd,
}

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPSILON: f64 = 1e-8;

/// An optimizer of variables. candle_nn's AdamW keeps its moments private; here they are part of `state`, so that
/// training resumes exactly.
pub(crate) struct Optimizer {
    vars: Vec<(String, Var)>,
    /// Adam's first and second moments, in the order of `vars`.
    moments: Option<Vec<[Tensor; 2]>>,
    average: Option<Average>,
    weight_decay: f64,
    steps: usize,
}

/// An average of the parameters after each step.
struct Average {
    /// The average while `Optimizer::step` is called, the parameters of the last step otherwise; in the order of
    /// `vars`.
    other: Vec<Tensor>,
    steps: usize,
    weights: Weights,
}

/// The weights of the steps in an average.
enum Weights {
    /// All weights are equal: averaged SGD (Polyak & Juditsky, 1992) as in PyTorch, with both of its late updates. From
    /// the second step on, a step has the learning rate that was given to the step before, and the average starts anew
    /// at the second step.
    Equal {
        /// The learning rate of the step before.
        lr: Option<f64>,
    },
    /// Step t has a weight of about t^N: polynomial-decay averaging (Shamir & Zhang, 2013), which needs no end of
    /// training to be known, as a falling learning rate does.
    Polynomial(usize),
}

impl Average {
    /// Returns the weight of the parameters after a step in the average with it.
    fn share(&self) -> f64 {
        match self.weights {
            Weights::Equal { .. } => 1.0 / self.steps.max(1) as f64,
            Weights::Polynomial(power) => (power + 1) as f64 / (self.steps + 1 + power) as f64,
        }
    }
}

impl Optimizer {
    /// Returns an optimizer of all variables.
    pub(crate) fn new(kind: OptimizerKind, weight_decay: f64, varmap: &VarMap) -> Result<Self> {
        let vars = sorted(varmap);
        let moments = match kind {
            OptimizerKind::Sgd => None,
            OptimizerKind::Adam => {
                Some(vars.iter().map(|(_, var)| Ok([var.zeros_like()?, var.zeros_like()?])).collect::<Result<_>>()?)
            }
        };
        Ok(Self { vars, moments, average: None, weight_decay, steps: 0 })
    }

    /// Begins to average: from now on the variables hold the average of the parameters after each step. To train,
    /// exchange the two by `swap` before the first step and after the last.
    pub(crate) fn start_averaging(&mut self) -> Result<()> {
        self.start(Weights::Equal { lr: None })
    }

    /// Begins to average as `start_averaging` does, but step t has a weight of about t^`power`.
    pub(crate) fn start_polynomial_averaging(&mut self, power: usize) -> Result<()> {
        self.start(Weights::Polynomial(power))
    }

    fn start(&mut self, weights: Weights) -> Result<()> {
        let other = self.vars.iter().map(|(_, var)| Ok(var.copy()?)).collect::<Result<_>>()?;
        self.average = Some(Average { other, steps: 0, weights });
        Ok(())
    }

    /// Returns whether the parameters are being averaged.
    pub(crate) fn is_averaging(&self) -> bool {
        self.average.is_some()
    }

    /// Returns the power of a polynomial average, if there is one.
    pub(crate) fn polynomial_power(&self) -> Option<usize> {
        match self.average.as_ref()?.weights {
            Weights::Equal { .. } => None,
            Weights::Polynomial(power) => Some(power),
        }
    }

    /// Exchanges the average and the parameters of the last step. Without an average it does nothing.
    pub(crate) fn swap(&mut self) -> Result<()> {
        let Some(average) = &mut self.average else { return Ok(()) };
        for ((_, var), other) in self.vars.iter().zip(&mut average.other) {
            let current = var.copy()?;
            var.set(other)?;
            *other = current;
        }
        Ok(())
    }

    /// Returns `sum + share * gradients`.
    pub(crate) fn accumulate(&self, sum: Option<GradStore>, gradients: GradStore, share: f64) -> Result<GradStore> {
        let gradients = if share == 1.0 { gradients } else { self.scaled(gradients, share)? };
        let Some(mut sum) = sum else { return Ok(gradients) };
        for (_, var) in &self.vars {
            let total = match (sum.get(var), gradients.get(var)) {
                (Some(a), Some(b)) => (a + b)?,
                (None, Some(b)) => b.clone(),
                (_, None) => continue,
            };
            sum.insert(var, total);
        }
        Ok(sum)
    }

    fn scaled(&self, mut gradients: GradStore, share: f64) -> Result<GradStore> {
        for (_, var) in &self.vars {
            if let Some(gradient) = gradients.get(var) {
                let scaled = (gradient * share)?;
                gradients.insert(var, scaled);
            }
        }
        Ok(gradients)
    }

    /// Replaces the gradients by their sums over all ranks.
    pub(crate) fn all_reduce(&self, gradients: &mut GradStore, ranks: &Ranks) -> Result<()> {
        ranks.all_reduce(gradients, &self.vars)
    }

    /// Takes one step with the gradients scaled so that their global norm is at most `clip` (0: no clipping). Returns
    /// `false`, without a step, if the norm is not finite.
    pub(crate) fn step(&mut self, grads: &GradStore, lr: f64, clip: f64) -> Result<bool> {
        let norm = self.norm(grads)?;
        if !norm.is_finite() {
            return Ok(false);
        }
        let scale = if clip > 0.0 { (clip / norm.max(1e-12)).min(1.0) } else { 1.0 };
        let given = lr;
        let lr = match &self.average {
            Some(Average { weights: Weights::Equal { lr: Some(before) }, .. }) => *before,
            _ => lr,
        };
        self.steps += 1;
        let warm1 = 1.0 - BETA1.powi(self.steps as i32);
        let warm2 = 1.0 - BETA2.powi(self.steps as i32);
        let keep = 1.0 - lr * self.weight_decay;
        for (i, (_, var)) in self.vars.iter().enumerate() {
            let Some(grad) = grads.get(var) else { continue };
            let in_place = inplace::supports(var);
            let grad = if in_place { grad.contiguous()? } else { grad.clone() };
            match &mut self.moments {
                None => mix(var, keep, &grad, -lr * scale)?,
                Some(moments) if in_place => {
                    let [first, second] = &moments[i];
                    let (keep1, gain) = (BETA1 as f32, (scale * (1.0 - BETA1)) as f32);
                    first.inplace_op2(&grad, &Decay { keep: keep1, scale: gain, squared: false })?;
                    let (keep2, gain) = (BETA2 as f32, (scale * scale * (1.0 - BETA2)) as f32);
                    second.inplace_op2(&grad, &Decay { keep: keep2, scale: gain, squared: true })?;
                    if keep < 1.0 {
                        mix(var, keep, &grad, 0.0)?;
                    }
                    let (rate, correction) = ((lr / warm1) as f32, (1.0 / warm2) as f32);
                    var.inplace_op3(first, second, &Descend { rate, correction, epsilon: EPSILON as f32 })?;
                }
                Some(moments) => {
                    let [first, second] = &mut moments[i];
                    *first = ((&*first * BETA1)? + (&grad * (scale * (1.0 - BETA1)))?)?;
                    *second = ((&*second * BETA2)? + (grad.sqr()? * (scale * scale * (1.0 - BETA2)))?)?;
                    let denominator = ((&*second * (1.0 / warm2))?.sqrt()? + EPSILON)?;
                    let update = (&*first * (lr / warm1))?.div(&denominator)?;
                    mix(var, keep, &update, -1.0)?;
                }
            }
        }
        if let Some(average) = &mut self.average {
            let share = average.share();
            for ((_, var), mean) in self.vars.iter().zip(&mut average.other) {
                if inplace::supports(mean) {
                    let decay = Decay { keep: (1.0 - share) as f32, scale: share as f32, squared: false };
                    mean.inplace_op2(var.as_tensor(), &decay)?;
                } else {
                    *mean = ((&*mean * (1.0 - share))? + (var.as_tensor() * share)?)?
                }
            }
            average.steps += 1;
            if let Weights::Equal { lr } = &mut average.weights {
                *lr = Some(given);
            }
        }
        Ok(true)
    }

    fn norm(&self, grads: &GradStore) -> Result<f64> {
        let mut sum = 0f64;
        let mut elsewhere = vec![]; // read back from the GPU together: each read synchronizes
        for (_, var) in &self.vars {
            match grads.get(var) {
                Some(grad) if inplace::supports(grad) => sum += inplace::square_sum(grad)?,
                Some(grad) => elsewhere.push(grad.sqr()?.sum_all()?.to_dtype(DType::F32)?),
                None => {}
            }
        }
        if !elsewhere.is_empty() {
            sum += Tensor::stack(&elsewhere, 0)?.to_vec1::<f32>()?.into_iter().map(f64::from).sum::<f64>();
        }
        Ok(sum.sqrt())
    }

    /// Returns the number of steps so far.
    pub(crate) fn steps(&self) -> usize {
        self.steps
    }

    /// Returns Adam's moments, and the parameters of the last step if the variables are their average; by name.
    pub(crate) fn state(&self) -> HashMap<String, Tensor> {
        let mut state = HashMap::new();
        for ((name, _), [first, second]) in self.vars.iter().zip(self.moments.iter().flatten()) {
            state.insert(format!("adam.first.{name}"), first.clone());
            state.insert(format!("adam.second.{name}"), second.clone());
        }
        for ((name, _), last) in self.vars.iter().zip(self.average.iter().flat_map(|average| &average.other)) {
            state.insert(format!("asgd.last.{name}"), last.clone());
        }
        state
    }

    /// Returns the counters, by name.
    pub(crate) fn counters(&self) -> Vec<(String, String)> {
        let mut counters = vec![("steps".into(), self.steps.to_string())];
        if let Some(average) = &self.average {
            counters.push(("asgd.steps".into(), average.steps.to_string()));
            counters.extend(match average.weights {
                Weights::Equal { lr } => lr.map(|lr| ("asgd.lr".into(), lr.to_string())),
                Weights::Polynomial(power) => Some(("asgd.power".into(), power.to_string())),
            });
        }
        counters
    }

    /// Reads the state that a checkpoint has.
    pub(crate) fn load_state(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        // Copies: they are updated in place.
        let get = |name: String| match checkpoint.tensors.get(&name) {
            Some(tensor) => Ok(tensor.copy()?),
            None => Err::<_, Box<dyn std::error::Error>>(format!("the checkpoint has no tensor {name}").into()),
        };
        for ((name, _), moments) in self.vars.iter().zip(self.moments.iter_mut().flatten()) {
            *moments = [get(format!("adam.first.{name}"))?, get(format!("adam.second.{name}"))?];
        }
        self.average = match checkpoint.optional("asgd.steps")? {
            Some(steps) => Some(Average {
                other: self.vars.iter().map(|(name, _)| get(format!("asgd.last.{name}"))).collect::<Result<_>>()?,
                steps,
                weights: match checkpoint.optional("asgd.power")? {
                    Some(power) => Weights::Polynomial(power),
                    None => Weights::Equal { lr: checkpoint.optional("asgd.lr")? },
                },
            }),
            None => None,
        };
        self.steps = checkpoint.get("steps")?;
        Ok(())
    }
}

/// Computes `var <- keep var + scale tensor`.
fn mix(var: &Var, keep: f64, tensor: &Tensor, scale: f64) -> Result<()> {
    if inplace::supports(var) {
        Ok(var.inplace_op2(tensor, &Decay { keep: keep as f32, scale: scale as f32, squared: false })?)
    } else {
        Ok(var.set(&((var.as_tensor() * keep)? + (tensor * scale)?)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::DeviceKind;
    use candle_core::Device;

    /// Returns a variable with these values.
    fn variable(values: &Tensor, dtype: DType) -> (Var, VarMap) {
        let (var, varmap) = (Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap(), VarMap::new());
        varmap.data().lock().unwrap().insert("values".into(), var.clone());
        (var, varmap)
    }

    /// Returns a variable after 20 steps that minimize the sum of its fourth powers.
    fn trained(dtype: DType, device: &Device) -> Vec<f32> {
        let values = Tensor::new(&[[0.5f32, -2.0, 3.0], [0.1, 4.0, -0.3]], device).unwrap();
        let (var, varmap) = variable(&values, dtype);
        let mut optimizer = Optimizer::new(OptimizerKind::Adam, 0.0, &varmap).unwrap();
        for _ in 0..20 {
            let sum = var.sqr().unwrap().sqr().unwrap().sum_all().unwrap();
            optimizer.step(&sum.backward().unwrap(), 0.05, 0.7).unwrap();
        }
        var.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn adam_in_place_equals_adam_from_ordinary_operations() {
        let in_place = trained(DType::F32, &Device::Cpu);
        // All but f32 on the CPU uses the ordinary operations.
        let mut ordinary = vec![trained(DType::F64, &Device::Cpu)];
        let devices = DeviceKind::value_variants().iter().filter_map(|kind| kind.open().ok());
        ordinary.extend(devices.map(|device| trained(DType::F32, &device)));
        for values in ordinary {
            for (a, b) in in_place.iter().zip(&values) {
                assert!((a - b).abs() < 1e-4, "{in_place:?} {values:?}");
            }
        }
    }

    /// The values of golden/asgd.py, in f32 with updates in place and in f64 with ordinary operations.
    #[test]
    fn averaged_sgd_equals_that_of_pytorch() {
        let golden: serde_json::Value = serde_json::from_str(include_str!("golden/asgd.json")).unwrap();
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            let rows = value.as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
            rows.map(|number| number.as_f64().unwrap()).collect()
        };
        let number = |key: &str| golden[key].as_f64().unwrap();
        // To clip, PyTorch divides by the norm plus 1e-6.
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-8)] {
            let start = Tensor::from_vec(numbers(&golden["start"]), (2, 3), &Device::Cpu).unwrap();
            let (var, varmap) = variable(&start, dtype);
            let mut optimizer = Optimizer::new(OptimizerKind::Sgd, number("weight_decay"), &varmap).unwrap();
            optimizer.start_averaging().unwrap();
            for (i, step) in golden["steps"].as_array().unwrap().iter().enumerate() {
                let check = |name: &str| {
                    let found = var.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                    for (found, expected) in found.iter().zip(numbers(&step[name])) {
                        assert!((found - expected).abs() < tolerance, "{dtype:?} step {i} {name}: {found} {expected}");
                    }
                };
                optimizer.swap().unwrap();
                let gradients = var.sqr().unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
                optimizer.step(&gradients, step["lr"].as_f64().unwrap(), number("clip")).unwrap();
                check("parameter");
                optimizer.swap().unwrap();
                check("average");
            }
        }
    }

    /// Against the sum over all steps t of t (t + 1) .. (t + power - 1) times the parameters after them.
    #[test]
    fn a_polynomial_average_weights_step_t_by_a_power_of_t() {
        for (kind, power) in [(OptimizerKind::Sgd, 1), (OptimizerKind::Sgd, 3), (OptimizerKind::Adam, 2)] {
            let (var, varmap) = variable(&Tensor::new(&[2f64, -4.0], &Device::Cpu).unwrap(), DType::F64);
            let mut optimizer = Optimizer::new(kind, 0.0, &varmap).unwrap();
            optimizer.start_polynomial_averaging(power).unwrap();
            let (mut sum, mut total) = ([0.0; 2], 0.0);
            for t in 1..=20 {
                optimizer.swap().unwrap();
                let gradients = var.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                optimizer.step(&gradients, 0.05, 0.0).unwrap();
                let weight: f64 = (t..t + power).map(|factor| factor as f64).product();
                let values = var.to_vec1::<f64>().unwrap();
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
                total += weight;
                optimizer.swap().unwrap();
                for (found, sum) in var.to_vec1::<f64>().unwrap().iter().zip(sum) {
                    assert!((found - sum / total).abs() < 1e-12, "{kind:?} {power} step {t}: {found} {}", sum / total);
                }
            }
        }
    }

    #[test]
    fn weight_decay_is_that_of_every_optimizer() {
        for (kind, dtype) in
            [OptimizerKind::Sgd, OptimizerKind::Adam].iter().flat_map(|kind| [(*kind, DType::F32), (*kind, DType::F64)])
        {
            let (var, varmap) = variable(&Tensor::new(&[2f64, -4.0], &Device::Cpu).unwrap(), dtype);
            let mut optimizer = Optimizer::new(kind, 0.1, &varmap).unwrap();
            // With a gradient of zero only the decay is left.
            let zero = (var.as_tensor() - var.as_tensor().detach()).unwrap().sqr().unwrap();
            let gradients = zero.sum_all().unwrap().backward().unwrap();
            optimizer.step(&gradients, 0.5, 0.0).unwrap();
            let values = var.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            assert!((values[0] - 1.9).abs() < 1e-6 && (values[1] + 3.8).abs() < 1e-6, "{kind:?} {dtype:?} {values:?}");
        }
    }

    #[test]
    fn gradients_of_parts_add_up_to_those_of_the_whole() {
        let (var, varmap) = variable(&Tensor::new(&[1f32, -2.0], &Device::Cpu).unwrap(), DType::F32);
        let optimizer = Optimizer::new(OptimizerKind::Sgd, 0.0, &varmap).unwrap();
        let gradients = |factor: f64| (var.sqr().unwrap() * factor).unwrap().sum_all().unwrap().backward().unwrap();
        let mut sum = None;
        for (factor, share) in [(1.0, 0.25), (2.0, 0.25), (4.0, 0.5)] {
            sum = Some(optimizer.accumulate(sum, gradients(factor), share).unwrap());
        }
        let found = sum.unwrap().get(&var).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(found, [5.5, -11.0]);
    }
}
