//! SGD, averaged SGD, Adam and Adagrad behind one `step`, with weight decay, clipping by the global gradient norm, and
//! a state that can be saved.

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
    /// Adagrad (Duchi et al., 2011), whose sums of squared gradients start at 1/400: at one, were the loss the sum of
    /// 20 steps of a text and not their mean
    Adagrad,
}

/// The sum of squared gradients from which Adagrad starts.
const ADAGRAD_START: f64 = 0.0025;
const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPSILON: f64 = 1e-8;

/// An optimizer of variables. candle_nn's AdamW keeps its moments private; here they are part of `state`, so that
/// training resumes exactly.
pub(crate) struct Optimizer {
    vars: Vec<(String, Var)>,
    state: State,
    /// The beginning of the names of the variables whose gradients are clipped; those of all are, if it is empty.
    clipped: &'static str,
    average: Option<Average>,
    weight_decay: f64,
    steps: usize,
}

/// What an optimizer keeps of earlier gradients, in the order of the variables.
enum State {
    Sgd,
    /// The first and the second moment.
    Adam(Vec<[Tensor; 2]>),
    /// The sum of the squares.
    Adagrad(Vec<Tensor>),
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
        let state = match kind {
            OptimizerKind::Sgd => State::Sgd,
            OptimizerKind::Adam => State::Adam(
                vars.iter().map(|(_, var)| Ok([var.zeros_like()?, var.zeros_like()?])).collect::<Result<_>>()?,
            ),
            OptimizerKind::Adagrad => State::Adagrad(
                vars.iter().map(|(_, var)| Ok((var.ones_like()? * ADAGRAD_START)?)).collect::<Result<_>>()?,
            ),
        };
        Ok(Self { vars, state, clipped: "", average: None, weight_decay, steps: 0 })
    }

    /// Returns the optimizer that clips the gradients of the variables whose names begin like this, by their norm.
    pub(crate) fn with_clipped(self, names: &'static str) -> Self {
        Self { clipped: names, ..self }
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

    /// Takes one step with the clipped gradients scaled so that their global norm is at most `clip` (0: no clipping).
    /// Returns `false`, without a step, if the norm of all is not finite.
    pub(crate) fn step(&mut self, grads: &GradStore, lr: f64, clip: f64) -> Result<bool> {
        let norm = self.norm(grads, "")?;
        if !norm.is_finite() {
            return Ok(false);
        }
        let norm = if self.clipped.is_empty() { norm } else { self.norm(grads, self.clipped)? };
        let clipped_scale = if clip > 0.0 { (clip / norm.max(1e-12)).min(1.0) } else { 1.0 };
        let given = lr;
        let lr = match &self.average {
            Some(Average { weights: Weights::Equal { lr: Some(before) }, .. }) => *before,
            _ => lr,
        };
        self.steps += 1;
        let warm1 = 1.0 - BETA1.powi(self.steps as i32);
        let warm2 = 1.0 - BETA2.powi(self.steps as i32);
        let keep = 1.0 - lr * self.weight_decay;
        for (i, (name, var)) in self.vars.iter().enumerate() {
            let Some(grad) = grads.get(var) else { continue };
            let scale = if name.starts_with(self.clipped) { clipped_scale } else { 1.0 };
            let in_place = inplace::supports(var);
            let grad = if in_place { grad.contiguous()? } else { grad.clone() };
            match &mut self.state {
                State::Sgd => mix(var, keep, &grad, -lr * scale)?,
                State::Adagrad(sums) if in_place => {
                    sums[i].inplace_op2(&grad, &Decay { keep: 1.0, scale: (scale * scale) as f32, squared: true })?;
                    if keep < 1.0 {
                        mix(var, keep, &grad, 0.0)?;
                    }
                    let rate = (lr * scale) as f32;
                    var.inplace_op3(&grad, &sums[i], &Descend { rate, correction: 1.0, epsilon: 0.0 })?;
                }
                State::Adagrad(sums) => {
                    sums[i] = (&sums[i] + (grad.sqr()? * (scale * scale))?)?;
                    mix(var, keep, &grad.div(&sums[i].sqrt()?)?, -lr * scale)?;
                }
                State::Adam(moments) if in_place => {
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
                State::Adam(moments) => {
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

    /// Computes the norm of the gradients of the variables whose names begin like this.
    fn norm(&self, grads: &GradStore, names: &str) -> Result<f64> {
        let mut sum = 0f64;
        let mut elsewhere = vec![]; // read back from the GPU together: each read synchronizes
        for (_, var) in self.vars.iter().filter(|(name, _)| name.starts_with(names)) {
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

    /// Returns what is kept of earlier gradients, and the parameters of the last step if the variables are their
    /// average; by name.
    pub(crate) fn state(&self) -> HashMap<String, Tensor> {
        let mut state = HashMap::new();
        for (i, (name, _)) in self.vars.iter().enumerate() {
            match &self.state {
                State::Sgd => {}
                State::Adam(moments) => {
                    let [first, second] = &moments[i];
                    state.insert(format!("adam.first.{name}"), first.clone());
                    state.insert(format!("adam.second.{name}"), second.clone());
                }
                State::Adagrad(sums) => {
                    state.insert(format!("adagrad.{name}"), sums[i].clone());
                }
            }
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
        for (i, (name, _)) in self.vars.iter().enumerate() {
            match &mut self.state {
                State::Sgd => {}
                State::Adam(moments) => {
                    moments[i] = [get(format!("adam.first.{name}"))?, get(format!("adam.second.{name}"))?];
                }
                State::Adagrad(sums) => sums[i] = get(format!("adagrad.{name}"))?,
            }
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
mod tests;
