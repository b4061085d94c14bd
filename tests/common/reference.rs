//! The reference: the mixture loss, its log-probabilities and every gradient, in `f64` and plain loops.
//!
//! `log P(v) = logsumexp_k(log pi_k + z_kv - lse_k)`, `z_k = cap(scale (W c_k + b))`. With `q` the smoothed and
//! weighted target and `r_k(v)` the posterior of component `k` given `v`:
//! `dl/dz_kv = R_k softmax(z_k)_v - q_v r_k(v) + (2 alpha / K) lse_k softmax(z_k)_v`, `R_k = sum_v q_v r_k(v)`,
//! `dl/d log pi_k = -R_k`.

mod projection;

use std::collections::BTreeMap;

use mos_head::Reduction;

use super::case::{Case, Logits};
use super::objective::Objective;
use projection::Projected;

/// The reference results of one case.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    /// One number; one per position without a reduction.
    pub value: Vec<f64>,
    pub sum: f64,
    pub count: f64,
    pub nll: Vec<f64>,
    pub correct: f64,
    pub argmax: Vec<u32>,
    pub log_probs: Vec<f64>,
    /// By the name of the operand.
    pub gradients: BTreeMap<&'static str, Vec<f64>>,
}

/// The reference results of `case` under `objective`; `upstream` is the gradient with respect to the value.
pub fn truth(case: &Case, objective: &Objective, upstream: &[f64]) -> Truth {
    let projected = Projected::new(case);
    let decoder = Decoder::new(case);
    let (positions, k, d) = (case.positions(), projected.components, case.sizes.context);
    let mut truth = Truth::default();
    let mut slopes = Slopes {
        contexts: vec![0.0; positions * k * d],
        log_priors: vec![0.0; positions * k],
        weight: vec![0.0; case.sizes.vocab * d],
        bias: vec![0.0; case.sizes.vocab],
    };

    for (t, &y) in case.targets.iter().enumerate() {
        if objective.ignore_index != Some(y) {
            truth.count += objective.position_weight(t, y) * objective.class_weight(y as usize);
        }
    }
    for (t, &y) in case.targets.iter().enumerate() {
        let contexts = &projected.contexts[t * k * d..][..k * d];
        let log_priors = &projected.log_priors[t * k..][..k];
        let position = Position::new(contexts, log_priors, &decoder);
        truth.argmax.push(argmax(&position.log_probs) as u32);
        truth.log_probs.extend(&position.log_probs);
        if objective.ignore_index == Some(y) {
            truth.nll.push(0.0);
            truth.value.push(0.0);
            continue;
        }
        let tau = objective.position_weight(t, y);
        let y = y as usize;
        truth.nll.push(-position.log_probs[y]);
        truth.correct += f64::from(u8::from(argmax(&position.log_probs) == y));
        truth.value.push(tau * position.objective(y, objective));
        let upstream = match objective.reduction {
            Reduction::None => upstream[t],
            Reduction::Mean if truth.count == 0.0 => 0.0,
            Reduction::Mean => upstream[0] / truth.count,
            _ => upstream[0],
        };
        slopes.add(t, &position, y, objective, tau * upstream, &decoder);
    }
    truth.sum = truth.value.iter().sum();
    match objective.reduction {
        Reduction::None => {}
        Reduction::Mean if truth.count == 0.0 => truth.value = vec![0.0],
        Reduction::Mean => truth.value = vec![truth.sum / truth.count],
        _ => truth.value = vec![truth.sum],
    }
    truth.gradients = projected.backward(case, slopes.contexts, &slopes.log_priors);
    truth.gradients.insert("decoder.weight", slopes.weight);
    truth.gradients.insert("decoder.bias", slopes.bias);
    truth.gradients.retain(|name, _| case.values.contains_key(name));
    truth
}

/// The log-probabilities of each position, and the log-sum-exp of each of its components.
pub fn distributions(case: &Case) -> Vec<(Vec<f64>, Vec<f64>)> {
    let (projected, decoder) = (Projected::new(case), Decoder::new(case));
    let k = projected.components;
    let contexts = projected.contexts.chunks(k * case.sizes.context);
    let position = |(contexts, log_priors)| {
        let position = Position::new(contexts, log_priors, &decoder);
        (position.log_probs, position.lse)
    };
    contexts.zip(projected.log_priors.chunks(k)).map(position).collect()
}

struct Decoder<'a> {
    weight: &'a [f64],
    bias: Option<&'a [f64]>,
    logits: Logits,
}

impl<'a> Decoder<'a> {
    fn new(case: &'a Case) -> Self {
        Self {
            weight: &case.values["decoder.weight"],
            bias: case.values.get("decoder.bias").map(Vec::as_slice),
            logits: case.logits,
        }
    }
}

/// The distribution at one position.
struct Position<'a> {
    contexts: &'a [f64],
    log_priors: &'a [f64],
    /// `[K][vocab]`, after their function.
    logits: Vec<Vec<f64>>,
    /// `[K][vocab]`: the derivative of each logit in the product of context and decoder.
    slopes: Vec<Vec<f64>>,
    lse: Vec<f64>,
    log_probs: Vec<f64>,
}

impl<'a> Position<'a> {
    fn new(contexts: &'a [f64], log_priors: &'a [f64], decoder: &Decoder) -> Self {
        let d = contexts.len() / log_priors.len();
        let logit = |context: &[f64], v: usize| {
            let product = dot(context, &decoder.weight[v * d..][..d]) + decoder.bias.map_or(0.0, |b| b[v]);
            decoder.logits.value_and_slope(product)
        };
        let vocab = decoder.weight.len() / d;
        let row = |context| (0..vocab).map(|v| logit(context, v)).unzip();
        let (logits, slopes): (Vec<Vec<f64>>, _) = contexts.chunks(d).map(row).unzip();
        let mut position = Self {
            contexts,
            log_priors,
            lse: logits.iter().map(|z| log_sum_exp(z)).collect(),
            logits,
            slopes,
            log_probs: vec![],
        };
        position.log_probs = (0..vocab).map(|v| log_sum_exp(&position.joint(v))).collect();
        position
    }

    /// `log pi_k + log softmax(z_k)_v` for every component.
    fn joint(&self, v: usize) -> Vec<f64> {
        (0..self.lse.len()).map(|k| self.log_priors[k] + (self.logits[k][v] - self.lse[k])).collect()
    }

    /// The posterior of every component given the id `v`.
    fn posterior(&self, v: usize) -> Vec<f64> {
        let joint = self.joint(v);
        joint.iter().map(|x| (x - self.log_probs[v]).exp()).collect()
    }

    fn objective(&self, y: usize, objective: &Objective) -> f64 {
        let vocab = self.log_probs.len();
        let mut value = 0.0;
        for (v, log_prob) in self.log_probs.iter().enumerate() {
            let mass = objective.target_mass(v, y, vocab);
            if mass != 0.0 {
                value -= mass * log_prob;
            }
        }
        let squares: f64 = self.lse.iter().map(|x| x * x).sum();
        value + objective.z_loss * squares / self.lse.len() as f64
    }
}

/// The gradients of the mixture's own operands.
struct Slopes {
    contexts: Vec<f64>,
    log_priors: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
}

impl Slopes {
    /// Adds position `t` with target `y`, its objective multiplied by `back`.
    fn add(&mut self, t: usize, position: &Position, y: usize, objective: &Objective, back: f64, decoder: &Decoder) {
        let (k, vocab) = (position.lse.len(), position.log_probs.len());
        let d = position.contexts.len() / k;
        let mut pulls = vec![vec![0.0; vocab]; k];
        for v in 0..vocab {
            let q = objective.target_mass(v, y, vocab);
            if q != 0.0 {
                for (pull, r) in pulls.iter_mut().zip(position.posterior(v)) {
                    pull[v] = q * r;
                }
            }
        }
        let masses: Vec<f64> = pulls.iter().map(|pull| pull.iter().sum()).collect();
        for i in 0..k {
            self.log_priors[t * k + i] = -back * masses[i];
            let context = &position.contexts[i * d..][..d];
            let push = masses[i] + 2.0 * objective.z_loss * position.lse[i] / k as f64;
            for (v, &z) in position.logits[i].iter().enumerate() {
                let softmax = (z - position.lse[i]).exp();
                let dz = back * position.slopes[i][v] * (push * softmax - pulls[i][v]);
                let row = &decoder.weight[v * d..][..d];
                add_scaled(&mut self.contexts[(t * k + i) * d..][..d], dz, row);
                add_scaled(&mut self.weight[v * d..][..d], dz, context);
                self.bias[v] += dz;
            }
        }
    }
}

/// `log(sum(exp(values)))`; minus infinity if all values are, NaN if one is.
pub fn log_sum_exp(values: &[f64]) -> f64 {
    if values.iter().any(|x| x.is_nan()) {
        return f64::NAN;
    }
    let largest = values.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    if largest == f64::NEG_INFINITY {
        return largest;
    }
    largest + values.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
}

/// Subtracts the log-sum-exp from every value.
pub fn log_softmax(values: &mut [f64]) {
    let lse = log_sum_exp(values);
    values.iter_mut().for_each(|x| *x -= lse);
}

fn argmax(values: &[f64]) -> usize {
    let better = |best, i| if values[i] > values[best] { i } else { best };
    (0..values.len()).fold(0, better)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(x, y)| *x += factor * y);
}
