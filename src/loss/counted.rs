//! The positions that count in an objective, selected before any product, and their weights.

use std::ops::Range;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::transfer;

/// The `n` positions that count.
#[derive(Clone)]
pub(crate) struct CountedPositions {
    /// Their places among all positions.
    pub(crate) positions: Vec<u32>,
    /// `[n]`, u32: the same places on the device; `None` if all positions count.
    pub(super) indices: Option<Tensor>,
    /// `[n]`: their targets.
    pub(crate) targets: Option<Tensor>,
    /// `[n]`, in the accumulation dtype: their weights divided by the denominator.
    pub(super) scales: Tensor,
    /// The sum of their weights.
    pub(crate) count: f64,
    /// The divisor of the weighted sum of their objectives.
    pub(crate) denominator: f64,
}

impl CountedPositions {
    /// Selects the positions that count, whose objectives are multiplied by these `scales`. They have no targets, the
    /// count is their number, and the denominator is one.
    pub(crate) fn new(counts: impl Iterator<Item = bool>, scales: Vec<f64>, like: &Tensor) -> Result<Self> {
        let (dtype, device) = (accumulation_dtype("hidden", like.dtype())?, like.device());
        let (mut positions, mut all) = (Vec::with_capacity(scales.len()), 0);
        for (position, counts) in (0..).zip(counts) {
            all += 1;
            positions.extend(counts.then_some(position));
        }
        let n = positions.len();
        let indices = (n < all).then(|| transfer::to_device(positions.clone(), n, device)).transpose()?;
        let scales = transfer::vector(scales, dtype, device)?;
        Ok(CountedPositions { positions, indices, targets: None, scales, count: n as f64, denominator: 1.0 })
    }

    /// Selects the rows of the counted positions from a tensor with a row for each position. They are differentiable.
    pub(crate) fn select_rows(&self, tensor: &Tensor) -> Result<Tensor> {
        match &self.indices {
            Some(indices) => transfer::select_rows(tensor, indices),
            None => Ok(tensor.clone()),
        }
    }

    /// Selects the rows of some of the counted positions from a tensor with a row for each position.
    pub(crate) fn chunk_rows(&self, tensor: &Tensor, positions: &Range<usize>) -> Result<Tensor> {
        Ok(match &self.indices {
            Some(indices) => tensor.index_select(&indices.narrow(0, positions.start, positions.len())?, 0)?,
            None => tensor.narrow(0, positions.start, positions.len())?,
        })
    }

    /// Sums the objectives of the counted positions, `[n]`, times their weights, and divides by the denominator.
    pub(crate) fn weighted_sum(&self, objective: &Tensor) -> Result<Tensor> {
        if objective.elem_count() == 0 {
            // A GPU cannot launch zero blocks.
            return Ok(Tensor::zeros((), objective.dtype(), objective.device())?);
        }
        let dtype = transfer::sum_dtype(objective);
        let weighted = (objective.to_dtype(dtype)? * self.scales.to_dtype(dtype)?)?;
        Ok(weighted.sum_all()?.to_dtype(objective.dtype())?)
    }

    /// Returns an error that names the position if a divergence of some positions, `[chunk]`, is infinite. On a GPU,
    /// where reading the divergences would wait, nothing is checked.
    pub(crate) fn check_finite(&self, positions: &Range<usize>, divergence: &Tensor) -> Result<()> {
        if !divergence.device().is_cpu() {
            return Ok(());
        }
        let values = divergence.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        match values.iter().position(|&value| value == f64::INFINITY) {
            Some(i) => Err(Error::InfiniteDivergence { position: self.positions[positions.start + i] as usize }),
            None => Ok(()),
        }
    }

    /// Returns the weights of some of the counted positions, divided by the denominator.
    pub(crate) fn chunk_scales(&self, positions: &Range<usize>) -> Result<Tensor> {
        Ok(self.scales.narrow(0, positions.start, positions.len())?)
    }
}
