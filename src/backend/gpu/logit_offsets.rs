//! The log-sum-exps of a single softmax, which the kernels do not return: the logit of each position's most probable
//! id, computed by candle's operations, minus its log-probability.

use candle_core::{DType, Tensor, D};

use crate::backend::operands::Operands;
use crate::error::Result;

/// Computes the log-sum-exp of each position's logits; none for several softmaxes.
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
    let z = operands.finish_logits((contexts * weight.to_dtype(DType::F32)?)?.sum(D::Minus1)?, bias)?;
    Ok(z.to_vec1::<f32>()?.iter().zip(largest).map(|(z, log_p)| z - log_p).collect())
}
