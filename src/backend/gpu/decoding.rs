//! The most probable ids on a GPU, and queries of each position's distribution, which the host answers.

use candle_core::{DType, Device, Tensor, D};

use super::chunks::Chunks;
use super::device::{Buffer, Gpu};
use super::plan::plan;
use crate::backend::distribution::{answers, read_positions, Computed, Reader};
use crate::backend::objective::Task;
use crate::backend::operands::Operands;
use crate::backend::plan::Planned;
use crate::backend::ranking::{tensors, TopKQuery};
use crate::error::{Error, Result};

/// The largest `k` that is ranked on the device, where the kernel scans the vocabulary once for each rank.
const MAX_K_ON_DEVICE: usize = 64;

/// Finds the `k` most probable ids and their log-probabilities, each `[positions, k]`: on the device if `k` is small,
/// otherwise on the host.
pub(in crate::backend) fn top_k<G: Gpu>(gpu: &G, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)> {
    if k > MAX_K_ON_DEVICE {
        let positions = operands.sizes.positions;
        let found = answers(&TopKQuery { k }, positions, |reader| visit(gpu, operands, reader))?;
        return tensors(&found, &[positions, k], DType::F32, operands.device());
    }
    let (ids, log_probs) = ranked(gpu, &plan(gpu, operands, Task::TopK { k }, None)?, k)?;
    // Reading back synchronizes. A NaN is ranked first.
    let first = log_probs.narrow(1, 0, 1)?.contiguous()?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
    match first.iter().position(|x| x.is_nan() || *x == f32::NEG_INFINITY) {
        Some(position) if first[position].is_nan() => Err(Error::Distribution { position }),
        Some(position) => Err(Error::Impossible { position }),
        None => Ok((ids, log_probs)),
    }
}

/// Finds the `k` most probable ids and their log-probabilities, `[positions, k]`, u32 and f32.
pub(super) fn ranked<G: Gpu>(gpu: &G, planned: &Planned, k: usize) -> Result<(Tensor, Tensor)> {
    let Planned { operands, plan, .. } = planned;
    let positions = operands.sizes.positions;
    let unwritten = |dtype| Buffer::unwritten(gpu, positions * k, dtype, operands.contexts.device());
    let (ids, log_probs) = (unwritten(DType::U32)?, unwritten(DType::F32)?);
    let chunks = Chunks::new(gpu, planned)?;
    let all_log_probs = chunks.log_prob_rows()?;
    plan.chunks().try_for_each(|positions| chunks.top_k(positions, k, &all_log_probs, &ids, &log_probs))?;
    Ok((ids.shaped((positions, k))?, log_probs.shaped((positions, k))?))
}

/// Reads the log-probabilities of all ids on the host, where a query reads them.
pub(in crate::backend) fn visit<G: Gpu>(gpu: &G, operands: &Operands, reader: &dyn Reader) -> Result<()> {
    visit_chunks(gpu, &plan(gpu, operands, Task::Visit, None)?, reader)
}

/// Lets the reader read the distributions of a chunk's positions before the next chunk is computed.
pub(super) fn visit_chunks<G: Gpu>(gpu: &G, planned: &Planned, reader: &dyn Reader) -> Result<()> {
    let chunks = Chunks::new(gpu, planned)?;
    let rows = chunks.log_prob_rows()?;
    planned.plan.chunks().try_for_each(|positions| {
        let log_probs = chunks.read_log_probs(&positions, &rows)?;
        let offsets = if reader.needs_logits() {
            logit_offsets(&planned.operands.narrow(&positions)?, &log_probs)?
        } else {
            Vec::new()
        };
        let first = positions.start;
        read_positions(positions, &|position| {
            let row: Vec<f64> = log_probs[position - first].iter().map(|&x| x.into()).collect();
            let offset = offsets.get(position - first).map(|&offset| offset.into());
            reader.read(position, &Computed::new(&row).with_logit_offset(offset))
        })
    })
}

/// Computes the log-sum-exp of each position's logits, which the kernels do not return: the logit of its most probable
/// id, from candle's operations, minus the id's log-probability. There is none for several softmaxes.
pub(super) fn logit_offsets(operands: &Operands, log_probs: &[Vec<f32>]) -> Result<Vec<f32>> {
    if operands.sizes.components > 1 || log_probs.is_empty() {
        return Ok(Vec::new());
    }
    let argmax = |row: &Vec<f32>| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0) as u32;
    let ids: Vec<u32> = log_probs.iter().map(argmax).collect();
    let largest = log_probs.iter().zip(&ids).map(|(row, &id)| row[id as usize]);
    let id_tensor = Tensor::new(ids.as_slice(), operands.contexts.device())?;
    let Operands { contexts, weight, bias, .. } = operands.select_ids(&id_tensor)?.join_adapter()?;
    let contexts = contexts.squeeze(1)?.to_dtype(DType::F32)?;
    let z = operands.finish_logits((contexts * weight.tensor()?.to_dtype(DType::F32)?)?.sum(D::Minus1)?, bias)?;
    Ok(z.to_vec1::<f32>()?.iter().zip(largest).map(|(z, log_p)| z - log_p).collect())
}
