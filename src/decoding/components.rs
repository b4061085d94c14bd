//! Fewer components: one, drawn from the priors; or those alone that matter.

use candle_core::Tensor;

use super::host;
use super::sampling::Sampler;
use crate::check::check_number;
use crate::mixture::Mixture;
use crate::{Error, Result};

/// A mixture without its least probable components, from [`Mixture::prune`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pruned {
    /// The mixture of the components that are left, their priors normalised again.
    pub mixture: Mixture,
    /// `[..]`: the prior probability of what each token lost, a bound of the total variation between the distributions before
    /// and after: no event changes its probability by more.
    pub total_variation: Tensor,
}

impl Mixture {
    /// Leaves out the components of each token that together have a prior of no more than `mass`. All tokens keep as many
    /// components as the one that needs most, so that fewer tokens may be pruned further. Waits for the device.
    ///
    /// With `m` the prior probability left out, `P = (1 - m) P' + m Q`, so that the total variation between `P` and the pruned
    /// `P'` is at most `m`.
    ///
    /// # Errors
    ///
    /// If `mass` is not at least 0 and below 1, or a prior is NaN.
    pub fn prune(&self, mass: f64) -> Result<Pruned> {
        check_number((0.0..1.0).contains(&mass), "mass", "at least 0 and below 1", mass)?;
        let operands = self.operands();
        let (tokens, components) = (operands.sizes.tokens, operands.sizes.components);
        let device = operands.contexts.device();
        let log_priors = match &operands.log_priors {
            Some(log_priors) => host::matrix(log_priors)?,
            None => vec![vec![0.0]; tokens],
        };
        if let Some(position) = log_priors.iter().position(|row| row.iter().any(|x| x.is_nan())) {
            return Err(Error::Distribution { position });
        }
        // The components of each token, the most probable first, and how many it needs.
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
        let mut indices = Vec::with_capacity(tokens * kept);
        let (mut priors, mut dropped) = (Vec::with_capacity(tokens * kept), Vec::with_capacity(tokens));
        for (token, (row, order)) in log_priors.iter().zip(&orders).enumerate() {
            let (keep, drop) = order.split_at(kept);
            let rest: f64 = keep.iter().map(|&k| row[k].exp()).sum();
            indices.extend(keep.iter().map(|&k| (token * components + k) as u32));
            priors.extend(keep.iter().map(|&k| row[k] - rest.ln()));
            dropped.push(drop.iter().map(|&k| row[k].exp()).sum());
        }
        let dtype = crate::backend::accumulation_dtype("contexts", operands.contexts.dtype())?;
        let priors = host::rounded(priors, &[tokens, kept], dtype, device)?;
        Ok(Pruned {
            mixture: self.with_components(indices, kept, Some(priors))?,
            total_variation: host::rounded(dropped, self.leading(), dtype, device)?,
        })
    }

    /// One component for each token, drawn from its priors.
    pub(super) fn draw_component(&self, sampler: &mut Sampler) -> Result<Mixture> {
        let operands = self.operands();
        let Some(log_priors) = &operands.log_priors else { return Ok(self.clone()) };
        let components = operands.sizes.components as u32;
        let chosen = sampler.choose(log_priors)?;
        let indices = chosen.iter().zip(0..).map(|(&k, token)| token * components + k).collect();
        self.with_components(indices, 1, None)
    }

    /// With the components of these indices into `[tokens * K]`, `kept` for each token.
    fn with_components(&self, indices: Vec<u32>, kept: usize, log_priors: Option<Tensor>) -> Result<Mixture> {
        let mut operands = self.operands().clone();
        let contexts = operands.contexts.flatten(0, 1)?;
        let indices = host::to_device(indices, operands.sizes.tokens * kept, contexts.device())?;
        // candle selects nothing from nothing.
        let contexts = if operands.sizes.tokens == 0 { contexts } else { contexts.index_select(&indices, 0)? };
        operands.contexts = contexts.reshape((operands.sizes.tokens, kept, operands.sizes.context))?.contiguous()?;
        operands.sizes.components = kept;
        operands.log_priors = log_priors;
        Ok(self.with_operands(operands))
    }
}
