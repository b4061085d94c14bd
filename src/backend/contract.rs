//! The contract of a backend: its operations, and the types of their arguments and results.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use rayon::prelude::*;

use crate::backend::collectives::Numbers;
use crate::backend::divergence::{self, DivergenceTerms};
use crate::backend::plan::Plan;
use crate::backend::shard::VocabShard;
use crate::error::{Error, Result};
use crate::tensors::kept::{self, IdLists};

/// The precision of matrix products: of a loss ([`LossOptions::with_precision`](crate::LossOptions::with_precision)), or
/// of all results of a mixture ([`Mixture::with_precision`](crate::Mixture::with_precision)). All sums, exponentials,
/// results and gradients keep their dtype.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{LossOptions, OutputLayer, Precision, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?; // [batch, seq]
/// let options = LossOptions::new().with_precision(Precision::Bf16Products);
/// let loss = head.loss(&hidden, &targets, &options)?.value; // f32, as with Precision::Full
/// # assert!((loss.to_scalar::<f32>()? - 100f32.ln()).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// The operands' own precision.
    #[default]
    Full,
    /// Operands of f32 or f16 may be rounded to bf16 before they are multiplied; sums stay f32. PyTorch's
    /// `torch.set_float32_matmul_precision("medium")` allows the same.
    ///
    /// It has an effect on CPUs with Intel AMX, and on those whose AVX512-BF16 is faster than their products in f32:
    /// on all products of losses over hard targets, and on the logits of other losses and of log-probabilities, unless the
    /// budget is too small for the rounded operands. A few rows, whose products take no longer than reading the decoder,
    /// are not rounded. Decoding rounds on Intel AMX alone, and only for more than 24 components: how many positions there
    /// are does not matter. `docs/measurements.md` has the errors: they grow with the logits.
    Bf16Products,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Number of positions: the product of the leading dimensions of the hidden states.
    pub(crate) positions: usize,
    /// Number of components, K.
    pub(crate) components: usize,
    /// Size of a context: d, or with an adapter d + r.
    pub(crate) context_dim: usize,
    pub(crate) vocab: usize,
}

/// The tensors of a mixture, on one device and with checked shapes; all but the decoder's weight are contiguous.
///
/// The logits are `z = cap tanh(scale (c W^T + b) / cap)`, or `scale (c W^T + b)` without a softcap.
#[derive(Clone, Debug)]
pub(crate) struct Operands {
    pub(crate) sizes: Sizes,
    /// `[positions, K, context_dim]`
    pub(crate) contexts: Tensor,
    /// `[positions, K]`, in the accumulation dtype
    pub(crate) log_priors: Option<Tensor>,
    /// `[vocab, d]`: contiguous, or the transpose of a contiguous tensor. A sampled softmax appends a row for each
    /// target outside its vocabulary ([`TargetLoss::own_shifts`]).
    pub(crate) weight: Tensor,
    /// `[vocab, r]`: columns to the right of the weight's. The decoder is `[W B]`, which nothing concatenates.
    pub(crate) adapter: Option<Tensor>,
    /// `[rows of the weight]`, in the accumulation dtype
    pub(crate) bias: Option<Tensor>,
    pub(crate) logit_scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) precision: Precision,
}

impl Operands {
    /// The operands of some positions.
    pub(crate) fn of_positions(&self, positions: &Range<usize>) -> Result<Self> {
        let of = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        Ok(Operands {
            sizes: Sizes { positions: positions.len(), ..self.sizes },
            contexts: of(&self.contexts)?,
            log_priors: self.log_priors.as_ref().map(of).transpose()?,
            ..self.clone()
        })
    }

    /// Whether they are a single softmax without a log-prior.
    pub(crate) fn is_single(&self) -> bool {
        self.sizes.components == 1 && self.log_priors.is_none()
    }

    /// The number of rows of the weight: the vocabulary, and the targets outside it.
    pub(crate) fn weight_rows(&self) -> Result<usize> {
        Ok(self.weight.dim(0)?)
    }

    /// The weight as it is stored, and whether it is stored as its transpose `[d, vocab]`.
    pub(crate) fn stored_weight(&self) -> Result<(Tensor, bool)> {
        if self.weight.is_contiguous() {
            Ok((self.weight.clone(), false))
        } else {
            Ok((self.weight.t()?, true))
        }
    }

    /// The columns of the decoder that are the adapter's.
    pub(crate) fn adapter_columns(&self) -> Result<Range<usize>> {
        Ok(self.weight.dim(1)?..self.sizes.context_dim)
    }
}

/// Which operands need a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NeedsGrad {
    pub(crate) contexts: bool,
    pub(crate) log_priors: bool,
    pub(crate) weight: bool,
    pub(crate) adapter: bool,
    pub(crate) bias: bool,
}

impl NeedsGrad {
    pub(crate) fn any(self) -> bool {
        self.contexts || self.log_priors || self.decoder()
    }

    /// Whether the weight, the adapter or the bias needs one.
    pub(crate) fn decoder(self) -> bool {
        self.weight || self.adapter || self.bias
    }
}

/// The objective whose value and gradients are computed.
#[derive(Clone, Debug)]
pub(crate) enum Objective {
    /// A loss over targets.
    Targets(TargetLoss),
    /// The inner product of the log-probabilities and `upstream`, `[positions, vocab]` in the accumulation dtype.
    LogProbs { upstream: Tensor },
}

/// What is asked of each position's distribution: its scores are the log-probabilities of `n` ids, its entropy, and the
/// logarithm of the mass outside these ids.
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    /// `[positions, n]`: u8, u32 or i64
    pub(crate) token_ids: Tensor,
    /// Whether the entropy is needed; if not, its column of the scores is zero.
    pub(crate) entropy: bool,
    /// Whether the logarithm of the mass outside the ids is needed; if not, its column of the scores is zero.
    pub(crate) outside: bool,
    /// Whether it is needed which of the ids is the most probable of all.
    pub(crate) best: bool,
    /// Of the mixture's distribution, after scale and softcap.
    pub(crate) temperature: f64,
}

impl Scored {
    /// Whether the temperature changes the distribution.
    pub(crate) fn is_tempered(&self) -> bool {
        self.temperature != 1.0
    }

    /// Whether the scores depend on the log-probability of every id in the mixture.
    pub(crate) fn need_all_ids(&self) -> bool {
        self.entropy || self.outside || self.is_tempered()
    }
}

/// How many columns of the scores follow the log-probabilities of ids: the entropy, and the logarithm of the mass outside
/// the ids.
pub(crate) const OF_POSITION: usize = 2;

/// Values of a chunk's positions, and their derivatives, as a function of the positions and their scores
/// `[chunk, n + 2]`: `[chunk]` and `[chunk, n + 2]`, all in the accumulation dtype.
pub(crate) type ScoreTerms = dyn Fn(Range<usize>, &Tensor) -> Result<(Tensor, Tensor)> + Send + Sync;

/// Values of a chunk's positions, and their derivatives, as a function of the positions and the log-probabilities of all
/// ids `[chunk, vocab]`, which the function may overwrite: `[chunk]` and `[chunk, vocab]`, all in the accumulation dtype.
/// Nothing else refers to the derivatives.
pub(crate) type LogProbTerms = dyn Fn(Range<usize>, Tensor) -> Result<(Tensor, Tensor)> + Send + Sync;

impl Objective {
    /// The task of a plan for this objective and the gradients of the operands that need one.
    pub(crate) fn task(&self, needs_grad: NeedsGrad) -> Task {
        match self {
            Objective::Targets(loss) => Task::of(loss, needs_grad),
            Objective::LogProbs { .. } => Task::log_probs(needs_grad),
        }
    }

    /// The part of the vocabulary that this rank has, if others have the rest.
    pub(crate) fn shard(&self) -> Option<&VocabShard> {
        match self {
            Objective::Targets(loss) => loss.shard.as_ref(),
            Objective::LogProbs { .. } => None,
        }
    }

    /// The place of the gradient that earlier losses have, if this one adds to it.
    pub(crate) fn so_far(&self) -> Option<&SoFar> {
        match self {
            Objective::Targets(loss) => loss.so_far.as_ref(),
            Objective::LogProbs { .. } => None,
        }
    }
}

/// A loss over targets whose shape and dtype have been checked.
#[derive(Clone, Debug)]
pub(crate) struct TargetLoss {
    /// `[positions]`: u8, u32 or i64
    pub(crate) targets: Tensor,
    pub(crate) ignore_index: Option<i64>,
    /// `[positions]`, in the accumulation dtype
    pub(crate) position_weights: Option<Tensor>,
    /// `[vocab]`, in the accumulation dtype
    pub(crate) class_weights: Option<Tensor>,
    pub(crate) terms: Terms,
    pub(crate) scale: GradScale,
    /// `[positions]`, in the accumulation dtype: a sampled softmax adds these to the targets' logits. A target then is
    /// a row of the weight, from `vocab` on if the vocabulary lacks it, and competes with all ids of the vocabulary but
    /// itself:
    ///
    /// ```text
    /// log p_k(y) = z_ky + shift - log( exp(z_ky + shift) + sum_{v != y} exp z_kv )
    /// ```
    ///
    /// Such a loss has no softcap, and the target's negative log-likelihood is its only term.
    pub(crate) own_shifts: Option<Tensor>,
    /// The part of the vocabulary that this rank has, if others have the rest: the weight has its rows, while targets,
    /// and the weights of classes, are of the whole vocabulary.
    pub(crate) shard: Option<VocabShard>,
    /// The gradient of the weight that earlier losses have: it is taken, and this loss adds its own.
    pub(crate) so_far: Option<SoFar>,
}

/// The place of a variable's gradient among the gradients of earlier losses.
#[derive(Clone, Debug)]
pub(crate) struct SoFar {
    pub(crate) gradients: Arc<Mutex<GradStore>>,
    pub(crate) variable: Tensor,
}

impl SoFar {
    /// Takes the gradient, which nothing else refers to, so that a backend can write to it.
    pub(crate) fn take(&self) -> Option<Tensor> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.variable)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Terms {
    pub(crate) label_smoothing: f64,
    pub(crate) z_loss: f64,
    /// Whether it is needed at which positions the target is the most probable id.
    pub(crate) correct: bool,
}

/// The factor of the gradient of each position's weighted objective.
#[derive(Clone, Debug)]
pub(crate) enum GradScale {
    Constant(f64),
    /// The reciprocal of the sum of all weights; zero if the sum is zero.
    OneOverCount,
    /// `[positions]`
    Upstream(Tensor),
}

/// The task that a plan is made for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Task {
    pub(crate) needs_grad: NeedsGrad,
    /// Whether the mixture's log-probability of every id is needed.
    pub(crate) all_ids: bool,
    /// Whether there are soft targets: label smoothing, or a gradient of the log-probabilities.
    pub(crate) soft_targets: bool,
    /// What is scored of each position. (The CPU's workspace is as for log-probabilities, or for a loss.)
    pub(crate) scores: Option<ScoreTask>,
    /// Whether chunks of a few rows suffice.
    pub(crate) few_rows: bool,
    /// How many of each position's most probable ids are needed, and nothing else.
    pub(crate) top_k: Option<usize>,
    /// Whether it is needed if targets or candidates are the most probable ids.
    pub(crate) best: bool,
    /// Whether each target is an entry of its own ([`TargetLoss::own_shifts`]).
    pub(crate) own_targets: bool,
    /// Whether other ranks have the rest of the vocabulary ([`TargetLoss::shard`]).
    pub(crate) is_shard: bool,
    /// Whether the log-probabilities of a chunk, a teacher's, and derivatives by them are held too.
    pub(crate) log_prob_terms: bool,
}

/// The most ids of a position whose gradients are added one by one, without a matrix product.
const MOST_LISTED: usize = 512;

/// What the computation of scores and its workspace depend on.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
pub(crate) struct ScoreTask {
    /// Number of ids of each position
    pub(crate) candidates: usize,
    /// Whether they depend on the log-probability of every id
    pub(crate) all_ids: bool,
    /// Whether the logits of a few ids and sums over the others suffice: gradients are then computed as for a loss over
    /// hard targets, of which each position has several.
    pub(crate) of_listed: bool,
}

impl Task {
    /// Computes a loss over targets, and the gradients of the operands that need one.
    pub(crate) fn of(loss: &TargetLoss, needs_grad: NeedsGrad) -> Self {
        Task {
            own_targets: loss.own_shifts.is_some(),
            is_shard: loss.shard.is_some(),
            ..Self::loss(&loss.terms, needs_grad)
        }
    }

    /// Computes a loss with these terms whose targets are ids of the vocabulary.
    pub(crate) fn loss(terms: &Terms, needs_grad: NeedsGrad) -> Self {
        let soft_targets = terms.label_smoothing > 0.0;
        Task { needs_grad, all_ids: soft_targets, soft_targets, best: terms.correct, ..Task::default() }
    }

    /// Computes log-probabilities, and in the backward pass the gradients of the operands that need one.
    pub(crate) fn log_probs(needs_grad: NeedsGrad) -> Self {
        Task { needs_grad, all_ids: true, soft_targets: needs_grad.any(), ..Task::default() }
    }

    /// Computes a function of the log-probabilities of all ids, and the gradients of the operands that need one.
    pub(crate) fn log_prob_terms(needs_grad: NeedsGrad) -> Self {
        Task { log_prob_terms: true, ..Self::log_probs(needs_grad) }
    }

    /// Computes scores or a function of them, and the gradients of the operands that need one.
    pub(crate) fn scores(scored: &Scored, operands: &Operands, needs_grad: NeedsGrad) -> Result<Self> {
        let candidates = scored.token_ids.dim(1)?;
        // A temperature divides the logits of a single softmax, and its entropy is a moment of them.
        let is_single = operands.is_single();
        let is_plain = !scored.is_tempered() || is_single && operands.softcap.is_none();
        let has_moments = !scored.entropy || is_single && !needs_grad.any();
        let are_few = candidates <= MOST_LISTED;
        let scores =
            ScoreTask { candidates, all_ids: scored.need_all_ids(), of_listed: are_few && is_plain && has_moments };
        Ok(Task { scores: Some(scores), best: scored.best, ..Self::log_probs(needs_grad) })
    }

    /// Reads each position's distribution, tile by tile.
    pub(crate) fn decoding() -> Self {
        Task { few_rows: true, all_ids: false, ..Self::log_probs(NeedsGrad::default()) }
    }

    /// Finds the `k` most probable ids of each position. Products of large chunks serve many rows; unlike a draw, the
    /// results may depend on the other positions by rounding.
    pub(crate) fn ranking(sizes: Sizes, k: usize) -> Self {
        /// Maximum rows for which chunks of a few rows are faster.
        const FEW_ROWS: usize = 64;
        if sizes.positions * sizes.components <= FEW_ROWS {
            Self::decoding()
        } else {
            Task { top_k: Some(k), ..Self::log_probs(NeedsGrad::default()) }
        }
    }
}

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
        kept::list_products(contexts, matrix, lists)
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
        kept::list_product_gradients(contexts, matrix, lists, upstream, needed)
    }

    /// A matrix `[rows, d]` with these values at the rows `ids`, in ascending order without repeats, and zeros
    /// elsewhere.
    fn scattered_rows(&self, values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
        kept::scattered_rows(values, ids, rows)
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

/// A type that log-probabilities are computed in.
pub(crate) trait Real: num_traits::Float + candle_core::WithDType {
    fn f64(self) -> f64 {
        candle_core::WithDType::to_f64(self)
    }

    /// As what ranks add up.
    fn numbers(values: &mut [Self]) -> Numbers<'_>;
}

impl Real for f32 {
    fn numbers(values: &mut [f32]) -> Numbers<'_> {
        Numbers::F32(values)
    }
}

impl Real for f64 {
    fn numbers(values: &mut [f64]) -> Numbers<'_> {
        Numbers::F64(values)
    }
}

/// Number of ids in a tile of a distribution.
pub(crate) const TILE: usize = 512;

/// The distribution of one position over the vocabulary, computed tile by tile on demand.
pub(crate) trait Distribution<F>: Sync {
    fn vocab(&self) -> usize;
    /// Why it is no distribution, if it is none.
    fn defect(&self) -> Option<Defect>;
    /// The log-probabilities of the ids from `tile * TILE` on: [`TILE`] of them, or fewer in the last tile. They may be
    /// written to `buffer`. Values below `floor` may be returned as minus infinity.
    fn tile<'a>(&'a self, tile: usize, floor: F, buffer: &'a mut Vec<F>) -> &'a [F];
    /// What the logits of a single softmax exceed its log-probabilities by, if it is known.
    fn logit_offset(&self) -> Option<F>;

    fn tiles(&self) -> usize {
        self.vocab().div_ceil(TILE)
    }

    /// Checks that it is a distribution.
    fn check(&self, position: usize) -> Result<()> {
        self.defect().map_or(Ok(()), |defect| Err(defect.at(position)))
    }
}

/// Why numbers are no distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    /// A number is NaN or plus infinity.
    NotFinite,
    /// All log-probabilities are minus infinity.
    Impossible,
}

impl Defect {
    pub(crate) fn at(self, position: usize) -> Error {
        match self {
            Defect::NotFinite => Error::Distribution { position },
            Defect::Impossible => Error::Impossible { position },
        }
    }
}

/// A query of the distribution of each position.
pub(crate) trait Visit: Sync {
    type Output: Send;

    /// Whether it asks for [`Distribution::logit_offset`].
    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    fn needs_logits(&self) -> bool {
        false
    }

    fn visit<F: Real>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<Self::Output>;

    /// The answers of positions that are visited in parallel. Of several errors it returns the first position's, in
    /// whatever order the threads find them.
    fn answers(answers: impl ParallelIterator<Item = Result<Self::Output>>) -> Result<Vec<Self::Output>> {
        answers.collect::<Vec<_>>().into_iter().collect()
    }
}

/// A distribution whose log-probabilities are already computed.
pub(crate) struct Computed<'a, F> {
    log_probs: &'a [F],
    logit_offset: Option<F>,
}

impl<'a, F> Computed<'a, F> {
    pub(crate) fn of(log_probs: &'a [F]) -> Self {
        Computed { log_probs, logit_offset: None }
    }

    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    pub(crate) fn with_logit_offset(self, logit_offset: Option<F>) -> Self {
        Computed { logit_offset, ..self }
    }
}

impl<F: Real> Distribution<F> for Computed<'_, F> {
    fn vocab(&self) -> usize {
        self.log_probs.len()
    }

    fn defect(&self) -> Option<Defect> {
        // A NaN is not below infinity either.
        if self.log_probs.iter().any(|&x| x.partial_cmp(&F::infinity()) != Some(Ordering::Less)) {
            return Some(Defect::NotFinite);
        }
        let is_possible = self.log_probs.iter().any(|&x| x > F::neg_infinity());
        (!is_possible).then_some(Defect::Impossible)
    }

    fn tile<'a>(&'a self, tile: usize, _: F, _: &'a mut Vec<F>) -> &'a [F] {
        &self.log_probs[tile * TILE..self.log_probs.len().min((tile + 1) * TILE)]
    }

    fn logit_offset(&self) -> Option<F> {
        self.logit_offset
    }
}

/// The dtype in which tensors of `dtype` are computed; an unsupported dtype is an error that names `argument`.
pub(crate) fn accumulation_dtype(argument: &'static str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => Ok(DType::F32),
        DType::F64 => Ok(DType::F64),
        got => Err(Error::DType { argument, expected: "f16, bf16, f32 or f64".into(), got }),
    }
}
