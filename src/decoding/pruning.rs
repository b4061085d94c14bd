//! Prunes the least probable components of a mixture.

use candle_core::{Tensor, D};

use super::log_probs::check_host_log_probs;
use crate::backend::operands::{accumulation_dtype, Sizes};
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::tensors::checks::check_number;
use crate::tensors::transfer;

/// A mixture without its least probable components, from [`Mixture::prune`].
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::Mixture;
///
/// # fn main() -> mos_head::Result<()> {
/// let contexts = Tensor::randn(0f32, 1., (2, 3, 8), &Device::Cpu)?; // 2 positions, K = 3, d = 8
/// let log_priors = Tensor::new(&[[0.7f32, 0.2, 0.1], [0.05, 0.05, 0.9]], &Device::Cpu)?.log()?;
/// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?; // 100 token ids
/// let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
/// let pruned = mixture.prune(0.15)?;
/// // The first position needs two components, so that the second one keeps two as well.
/// assert_eq!(pruned.mixture.contexts()?.dims(), [2, 2, 8]);
/// let bounds = pruned.total_variation.to_vec1::<f32>()?;
/// assert!((bounds[0] - 0.1).abs() < 1e-6 && (bounds[1] - 0.05).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pruned {
    /// The mixture of the remaining components, with renormalised priors. Differentiable.
    pub mixture: Mixture,
    /// `[..]`: the prior probability of the pruned components at each position. It bounds the total variation between
    /// the distributions before and after: no event changes its probability by more.
    pub total_variation: Tensor,
}

impl Mixture {
    /// Prunes the components of each position whose priors sum to at most `mass`. All positions keep the same number of
    /// components, the largest that one of them needs. Waits for the device.
    ///
    /// If `m` is the pruned prior probability, `P = (1 - m) P' + m Q`: the total variation between `P` and the pruned
    /// `P'` is at most `m`.
    ///
    /// # Shapes
    ///
    /// - the pruned mixture has contexts `[.., K', d]` with K' <= K; the bound is `[..]`
    ///
    /// # Errors
    ///
    /// If `mass` is not at least 0 and below 1. [`Error::Distribution`] if a prior is NaN or infinite, [`Error::Value`] if
    /// a log-prior is above zero by more than rounding, and [`Error::Impossible`] if all priors of a position are zero.
    pub fn prune(&self, mass: f64) -> Result<Pruned> {
        check_number((0.0..1.0).contains(&mass), "mass", "at least 0 and below 1", mass)?;
        let operands = self.operands();
        let (positions, components) = (operands.sizes.positions, operands.sizes.components);
        let device = operands.contexts.device();
        let log_priors = match &operands.log_priors {
            Some(log_priors) => transfer::read_matrix(log_priors)?,
            None => vec![vec![0.0]; positions],
        };
        check_host_log_probs("log_priors", &log_priors, operands.contexts.dtype())?;
        if let Some(position) = log_priors.iter().position(|row| row.iter().all(|x| *x == f64::NEG_INFINITY)) {
            return Err(Error::Impossible { position });
        }
        // The components of each position, the most probable first, and the number that it needs.
        let order = |row: &Vec<f64>| {
            let mut order: Vec<usize> = (0..components).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            order
        };
        let orders: Vec<Vec<usize>> = log_priors.iter().map(order).collect();
        let needed = |(row, order): (&Vec<f64>, &Vec<usize>)| {
            let mut dropped = 0.0;
            let droppable = order.iter().rev().take_while(|&&k| {
                dropped += row[k].exp();
                dropped <= mass
            });
            components - droppable.count().min(components - 1)
        };
        let kept = log_priors.iter().zip(&orders).map(needed).max().unwrap_or(components);
        let mut indices = Vec::with_capacity(positions * kept);
        let mut dropped = Vec::with_capacity(positions);
        for (row, order) in log_priors.iter().zip(&orders) {
            let (keep, drop) = order.split_at(kept);
            indices.extend(keep.iter().map(|&k| k as u32));
            dropped.push(drop.iter().fold(0.0, |sum, &k| sum + row[k].exp()));
        }
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        Ok(Pruned {
            mixture: self.with_components(indices, kept, true)?,
            total_variation: transfer::to_device_as(dropped, self.leading(), dtype, device)?,
        })
    }

    /// Selects components by their indices `[positions, kept]`, with renormalised priors if `keep_priors`.
    /// Differentiable.
    pub(super) fn with_components(&self, indices: Vec<u32>, kept: usize, keep_priors: bool) -> Result<Mixture> {
        let mut operands = self.operands().clone();
        let Sizes { positions, components, context_dim, .. } = operands.sizes;
        operands.sizes.components = kept;
        let log_priors = operands.log_priors.take().filter(|_| keep_priors);
        // candle's index_select does not take empty tensors.
        if positions == 0 {
            operands.contexts = operands.contexts.narrow(1, 0, kept)?.contiguous()?;
            operands.log_priors =
                log_priors.map(|log_priors| log_priors.narrow(1, 0, kept)?.contiguous()).transpose()?;
            return Ok(self.with_operands(operands));
        }
        let rows = indices.iter().enumerate().map(|(i, &k)| (i / kept * components) as u32 + k).collect();
        let rows = transfer::to_device::<u32>(rows, positions * kept, operands.contexts.device())?;
        let select = |rows_of: Tensor| rows_of.index_select(&rows, 0);
        operands.contexts = select(operands.contexts.flatten(0, 1)?)?.reshape((positions, kept, context_dim))?;
        if let Some(log_priors) = log_priors {
            let log_priors = select(log_priors.flatten_all()?)?.reshape((positions, kept))?;
            operands.log_priors = Some(candle_nn::ops::log_softmax(&log_priors, D::Minus1)?);
        }
        Ok(self.with_operands(operands))
    }
}
