//! What a loss of one's own knows of a chunk of positions, and what it returns; and the node of such a loss.

use std::ops::Range;

use candle_core::Tensor;

use super::node::{self, Known};
use super::Mixture;
use crate::backend::contract::{Gradients, LossResults, NeedsGrad, Operands};
use crate::error::Result;
use crate::loss::{Loss, Reduction};

/// The scores of some positions, on the device of the contexts, in f32 (f64 for f64).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkScores {
    /// These positions among all, in the flattened leading dimensions.
    pub positions: Range<usize>,
    /// `[positions]`, or `[positions, n]` for `n` candidates: the log-probability of each token id.
    pub log_prob: Tensor,
    /// `[positions]`: the entropy; zeros if the options do not ask for it.
    pub entropy: Tensor,
    /// `[positions]`: the logarithm of the mass outside the token ids; zeros if the options do not ask for it.
    pub log_outside: Tensor,
}

/// The log-probabilities of some positions, on the device of the contexts, in f32 (f64 for f64).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkLogProbs {
    /// These positions among all, in the flattened leading dimensions.
    pub positions: Range<usize>,
    /// `[positions, vocab]`
    pub log_probs: Tensor,
}

/// The terms of some positions, in the dtype of the scores or log-probabilities.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkTerms {
    /// `[positions]`: what each position adds to the loss.
    pub values: Tensor,
    /// `[positions]`, `[positions, n]`, or `[positions, vocab]`: the derivatives of the values by the log-probabilities.
    pub by_log_prob: Tensor,
    /// `[positions]`: the derivatives of the values by the entropies; `None` if they do not depend on them.
    pub by_entropy: Option<Tensor>,
    /// `[positions]`: the derivatives of the values by the logarithms of the mass outside; `None` if they do not depend
    /// on them.
    pub by_outside: Option<Tensor>,
}

impl ChunkTerms {
    /// Values that depend on the log-probabilities alone.
    ///
    /// # Shapes
    ///
    /// - values: `[positions]`
    /// - by_log_prob: `[positions]`, `[positions, n]` for `n` candidates, or `[positions, vocab]` for all ids
    pub fn new(values: Tensor, by_log_prob: Tensor) -> Self {
        ChunkTerms { values, by_log_prob, by_entropy: None, by_outside: None }
    }

    /// Sets the derivatives by the entropies.
    ///
    /// # Shapes
    ///
    /// - by_entropy: `[positions]`
    pub fn with_by_entropy(self, by_entropy: Tensor) -> Self {
        ChunkTerms { by_entropy: Some(by_entropy), ..self }
    }

    /// Sets the derivatives by the logarithms of the mass outside.
    ///
    /// # Shapes
    ///
    /// - by_outside: `[positions]`
    pub fn with_by_outside(self, by_outside: Tensor) -> Self {
        ChunkTerms { by_outside: Some(by_outside), ..self }
    }
}

impl Mixture {
    /// The loss whose value is the sum of these results; `compute` computes its gradients again.
    pub(super) fn loss_of_results(
        &self,
        results: LossResults,
        needs_grad: NeedsGrad,
        compute: impl Fn(&Operands) -> Result<Gradients> + Send + Sync + 'static,
    ) -> Result<Loss> {
        let operands = self.operands.clone();
        let (value, decoder) = (results.sum.clone(), Some(operands.weight.clone()).filter(Tensor::is_variable));
        let value = match needs_grad.any() {
            true => {
                let known = Some(Known { gradients: results.gradients, is_sum: false });
                node::attach_loss(value, operands, needs_grad, Reduction::Sum, known, move |operands, _| {
                    compute(operands)
                })?
            }
            false => value,
        };
        let nll = results.nll.reshape(self.leading.as_slice())?;
        Ok(Loss { decoder, ..Loss::new(value, results.sum, results.count, nll) })
    }
}
