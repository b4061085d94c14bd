//! The positions of a distillation that count, and their weights.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::options::DistillOptions;
use crate::error::{Error, Result};
use crate::loss::Reduction;
use crate::mixture::Mixture;
use crate::tensors::checks::{check_device, check_targets, check_weights, read_ids};
use crate::tensors::transfer;

/// The positions that count.
#[derive(Clone)]
pub(super) struct Counted {
    /// These positions among all
    pub(super) positions: Vec<u32>,
    /// `[n]`, u32: the same; `None` if all count
    indices: Option<Tensor>,
    /// `[n]`: the targets
    pub(super) targets: Option<Tensor>,
    /// `[n]`, in the accumulation dtype: the weight of each divided by the denominator
    scales: Tensor,
    /// The sum of the weights
    pub(super) count: f64,
    pub(super) denominator: f64,
}

impl Counted {
    /// Waits for the device of the weights, or of the targets if there is an ignored index.
    pub(super) fn new(
        leading: &[usize],
        vocab: usize,
        like: &Tensor,
        dtype: DType,
        options: &DistillOptions,
    ) -> Result<Self> {
        let (positions, device): (usize, _) = (leading.iter().product(), like.device());
        if let Some(targets) = &options.targets {
            check_targets("targets", targets, leading)?;
            check_device("targets", targets, like)?;
        }
        let mut weights = vec![1.0; positions];
        if let Some(of_positions) = &options.position_weights {
            check_weights("position_weights", of_positions, leading, like)?;
            let on_host = of_positions.detach().to_device(&Device::Cpu)?.flatten_all()?;
            weights = on_host.to_dtype(DType::F64)?.to_vec1()?;
        }
        let is_read = options.ignore_index.is_some() || device.is_cpu();
        if let Some(targets) = options.targets.as_ref().filter(|_| is_read) {
            let ids = read_ids("targets", &targets.to_device(&Device::Cpu)?, options.ignore_index, vocab)?;
            weights.iter_mut().zip(ids).filter(|(_, id)| id.is_none()).for_each(|(weight, _)| *weight = 0.0);
        }
        let counts: Vec<u32> = (0u32..).zip(&weights).filter(|(_, &w)| w != 0.0).map(|(t, _)| t).collect();
        let (n, count) = (counts.len(), weights.iter().sum::<f64>());
        let denominator = match (options.reduction, options.denominator) {
            (Reduction::Mean, Some(denominator)) => denominator,
            // A mean over nothing is zero.
            (Reduction::Mean, None) if count != 0.0 => count,
            _ => 1.0,
        };
        let scales: Vec<f64> = weights.into_iter().filter(|&w| w != 0.0).map(|w| w / denominator).collect();
        let indices = (n < positions).then(|| transfer::to_device(counts.clone(), n, device)).transpose()?;
        let scales = Tensor::from_vec(scales, n, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
        let counted = Counted { positions: counts, indices, targets: None, scales, count, denominator };
        let select = |targets: &Tensor| counted.rows(&targets.flatten_all()?.to_dtype(DType::I64)?);
        let targets = options.targets.as_ref().map(select).transpose()?;
        Ok(Counted { targets, ..counted })
    }

    /// The rows of these positions, of a tensor with a row for each position; differentiable.
    pub(super) fn rows(&self, of_all: &Tensor) -> Result<Tensor> {
        match &self.indices {
            Some(indices) => transfer::select_rows(of_all, indices),
            None => Ok(of_all.clone()),
        }
    }

    /// The mixture of these positions, `[n]`.
    pub(super) fn mixture(&self, of_all: &Mixture) -> Result<Mixture> {
        of_all.select(&self.positions)
    }

    /// The rows of some of these positions.
    pub(super) fn rows_of(&self, of_all: &Tensor, positions: &Range<usize>) -> Result<Tensor> {
        Ok(match &self.indices {
            Some(indices) => of_all.index_select(&indices.narrow(0, positions.start, positions.len())?, 0)?,
            None => of_all.narrow(0, positions.start, positions.len())?,
        })
    }

    /// The sum of the objectives of these positions, `[n]`, times their weights, divided by the denominator.
    pub(super) fn weighted_sum(&self, objective: &Tensor) -> Result<Tensor> {
        if objective.elem_count() == 0 {
            // A GPU cannot launch zero blocks.
            return Ok(Tensor::zeros((), objective.dtype(), objective.device())?);
        }
        // In f64 on the CPU; not every GPU has it.
        let dtype = if objective.device().is_cpu() { DType::F64 } else { objective.dtype() };
        let weighted = (objective.to_dtype(dtype)? * self.scales.to_dtype(dtype)?)?;
        Ok(weighted.sum_all()?.to_dtype(objective.dtype())?)
    }

    /// An error that names the position if a divergence of some positions, `[chunk]`, is infinite. On a GPU, where reading
    /// it would wait, it is not read.
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

    /// The weights of some positions, divided by the denominator.
    pub(super) fn scales(&self, positions: &Range<usize>) -> Result<Tensor> {
        Ok(self.scales.narrow(0, positions.start, positions.len())?)
    }
}
