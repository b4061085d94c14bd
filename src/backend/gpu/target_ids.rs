//! The targets of a loss on a GPU, and the scales of its gradients, which follow from weights and reduction: the
//! kernels of `kernels/targets.h`, and what they read. Nothing waits for the device.

use candle_core::{DType, Tensor, D};

use super::arguments::{Read, Write};
use super::device::{Buffer, Gpu, BLOCK};
use super::kernels::{
    KernelArguments, PositionGradientScalesArguments, PositionTargetsArguments, ReductionScalesArguments,
};
use crate::backend::objective::{GradScale, TargetLoss};
use crate::backend::operands::Operands;
use crate::error::Result;

/// The targets of a loss, as the kernel `position_targets` writes them, `[positions]` each.
pub(super) struct DeviceTargetIds {
    /// The row of each target, or why there is none.
    pub(super) ids: Buffer,
    /// The mass of each target in `q`.
    pub(super) hard: Buffer,
    pub(super) weights: Buffer,
    /// `[4]`: the scalars of the kernel `reduction_scales`.
    scalars: Buffer,
}

impl DeviceTargetIds {
    /// The targets and weights of a loss.
    pub(super) fn new<G: Gpu>(
        gpu: &G,
        loss: &TargetLoss,
        class_weights: &Option<Buffer>,
        operands: &Operands,
    ) -> Result<Self> {
        let (positions, device) = (operands.sizes.positions, loss.targets.device());
        // Every row of the weight can be a target.
        let weight_rows = 0..operands.weight_rows()?;
        let (vocab_size, rows) = match &loss.shard {
            Some(shard) => (shard.vocab_size(), shard.range()),
            None => (weight_rows.end, weight_rows),
        };
        // A GPU cannot launch zero blocks, not even to convert a dtype.
        let targets =
            if positions == 0 { Tensor::zeros(1, DType::I64, device)? } else { loss.targets.to_dtype(DType::I64)? };
        let targets = Buffer::new(gpu, targets)?;
        let position_weights = Buffer::from_option(gpu, &loss.position_weights)?;
        let unwritten = |dtype| Buffer::unwritten(gpu, positions, dtype, device);
        let ids = unwritten(DType::U32)?;
        let [hard, weights, counts] = [DType::F32; 3].map(unwritten);
        let (hard, weights, counts) = (hard?, weights?, counts?);
        let arguments = PositionTargetsArguments {
            targets: Read(targets.at(0)),
            position_weights: Read(Buffer::or_null(&position_weights)),
            class_weights: Read(Buffer::or_null(class_weights)),
            ignore_index: loss.ignore_index.unwrap_or(0),
            has_ignore_index: i32::from(loss.ignore_index.is_some()),
            smoothing: loss.terms.label_smoothing as f32,
            ids: Write(ids.at(0)),
            hard: Write(hard.at(0)),
            weights: Write(weights.at(0)),
            counts: Write(counts.at(0)),
            positions: positions as i32,
            vocab: vocab_size as i64,
            first_row: rows.start as i64,
            row_count: rows.len() as i32,
        };
        arguments.launch(gpu, positions.div_ceil(BLOCK))?;
        let scalars = Buffer::unwritten(gpu, 4, DType::F32, device)?;
        let class_bound = match class_weights {
            // A z-loss is not multiplied by class weights, and must not become large relative to small ones.
            Some(class_weights) => {
                let largest = class_weights.tensor.abs()?.max(0)?;
                Some(Buffer::new(gpu, largest.maximum(2.0 * loss.terms.z_loss)?)?)
            }
            None => None,
        };
        let (is_mean, constant_scale) = match loss.scale {
            GradScale::OneOverCount => (true, 1.0),
            GradScale::Constant(factor) => (false, factor),
            GradScale::Upstream(_) => (false, 1.0),
        };
        let arguments = ReductionScalesArguments {
            weights: Read(weights.at(0)),
            counts: Read(counts.at(0)),
            class_bound: Read(Buffer::or_null(&class_bound)),
            is_mean: i32::from(is_mean),
            constant_scale: constant_scale as f32,
            scalars: Write(scalars.at(0)),
            positions: positions as i32,
        };
        arguments.launch(gpu, 1)?;
        Ok(DeviceTargetIds { ids, hard, weights, scalars })
    }

    /// The denominator of the mean, a scalar.
    pub(super) fn count(&self) -> Result<Tensor> {
        Ok(self.scalars.element(0)?.tensor)
    }

    /// The address of the denominator of the mean.
    pub(super) fn count_at(&self) -> u64 {
        self.scalars.at(0)
    }
}

/// The scale of each position's gradients, and a factor of all of them.
pub(super) struct GradientScales {
    /// `[positions]`, divided by the factor, so that the largest is about 1.
    pub(super) scales: Buffer,
    /// A scalar.
    pub(super) factor: Buffer,
}

impl GradientScales {
    /// The scales that follow from the weights and the reduction of a loss.
    pub(super) fn new<G: Gpu>(gpu: &G, loss: &TargetLoss, targets: &DeviceTargetIds) -> Result<Self> {
        let positions = loss.targets.elem_count();
        let scales = Buffer::unwritten(gpu, positions, DType::F32, loss.targets.device())?;
        let upstream = counted_upstream(gpu, loss, targets)?;
        // With upstream gradients, the factor of all of them is the largest.
        let (largest_upstream, factor) = match &upstream {
            Some(upstream) if positions > 0 => {
                let largest = upstream.tensor.abs()?.max(D::Minus1)?;
                let factor = Buffer::new(gpu, (&largest * targets.scalars.element(2)?.tensor)?)?;
                (Some(Buffer::new(gpu, largest)?), factor)
            }
            _ => (None, targets.scalars.element(3)?),
        };
        let common_scale = largest_upstream.as_ref().map_or(targets.scalars.at(1), |largest| largest.at(0));
        let arguments = PositionGradientScalesArguments {
            weights: Read(targets.weights.at(0)),
            upstream: Read(Buffer::or_null(&upstream)),
            common_scale: Read(common_scale),
            largest_weight: Read(targets.scalars.at(2)),
            scales: Write(scales.at(0)),
            positions: positions as i32,
        };
        arguments.launch(gpu, positions.div_ceil(BLOCK))?;
        Ok(GradientScales { scales, factor })
    }
}

/// The upstream gradient of each position, if there is one: zero at positions without weight, which do not count,
/// whatever their upstream gradient is.
fn counted_upstream<G: Gpu>(gpu: &G, loss: &TargetLoss, targets: &DeviceTargetIds) -> Result<Option<Buffer>> {
    let GradScale::Upstream(upstream) = &loss.scale else { return Ok(None) };
    let upstream = upstream.to_dtype(DType::F32)?;
    if upstream.elem_count() == 0 {
        return Ok(Some(Buffer::new(gpu, upstream)?));
    }
    let counts = targets.weights.tensor.ne(0f32)?;
    Ok(Some(Buffer::new(gpu, counts.where_cond(&upstream, &upstream.zeros_like()?)?)?))
}
