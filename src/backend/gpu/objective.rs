//! The objective of each position in the kernels' layout, prepared on the device without synchronization.

use candle_core::{DType, Tensor};

use super::arguments::{LossTermsArgument, ObjectiveArgument};
use super::columns::product_dtype;
use super::device::{Buffer, Gpu};
use super::target_ids::{DeviceTargetIds, GradientScales};
use crate::backend::objective::{LossTerms, Scored, TargetLoss};
use crate::backend::operands::{Operands, Sizes};
use crate::error::{Error, Result};

/// An objective on the device.
pub(super) struct DeviceObjective {
    /// The targets, if the objective is a loss over targets.
    pub(super) targets: Option<DeviceTargetIds>,
    /// `[positions]`: the scale of each position's gradients, if they differ.
    scales: Option<Buffer>,
    /// Masses of all ids: `[vocab]`, or `[positions, vocab]` if `soft_stride` is not zero.
    soft: Option<Buffer>,
    soft_stride: usize,
    /// All zero without targets.
    pub(super) terms: LossTerms,
    /// The power of two that the kernels multiply the gradient of the logits by.
    unit: f32,
    /// `[1]`: a factor of the gradients of all positions.
    pub(super) factor: Buffer,
    logits_factors: LogitsFactors,
}

/// `[1]` each: the factors that the gradient of the logits still needs, by the step that applies them.
struct LogitsFactors {
    /// The factor in the kernel that writes the gradient: all of it in f32 and bf16.
    kernel: Option<Buffer>,
    /// The factor in the products, since in f16 the scaled gradient could overflow or underflow.
    products: Option<Buffer>,
}

impl LogitsFactors {
    /// The factors whose product is `factor` times the scale of the logits. In f16 the products divide by `unit`, which
    /// the kernels have multiplied by.
    fn new<G: Gpu>(gpu: &G, dtype: DType, factor: &Buffer, unit: f32, logit_scale: f64) -> Result<Self> {
        let buffer = |scale: f64| match scale {
            1.0 => Ok::<_, Error>(Some(factor.clone())),
            _ => Ok(Some(Buffer::new(gpu, factor.tensor.affine(scale, 0.0)?)?)),
        };
        Ok(match dtype {
            DType::F16 => LogitsFactors { kernel: None, products: buffer(logit_scale / f64::from(unit))? },
            _ => LogitsFactors { kernel: buffer(logit_scale)?, products: None },
        })
    }
}

/// The largest power of two that an f16 gradient of the logits is multiplied by, against underflow.
const UNIT: f64 = 64.0;

/// The power of two that an f16 gradient of the logits is multiplied by. Without a z-loss the gradient is at most 1,
/// since weights are relative to the largest, and mostly far less; a z-loss adds `2 z_loss` log-sum-exps, which may be
/// 500, relative to class weights of at least `2 z_loss`.
fn half_unit(z_loss: f64) -> f32 {
    (UNIT / (2.0 * z_loss).max(1.0)).log2().floor().exp2() as f32
}

impl DeviceObjective {
    /// A loss over targets.
    pub(super) fn from_targets<G: Gpu>(gpu: &G, loss: &TargetLoss, operands: &Operands) -> Result<Self> {
        let class_weights = Buffer::from_option(gpu, &loss.class_weights)?;
        let targets = DeviceTargetIds::new(gpu, loss, &class_weights, operands)?;
        let GradientScales { scales, factor } = GradientScales::new(gpu, loss, &targets)?;
        Ok(DeviceObjective {
            targets: Some(targets),
            scales: Some(scales),
            soft: smoothing_masses(gpu, loss, &class_weights, operands.sizes.vocab)?,
            ..Self::new(gpu, loss.terms, factor, operands)?
        })
    }

    /// The inner product of the log-probabilities and `upstream`, `[positions, vocab]`.
    pub(super) fn from_upstream<G: Gpu>(gpu: &G, upstream: &Tensor, operands: &Operands) -> Result<Self> {
        let Sizes { positions, vocab, .. } = operands.sizes;
        let upstream =
            if positions == 0 { &Tensor::zeros((1, vocab), DType::F32, upstream.device())? } else { upstream };
        // A bound on all masses: each is a part of the position's upstream gradient.
        let largest = upstream.abs()?.sum(1)?.max(0)?;
        let factor = largest.eq(0f32)?.where_cond(&largest.ones_like()?, &largest)?;
        Ok(DeviceObjective {
            soft: Some(Buffer::new(gpu, upstream.broadcast_div(&factor)?.neg()?)?),
            soft_stride: vocab,
            ..Self::new(gpu, LossTerms::default(), Buffer::new(gpu, factor)?, operands)?
        })
    }

    /// The inner product of scores and their upstream gradients, which are not known yet.
    pub(super) fn from_scores<G: Gpu>(gpu: &G, scored: &Scored, operands: &Operands) -> Result<Self> {
        let device = operands.contexts.device();
        let factor = Buffer::new(gpu, Tensor::full(1.0 / scored.temperature as f32, (), device)?)?;
        Ok(DeviceObjective {
            scales: Some(Buffer::unwritten(gpu, operands.sizes.positions, DType::F32, device)?),
            ..Self::new(gpu, LossTerms::default(), factor, operands)?
        })
    }

    /// An objective without targets and masses, whose gradients have this factor.
    fn new<G: Gpu>(gpu: &G, terms: LossTerms, factor: Buffer, operands: &Operands) -> Result<Self> {
        let dtype = gpu.kind().gradient_dtype(product_dtype(operands));
        let unit = if dtype == DType::F16 { half_unit(terms.z_loss) } else { 1.0 };
        let logits_factors = LogitsFactors::new(gpu, dtype, &factor, unit, operands.logit_scale)?;
        Ok(DeviceObjective {
            targets: None,
            scales: None,
            soft: None,
            soft_stride: 0,
            terms,
            unit,
            factor,
            logits_factors,
        })
    }

    /// Keeps the gradient of a chunk's logits in the range of f16: the kernels divide it by the largest of
    /// `mass_bounds`, `[chunk]`, and the products multiply by it. In f32 and bf16 nothing changes.
    pub(super) fn normalize<G: Gpu>(&mut self, gpu: &G, mass_bounds: &Tensor, operands: &Operands) -> Result<()> {
        let dtype = gpu.kind().gradient_dtype(product_dtype(operands));
        if dtype != DType::F16 {
            return Ok(());
        }
        let largest = mass_bounds.max(0)?;
        let one = largest.ones_like()?;
        // An infinite bound and NaN are left to the positions that have them.
        let is_usual = (largest.gt(0f32)? * largest.le(f32::MAX)?)?;
        let largest = is_usual.where_cond(&largest, &one)?;
        let factor = Buffer::new(gpu, (&largest * &self.factor.tensor)?)?;
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

    /// Whether all ids have masses.
    pub(super) fn has_soft_masses(&self) -> bool {
        self.soft.is_some()
    }

    /// The kernels' argument for the positions from `first` on.
    pub(super) fn argument(&self, first: usize) -> ObjectiveArgument {
        let address = |buffer: Option<&Buffer>, element| buffer.map_or(0, |buffer| buffer.at(element));
        let targets = self.targets.as_ref();
        ObjectiveArgument {
            ids: address(targets.map(|targets| &targets.ids), first),
            hard: address(targets.map(|targets| &targets.hard), first),
            scales: address(self.scales.as_ref(), first),
            soft: address(self.soft.as_ref(), first * self.soft_stride),
            factor: Buffer::or_null(&self.logits_factors.kernel),
            soft_stride: self.soft_stride as i64,
            terms: LossTermsArgument::new(&self.terms, self.unit),
        }
    }
}

/// The masses that label smoothing gives to all ids of the vocabulary, `[vocab]`: equal ones, times the weights of
/// classes.
fn smoothing_masses<G: Gpu>(
    gpu: &G,
    loss: &TargetLoss,
    class_weights: &Option<Buffer>,
    vocab: usize,
) -> Result<Option<Buffer>> {
    let is_smoothed = loss.terms.label_smoothing > 0.0;
    if !is_smoothed {
        return Ok(None);
    }
    let share = loss.terms.label_smoothing / vocab as f64;
    let masses = match class_weights {
        Some(weights) => weights.tensor.affine(share, 0.0)?,
        None => Tensor::full(share as f32, vocab, loss.targets.device())?,
    };
    Ok(Some(Buffer::new(gpu, masses)?))
}
