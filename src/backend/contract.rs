//! The contract of a backend: its operations and their results. Each operation without a body is a device's own; the
//! others are composed of candle's operations, and a device overrides those for which it has kernels.

use candle_core::{DType, Tensor};

use crate::backend::distribution::Visit;
use crate::backend::divergence::{self, DivergenceTerms};
use crate::backend::objective::{Objective, Scored, Task};
use crate::backend::operands::Operands;
use crate::backend::plan::Planned;
use crate::backend::shard::VocabShard;
use crate::error::{Error, Result};
use crate::tensors::id_lists::{self, IdLists};

/// The gradients of the operands that need one. Each has its operand's shape and the accumulation dtype; the weight's may
/// already be rounded to the weight's dtype.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gradients {
    pub(crate) contexts: Option<Tensor>,
    pub(crate) log_priors: Option<Tensor>,
    pub(crate) weight: Option<Tensor>,
    pub(crate) adapter: Option<Tensor>,
    pub(crate) bias: Option<Tensor>,
}

/// The results of a loss.
#[derive(Debug)]
pub(crate) struct LossResults {
    /// `[positions]`: each position's objective times its weight.
    pub(crate) objective: Tensor,
    /// `[positions]`: each position's negative log-likelihood.
    pub(crate) nll: Tensor,
    /// The sum of the objective.
    pub(crate) sum: Tensor,
    /// The sum of the weights, which is the denominator of a mean.
    pub(crate) count: Tensor,
    /// `[positions]`, u8: whether the target is the most probable id; `None` unless the task asks for it.
    pub(crate) is_correct: Option<Tensor>,
    pub(crate) gradients: Gradients,
}

/// The operations of a device. The CPU supports f16, bf16, f32 and f64; GPUs support f16, bf16 and f32.
pub(crate) trait Backend {
    /// Chooses the computation of a task, and cuts the positions into chunks.
    fn plan(&self, operands: &Operands, task: Task, budget: Option<usize>) -> Result<Planned>;

    /// Computes an objective, and the gradients of the operands that need one.
    fn loss(&self, planned: &Planned, objective: &Objective) -> Result<LossResults>;

    /// Computes log-probabilities `[positions, vocab]`, in the operands' dtype or in the accumulation dtype.
    fn log_probs(&self, planned: &Planned, dtype: DType) -> Result<Tensor>;

    /// Computes the scores of each position, `[positions, n + 2]` in the accumulation dtype: log-probabilities, the
    /// entropy, and the logarithm of the mass outside the ids. If [`Scored::needs_argmax`], it also tells whether each id
    /// is the most probable of all, `[positions, n]` in u8: among equal ids the lowest is, and none is if the distribution
    /// is not defined.
    fn scores(&self, planned: &Planned, scored: &Scored) -> Result<(Tensor, Option<Tensor>)>;

    /// Computes the divergence of each row of log-probabilities `[n, vocab]` from the teacher's, `[n]`, and its derivatives
    /// by the log-probabilities, times their scales. Nothing else refers to the log-probabilities, which may be
    /// overwritten.
    fn divergence(&self, log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
        divergence::composed(&log_probs, log_teacher, terms)
    }

    /// Finds the `k` most probable ids and their log-probabilities, each `[positions, k]`, in u32 and in the accumulation
    /// dtype, in descending order of probability; ties go to the lower id. If a position has no distribution, it returns
    /// an error that names the first such position.
    fn top_k(&self, operands: &Operands, k: usize) -> Result<(Tensor, Tensor)>;

    /// Runs a query on each position's distribution.
    fn visit<V: Visit>(&self, operands: &Operands, visit: &V) -> Result<Vec<V::Output>>;

    /// Runs a query on the part of each position's distribution that a shard has: its own ids, with their
    /// log-probabilities under the whole vocabulary. Every rank calls it.
    fn visit_shard<V: Visit>(&self, operands: &Operands, shard: &VocabShard, visit: &V) -> Result<Vec<V::Output>> {
        let (_, _, got) = (shard, visit, format!("{:?}", operands.contexts.device().location()));
        Err(Error::Device { argument: "contexts", expected: "Cpu".into(), got })
    }

    /// Computes the product of two matrices.
    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        Ok(left.matmul(right)?)
    }

    /// Computes the products of each context, `[positions, d]`, with the matrix's rows of its list of ids,
    /// `[positions, longest]` in the accumulation dtype; entries past the end of a list are unspecified. The matrix is
    /// contiguous, or the transpose of a contiguous one.
    fn list_products(&self, contexts: &Tensor, matrix: &Tensor, lists: &IdLists) -> Result<Tensor> {
        id_lists::list_products(contexts, matrix, lists)
    }

    /// Computes the gradients of contexts and matrix from the `upstream` gradient of [`Backend::list_products`], each if
    /// it is `needed`, in the operands' dtype.
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

    /// Makes a matrix `[rows, d]` that has these values in the rows `ids`, which ascend without repeats, and zeros
    /// elsewhere.
    fn scattered_rows(&self, values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
        id_lists::scattered_rows(values, ids, rows)
    }

    /// Converts a gradient to the dtype of its operand.
    fn rounded(&self, gradient: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(gradient.to_dtype(dtype)?)
    }

    /// Computes `tanh(z + bias)` for `z` `[rows, n]` and `bias` `[n]`.
    fn bias_tanh(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor>;

    /// Computes the gradient of the argument of `tanh`, from its result and the gradient of the result.
    fn tanh_gradient(&self, result: &Tensor, upstream: &Tensor) -> Result<Tensor>;
}
