//! The objective of each position in the kernels' layout, prepared on the device without synchronization.

use candle_core::{DType, Tensor, D};

use super::arguments::{self, Argument};
use super::device::{Buffer, Gpu, BLOCK};
use crate::backend::objective::{GradScale, LossTerms, Objective, Scored, TargetLoss};
use crate::backend::operands::{Operands, Sizes};
use crate::error::{Error, Result};

/// The targets of a loss.
pub(super) struct TargetIds {
    /// `[positions]`, as the kernel `position_targets` writes them
    pub(super) ids: Buffer,
    hard: Buffer,
    pub(super) weights: Buffer,
    /// Scalar: the denominator of the mean.
    pub(super) count: Tensor,
}

/// An objective on the device.
pub(super) struct DeviceObjective {
    pub(super) ids: Option<TargetIds>,
    /// `[positions]`: the scale of each position's gradients, if they differ
    pub(super) scales: Option<Buffer>,
    /// `[vocab]`, or `[positions, vocab]` if `soft_stride` is not zero
    soft: Option<Buffer>,
    soft_stride: usize,
    /// All zero without targets
    pub(super) terms: LossTerms,
    unit: f32,
    /// Scalar: the kernels leave out this factor of the gradients.
    pub(super) factor: Tensor,
    logits_factors: LogitsFactors,
}

/// `[1]` each: the factors that the gradient of the logits still needs, by the step that applies them.
struct LogitsFactors {
    /// In the kernel that writes the gradient: all of it in f32
    kernel: Option<Buffer>,
    /// In the products, since in half precision the scaled gradient could overflow or underflow
    products: Option<Buffer>,
}

impl LogitsFactors {
    /// `factor` times the scale of the logits. In half precision the products divide by `unit`, which the kernels have
    /// multiplied by.
    fn new<G: Gpu>(gpu: &G, dtype: DType, factor: &Tensor, unit: f32, logit_scale: f64) -> Result<Self> {
        let buffer = |scale: f64| Ok::<_, Error>(Some(Buffer::new(gpu, factor.affine(scale, 0.0)?)?));
        Ok(match dtype {
            DType::F32 => LogitsFactors { kernel: buffer(logit_scale)?, products: None },
            _ => LogitsFactors { kernel: None, products: buffer(logit_scale / f64::from(unit))? },
        })
    }
}

/// The largest power of two that an f16 gradient of the logits is multiplied by, against underflow.
const UNIT: f64 = 64.0;

/// An f16 gradient of the logits is multiplied by this power of two. Without a z-loss the gradient is at most 1, since
/// weights are relative to the largest, and mostly far less; a z-loss adds `2 z_loss` log-sum-exps, which may be 500.
fn half_unit(objective: &Objective) -> f32 {
    match objective {
        Objective::Targets(loss) => (UNIT / (2.0 * loss.terms.z_loss).max(1.0)).log2().floor().exp2() as f32,
        Objective::LogProbs { .. } => UNIT as f32,
    }
}

impl DeviceObjective {
    /// The objective of a mixture with these operands.
    pub(super) fn new<G: Gpu>(gpu: &G, objective: &Objective, operands: &Operands) -> Result<Self> {
        let Sizes { positions, vocab, .. } = operands.sizes;
        let dtype = gpu.kind().gradient_dtype(operands.contexts.dtype());
        let unit = if dtype == DType::F16 { half_unit(objective) } else { 1.0 };
        let logits_factors = |factor: &Tensor| LogitsFactors::new(gpu, dtype, factor, unit, operands.logit_scale);
        let loss = match objective {
            Objective::LogProbs { upstream } => {
                let upstream =
                    if positions == 0 { &Tensor::zeros((1, vocab), DType::F32, upstream.device())? } else { upstream };
                // A bound on all masses: each is a part of the position's upstream gradient.
                let largest = upstream.abs()?.sum(1)?.max(0)?;
                let factor = largest.eq(0f32)?.where_cond(&largest.ones_like()?, &largest)?;
                return Ok(DeviceObjective {
                    ids: None,
                    scales: None,
                    soft: Some(Buffer::new(gpu, upstream.broadcast_div(&factor)?.neg()?)?),
                    soft_stride: vocab,
                    terms: LossTerms::default(),
                    unit,
                    logits_factors: logits_factors(&factor)?,
                    factor,
                });
            }
            Objective::Targets(loss) => loss,
        };
        let TargetLoss { targets, position_weights, class_weights, ignore_index, terms, scale, shard, .. } = loss;
        // Every row of the weight can be a target.
        let all = 0..operands.weight_rows()?;
        let (vocab_size, rows) = shard.as_ref().map_or((all.end, all), |shard| (shard.vocab_size(), shard.range()));
        let device = targets.device();
        let floats = || Buffer::new(gpu, Tensor::zeros(positions.max(1), DType::F32, device)?);
        // A GPU cannot launch zero blocks, not even to convert a dtype.
        let targets = match positions {
            0 => Tensor::zeros(1, DType::I64, device)?,
            _ => targets.to_dtype(DType::I64)?,
        };
        let targets = Buffer::new(gpu, targets)?;
        let (position_weights, class_weights) =
            (Buffer::from_option(gpu, position_weights)?, Buffer::from_option(gpu, class_weights)?);
        let ids = Buffer::new(gpu, Tensor::full(u32::MAX, positions.max(1), device)?)?;
        let (hard, weights, counts, scales) = (floats()?, floats()?, floats()?, floats()?);
        let blocks = positions.div_ceil(BLOCK);
        gpu.launch(
            "position_targets",
            blocks,
            &[
                Argument::Read(targets.at(0)),
                Argument::Read(Buffer::or_null(&position_weights)),
                Argument::Read(Buffer::or_null(&class_weights)),
                Argument::Long(ignore_index.unwrap_or(0)),
                Argument::Int(i32::from(ignore_index.is_some())),
                Argument::Float(terms.label_smoothing as f32),
                Argument::Write(ids.at(0)),
                Argument::Write(hard.at(0)),
                Argument::Write(weights.at(0)),
                Argument::Write(counts.at(0)),
                Argument::Int(positions as i32),
                Argument::Long(vocab_size as i64),
                Argument::Long(rows.start as i64),
                Argument::Int(rows.len() as i32),
            ],
        )?;
        let count = counts.tensor.sum_all()?;
        let upstream = match scale {
            // Positions without weight do not count, whatever their upstream gradient is.
            GradScale::Upstream(upstream) if positions > 0 => {
                let upstream = upstream.to_dtype(DType::F32)?;
                let counts = weights.tensor.ne(0f32)?;
                Some(Buffer::new(gpu, counts.where_cond(&upstream, &upstream.zeros_like()?)?)?)
            }
            GradScale::Upstream(upstream) => Some(Buffer::new(gpu, upstream.to_dtype(DType::F32)?)?),
            _ => None,
        };
        // The scale of the gradients of all positions: the largest upstream gradient, if there is one.
        let common_scale = match (&upstream, scale) {
            (Some(upstream), _) if positions > 0 => upstream.tensor.abs()?.max(D::Minus1)?,
            (None, GradScale::OneOverCount) => count.eq(0f32)?.where_cond(&count.zeros_like()?, &count.recip()?)?,
            (None, GradScale::Constant(factor)) => (count.ones_like()? * *factor)?,
            _ => count.ones_like()?,
        };
        let largest_weight = match &class_weights {
            Some(class_weights) => (weights.tensor.abs()?.max(0)? * class_weights.tensor.abs()?.max(0)?)?,
            None => weights.tensor.abs()?.max(0)?,
        };
        let is_zero = largest_weight.eq(0f32)?;
        let largest_weight = Buffer::new(gpu, is_zero.where_cond(&largest_weight.ones_like()?, &largest_weight)?)?;
        let factor = (&common_scale * &largest_weight.tensor)?;
        let common_scale = Buffer::new(gpu, common_scale)?;
        gpu.launch(
            "position_weighting",
            blocks,
            &[
                Argument::Read(weights.at(0)),
                Argument::Read(Buffer::or_null(&upstream)),
                Argument::Read(common_scale.at(0)),
                Argument::Read(largest_weight.at(0)),
                Argument::Write(scales.at(0)),
                Argument::Int(positions as i32),
            ],
        )?;
        let soft = if terms.label_smoothing > 0.0 {
            let share = terms.label_smoothing / vocab as f64;
            Some(Buffer::new(
                gpu,
                match &class_weights {
                    Some(weights) => weights.tensor.affine(share, 0.0)?,
                    None => Tensor::full(share as f32, vocab, device)?,
                },
            )?)
        } else {
            None
        };
        Ok(DeviceObjective {
            ids: Some(TargetIds { ids, hard, weights, count }),
            scales: Some(scales),
            soft,
            soft_stride: 0,
            terms: *terms,
            unit,
            logits_factors: logits_factors(&factor)?,
            factor,
        })
    }

    /// The inner product of scores and their upstream gradients, which are not known yet.
    pub(super) fn of_scores<G: Gpu>(gpu: &G, scored: &Scored, operands: &Operands) -> Result<Self> {
        let dtype = gpu.kind().gradient_dtype(operands.contexts.dtype());
        let device = operands.contexts.device();
        let unit = if dtype == DType::F16 { UNIT as f32 } else { 1.0 };
        let factor = Tensor::full(1.0 / scored.temperature as f32, (), device)?;
        Ok(DeviceObjective {
            ids: None,
            scales: Some(Buffer::zeros(gpu, operands.sizes.positions, DType::F32, device)?),
            soft: None,
            soft_stride: 0,
            terms: LossTerms::default(),
            unit,
            logits_factors: LogitsFactors::new(gpu, dtype, &factor, unit, operands.logit_scale)?,
            factor,
        })
    }

    /// In half precision the kernels divide the gradient of a chunk's logits by the largest of these magnitudes of its
    /// masses, `[chunk]`, and the products multiply by it.
    pub(super) fn normalize<G: Gpu>(&mut self, gpu: &G, magnitudes: &Tensor, operands: &Operands) -> Result<()> {
        let dtype = gpu.kind().gradient_dtype(operands.contexts.dtype());
        if dtype == DType::F32 {
            return Ok(());
        }
        let largest = magnitudes.max(0)?;
        let one = largest.ones_like()?;
        // An infinite magnitude and NaN are left to the positions that have them.
        let is_usual = (largest.gt(0f32)? * largest.le(f32::MAX)?)?;
        let largest = is_usual.where_cond(&largest, &one)?;
        let factor = (&largest * &self.factor)?;
        self.logits_factors = LogitsFactors {
            kernel: Some(Buffer::new(gpu, largest.recip()?)?),
            ..LogitsFactors::new(gpu, dtype, &factor, self.unit, operands.logit_scale)?
        };
        Ok(())
    }

    /// The address of the factor of products with the gradient of the logits.
    pub(super) fn alpha(&self) -> Option<u64> {
        self.logits_factors.products.as_ref().map(|alpha| alpha.at(0))
    }

    pub(super) fn is_soft(&self) -> bool {
        self.soft.is_some()
    }

    /// The kernels' argument for the positions from `first` on.
    pub(super) fn argument(&self, first: usize) -> arguments::ObjectiveArgument {
        let soft = self.soft.as_ref().map_or(0, |soft| soft.at(first * self.soft_stride));
        let (ids, hard) = self.ids.as_ref().map_or((0, 0), |ids| (ids.ids.at(first), ids.hard.at(first)));
        arguments::ObjectiveArgument {
            ids,
            hard,
            scales: self.scales.as_ref().map_or(0, |scales| scales.at(first)),
            soft,
            factor: Buffer::or_null(&self.logits_factors.kernel),
            soft_stride: self.soft_stride as i64,
            terms: arguments::TermsArgument::new(&self.terms, self.unit),
        }
    }
}
