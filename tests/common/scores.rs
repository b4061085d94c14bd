//! Scores of a mixture, and their gradients, from candle's operations in f64.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use mos_head::score::{ScoreOptions, Scores};
use mos_head::Distributions;
use mos_head::Mixture;

use super::on;

use rand::{rngs::StdRng, Rng, SeedableRng};

/// Numbers from -1.7 to 1.7, whose standard deviation is one.
fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.7..1.7)).collect()
}

/// A mixture with an upstream gradient for each score.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub positions: usize,
    pub components: usize,
    pub d: usize,
    pub vocab: usize,
    /// Candidates for each position.
    pub n: usize,
    pub entropy: bool,
    pub outside: bool,
    pub temperature: f64,
    /// The spread of the logits.
    pub spread: f64,
    pub logit_scale: f64,
    pub softcap: Option<f64>,
    /// Whether the bias of every third id is minus infinity.
    pub masked: bool,
    pub transposed: bool,
    pub workspace_bytes: Option<usize>,
}

impl Case {
    pub const fn new(positions: usize, components: usize, d: usize, vocab: usize) -> Self {
        Case {
            positions,
            components,
            d,
            vocab,
            n: 1,
            entropy: true,
            outside: false,
            temperature: 1.0,
            spread: 1.0,
            logit_scale: 1.0,
            softcap: None,
            masked: false,
            transposed: false,
            workspace_bytes: None,
        }
    }

    pub fn options(&self) -> ScoreOptions {
        let options = ScoreOptions::new().with_entropy(self.entropy).with_outside(self.outside);
        let options = options.with_temperature(self.temperature);
        match self.workspace_bytes {
            Some(bytes) => options.with_workspace_bytes(bytes),
            None => options,
        }
    }

    /// Contexts, the log-priors before their softmax, the weight and the bias, rounded to `dtype`.
    pub fn operands(&self, dtype: DType) -> Result<[Tensor; 4]> {
        let Case { positions, components, d, vocab, .. } = *self;
        let of = |seed: u64, shape: &[usize], scale: f64| {
            let n = shape.iter().product();
            let values = Tensor::from_vec(numbers(seed, n), shape, &Device::Cpu)?;
            (values.to_dtype(DType::F64)? * scale)?.to_dtype(dtype)
        };
        let scale = self.spread / (d as f64).sqrt();
        let weight = if !self.transposed { of(3, &[vocab, d], scale)? } else { of(3, &[d, vocab], scale)?.t()? };
        let mut bias = of(4, &[vocab], 1.0)?;
        if self.masked {
            let masked: Vec<f64> = (0..vocab).map(|v| if v % 3 == 1 { f64::NEG_INFINITY } else { 0.0 }).collect();
            bias = (bias + Tensor::from_vec(masked, vocab, &Device::Cpu)?.to_dtype(dtype)?)?;
        }
        Ok([of(1, &[positions, components, d], 1.0)?, of(2, &[positions, components], 1.0)?, weight, bias])
    }

    pub fn token_ids(&self) -> Result<Tensor> {
        // Not masked; some are equal.
        let ids = (0..self.positions * self.n).map(|i| ((i * i + 3 * i) / 2 % self.vocab.div_ceil(3) * 3) as u32);
        Tensor::from_vec(ids.collect::<Vec<_>>(), (self.positions, self.n), &Device::Cpu)
    }

    /// The upstream gradient of each score, `[positions, n + 2]`.
    pub fn upstream(&self) -> Result<Tensor> {
        let values = numbers(5, self.positions * (self.n + 2));
        Tensor::from_vec(values, (self.positions, self.n + 2), &Device::Cpu)?.to_dtype(DType::F64)
    }

    /// The scores of the crate.
    pub fn scores(&self, [contexts, logits, weight, bias]: &[Tensor; 4]) -> mos_head::Result<Scores> {
        let dtype = if contexts.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let log_priors = log_softmax(&logits.to_dtype(dtype)?, D::Minus1)?;
        let log_priors = Some(&log_priors).filter(|_| self.components > 1);
        let mixture = Mixture::new(contexts, log_priors, weight, Some(bias))?.with_logit_scale(self.logit_scale)?;
        let mixture = match self.softcap {
            Some(cap) => mixture.with_softcap(cap)?,
            None => mixture,
        };
        mixture.score(&on(contexts.device(), &self.token_ids()?)?, &self.options())
    }

    /// The ids that are not masked, whose gradients candle can compute.
    fn possible(&self) -> Vec<u32> {
        (0..self.vocab as u32).filter(|v| !self.masked || v % 3 != 1).collect()
    }

    /// The log-probabilities of the possible ids, `[positions, possible]`, tempered.
    pub fn composed_log_probs(&self, [contexts, logits, weight, bias]: &[Tensor; 4]) -> Result<Tensor> {
        let possible = self.possible();
        let (components, vocab) = (self.components, possible.len());
        let possible = Tensor::from_vec(possible, vocab, &Device::Cpu)?;
        let (weight, bias) = (weight.contiguous()?.index_select(&possible, 0)?, bias.index_select(&possible, 0)?);
        let z = contexts.reshape((self.positions * components, self.d))?.matmul(&weight.t()?)?;
        let mut z = (z.broadcast_add(&bias)? * self.logit_scale)?;
        if let Some(cap) = self.softcap {
            z = ((z / cap)?.tanh()? * cap)?;
        }
        let log_p = log_softmax(&z.reshape((self.positions, components, vocab))?, D::Minus1)?;
        let joint = log_p.broadcast_add(&log_softmax(logits, D::Minus1)?.unsqueeze(2)?)?;
        let largest = joint.max_keepdim(1)?.detach();
        let log_p = (joint.broadcast_sub(&largest)?.exp()?.sum(1)?.log()? + largest.squeeze(1)?)?;
        if self.temperature == 1.0 {
            return Ok(log_p);
        }
        log_softmax(&(log_p / self.temperature)?, D::Minus1)
    }

    /// The scores from candle's operations, `[positions, n + 2]`: log-probabilities, the entropy, and the logarithm of the
    /// mass outside.
    pub fn composed(&self, operands: &[Tensor; 4]) -> Result<Tensor> {
        let log_probs = self.composed_log_probs(operands)?;
        let index = if self.masked {
            ((self.token_ids()?.to_dtype(DType::F64)? / 3.0)? * 2.0)?.to_dtype(DType::U32)?
        } else {
            self.token_ids()?
        };
        let of_ids = log_probs.gather(&index, 1)?;
        let entropy = if self.entropy {
            (log_probs.exp()? * &log_probs)?.sum_keepdim(1)?.neg()?
        } else {
            Tensor::zeros((self.positions, 1), DType::F64, &Device::Cpu)?
        };
        let log_outside = if self.outside {
            let columns = log_probs.dim(1)?;
            let mut is_outside = vec![1u8; self.positions * columns];
            for (i, &column) in index.flatten_all()?.to_vec1::<u32>()?.iter().enumerate() {
                is_outside[i / self.n * columns + column as usize] = 0;
            }
            let is_outside = Tensor::from_vec(is_outside, (self.positions, columns), &Device::Cpu)?;
            is_outside.where_cond(&log_probs.exp()?, &log_probs.zeros_like()?)?.sum_keepdim(1)?.log()?
        } else {
            Tensor::zeros((self.positions, 1), DType::F64, &Device::Cpu)?
        };
        Tensor::cat(&[of_ids, entropy, log_outside], 1)
    }

    /// Compares scores and gradients in this dtype with those of the same operands in f64.
    pub fn check(&self, dtype: DType, tolerance: f64) -> mos_head::Result<()> {
        self.check_on(&Device::Cpu, dtype, tolerance)
    }

    /// Compares scores and gradients on a device with those on the CPU in f64.
    pub fn check_on(&self, device: &Device, dtype: DType, tolerance: f64) -> mos_head::Result<()> {
        let operands = self.operands(dtype)?;
        let vars = operands.iter().map(|t| Var::from_tensor(&t.to_device(device)?)).collect::<Result<Vec<_>>>()?;
        let truth = operands.iter().map(|t| Var::from_tensor(&t.to_dtype(DType::F64)?)).collect::<Result<Vec<_>>>()?;
        let of = |vars: &[Var]| -> [Tensor; 4] { std::array::from_fn(|i| vars[i].as_tensor().clone()) };
        let mut inputs = of(&vars);
        if self.transposed {
            // A variable is contiguous: this is its transpose's.
            let stored = Var::from_tensor(&vars[2].t()?.contiguous()?)?;
            inputs[2] = stored.t()?;
        }
        let scores = self.scores(&inputs)?;
        let upstream = self.upstream()?;
        let expected = self.composed(&of(&truth))?;
        // A score that was not asked for is a constant.
        let column = |score: &Option<Tensor>, i: usize| match score {
            Some(score) => score.unsqueeze(1),
            None => expected.narrow(1, self.n + i, 1)?.detach().to_dtype(scores.log_prob.dtype())?.to_device(device),
        };
        let (entropy, log_outside) = (column(&scores.entropy, 0)?, column(&scores.log_outside, 1)?);
        let found = Tensor::cat(&[&scores.log_prob, &entropy, &log_outside], 1)?;
        compare("scores", self, dtype, &found, &expected, tolerance)?;
        let expected = (expected * &upstream)?.sum_all()?.backward()?;
        let found = (&found * upstream.to_dtype(found.dtype())?.to_device(device)?)?.sum_all()?.backward()?;
        let names = ["contexts", "log_priors", "weight", "bias"];
        for ((name, var), truth) in names.into_iter().zip(&vars).zip(&truth) {
            if self.transposed && name == "weight" || self.components == 1 && name == "log_priors" {
                continue;
            }
            let (Some(found), Some(expected)) = (found.get(var), expected.get(truth)) else {
                panic!("{name} has no gradient: {self:?}");
            };
            let of_rounding = match dtype {
                DType::F64 | DType::F32 => 0.0,
                _ if device.is_cpu() => 6e-3,
                // A GPU rounds the gradient of the logits too.
                _ => 1e-2,
            };
            compare(name, self, dtype, found, expected, 4.0 * tolerance + of_rounding)?;
        }
        Ok(())
    }
}

/// Demands that two tensors differ by at most a share of the largest number, which counts as at least a tenth.
pub fn compare(
    name: &str,
    case: &dyn std::fmt::Debug,
    dtype: DType,
    found: &Tensor,
    expected: &Tensor,
    tolerance: f64,
) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{name} {case:?}");
    let values = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (found, expected) = (values(found)?, values(expected)?);
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.1f64, |a, x| a.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
        let is_close = a == b || (a - b).abs() <= tolerance * largest;
        assert!(is_close, "{name}[{i}]: {a}, expected {b} (largest {largest}), {dtype:?} {case:?}");
    }
    Ok(())
}

/// Checks the gradients of a scalar function of four operands, in f64.
pub fn check_central_differences(
    vars: &[Var; 4],
    gradients: &GradStore,
    value: impl Fn(&[Tensor; 4]) -> mos_head::Result<Tensor>,
) -> mos_head::Result<()> {
    const STEP: f64 = 1e-5;
    for (i, var) in vars.iter().enumerate() {
        let found = gradients.get(var).expect("a gradient").flatten_all()?.to_vec1::<f64>()?;
        let values = var.flatten_all()?.to_vec1::<f64>()?;
        for j in 0..values.len() {
            let at = |step: f64| -> mos_head::Result<f64> {
                let mut moved = values.clone();
                moved[j] += step;
                let mut operands = vars.each_ref().map(|var| var.as_detached_tensor());
                operands[i] = Tensor::from_vec(moved, var.shape(), &Device::Cpu)?;
                Ok(value(&operands)?.to_scalar::<f64>()?)
            };
            let expected = (at(STEP)? - at(-STEP)?) / (2.0 * STEP);
            assert!((found[j] - expected).abs() < 1e-8, "operand {i}[{j}]: {} {expected}", found[j]);
        }
    }
    Ok(())
}
