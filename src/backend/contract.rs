//! The contract of a backend: its operations and their results.

use std::ops::Range;

use candle_core::{DType, Tensor};

use crate::backend::distribution::Visit;
use crate::backend::divergence::{self, DivergenceTerms};
use crate::backend::objective::{LogProbTerms, Objective, ScoreTerms, Scored};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::backend::shard::VocabShard;
use crate::backend::task::Task;
use crate::error::{Error, Result};
use crate::tensors::id_lists::{self, IdLists};

/// The gradients of the operands that need one, each with its operand's shape, in the accumulation dtype; the weight's
/// may be rounded to its own dtype already.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gradients {
    pub(crate) contexts: Option<Tensor>,
    pub(crate) log_priors: Option<Tensor>,
    pub(crate) weight: Option<Tensor>,
    pub(crate) adapter: Option<Tensor>,
    pub(crate) bias: Option<Tensor>,
}

#[derive(Debug)]
pub(crate) struct LossResults {
    /// `[positions]`: each position's objective times its weight
    pub(crate) objective: Tensor,
    /// `[positions]`
    pub(crate) nll: Tensor,
    pub(crate) sum: Tensor,
    pub(crate) count: Tensor,
    /// `[positions]`, u8, if it is needed: whether the target is the most probable id
    pub(crate) is_correct: Option<Tensor>,
    pub(crate) gradients: Gradients,
}

/// The operations of a device. The CPU supports f16, bf16, f32 and f64; GPUs support f16, bf16 and f32.
pub(crate) trait Backend {
    /// Chooses the computation of a task, and cuts the positions into chunks.
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan>;

    /// The objective, and the gradients of the operands that need one.
    fn loss(
        &self,
        operands: &Operands,
        objective: &Objective,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults>;

    /// Log-probabilities `[positions, vocab]`, in the operands' dtype or in the accumulation dtype.
    fn log_probs(&self, operands: &Operands, dtype: DType, plan: &Plan) -> Result<Tensor>;

    /// The scores of each position, `[positions, n + 2]` in the accumulation dtype: log-probabilities, the entropy, and
    /// the logarithm of the mass outside the ids. And, if it is needed, whether each id is the most probable of all,
    /// `[positions, n]` in u8: the lowest of equals is, and none is if the distribution is not defined.
    fn scores(&self, operands: &Operands, scored: &Scored, plan: &Plan) -> Result<(Tensor, Option<Tensor>)>;

    /// The gradients of the inner product of scores and `upstream`, `[positions, n + 2]` in the accumulation dtype.
    fn score_gradients(
        &self,
        operands: &Operands,
        scored: &Scored,
        upstream: &Tensor,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<Gradients> {
        // The upstream gradient of each position is known, whatever its scores are.
        let upstream = upstream.clone();
        let terms = move |positions: Range<usize>, scores: &Tensor| {
            Ok((scores.narrow(1, 0, 1)?.squeeze(1)?, upstream.narrow(0, positions.start, positions.len())?))
        };
        Ok(self.score_loss(operands, scored, &terms, needs_grad, plan)?.gradients)
    }

    /// The sum of the values that `terms` gives for the scores of each chunk, and its gradients.
    fn score_loss(
        &self,
        operands: &Operands,
        scored: &Scored,
        terms: &ScoreTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults>;

    /// The sum of the values that `terms` gives for the log-probabilities of each chunk, and its gradients.
    fn log_prob_loss(
        &self,
        operands: &Operands,
        terms: &LogProbTerms,
        needs_grad: NeedsGrad,
        plan: &Plan,
    ) -> Result<LossResults>;

    /// The divergence of each row of log-probabilities `[n, vocab]` from the teacher's, `[n]`, and its derivatives by the
    /// log-probabilities, times their scales. Nothing else refers to the log-probabilities, which may be overwritten.
    fn divergence(&self, log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
        divergence::composed(&log_probs, log_teacher, terms)
    }

    /// The `k` most probable ids and their log-probabilities, each `[positions, k]`, in u32 and in the accumulation
    /// dtype, in descending order of probability; ties go to the lower id. If a position has no distribution, returns
    /// an error that names the first such one.
    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)>;

    /// Runs a query on each position's distribution.
    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>>;

    /// The same of a shard: a distribution is the part of its own ids, with their log-probabilities under the whole
    /// vocabulary. Every rank calls it.
    fn visit_shard<V: Visit>(&self, operands: &Operands, shard: &VocabShard, visit: &V) -> Result<Vec<V::Output>> {
        let (_, _, got) = (shard, visit, format!("{:?}", operands.contexts.device().location()));
        Err(Error::Device { argument: "contexts", expected: "Cpu".into(), got })
    }

    /// The product of two matrices.
    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        Ok(left.matmul(right)?)
    }

    /// The products of each context, `[positions, d]`, with the matrix's rows of its list of ids, `[positions, longest]`
    /// in the accumulation dtype; of no meaning beyond a list. The matrix is contiguous, or the transpose of a
    /// contiguous one.
    fn list_products(&self, contexts: &Tensor, matrix: &Tensor, lists: &IdLists) -> Result<Tensor> {
        id_lists::list_products(contexts, matrix, lists)
    }

    /// The gradients of contexts and matrix from the `upstream` of [`Backend::list_products`], as far as `needed`, in
    /// the operands' dtype.
    fn list_product_gradients(
        &self,
        contexts: &Tensor,
        matrix: &Tensor,
        lists: &IdLists,
        upstream: &Tensor,
        needed: [bool; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        id_lists::list_product_gradients(contexts, matrix, lists, upstream, needed)
    }

    /// A matrix `[rows, d]` with these values at the rows `ids`, in ascending order without repeats, and zeros
    /// elsewhere.
    fn scattered_rows(&self, values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
        id_lists::scattered_rows(values, ids, rows)
    }

    /// A gradient in the dtype of its operand.
    fn rounded(&self, gradient: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(gradient.to_dtype(dtype)?)
    }

    /// `tanh(z + bias)` for `z` `[rows, n]` and `bias` `[n]`.
    fn bias_tanh(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor>;

    /// The gradient of the argument of `tanh`, from its result and the gradient of the result.
    fn tanh_gradient(&self, result: &Tensor, upstream: &Tensor) -> Result<Tensor>;
}
