//! The own targets of a sampled softmax on a GPU: candle's operations compute their logits before the kernels, and what
//! their logits add to the gradients after them.

use candle_core::{DType, Tensor};

use crate::backend::objective::{Gradients, TargetLoss};
use crate::backend::operands::Operands;
use crate::error::Result;

/// Targets that are entries of their own beside the vocabulary ([`TargetLoss::own_shifts`]).
pub(super) struct OwnTargets {
    /// `[positions]`, u32: the row of the weight; zero where the target is ignored.
    rows: Tensor,
    /// `[positions, d]`, f32: the decoder's rows of the targets
    decoder: Tensor,
    /// `[positions, K]`, f32
    pub(super) logits: Tensor,
}

impl OwnTargets {
    /// The own targets of a loss, if it has any.
    pub(super) fn new(operands: &Operands, loss: &TargetLoss) -> Result<Option<Self>> {
        let Some(shifts) = &loss.own_shifts else { return Ok(None) };
        let rows = loss.targets.to_dtype(DType::I64)?.maximum(0i64)?.to_dtype(DType::U32)?;
        let decoder = operands.weight.tensor()?.index_select(&rows, 0)?.to_dtype(DType::F32)?;
        let contexts = operands.contexts.to_dtype(DType::F32)?;
        let mut logits = contexts.broadcast_mul(&decoder.unsqueeze(1)?)?.sum(2)?;
        if let Some(bias) = &operands.bias {
            logits = logits.broadcast_add(&bias.index_select(&rows, 0)?.unsqueeze(1)?)?;
        }
        let logits = (logits * operands.logit_scale)?.broadcast_add(&shifts.unsqueeze(1)?)?.contiguous()?;
        Ok(Some(OwnTargets { rows, decoder, logits }))
    }

    /// Adds to the operands' gradients what follows from the gradient of these logits, `[positions, K]`. The gradients
    /// of weight and bias get the rows behind the vocabulary.
    pub(super) fn add_to(
        &self,
        gradients: Gradients,
        logit_gradient: &Tensor,
        operands: &Operands,
    ) -> Result<Gradients> {
        let product_gradient = (logit_gradient * operands.logit_scale)?;
        let contexts = match gradients.contexts {
            Some(found) => Some((found + product_gradient.unsqueeze(2)?.broadcast_mul(&self.decoder.unsqueeze(1)?)?)?),
            None => None,
        };
        let behind = operands.weight_rows()? - operands.sizes.vocab;
        let weight = match gradients.weight {
            Some(found) => {
                let contexts = operands.contexts.to_dtype(DType::F32)?;
                let row_gradients = contexts.broadcast_mul(&product_gradient.unsqueeze(2)?)?.sum(1)?;
                Some(found.pad_with_zeros(0, 0, behind)?.index_add(&self.rows, &row_gradients, 0)?)
            }
            None => None,
        };
        let bias = match gradients.bias {
            Some(found) => {
                Some(found.pad_with_zeros(0, 0, behind)?.index_add(&self.rows, &product_gradient.sum(1)?, 0)?)
            }
            None => None,
        };
        Ok(Gradients { contexts, weight, bias, ..gradients })
    }
}
