//! SGD and Adam behind one `step`, with clipping by the global gradient norm and a state that can be saved.

use super::inplace::{self, Decay, Descend};
use super::{init::sorted, Result};
use candle_core::{backprop::GradStore, DType, Tensor, Var};
use candle_nn::VarMap;
use clap::ValueEnum;
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OptimizerKind {
    Adam,
    Sgd,
}

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPSILON: f64 = 1e-8;

/// candle_nn's AdamW keeps its moments private; here they are part of `state`, so that training resumes exactly.
pub(crate) struct Optimizer {
    vars: Vec<(String, Var)>,
    moments: Option<Vec<[Tensor; 2]>>, // Adam's first and second, in the order of vars
    steps: usize,
}

impl Optimizer {
    pub(crate) fn new(kind: OptimizerKind, varmap: &VarMap) -> Result<Self> {
        let vars = sorted(varmap);
        let moments = match kind {
            OptimizerKind::Sgd => None,
            OptimizerKind::Adam => {
                Some(vars.iter().map(|(_, var)| Ok([var.zeros_like()?, var.zeros_like()?])).collect::<Result<_>>()?)
            }
        };
        Ok(Self { vars, moments, steps: 0 })
    }

    /// One step with the gradients scaled so that their global norm is at most `clip` (0: no clipping). Returns
    /// `false`, without a step, if the norm is not finite.
    pub(crate) fn step(&mut self, grads: &GradStore, lr: f64, clip: f64) -> Result<bool> {
        let norm = self.norm(grads)?;
        if !norm.is_finite() {
            return Ok(false);
        }
        let scale = if clip > 0.0 { (clip / norm.max(1e-12)).min(1.0) } else { 1.0 };
        self.steps += 1;
        let warm1 = 1.0 - BETA1.powi(self.steps as i32);
        let warm2 = 1.0 - BETA2.powi(self.steps as i32);
        for (i, (_, var)) in self.vars.iter().enumerate() {
            let Some(grad) = grads.get(var) else { continue };
            let update = match &mut self.moments {
                None => (grad * (lr * scale))?,
                Some(moments) if inplace::supports(var) => {
                    let [first, second] = &moments[i];
                    let (keep, gain) = (BETA1 as f32, (scale * (1.0 - BETA1)) as f32);
                    let grad = grad.contiguous()?;
                    first.inplace_op2(&grad, &Decay { keep, scale: gain, squared: false })?;
                    let (keep, gain) = (BETA2 as f32, (scale * scale * (1.0 - BETA2)) as f32);
                    second.inplace_op2(&grad, &Decay { keep, scale: gain, squared: true })?;
                    let (rate, correction) = ((lr / warm1) as f32, (1.0 / warm2) as f32);
                    var.inplace_op3(first, second, &Descend { rate, correction, epsilon: EPSILON as f32 })?;
                    continue;
                }
                Some(moments) => {
                    let [first, second] = &mut moments[i];
                    *first = ((&*first * BETA1)? + (grad * (scale * (1.0 - BETA1)))?)?;
                    *second = ((&*second * BETA2)? + (grad.sqr()? * (scale * scale * (1.0 - BETA2)))?)?;
                    let denominator = ((&*second * (1.0 / warm2))?.sqrt()? + EPSILON)?;
                    (&*first * (lr / warm1))?.div(&denominator)?
                }
            };
            var.set(&(var.as_tensor() - update)?)?;
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

    pub(crate) fn steps(&self) -> usize {
        self.steps
    }

    /// Adam's moments by name; empty for SGD.
    pub(crate) fn state(&self) -> HashMap<String, Tensor> {
        let mut state = HashMap::new();
        for ((name, _), [first, second]) in self.vars.iter().zip(self.moments.iter().flatten()) {
            state.insert(format!("adam.first.{name}"), first.clone());
            state.insert(format!("adam.second.{name}"), second.clone());
        }
        state
    }

    pub(crate) fn load_state(&mut self, tensors: &HashMap<String, Tensor>, steps: usize) -> Result<()> {
        // Copies: the moments are updated in place.
        let get = |name: String| match tensors.get(&name) {
            Some(tensor) => Ok(tensor.copy()?),
            None => Err::<_, Box<dyn std::error::Error>>(format!("the checkpoint has no tensor {name}").into()),
        };
        for ((name, _), moments) in self.vars.iter().zip(self.moments.iter_mut().flatten()) {
            *moments = [get(format!("adam.first.{name}"))?, get(format!("adam.second.{name}"))?];
        }
        self.steps = steps;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::DeviceKind;
    use super::*;
    use candle_core::Device;

    /// A variable after 20 steps that minimize the sum of its fourth powers.
    fn trained(dtype: DType, device: &Device) -> Vec<f32> {
        let values = Tensor::new(&[[0.5f32, -2.0, 3.0], [0.1, 4.0, -0.3]], device).unwrap();
        let var = Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap();
        let varmap = VarMap::new();
        varmap.data().lock().unwrap().insert("values".into(), var.clone());
        let mut optimizer = Optimizer::new(OptimizerKind::Adam, &varmap).unwrap();
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
        ordinary.extend(DeviceKind::gpus().iter().map(|device| trained(DType::F32, device)));
        for values in ordinary {
            for (a, b) in in_place.iter().zip(&values) {
                assert!((a - b).abs() < 1e-4, "{in_place:?} {values:?}");
            }
        }
    }
}
