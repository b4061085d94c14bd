//! Mixtures whose distributions are restricted to sets of ids: plain loops in f64, and candle's operations.

use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use mos_head::sets::AllowedIds;
use mos_head::Mixture;
use rand::{rngs::StdRng, Rng, SeedableRng};

use super::reference::log_sum_exp;

/// Which ids are allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sets {
    /// The same number of ids at all positions.
    Shared(usize),
    /// From one to so many ids for each position.
    Each(usize),
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub positions: usize,
    pub components: usize,
    pub d: usize,
    pub vocab: usize,
    pub sets: Sets,
    pub logit_scale: f64,
    pub softcap: Option<f64>,
    pub bias: bool,
    pub transposed: bool,
    pub temperature: f64,
}

/// Cases of every way in which the log-probabilities of sets are computed.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (components, positions, d, vocab, sets) in [
        (1, 1, 1, 1, Sets::Shared(1)),
        (1, 5, 7, 37, Sets::Shared(9)),
        (1, 6, 8, 30, Sets::Shared(30)),
        // Short lists: the logits of each list.
        (1, 13, 19, 600, Sets::Each(5)),
        (1, 11, 16, 900, Sets::Each(1)),
        // Long lists: the logits of all ids in any list, or of all ids.
        (1, 4, 5, 50, Sets::Each(6)),
        (1, 9, 5, 20, Sets::Each(18)),
        (3, 5, 7, 37, Sets::Shared(9)),
        (3, 4, 6, 700, Sets::Shared(300)),
        (3, 6, 5, 90, Sets::Each(12)),
        (3, 3, 6, 700, Sets::Each(400)),
        (3, 2, 3, 1, Sets::Each(1)),
    ] {
        let case = Case {
            positions,
            components,
            d,
            vocab,
            sets,
            logit_scale: 1.0,
            softcap: None,
            bias: true,
            transposed: false,
            temperature: 1.0,
        };
        cases.push(case);
        cases.push(Case { logit_scale: 0.7, softcap: Some(1.3), temperature: 0.6, ..case });
        cases.push(Case { bias: false, transposed: true, temperature: 1.7, ..case });
    }
    cases
}

fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.7..1.7)).collect()
}

impl Case {
    /// Contexts, the log-priors before their softmax, the weight (as it is stored) and the bias, rounded to `dtype`.
    pub fn operands(&self, dtype: DType) -> Result<[Tensor; 4]> {
        let Case { positions, components, d, vocab, .. } = *self;
        let of = |seed: u64, shape: &[usize], scale: f64| {
            let values: Vec<f64> = numbers(seed, shape.iter().product()).iter().map(|x| x * scale).collect();
            Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
        };
        let stored = if self.transposed { [d, vocab] } else { [vocab, d] };
        Ok([
            of(1, &[positions, components, d], 1.0)?,
            of(2, &[positions, components], 1.0)?,
            of(3, &stored, 1.5 / (d as f64).sqrt())?,
            of(4, &[vocab], 1.0)?,
        ])
    }

    /// The ids of each position.
    pub fn lists(&self) -> Vec<Vec<u32>> {
        let mut rng = StdRng::seed_from_u64(self.vocab as u64);
        let mut draw = |n: usize| {
            let mut ids: Vec<usize> = rand::seq::index::sample(&mut rng, self.vocab, n).into_vec();
            ids.sort_unstable();
            ids.into_iter().map(|id| id as u32).collect::<Vec<_>>()
        };
        match self.sets {
            Sets::Shared(n) => vec![draw(n); self.positions],
            Sets::Each(most) => (0..self.positions).map(|t| draw(1 + (t * 7 + most - 1) % most)).collect(),
        }
    }

    pub fn allowed(&self) -> AllowedIds {
        let lists = self.lists();
        match self.sets {
            Sets::Shared(_) => AllowedIds::new(&lists[0]),
            Sets::Each(_) => of_lists(&lists),
        }
    }

    /// An allowed id of each position.
    pub fn targets(&self) -> Vec<u32> {
        self.lists().iter().enumerate().map(|(t, list)| list[(t * t + 1) % list.len()]).collect()
    }

    pub fn mixture(&self, [contexts, logits, weight, bias]: &[Tensor; 4]) -> mos_head::Result<Mixture> {
        let dtype = if contexts.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let log_priors = log_softmax(&logits.to_dtype(dtype)?, D::Minus1)?;
        let log_priors = Some(&log_priors).filter(|_| self.components > 1);
        let weight = if self.transposed { weight.t()? } else { weight.clone() };
        let bias = Some(bias).filter(|_| self.bias);
        let mixture = Mixture::new(contexts, log_priors, &weight, bias)?.with_logit_scale(self.logit_scale)?;
        match self.softcap {
            Some(cap) => mixture.with_softcap(cap),
            None => Ok(mixture),
        }
    }

    /// `log P(v)` at each position, by loops.
    fn log_probs(&self, operands: &[Vec<f64>; 4]) -> Vec<Vec<f64>> {
        let [contexts, logits, weight, bias] = operands;
        let Case { components, d, vocab, .. } = *self;
        let of_position = |t: usize| {
            let priors = &logits[t * components..][..components];
            let prior_lse = log_sum_exp(priors);
            let of_component = |k: usize| {
                let logit = |v: usize| {
                    let element = |i: usize| if self.transposed { weight[i * vocab + v] } else { weight[v * d + i] };
                    let product: f64 = (0..d).map(|i| contexts[(t * components + k) * d + i] * element(i)).sum();
                    let z = self.logit_scale * (product + if self.bias { bias[v] } else { 0.0 });
                    self.softcap.map_or(z, |cap| cap * (z / cap).tanh())
                };
                let z: Vec<f64> = (0..vocab).map(logit).collect();
                let lse = log_sum_exp(&z);
                z.iter().map(|z| priors[k] - prior_lse + z - lse).collect::<Vec<_>>()
            };
            let joint: Vec<Vec<f64>> = (0..components).map(of_component).collect();
            (0..vocab).map(|v| log_sum_exp(&joint.iter().map(|of_k| of_k[v]).collect::<Vec<_>>())).collect()
        };
        (0..self.positions).map(of_position).collect()
    }

    /// `log P(v | S)` at each position for the ids of these lists, at a temperature, by loops.
    pub fn restricted(&self, operands: &[Vec<f64>; 4], lists: &[Vec<u32>], temperature: f64) -> Vec<Vec<f64>> {
        let of_list = |(log_probs, list): (Vec<f64>, &Vec<u32>)| {
            let of_ids: Vec<f64> = list.iter().map(|&id| log_probs[id as usize] / temperature).collect();
            let lse = log_sum_exp(&of_ids);
            of_ids.into_iter().map(|x| x - lse).collect()
        };
        self.log_probs(operands).into_iter().zip(lists).map(of_list).collect()
    }

    /// `log P(v | S)` for the ids of these lists, one row for each position, from candle's operations.
    pub fn composed(&self, operands: &[Tensor; 4], lists: &[Vec<u32>], temperature: f64) -> Result<Vec<Tensor>> {
        let [contexts, logits, weight, bias] = operands;
        let Case { positions, components, d, vocab, .. } = *self;
        let weight = if self.transposed { weight.clone() } else { weight.t()? };
        let mut z = contexts.reshape((positions * components, d))?.matmul(&weight)?;
        if self.bias {
            z = z.broadcast_add(bias)?;
        }
        z = (z * self.logit_scale)?;
        if let Some(cap) = self.softcap {
            z = ((z / cap)?.tanh()? * cap)?;
        }
        let log_p = log_softmax(&z.reshape((positions, components, vocab))?, D::Minus1)?;
        let joint = log_p.broadcast_add(&log_softmax(logits, D::Minus1)?.unsqueeze(2)?)?;
        let largest = joint.max_keepdim(1)?.detach();
        let log_p = (joint.broadcast_sub(&largest)?.exp()?.sum(1)?.log()? + largest.squeeze(1)?)?;
        let of_list = |(t, list): (usize, &Vec<u32>)| {
            let ids = Tensor::new(list.as_slice(), &Device::Cpu)?;
            log_softmax(&(log_p.get(t)?.index_select(&ids, 0)? / temperature)?, 0)
        };
        lists.iter().enumerate().map(of_list).collect()
    }
}

/// Lists one after another.
pub fn of_lists(lists: &[Vec<u32>]) -> AllowedIds {
    let mut offsets = vec![0];
    for list in lists {
        offsets.push(offsets[offsets.len() - 1] + list.len());
    }
    AllowedIds::per_position(&lists.concat(), &offsets).expect("offsets that ascend")
}

pub fn variables(tensors: &[Tensor; 4]) -> [Var; 4] {
    tensors.each_ref().map(|tensor| Var::from_tensor(tensor).expect("a variable"))
}

pub fn tensors(variables: &[Var; 4]) -> [Tensor; 4] {
    variables.each_ref().map(|variable| variable.as_tensor().clone())
}

/// The numbers of tensors.
pub fn values(tensors: &[Tensor; 4]) -> [Vec<f64>; 4] {
    tensors.each_ref().map(|t| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap())
}

/// Demands that numbers differ by at most a share of the largest, which counts as at least a tenth.
pub fn assert_near(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.1f64, |a, x| a.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let is_near = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * largest;
        assert!(is_near, "{name}[{i}]: {a}, expected {b} (largest {largest})");
    }
}

pub fn ids(ids: &[u32], shape: &[usize]) -> Tensor {
    Tensor::from_vec(ids.to_vec(), shape, &Device::Cpu).expect("ids")
}

/// Demands an error of a number or option.
pub fn assert_config<T: std::fmt::Debug>(result: mos_head::Result<T>, name: &str, part: &str) {
    let error = result.expect_err(name);
    assert!(matches!(error, mos_head::Error::Config { argument, .. } if argument == name), "{name}: {error:?}");
    assert!(error.to_string().contains(part), "{error}");
}
