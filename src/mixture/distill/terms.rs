//! The objective of a chunk of positions in a distillation, with its derivatives.

use candle_core::Tensor;

use crate::backend::divergence::not_negative;
use crate::error::Result;

/// The objective of a chunk's positions, and its derivatives.
pub(super) struct DistillTerms {
    /// `[chunk]`: the objective, without the weights of the positions.
    pub(super) objective: Tensor,
    /// `[chunk, ids]`: the derivatives by the student's log-probabilities, times the weights divided by the
    /// denominator.
    pub(super) derivatives: Tensor,
}

/// Returns `(1 - weight) divergence + weight nll`, or the divergence if there are no targets.
pub(super) fn mix_objectives(divergence: Tensor, nll: Option<Tensor>, weight: f64) -> Result<Tensor> {
    Ok(match nll {
        Some(nll) => ((divergence * (1.0 - weight))? + (not_negative(&nll)? * weight)?)?,
        None => divergence,
    })
}
