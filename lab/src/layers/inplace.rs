//! Updates of parameters in place on the CPU. Ordinary candle operations make up to a dozen passes over new memory.

use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, InplaceOp3, Layout, Result, Storage, Tensor};
use rayon::prelude::*;

const BLOCK: usize = 1 << 14;

/// Returns whether the functions below support this tensor.
pub fn supports(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && tensor.dtype() == candle_core::DType::F32 && tensor.is_contiguous()
}

/// `target <- keep target + scale source^power`, power 1 or 2.
pub(crate) struct Decay {
    /// The factor of the target.
    pub(crate) keep: f32,
    /// The factor of the source.
    pub(crate) scale: f32,
    /// Whether the power is 2.
    pub(crate) squared: bool,
}

impl InplaceOp2 for Decay {
    fn name(&self) -> &'static str {
        "decay"
    }

    fn cpu_fwd(&self, target: &mut CpuStorage, at: &Layout, source: &CpuStorage, from: &Layout) -> Result<()> {
        let source = values(source, from)?;
        values_mut(target, at)?.par_chunks_mut(BLOCK).zip(source.par_chunks(BLOCK)).for_each(|(target, source)| {
            for (target, &source) in target.iter_mut().zip(source) {
                let source = if self.squared { source * source } else { source };
                *target = self.keep * *target + self.scale * source;
            }
        });
        Ok(())
    }
}

/// `target <- target - rate first / (sqrt(correction second) + epsilon)`.
pub(crate) struct Descend {
    /// The step size.
    pub(crate) rate: f32,
    /// The factor of the second moment.
    pub(crate) correction: f32,
    /// The number that keeps the denominator from zero.
    pub(crate) epsilon: f32,
}

impl InplaceOp3 for Descend {
    fn name(&self) -> &'static str {
        "descend"
    }

    fn cpu_fwd(
        &self,
        target: &mut CpuStorage,
        at: &Layout,
        first: &CpuStorage,
        first_at: &Layout,
        second: &CpuStorage,
        second_at: &Layout,
    ) -> Result<()> {
        let (first, second) = (values(first, first_at)?, values(second, second_at)?);
        let moments = first.par_chunks(BLOCK).zip(second.par_chunks(BLOCK));
        values_mut(target, at)?.par_chunks_mut(BLOCK).zip(moments).for_each(|(target, (first, second))| {
            for ((target, &first), &second) in target.iter_mut().zip(first).zip(second) {
                *target -= self.rate * first / ((self.correction * second).sqrt() + self.epsilon);
            }
        });
        Ok(())
    }
}

/// `target <- target + decay (start - target) - rate gradient`, each by element.
pub struct Adapt<'a> {
    /// The values to which parameters decay.
    pub start: &'a Tensor,
    /// The share of the distance to `start` that is taken back.
    pub decay: &'a Tensor,
    /// The learning rate of each element.
    pub rate: &'a Tensor,
    /// The gradient.
    pub gradient: &'a Tensor,
}

impl InplaceOp1 for Adapt<'_> {
    fn name(&self) -> &'static str {
        "adapt"
    }

    fn cpu_fwd(&self, target: &mut CpuStorage, at: &Layout) -> Result<()> {
        let guards = [self.start, self.decay, self.rate, self.gradient].map(Tensor::storage_and_layout);
        let mut slices = vec![];
        for (storage, layout) in &guards {
            let Storage::Cpu(storage) = &**storage else { candle_core::bail!("expected a tensor on the CPU") };
            slices.push(values(storage, layout)?);
        }
        values_mut(target, at)?.par_chunks_mut(BLOCK).enumerate().for_each(|(block, target)| {
            let first = block * BLOCK;
            let slice = |i: usize| &slices[i][first..first + target.len()];
            let others = slice(0).iter().zip(slice(1)).zip(slice(2)).zip(slice(3));
            for (target, (((start, decay), rate), gradient)) in target.iter_mut().zip(others) {
                *target += decay * (start - *target) - rate * gradient;
            }
        });
        Ok(())
    }
}

/// Returns the sum of the squares, the same for any number of threads.
pub(crate) fn square_sum(tensor: &Tensor) -> Result<f64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("expected a tensor on the CPU") };
    let sums = values(storage, layout)?.par_chunks(BLOCK).map(|block| {
        let mut lanes = [0f32; 16];
        for values in block.chunks(lanes.len()) {
            for (lane, value) in lanes.iter_mut().zip(values) {
                *lane += value * value;
            }
        }
        lanes.iter().map(|&lane| f64::from(lane)).sum()
    });
    Ok(sums.collect::<Vec<f64>>().iter().sum())
}

/// Returns the elements of a contiguous tensor.
pub(crate) fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("expected contiguous values"),
    }
}

fn values_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&mut values[start..end]),
        _ => candle_core::bail!("expected contiguous f32 values"),
    }
}
