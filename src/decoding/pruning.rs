//! Prunes the least probable components of a mixture, with a bound of the error, before anything is computed of them.

use candle_core::{Tensor, D};

use super::log_probs::check_host_log_probs;
use crate::backend::operands::Sizes;
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::tensors::checks::{accumulation_dtype, check_number};
use crate::tensors::permutation::sorted;
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
    /// the distributions before and after: the probability of no event changes by more.
    pub total_variation: Tensor,
}

impl Mixture {
    /// Prunes the least probable components of each position, whose priors sum to at most `mass`. All positions keep
    /// the same number of components, the largest that one of them needs. The priors are read on the host, which waits
    /// for the device.
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
    /// If `mass` is not at least 0 and below 1. [`Error::Distribution`] if a prior is NaN or infinite, [`Error::Value`]
    /// if a log-prior is above zero by more than rounding, and [`Error::Impossible`] if all priors of a position are
    /// zero.
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
        // For each position, its components with the most probable first, and the number of components that it needs.
        let order = |row: &Vec<f64>| sorted(components, &|a, b| row[b].total_cmp(&row[a]));
        let orders: Vec<Vec<u32>> = log_priors.iter().map(order).collect();
        let needed = |(row, order): (&Vec<f64>, &Vec<u32>)| {
            let mut sum = 0.0;
            let prunable = order.iter().rev().take_while(|&&k| {
                sum += row[k as usize].exp();
                sum <= mass
            });
            components - prunable.count().min(components - 1)
        };
        let remaining = log_priors.iter().zip(&orders).map(needed).max().unwrap_or(components);
        let mut indices = Vec::with_capacity(positions * remaining);
        let mut pruned_priors = Vec::with_capacity(positions);
        for (row, order) in log_priors.iter().zip(&orders) {
            let (remaining, pruned) = order.split_at(remaining);
            indices.extend_from_slice(remaining);
            pruned_priors.push(pruned.iter().fold(0.0, |sum, &k| sum + row[k as usize].exp()));
        }
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        Ok(Pruned {
            mixture: self.select_components(indices, remaining, true)?,
            total_variation: transfer::to_device_as(pruned_priors, self.leading(), dtype, device)?,
        })
    }

    /// Selects `n` components at each position by their indices `[positions, n]`. The mixture is differentiable. It has
    /// renormalised priors if `keep_priors`, and none otherwise, where `n` must be one.
    pub(super) fn select_components(&self, indices: Vec<u32>, n: usize, keep_priors: bool) -> Result<Mixture> {
        let mut operands = self.operands().clone();
        let Sizes { positions, components, context_dim, .. } = operands.sizes;
        operands.sizes.components = n;
        let log_priors = operands.log_priors.take().filter(|_| keep_priors);
        // candle's index_select does not take empty tensors.
        if positions == 0 {
            operands.contexts = operands.contexts.narrow(1, 0, n)?.contiguous()?;
            operands.log_priors = log_priors.map(|log_priors| log_priors.narrow(1, 0, n)?.contiguous()).transpose()?;
            return Ok(self.with_operands(operands));
        }
        let rows = indices.iter().enumerate().map(|(i, &k)| (i / n * components) as u32 + k).collect();
        let rows = transfer::to_device::<u32>(rows, positions * n, operands.contexts.device())?;
        let select = |tensor: Tensor| tensor.index_select(&rows, 0);
        operands.contexts = select(operands.contexts.flatten(0, 1)?)?.reshape((positions, n, context_dim))?;
        if let Some(log_priors) = log_priors {
            let log_priors = select(log_priors.flatten_all()?)?.reshape((positions, n))?;
            operands.log_priors = Some(candle_nn::ops::log_softmax(&log_priors, D::Minus1)?);
        }
        Ok(self.with_operands(operands))
    }
}
