//! A loss of the user's own: a function of log-probabilities, entropies and masses outside the ids, chunk by chunk.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use super::chunk_terms::{ChunkScores, ChunkTerms};
use super::node::needs_grad;
use super::Mixture;
use crate::backend;
use crate::backend::objective::{LossResults, Objective, ScoreTerms};
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, OptionName, Result};
use crate::loss::Loss;
use crate::scores::{candidate_count, ScoreOptions};

impl Mixture {
    /// Computes the sum of values that depend on the log-probabilities of token ids, on the entropy and on the mass
    /// outside the ids at each position, with gradients from three products. `terms` gets the scores of a chunk of
    /// positions and returns the values and their derivatives, before the gradient of the chunk's logits replaces them.
    /// (A function of scores from [`Mixture::score`] costs a fourth product.)
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the contexts, or `[.., n]` for `n` candidates at each position;
    ///   u8, u32 or i64
    /// - `terms`: from [`ChunkScores`] to [`ChunkTerms`], whose fields have the shapes
    /// - [`Loss::nll`]: `[..]`, that of the first id at each position
    ///
    /// # Errors
    ///
    /// The errors of the ids are those of the targets of [`Mixture::loss`]. It is an error too if an option is out of
    /// range, or if `terms` fails or returns other shapes. [`Error::Unsupported`] for [`ScoreOptions::is_argmax`],
    /// which has no derivative.
    ///
    /// # Examples
    ///
    /// The policy gradient of REINFORCE (Williams: Simple Statistical Gradient-Following Algorithms for Connectionist
    /// Reinforcement Learning. Machine Learning 8, 1992) with an entropy bonus:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::{ChunkTerms, ScoreOptions};
    /// use mos_head::Mixture;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let mixture = Mixture::new(&contexts, None, &weight, None)?;
    /// let token_ids = Tensor::new(&[3u32, 14, 15, 92], &Device::Cpu)?;
    /// let rewards = Tensor::new(&[1f32, 0., 0., 1.], &Device::Cpu)?;
    /// let options = ScoreOptions::new().with_entropy(true);
    /// let loss = mixture.score_loss(&token_ids, &options, move |scores| {
    ///     let rewards = rewards.narrow(0, scores.positions.start, scores.positions.len())?;
    ///     let values = ((&rewards * &scores.log_prob)?.neg()? - (&scores.entropy * 0.01)?)?;
    ///     let by_entropy = scores.entropy.zeros_like()?.affine(1.0, -0.01)?;
    ///     Ok(ChunkTerms::new(values, rewards.neg()?).with_by_entropy(by_entropy))
    /// })?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The divergence `sum_v T(v) (log T(v) - log P(v))` from a teacher T whose most probable ids are known:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::score::{ChunkTerms, ScoreOptions};
    /// use mos_head::Mixture;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Var::randn(0f32, 1., (4, 1, 8), &Device::Cpu)?; // 4 positions, K = 1, d = 8
    /// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let student = Mixture::new(&contexts, None, &weight, None)?;
    /// let teacher = Mixture::new(&contexts.detach().affine(2.0, 0.0)?, None, &weight, None)?.top_k(16)?;
    /// let log_teacher = teacher.log_probs.clone(); // [4, 16]
    /// let loss = student.score_loss(&teacher.token_ids, &ScoreOptions::new(), move |scores| {
    ///     let log_teacher = log_teacher.narrow(0, scores.positions.start, scores.positions.len())?;
    ///     let p = log_teacher.exp()?;
    ///     let values = ((log_teacher - scores.log_prob)? * &p)?.sum(1)?;
    ///     Ok(ChunkTerms::new(values, p.neg()?))
    /// })?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&contexts).is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn score_loss(
        &self,
        token_ids: &Tensor,
        options: &ScoreOptions,
        terms: impl Fn(ChunkScores) -> Result<ChunkTerms> + Send + Sync + 'static,
    ) -> Result<Loss> {
        Ok(self.score_loss_and_values(token_ids, options, Ok, terms)?.0)
    }

    /// Computes the loss as [`Mixture::score_loss`] does, and returns beside it the value that `terms` gives to each
    /// position, `[positions]`. `reduce` may change the results before both are read from them, such as by a weight.
    pub(super) fn score_loss_and_values(
        &self,
        token_ids: &Tensor,
        options: &ScoreOptions,
        reduce: impl FnOnce(LossResults) -> Result<LossResults>,
        terms: impl Fn(ChunkScores) -> Result<ChunkTerms> + Send + Sync + 'static,
    ) -> Result<(Loss, Tensor)> {
        options.validate()?;
        if options.is_argmax {
            return Err(Error::Unsupported { option: OptionName::IsArgmax, head: "a loss of scores" });
        }
        let n = candidate_count("token_ids", token_ids, &self.leading)?;
        let has_candidates = token_ids.dims() != self.leading;
        let operands = &self.operands;
        let token_ids = token_ids.reshape((operands.sizes.positions, n))?;
        let scored = options.scored(token_ids);
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        let terms: ScoreTerms = Arc::new(move |positions: Range<usize>, scores: &Tensor| {
            let log_prob = scores.narrow(1, 0, n)?;
            let log_prob = if has_candidates { log_prob } else { log_prob.squeeze(1)? };
            let column = |i| scores.narrow(1, n + i, 1)?.squeeze(1);
            let (entropy, log_outside) = (column(0)?, column(1)?);
            let chunk = ChunkScores { positions, log_prob, entropy, log_outside };
            let (values, derivatives) = join_derivatives(terms(chunk.clone())?, n, &chunk.log_prob, &chunk.entropy)?;
            Ok((values.detach().to_dtype(dtype)?, derivatives.to_dtype(dtype)?.detach()))
        });
        let objective = Objective::Scores { scored, terms };
        let task = objective.task(operands, needs_grad(operands))?;
        let planned = backend::plan(operands, task, options.workspace_bytes)?;
        let results = reduce(backend::loss(&planned, &objective)?)?;
        let nll = match n {
            // Without ids there is no log-probability.
            0 => results.nll.zeros_like()?,
            _ => results.nll.clone(),
        };
        let (values, results) = (results.objective.clone(), LossResults { nll, ..results });
        Ok((self.loss_from_results(results, planned, objective)?, values))
    }
}

/// Checks the shapes of a chunk's terms against those of its scores for `n` ids, and returns the values, `[chunk]`, and
/// all derivatives as columns, `[chunk, n + 2]`.
fn join_derivatives(terms: ChunkTerms, n: usize, log_prob: &Tensor, entropy: &Tensor) -> Result<(Tensor, Tensor)> {
    let zero = entropy.zeros_like()?;
    let ChunkTerms { values, by_log_prob, by_entropy, by_outside } = terms;
    let (by_entropy, by_outside) = (by_entropy.unwrap_or(zero.clone()), by_outside.unwrap_or(zero));
    for (argument, tensor, expected) in [
        ("values", &values, entropy),
        ("by_log_prob", &by_log_prob, log_prob),
        ("by_entropy", &by_entropy, entropy),
        ("by_outside", &by_outside, entropy),
    ] {
        if tensor.dims() != expected.dims() {
            return Err(Error::shape(argument, format!("{:?}", expected.dims()), tensor.dims()));
        }
    }
    let by_log_prob = by_log_prob.reshape((entropy.dim(0)?, n))?;
    let derivatives = [by_log_prob, by_entropy.unsqueeze(1)?, by_outside.unsqueeze(1)?];
    Ok((values, Tensor::cat(&derivatives, 1)?))
}
