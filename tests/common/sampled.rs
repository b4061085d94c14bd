//! Random mixtures, and the formulas of losses over a sample in candle's operations.

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use mos_head::sampled::{Negatives, NoiseDistribution};
use mos_head::{Error, Mixture, Result};

use super::exact;

pub const VOCAB: usize = 40;

/// Random operands of a mixture, all variables.
pub struct Operands {
    pub contexts: Var,
    /// Before their softmax.
    pub priors: Var,
    pub weight: Var,
    pub bias: Option<Var>,
    pub scale: f64,
}

impl Operands {
    pub fn random(positions: usize, components: usize, dtype: DType, device: &Device) -> Result<Self> {
        let mut state = 7u64;
        let mut random = |shape: &[usize]| {
            let values = (0..shape.iter().product()).map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as f64 / (1u64 << 31) as f64 * 2.0 - 1.0
            });
            let tensor = Tensor::from_iter(values.collect::<Vec<f64>>(), &Device::Cpu)?.reshape(shape)?;
            Ok::<_, Error>(Var::from_tensor(&tensor.to_dtype(dtype)?.to_device(device)?)?)
        };
        Ok(Operands {
            contexts: random(&[positions, components, 6])?,
            priors: random(&[positions, components])?,
            weight: random(&[VOCAB, 6])?,
            bias: Some(random(&[VOCAB])?),
            scale: 1.0,
        })
    }

    pub fn variables(&self) -> Vec<&Var> {
        let always = [&self.contexts, &self.priors, &self.weight];
        always.into_iter().chain(&self.bias).collect()
    }

    pub fn log_priors(&self) -> Result<Tensor> {
        Ok(log_softmax(&self.priors.to_dtype(exact(self.priors.device()))?, D::Minus1)?)
    }

    pub fn mixture(&self) -> Result<Mixture> {
        let bias = self.bias.as_deref();
        Mixture::new(&self.contexts, Some(&self.log_priors()?), &self.weight, bias)?.with_logit_scale(self.scale)
    }

    /// Logits of some ids, `[positions, K, n]`.
    pub fn logits(&self, ids: &[usize]) -> Result<Tensor> {
        let exact = exact(self.weight.device());
        let ids = Tensor::from_iter(ids.iter().map(|&id| id as u32), self.weight.device())?;
        let rows = self.weight.to_dtype(exact)?.index_select(&ids, 0)?;
        let logits = self.contexts.to_dtype(exact)?.broadcast_matmul(&rows.t()?)?;
        let logits = match &self.bias {
            Some(bias) => logits.broadcast_add(&bias.to_dtype(exact)?.index_select(&ids, 0)?)?,
            None => logits,
        };
        Ok((logits * self.scale)?)
    }

    /// `z - log E[count]` of the negatives `[positions, K, S]`, minus infinity at the target, and of the target
    /// `[positions, K]`.
    pub fn shifted(&self, negatives: &Negatives, targets: &[usize]) -> Result<(Tensor, Tensor)> {
        let (device, exact) = (self.weight.device(), exact(self.weight.device()));
        let shift = |id: usize| -negatives.expected_count(id).ln();
        let table = |of: &dyn Fn(usize) -> f64, ids: &[usize]| {
            Tensor::from_iter(ids.iter().map(|&id| of(id)).collect::<Vec<_>>(), &Device::Cpu)?
                .to_dtype(exact)?
                .to_device(device)
        };
        let logits = self.logits(negatives.token_ids())?.broadcast_add(&table(&shift, negatives.token_ids())?)?;
        let own: Vec<Tensor> = targets
            .iter()
            .enumerate()
            .map(|(position, &id)| Ok((self.logits(&[id])?.get(position)?.squeeze(1)? + shift(id))?))
            .collect::<Result<_>>()?;
        Ok((logits, Tensor::stack(&own, 0)?))
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
        let log_p = (own - all.log_sum_exp(2)?)?;
        Ok((self.log_priors()? + log_p)?.log_sum_exp(1)?.neg()?)
    }

    /// NCE at each position, by its formula.
    pub fn nce(&self, negatives: &Negatives, targets: &[usize]) -> Result<Tensor> {
        let (logits, own) = self.shifted(negatives, targets)?;
        let sigmoid = |x: &Tensor| (x.neg()?.exp()? + 1.0)?.recip();
        let repeats = Tensor::from_iter(negatives.repeats().iter().map(|&n| n as f32), logits.device())?;
        let noise = sigmoid(&logits.neg()?)?.log()?.broadcast_mul(&repeats.to_dtype(logits.dtype())?)?.sum(2)?;
        Ok((sigmoid(&own)?.log()? + noise)?.neg()?.squeeze(1)?)
    }
}

pub fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

pub fn numbers_of(tensor: &Tensor) -> Result<Vec<f64>> {
    match tensor.dtype() {
        DType::F64 => Ok(tensor.flatten_all()?.to_vec1()?),
        _ => numbers(tensor),
    }
}

#[track_caller]
pub fn close(name: &str, found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let (found, expected) = (numbers_of(found)?, numbers_of(expected)?);
    let largest = expected.iter().fold(1e-3f64, |largest, x| largest.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= tolerance * largest, "{name}[{i}]: {found}, expected {expected}");
    }
    Ok(())
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
