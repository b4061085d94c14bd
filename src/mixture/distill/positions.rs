//! The positions that count in a distillation, and their weights.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::options::DistillOptions;
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::loss::Reduction;
use crate::mixture::Mixture;
use crate::tensors::checks::{check_device, check_targets, check_weights, read_ids};
use crate::tensors::transfer;

/// The positions and the vocabulary of a student, and a tensor that has its dtype and device.
#[derive(Clone, Copy)]
pub(super) struct StudentShape<'a> {
    /// The leading dimensions, whose product is the number of positions.
    pub(super) leading: &'a [usize],
    pub(super) vocab: usize,
    /// Hidden states or contexts of the student.
    pub(super) like: &'a Tensor,
}

/// The `n` positions that count.
#[derive(Clone)]
pub(super) struct CountedPositions {
    /// Their places among all positions.
    pub(super) positions: Vec<u32>,
    /// `[n]`, u32: the same places on the device; `None` if all positions count.
    indices: Option<Tensor>,
    /// `[n]`: their targets.
    pub(super) targets: Option<Tensor>,
    /// `[n]`, in the accumulation dtype: their weights divided by the denominator.
    scales: Tensor,
    /// The sum of their weights.
    pub(super) count: f64,
    /// The divisor of the weighted sum of their objectives.
    pub(super) denominator: f64,
}

impl CountedPositions {
    /// Selects the positions that count: their weight is not zero and, if targets are given, their target is not ignored.
    /// Weights and targets are checked, and read on the host, which waits for their device.
    pub(super) fn new(student: StudentShape, options: &DistillOptions) -> Result<Self> {
        let StudentShape { leading, vocab, like } = student;
        let dtype = accumulation_dtype("hidden", like.dtype())?;
        let (positions, device): (usize, _) = (leading.iter().product(), like.device());
        if let Some(targets) = &options.targets {
            check_targets("targets", targets, leading)?;
            check_device("targets", targets, like)?;
        }
        let mut weights = vec![1.0; positions];
        if let Some(position_weights) = &options.position_weights {
            check_weights("position_weights", position_weights, leading, like)?;
            let on_host = position_weights.detach().to_device(&Device::Cpu)?.flatten_all()?;
            weights = on_host.to_dtype(DType::F64)?.to_vec1()?;
        }
        let are_read = options.ignore_index.is_some() || device.is_cpu();
        if let Some(targets) = options.targets.as_ref().filter(|_| are_read) {
            let ids = read_ids("targets", &targets.to_device(&Device::Cpu)?, options.ignore_index, vocab)?;
            weights.iter_mut().zip(ids).filter(|(_, id)| id.is_none()).for_each(|(weight, _)| *weight = 0.0);
        }
        let counted: Vec<u32> = (0u32..).zip(&weights).filter(|(_, &w)| w != 0.0).map(|(t, _)| t).collect();
        let (n, count) = (counted.len(), weights.iter().sum::<f64>());
        let denominator = match (options.reduction, options.denominator) {
            (Reduction::Mean, Some(denominator)) => denominator,
            // The mean of no positions is zero.
            (Reduction::Mean, None) if count != 0.0 => count,
            _ => 1.0,
        };
        let scales: Vec<f64> = weights.into_iter().filter(|&w| w != 0.0).map(|w| w / denominator).collect();
        let indices = (n < positions).then(|| transfer::to_device(counted.clone(), n, device)).transpose()?;
        let scales = Tensor::from_vec(scales, n, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
        let counted = CountedPositions { positions: counted, indices, targets: None, scales, count, denominator };
        let select = |targets: &Tensor| counted.select_rows(&targets.flatten_all()?.to_dtype(DType::I64)?);
        let targets = options.targets.as_ref().map(select).transpose()?;
        Ok(CountedPositions { targets, ..counted })
    }

    /// Selects the rows of the counted positions from a tensor with a row for each position. They are differentiable.
    pub(super) fn select_rows(&self, tensor: &Tensor) -> Result<Tensor> {
        match &self.indices {
            Some(indices) => transfer::select_rows(tensor, indices),
            None => Ok(tensor.clone()),
        }
    }

    /// Selects the counted positions of a mixture. Its leading dimensions are then `[n]`.
    pub(super) fn select_mixture(&self, mixture: &Mixture) -> Result<Mixture> {
        mixture.select(&self.positions)
    }

    /// Selects the rows of some of the counted positions from a tensor with a row for each position.
    pub(super) fn chunk_rows(&self, tensor: &Tensor, positions: &Range<usize>) -> Result<Tensor> {
        Ok(match &self.indices {
            Some(indices) => tensor.index_select(&indices.narrow(0, positions.start, positions.len())?, 0)?,
            None => tensor.narrow(0, positions.start, positions.len())?,
        })
    }

    /// Sums the objectives of the counted positions, `[n]`, times their weights, and divides by the denominator.
    pub(super) fn weighted_sum(&self, objective: &Tensor) -> Result<Tensor> {
        if objective.elem_count() == 0 {
            // A GPU cannot launch zero blocks.
            return Ok(Tensor::zeros((), objective.dtype(), objective.device())?);
        }
        // The sum is in f64 on the CPU; not every GPU has this dtype.
        let dtype = if objective.device().is_cpu() { DType::F64 } else { objective.dtype() };
        let weighted = (objective.to_dtype(dtype)? * self.scales.to_dtype(dtype)?)?;
        Ok(weighted.sum_all()?.to_dtype(objective.dtype())?)
    }

    /// Returns an error that names the position if a divergence of some positions, `[chunk]`, is infinite. On a GPU,
    /// where reading the divergences would wait, nothing is checked.
    pub(super) fn check_finite(&self, positions: &Range<usize>, divergence: &Tensor) -> Result<()> {
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
    pub(super) fn chunk_scales(&self, positions: &Range<usize>) -> Result<Tensor> {
        Ok(self.scales.narrow(0, positions.start, positions.len())?)
    }
}
