//! The mean of a position's logits over the vocabulary: the logit of the decoder's mean row, because a logit without a
//! function is linear in its row.
//!
//! ```text
//! mean_v z_kv = scale (c_k . mean_v w_v + mean_v b_v),     the mean logit = sum_k pi_k mean_v z_kv
//! ```

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::node::{attach_operands, needs_grad};
use super::Mixture;
use crate::backend::objective::Gradients;
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::weight::Weight;
use crate::error::Result;
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::transfer::sum_all;

/// The number of the decoder's rows that are converted and added up at a time.
const ROWS: usize = 1024;

impl Mixture {
    /// Computes the mean logit of each position, the components weighted by their priors: `[..]` in the accumulation
    /// dtype, from one reading of the decoder. Differentiable. There must be no function of the logits.
    pub(crate) fn mean_logit(&self) -> Result<Tensor> {
        let operands = &self.operands;
        let terms = MeanTerms::new(operands)?;
        let value = terms.value()?.reshape(self.leading())?;
        let needs_grad = needs_grad(operands);
        attach_operands(value, operands, needs_grad, move |_, upstream| terms.gradients(upstream, needs_grad))
    }
}

/// What the mean logits of all positions and their gradients are made of, detached, in the accumulation dtype.
struct MeanTerms {
    operands: Operands,
    dtype: DType,
    /// `[1, d]`: the mean of the decoder's rows, with the columns of an adapter.
    mean_row: Tensor,
    /// `[positions, K]`: the mean logit of each component; zero where the component has no prior.
    logits: Tensor,
    /// `[positions, K]`: the priors.
    priors: Tensor,
}

impl MeanTerms {
    /// Reads the decoder.
    fn new(operands: &Operands) -> Result<Self> {
        let operands = operands.detach();
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        let (positions, components) = (operands.sizes.positions, operands.sizes.components);
        let mean_row = mean_row(&operands, dtype)?;
        // Not every device computes with empty tensors.
        let priors = match &operands.log_priors {
            _ if positions == 0 => Tensor::zeros((positions, components), dtype, operands.device())?,
            Some(log_priors) => log_priors.exp()?,
            None => Tensor::ones((positions, components), dtype, operands.device())?,
        };
        let logits = if positions == 0 {
            priors.clone()
        } else {
            let products = contexts(&operands, dtype)?.matmul(&mean_row.t()?)?.reshape((positions, components))?;
            let logits = match &operands.bias {
                Some(bias) => products.broadcast_add(&(sum_all(bias)? / bias.elem_count() as f64)?)?,
                None => products,
            };
            // The mean of a component without a prior takes no part, even if it is infinite.
            priors.eq(0.0)?.where_cond(&logits.zeros_like()?, &(logits * operands.logit_scale)?)?
        };
        Ok(MeanTerms { operands, dtype, mean_row, logits, priors })
    }

    /// Computes the mean logits, `[positions]`.
    fn value(&self) -> Result<Tensor> {
        match self.operands.sizes.positions {
            0 => Ok(Tensor::zeros(0, self.dtype, self.operands.device())?),
            _ => Ok((&self.logits * &self.priors)?.sum(1)?),
        }
    }

    /// Computes the gradients of the operands from the upstream gradient of each position.
    fn gradients(&self, upstream: &Tensor, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Operands { sizes, weight, adapter, logit_scale, .. } = &self.operands;
        if sizes.positions == 0 {
            return self.zeros(needs_grad);
        }
        let adapter_columns = self.operands.adapter_columns()?;
        let upstream = upstream.reshape((sizes.positions, 1))?.to_dtype(self.dtype)?;
        let scaled = (self.priors.broadcast_mul(&upstream)? * *logit_scale)?; // [positions, K]
        let context_gradient = || scaled.unsqueeze(2)?.broadcast_mul(&self.mean_row.unsqueeze(0)?);
        // A NaN where no gradient comes from takes no part.
        let log_prior_gradient = || where_not_zero(&scaled, &(&self.logits * &self.priors)?.broadcast_mul(&upstream)?);
        // Every row of the decoder has the same gradient.
        let rows = |row: Tensor, dtype: DType| -> Result<Tensor> {
            let row = (row / sizes.vocab as f64)?.to_dtype(dtype)?;
            Ok(row.broadcast_as([&[sizes.vocab], &row.dims()[1..]].concat())?.contiguous()?)
        };
        let row_gradient = if needs_grad.weight || needs_grad.adapter {
            let contexts = contexts(&self.operands, self.dtype)?;
            scaled.reshape((1, ()))?.matmul(&where_not_zero(&scaled.reshape(((), 1))?, &contexts)?)?
        } else {
            self.mean_row.zeros_like()?
        };
        let columns = |columns: Range<usize>| row_gradient.narrow(1, columns.start, columns.len());
        let weight_gradient = |weight: &Tensor| rows(columns(0..adapter_columns.start)?, weight.dtype());
        let adapter_gradient = |adapter: &Tensor| rows(columns(adapter_columns.clone())?, adapter.dtype());
        let bias_gradient = || rows(scaled.flatten_all()?.sum_keepdim(0)?, self.dtype);
        Ok(Gradients {
            contexts: needs_grad.contexts.then(context_gradient).transpose()?,
            log_priors: needs_grad.log_priors.then(log_prior_gradient).transpose()?,
            weight: weight.dense().filter(|_| needs_grad.weight).map(weight_gradient).transpose()?,
            adapter: adapter.as_ref().filter(|_| needs_grad.adapter).map(adapter_gradient).transpose()?,
            bias: needs_grad.bias.then(bias_gradient).transpose()?,
        })
    }

    /// Returns the gradients of no positions.
    fn zeros(&self, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Operands { contexts, log_priors, weight, adapter, bias, .. } = &self.operands;
        let zeros = |operand: Option<&Tensor>, is_needed: bool| {
            operand.filter(|_| is_needed).map(Tensor::zeros_like).transpose()
        };
        Ok(Gradients {
            contexts: zeros(Some(contexts), needs_grad.contexts)?,
            log_priors: zeros(log_priors.as_ref(), needs_grad.log_priors)?,
            weight: zeros(weight.dense(), needs_grad.weight)?,
            adapter: zeros(adapter.as_ref(), needs_grad.adapter)?,
            bias: zeros(bias.as_ref(), needs_grad.bias)?,
        })
    }
}

/// Returns the numbers where the factors, of the same shape or `[.., 1]`, are not zero; otherwise zeros.
fn where_not_zero(factors: &Tensor, numbers: &Tensor) -> Result<Tensor> {
    let is_used = factors.ne(0.0)?.broadcast_as(numbers.shape())?.contiguous()?;
    Ok(is_used.where_cond(numbers, &numbers.zeros_like()?)?)
}

/// Returns the contexts `[rows, d]` in this dtype.
fn contexts(operands: &Operands, dtype: DType) -> Result<Tensor> {
    Ok(operands.contexts.flatten(0, 1)?.to_dtype(dtype)?)
}

/// Computes the mean of the decoder's rows in this dtype, `[1, d]`, from a few of the rows at a time.
fn mean_row(operands: &Operands, dtype: DType) -> Result<Tensor> {
    let weight_rows = |ids: Range<usize>| match &operands.weight {
        Weight::Dense(weight) => Ok(weight.narrow(0, ids.start, ids.len())?),
        Weight::Quantised(matrix) => matrix.rows(&Tensor::arange(ids.start as u32, ids.end as u32, operands.device())?),
    };
    let mean = mean_of_rows(weight_rows, operands.sizes.vocab, dtype)?;
    match &operands.adapter {
        Some(adapter) => {
            let rows = |ids: Range<usize>| Ok(adapter.narrow(0, ids.start, ids.len())?);
            Ok(Tensor::cat(&[mean, mean_of_rows(rows, operands.sizes.vocab, dtype)?], 1)?)
        }
        None => Ok(mean),
    }
}

/// Computes the mean of the rows of a matrix, of which `rows` returns some.
fn mean_of_rows(rows: impl Fn(Range<usize>) -> Result<Tensor>, vocab: usize, dtype: DType) -> Result<Tensor> {
    let sum = |first: usize| -> Result<Tensor> {
        let rows = rows(first..vocab.min(first + ROWS))?.to_dtype(dtype)?.contiguous()?;
        Ok(Tensor::ones((1, rows.dim(0)?), dtype, rows.device())?.matmul(&rows)?)
    };
    let mut total = sum(0)?;
    for first in (ROWS..vocab).step_by(ROWS) {
        total = (total + sum(first)?)?;
    }
    Ok((total / vocab as f64)?)
}
