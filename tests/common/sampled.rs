//! Random mixtures, and the formulas of losses over a sample in candle's operations.

use approx::assert_relative_eq;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use mos_head::sampled::{Negatives, NoiseDistribution};
use mos_head::{Mixture, Result};

use super::case::{Case, Head, Sizes, Tensors};
use super::check::{self, gradients, Gradients};
use super::composed::{log_sum_exp, Operands};
use super::exact;
use super::values::numbers;

pub const VOCAB: usize = 40;

/// A random mixture whose operands are variables.
pub struct Problem {
    case: Case,
    pub vars: Tensors,
}

impl Problem {
    pub fn new(components: usize, dtype: DType, device: &Device) -> Result<Self> {
        let case = Case::random(Head::Mixture, Sizes::new(0, 6, components, VOCAB), &[TARGETS.len()], 7);
        Ok(Self { vars: case.variables(dtype, device)?, case })
    }

    pub fn with_scale(mut self, scale: f64) -> Self {
        self.case.logits.scale = scale;
        self
    }

    pub fn without_bias(mut self) -> Self {
        self.vars.remove("decoder.bias");
        self
    }

    pub fn operands(&self) -> Result<Operands> {
        Ok(self.case.operands(&self.vars)?)
    }

    pub fn mixture(&self) -> Result<Mixture> {
        self.operands()?.mixture(self.case.logits)
    }

    /// The gradients of the operands. A single log-prior has none.
    pub fn gradients(&self, store: &GradStore) -> Gradients {
        let mut gradients = gradients(store, &self.vars);
        if self.case.sizes.components == 1 {
            gradients.remove("log_priors");
        }
        gradients
    }

    /// Demands equal gradients, up to a share of the largest number of each.
    pub fn assert_near(&self, found: &GradStore, expected: &GradStore, tolerance: f64) {
        let expected = self.gradients(expected);
        assert!(expected.len() >= 3, "{:?}", expected.keys());
        check::assert_near("a sampled loss", &self.gradients(found), &expected, tolerance);
    }

    /// The logits of some ids, `[positions, K, n]`.
    pub fn logits(&self, ids: &[usize]) -> Result<Tensor> {
        let device = self.vars["contexts"].device();
        let ids = Tensor::from_iter(ids.iter().map(|&id| id as u32), device)?;
        Ok(self.operands()?.to_dtype(exact(device))?.only(&ids)?.logits(self.case.logits)?)
    }

    /// `z - log E[count]` of the negatives `[positions, K, S]`, and of the target `[positions, K]`.
    pub fn shifted(&self, negatives: &Negatives, targets: &[usize]) -> Result<(Tensor, Tensor)> {
        let shift = |id: usize| -negatives.expected_count(id).ln();
        let logits = self.logits(negatives.token_ids())?;
        let shifts: Vec<f64> = negatives.token_ids().iter().map(|&id| shift(id)).collect();
        let shifts = Tensor::new(shifts, &Device::Cpu)?.to_dtype(logits.dtype())?.to_device(logits.device())?;
        let own = targets.iter().enumerate();
        let own = own.map(|(t, &id)| Ok((self.logits(&[id])?.get(t)?.squeeze(1)? + shift(id))?));
        Ok((logits.broadcast_add(&shifts)?, Tensor::stack(&own.collect::<Result<Vec<_>>>()?, 0)?))
    }

    /// The sampled softmax at each position, by its formula.
    pub fn softmax(&self, negatives: &Negatives, targets: &[usize]) -> Result<Tensor> {
        let (logits, own) = self.shifted(negatives, targets)?;
        let counts = targets.iter().flat_map(|target| {
            let ids = negatives.token_ids().iter().zip(negatives.repeats());
            ids.map(move |(id, &repeats)| if id == target { -1e9 } else { (repeats as f64).ln() })
        });
        let counts = Tensor::from_iter(counts.collect::<Vec<f64>>(), &Device::Cpu)?;
        let counts = counts.reshape((targets.len(), 1, ()))?.to_dtype(logits.dtype())?.to_device(logits.device())?;
        let all = Tensor::cat(&[&logits.broadcast_add(&counts)?, &own.unsqueeze(2)?], 2)?;
        let log_p = (own - log_sum_exp(&all)?)?;
        let log_priors = self.operands()?.log_priors.expect("log-priors").to_dtype(log_p.dtype())?;
        Ok(log_sum_exp(&(log_priors + log_p)?)?.neg()?)
    }

    /// NCE at each position, by its formula.
    pub fn nce(&self, negatives: &Negatives, targets: &[usize]) -> Result<Tensor> {
        let (logits, own) = self.shifted(negatives, targets)?;
        let repeats = Tensor::from_iter(negatives.repeats().iter().map(|&n| n as f32), logits.device())?;
        let noise = sigmoid(&logits.neg()?)?.log()?.broadcast_mul(&repeats.to_dtype(logits.dtype())?)?.sum(2)?;
        Ok((sigmoid(&own)?.log()? + noise)?.neg()?.squeeze(1)?)
    }
}

pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x.neg()?.exp()? + 1.0)?.recip()?)
}

/// Demands that tensors differ by at most a share of the largest number.
#[track_caller]
pub fn assert_near(name: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let found = numbers(found).named(name);
    assert_relative_eq!(found, numbers(expected), max_relative = tolerance);
}

/// The tolerance of gradients and losses, relative to the largest.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 1.5e-2,
    }
}

pub const TARGETS: [u32; 7] = [3, 0, 39, 17, 3, 1, 20];

pub fn targets(device: &Device) -> Result<(Tensor, Vec<usize>)> {
    Ok((Tensor::new(&TARGETS, device)?, TARGETS.iter().map(|&id| id as usize).collect()))
}

pub fn draws() -> Result<[Negatives; 4]> {
    let counts: Vec<f64> = (0..VOCAB).map(|id| 1.0 + (id % 5) as f64).collect();
    let (log_uniform, unigram) = (NoiseDistribution::log_uniform(VOCAB)?, NoiseDistribution::unigram(&counts)?);
    Ok([
        log_uniform.draw(12, 1)?,
        log_uniform.draw_with_replacement(12, 1)?,
        unigram.draw(5, 2)?,
        unigram.draw_with_replacement(30, 2)?,
    ])
}
