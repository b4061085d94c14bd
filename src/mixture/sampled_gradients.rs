//! The gradients of a sampled softmax, from those of the small losses of its groups of positions.

use candle_core::Tensor;

use crate::backend::contract::{Gradients, NeedsGrad, Operands};
use crate::error::Result;

/// Sums in the accumulation dtype, whatever that of the operands.
pub(super) struct SampledGradients {
    needs_grad: NeedsGrad,
    /// Number of negatives: the first rows of the weight.
    samples: usize,
    /// The own logit's element of a context, times this, is `c . W[y] + b[y]` but for a constant.
    element: f64,
    /// One for each group.
    contexts: Vec<Tensor>,
    /// One for each group.
    log_priors: Vec<Tensor>,
    weight: Option<Rows>,
    bias: Option<Rows>,
}

/// The gradient of rows.
struct Rows {
    negatives: Tensor,
    /// Of the targets that are no negatives, and a row for those that are.
    others: Tensor,
}

impl SampledGradients {
    pub(super) fn new(samples: usize, element: f64, needs_grad: NeedsGrad) -> Self {
        SampledGradients {
            needs_grad,
            samples,
            element,
            contexts: Vec::new(),
            log_priors: Vec::new(),
            weight: None,
            bias: None,
        }
    }

    /// The gradients of the small loss that are needed: that of the own logits is a part of that of the extended
    /// contexts.
    pub(super) fn of_small(&self) -> NeedsGrad {
        let NeedsGrad { contexts, weight, bias, .. } = self.needs_grad;
        NeedsGrad { contexts: contexts || weight || bias, ..self.needs_grad }
    }

    /// Adds the gradients of a group's small loss, `found`. `own` `[positions, d]` are the rows of the targets, which
    /// are in these places of the weight.
    pub(super) fn add(&mut self, found: Gradients, operands: &Operands, own: &Tensor, places: &[u32]) -> Result<()> {
        let (samples, context) = (self.samples, operands.sizes.context);
        self.log_priors.extend(found.log_priors);
        let Some(extended) = found.contexts else { return Ok(()) };
        // Of `c . W[y] + b[y]`.
        let logits = (extended.narrow(2, context, 1)? / self.element)?;
        if self.needs_grad.contexts {
            self.contexts.push((extended.narrow(2, 0, context)? + outer(&logits, &own.unsqueeze(1)?)?)?);
        }
        let others = operands.sizes.vocab - samples;
        let places = places.iter().map(|&place| (place as usize).checked_sub(samples).unwrap_or(others) as u32);
        let places = Tensor::from_iter(places, own.device())?;
        if let Some(found) = found.weight {
            let contexts = operands.contexts.to_dtype(own.dtype())?;
            let of_targets = outer(&logits.transpose(1, 2)?, &contexts)?.squeeze(1)?;
            let of_negatives = found.narrow(0, 0, samples)?.narrow(1, 0, context)?;
            self.weight = Some(Rows::sum(self.weight.take(), of_negatives, of_targets, &places, others)?);
        }
        if let Some(found) = found.bias {
            let of_negatives = found.narrow(0, 0, samples)?;
            self.bias = Some(Rows::sum(self.bias.take(), of_negatives, logits.sum((1, 2))?, &places, others)?);
        }
        Ok(())
    }

    pub(super) fn into_gradients(self) -> Result<Gradients> {
        let of_groups = |groups: Vec<Tensor>| match groups.is_empty() {
            true => Ok(None),
            false => Tensor::cat(&groups, 0).map(Some),
        };
        Ok(Gradients {
            contexts: of_groups(self.contexts)?,
            log_priors: of_groups(self.log_priors)?,
            weight: self.weight.map(Rows::of_weight).transpose()?,
            bias: self.bias.map(Rows::of_weight).transpose()?,
        })
    }
}

impl Rows {
    /// `of_targets` `[positions, ..]` are added to the rows of the others in these places, of which there are `others`;
    /// those of negatives are zero.
    fn sum(
        before: Option<Self>,
        of_negatives: Tensor,
        of_targets: Tensor,
        places: &Tensor,
        others: usize,
    ) -> Result<Self> {
        let (negatives, rows) = match before {
            Some(before) => ((before.negatives + of_negatives)?, before.others),
            None => {
                let dims = [&[others + 1], &of_targets.dims()[1..]].concat();
                (of_negatives, Tensor::zeros(dims, of_targets.dtype(), of_targets.device())?)
            }
        };
        Ok(Rows { negatives, others: rows.index_add(places, &of_targets, 0)? })
    }

    /// Of all rows of the weight.
    fn of_weight(self) -> Result<Tensor> {
        let others = self.others.dim(0)? - 1;
        Ok(Tensor::cat(&[&self.negatives, &self.others.narrow(0, 0, others)?], 0)?)
    }
}

/// `a [n, i, k]` times `b [n, k, j]`.
fn outer(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(match a.dims3()? {
        (_, 1, 1) => a.broadcast_mul(b)?,
        _ => a.contiguous()?.matmul(b)?,
    })
}
