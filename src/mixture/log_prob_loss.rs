//! A loss of the user's own: a function of the log-probabilities of all ids, chunk by chunk.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use super::chunk_terms::{ChunkLogProbs, ChunkTerms};
use super::node::needs_grad;
use super::Mixture;
use crate::backend;
use crate::backend::objective::{LossResults, Objective};
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::loss::Loss;

impl Mixture {
    /// Computes the sum of values that depend on the log-probabilities of all ids at each position, with gradients from
    /// three products (on a GPU four). `terms` gets the log-probabilities of a chunk of positions and returns the
    /// values and their derivatives, before the gradient of the chunk's logits replaces them, so that the
    /// log-probabilities of all positions are never in memory at once. `workspace_bytes` is the budget of the
    /// workspace, as in [`LossOptions::with_workspace_bytes`](crate::LossOptions::with_workspace_bytes).
    ///
    /// # Shapes
    ///
    /// - `terms`: from log-probabilities `[positions, vocab]` of a chunk to values `[positions]` and derivatives
    ///   `[positions, vocab]`
    /// - [`Loss::nll`]: `[..]`, the leading dimensions of the contexts: the values
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device, the budget cannot hold one position, or `terms` fails or returns other
    /// shapes.
    ///
    /// # Examples
    ///
    /// The probability that two draws are equal, `sum_v P(v)^2`, and its derivative by log P(v), `2 P(v)^2`:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::ChunkTerms;
    /// use mos_head::Mixture;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let mixture = Mixture::new(&contexts, None, &weight, None)?;
    /// let loss = mixture.log_prob_loss(None, |chunk| {
    ///     let squares = (chunk.log_probs * 2.0)?.exp()?;
    ///     Ok(ChunkTerms::new(squares.sum(1)?, (squares * 2.0)?))
    /// })?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn log_prob_loss(
        &self,
        workspace_bytes: Option<usize>,
        terms: impl Fn(ChunkLogProbs) -> Result<ChunkTerms> + Send + Sync + 'static,
    ) -> Result<Loss> {
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        self.unchecked_log_prob_loss(workspace_bytes, Ok, move |positions, log_probs| {
            let (n, dims) = (positions.len(), log_probs.dims().to_vec());
            let ChunkTerms { values, by_log_prob, .. } = terms(ChunkLogProbs { positions, log_probs })?;
            for (argument, tensor, expected) in [("values", &values, &[n][..]), ("by_log_prob", &by_log_prob, &dims)] {
                if tensor.dims() != expected {
                    return Err(Error::shape(argument, format!("{expected:?}"), tensor.dims()));
                }
            }
            // The derivatives are copied, because the function may have kept a reference to them.
            Ok((values.detach().to_dtype(dtype)?, by_log_prob.detach().to_dtype(dtype)?.copy()?))
        })
    }

    /// Computes the loss as [`Mixture::log_prob_loss`] does, without checks of shapes and without a copy of the
    /// derivatives, which nothing else may refer to. `reduce` may change the results before they become the loss.
    pub(super) fn unchecked_log_prob_loss(
        &self,
        workspace_bytes: Option<usize>,
        reduce: impl FnOnce(LossResults) -> Result<LossResults>,
        terms: impl Fn(Range<usize>, Tensor) -> Result<(Tensor, Tensor)> + Send + Sync + 'static,
    ) -> Result<Loss> {
        let (operands, objective) = (&self.operands, Objective::AllLogProbs(Arc::new(terms)));
        let planned = backend::plan(operands, objective.task(operands, needs_grad(operands))?, workspace_bytes)?;
        let results = reduce(backend::loss(&planned, &objective)?)?;
        self.loss_from_results(results, planned, objective)
    }
}
