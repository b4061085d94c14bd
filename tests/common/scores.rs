//! Scores of a random mixture, and their gradients, from candle's operations in f64.

use approx::assert_relative_eq;
use candle_core::{DType, Device, Result, Tensor, D};
use mos_head::score::{ScoreOptions, Scores};
use mos_head::Distributions;

use super::case::Tensors;
use super::check::{assert_near_from, gradients};
use super::composed::log_softmax;
use super::on;
use super::problem::Problem;
use super::values::{numbers, uniform};

impl Problem {
    pub fn options(&self) -> ScoreOptions {
        let options = ScoreOptions::new().with_entropy(self.entropy).with_outside(self.outside);
        let mut options = options.with_collision(self.collision).with_temperature(self.temperature);
        options.workspace_bytes = self.workspace_bytes;
        options
    }

    pub fn token_ids(&self) -> Result<Tensor> {
        // Not masked; some are equal.
        let ids = (0..self.positions * self.n).map(|i| ((i * i + 3 * i) / 2 % self.vocab.div_ceil(3) * 3) as u32);
        Tensor::from_vec(ids.collect::<Vec<_>>(), (self.positions, self.n), &Device::Cpu)
    }

    /// The upstream gradient of each score, `[positions, n + 3]`.
    pub fn upstream(&self) -> mos_head::Result<Tensor> {
        uniform(&[self.positions, self.n + 3], 1.7, 5)
    }

    /// The scores of the crate.
    pub fn scores(&self, tensors: &Tensors) -> mos_head::Result<Scores> {
        let device = tensors["contexts"].device();
        self.mixture(tensors)?.score(&on(device, &self.token_ids()?)?, &self.options())
    }

    /// The log-probabilities of the ids that are not masked, whose gradients candle can compute, `[positions,
    /// possible]`, tempered.
    pub fn composed_log_probs(&self, tensors: &Tensors) -> Result<Tensor> {
        let possible: Vec<u32> = (0..self.vocab as u32).filter(|v| !self.masked || v % 3 != 1).collect();
        let operands = self.operands(tensors)?.only(&Tensor::new(possible, &Device::Cpu)?)?;
        let (log_p, _) = operands.log_probs(self.logits())?;
        if self.temperature == 1.0 {
            return Ok(log_p);
        }
        log_softmax(&(log_p / self.temperature)?)
    }

    /// The scores from candle's operations, `[positions, n + 3]`: log-probabilities, the entropy, and the logarithms of
    /// the mass outside and of the collision probability.
    pub fn composed_scores(&self, tensors: &Tensors) -> Result<Tensor> {
        let log_probs = self.composed_log_probs(tensors)?;
        let index = if self.masked {
            ((self.token_ids()?.to_dtype(DType::F64)? / 3.0)? * 2.0)?.to_dtype(DType::U32)?
        } else {
            self.token_ids()?
        };
        let mut columns = vec![log_probs.gather(&index, 1)?];
        let nothing = || Tensor::zeros((self.positions, 1), DType::F64, &Device::Cpu);
        columns.push(match self.entropy {
            true => (log_probs.exp()? * &log_probs)?.sum_keepdim(1)?.neg()?,
            false => nothing()?,
        });
        columns.push(if self.outside {
            let mut is_outside = vec![vec![1u8; log_probs.dim(1)?]; self.positions];
            for (is_outside, ids) in is_outside.iter_mut().zip(index.to_vec2::<u32>()?) {
                ids.into_iter().for_each(|id| is_outside[id as usize] = 0);
            }
            let is_outside = Tensor::new(is_outside, &Device::Cpu)?;
            is_outside.where_cond(&log_probs.exp()?, &log_probs.zeros_like()?)?.sum_keepdim(1)?.log()?
        } else {
            nothing()?
        });
        columns.push(match self.collision {
            true => log_probs.exp()?.sqr()?.sum_keepdim(1)?.log()?,
            false => nothing()?,
        });
        Tensor::cat(&columns, 1)
    }

    /// Compares scores and gradients in this dtype with those of the same operands in f64.
    pub fn check(&self, dtype: DType, tolerance: f64) -> mos_head::Result<()> {
        self.check_on(&Device::Cpu, dtype, tolerance)
    }

    /// Compares scores and gradients on a device with those on the CPU in f64.
    pub fn check_on(&self, device: &Device, dtype: DType, tolerance: f64) -> mos_head::Result<()> {
        let case = self.drawn(dtype);
        let (vars, truth) = (case.variables(dtype, device)?, case.variables(DType::F64, &Device::Cpu)?);
        let scores = self.scores(&vars)?;
        let upstream = self.upstream()?;
        let expected = self.composed_scores(&truth)?;
        // A score that was not asked for is a constant.
        let column = |score: &Option<Tensor>, i: usize| match score {
            Some(score) => score.unsqueeze(1),
            None => expected.narrow(1, self.n + i, 1)?.detach().to_dtype(scores.log_prob.dtype())?.to_device(device),
        };
        let (entropy, log_outside) = (column(&scores.entropy, 0)?, column(&scores.log_outside, 1)?);
        let log_collision = column(&scores.log_collision, 2)?;
        let found = Tensor::cat(&[&scores.log_prob, &entropy, &log_outside, &log_collision], 1)?;
        let name = format!("scores of {self:?} in {dtype:?}");
        assert_relative_eq!(numbers(&found).named(&name), numbers(&expected), max_relative = tolerance);
        let expected = (expected * &upstream)?.sum_all()?.backward()?;
        let found = (&found * upstream.to_dtype(found.dtype())?.to_device(device)?)?.sum_all()?.backward()?;
        let rounding = match dtype {
            DType::F64 | DType::F32 => 0.0,
            _ if device.is_cpu() => 6e-3,
            // A GPU rounds the gradient of the logits too.
            _ => 1e-2,
        };
        let (found, expected) = (gradients(&found, &vars), gradients(&expected, &truth));
        // With a single id all are rounding errors of zero.
        assert_near_from(1e-2, &name, &found, &expected, 4.0 * tolerance + rounding);
        Ok(())
    }
}
