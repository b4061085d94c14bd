//! The distributions of a mixture: each result is one of the backend's operations.

use candle_core::{DType, Tensor};

use super::{Distributions, Sealed};
use crate::backend;
use crate::backend::objective::{Objective, Scored, Task};
use crate::backend::operands::NeedsGrad;
use crate::decoding::{DrawQuery, NextToken, NextTokenQuery, Sampler, TokenRequest, TopK};
use crate::error::Result;
use crate::loss::{CountedPositions, Loss, OutputShape, Request};
use crate::mixture::{node, Mixture};
use crate::scores::{candidate_count, LogProbLoss, ScoreLoss, ScoreOptions, Scores};
use crate::tensors::checks::{accumulation_dtype, check_product};
use crate::tensors::transfer;

impl Sealed for Mixture {
    fn shape(&self) -> OutputShape<'_> {
        let operands = self.operands();
        OutputShape { leading: self.leading(), vocab: operands.sizes.vocab, like: &operands.contexts }
    }

    fn select(&self, positions: &[u32]) -> Result<Box<dyn Distributions + '_>> {
        Ok(Box::new(self.with_positions(positions)?))
    }
}

impl Distributions for Mixture {
    fn request_loss(&self, request: &Request) -> Result<Loss> {
        self.masked(request)?.loss_from_request(request)
    }

    fn log_probs_as(&self, dtype: DType) -> Result<Tensor> {
        let operands = self.operands();
        accumulation_dtype("dtype", dtype)?;
        check_product("positions * vocab", &[operands.sizes.positions, operands.sizes.vocab])?;
        let own = operands.contexts.dtype();
        let computed = if dtype == own { own } else { accumulation_dtype("contexts", own)? };
        let planned = backend::plan(operands, Task::LogProbs { needs_grad: node::needs_grad(operands) }, None)?;
        let shape = [self.leading(), &[operands.sizes.vocab]].concat();
        let mut log_probs = backend::log_probs(&planned, computed)?.reshape(shape)?;
        if planned.needs_grad.any() {
            log_probs = node::attach_log_probs(log_probs, planned)?;
        }
        Ok(log_probs.to_dtype(dtype)?)
    }

    fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        options.validate()?;
        if !self.operands().logit_function.is_identity() {
            options.refuse_mean_logit("a mixture with a function of the logits")?;
        }
        let scores = self.distribution_scores(token_ids, options)?;
        let mean_logit = options.mean_logit.then(|| self.mean_logit()).transpose()?;
        Ok(Scores { mean_logit, ..scores })
    }

    fn top_k(&self, k: usize) -> Result<TopK> {
        let operands = self.operands();
        TopK::check_k(k, operands.sizes.vocab)?;
        let (token_ids, log_probs) = backend::top_k(operands, k)?;
        let shape = [self.leading(), &[k]].concat();
        Ok(TopK { token_ids: token_ids.reshape(shape.as_slice())?, log_probs: log_probs.reshape(shape)? })
    }

    fn sample(&self, sampler: &mut Sampler) -> Result<Tensor> {
        let mut mixture = self.tempered(sampler)?;
        if sampler.sampling().ancestral {
            mixture = mixture.draw_component(sampler)?;
        }
        let operands = mixture.operands();
        let uniform = sampler.uniform(operands.sizes.positions);
        let ids = backend::visit(operands, &DrawQuery { sampling: sampler.sampling(), uniform: &uniform })?;
        transfer::to_device(ids, self.leading(), operands.contexts.device())
    }

    fn next_tokens_per_position(&self, requests: &[&[&TokenRequest]]) -> Result<Vec<Vec<NextToken>>> {
        let operands = self.operands();
        backend::visit(operands, &NextTokenQuery::new(requests, operands.sizes.positions, operands.sizes.vocab)?)
    }

    fn loss_from_scores(&self, loss: &ScoreLoss) -> Result<(Loss, Tensor)> {
        let n = candidate_count("token_ids", &loss.token_ids, self.leading())?;
        let scored = loss.options.scored(loss.token_ids.reshape((self.operands().sizes.positions, n))?);
        let objective = Objective::Scores { scored, terms: loss.terms.clone() };
        self.loss_from_terms(objective, loss.options.workspace_bytes, loss.counted.as_ref(), n > 0)
    }

    fn loss_from_log_probs(&self, loss: &LogProbLoss) -> Result<(Loss, Tensor)> {
        let objective = Objective::AllLogProbs(loss.terms.clone());
        self.loss_from_terms(objective, loss.workspace_bytes, loss.counted.as_ref(), true)
    }
}

impl Mixture {
    /// Computes the scores that are functions of the distribution: all but the mean logit.
    fn distribution_scores(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        let leading = self.leading();
        let n = candidate_count("token_ids", token_ids, leading)?;
        if token_ids.dims() == leading && options.is_plain() {
            return Scores::from_loss(self.loss(token_ids, &options.loss_options()));
        }
        let operands = self.operands();
        let scored = options.scored(token_ids.reshape((operands.sizes.positions, n))?);
        let plan = |needs_grad| backend::plan(operands, scored.task(operands, needs_grad)?, options.workspace_bytes);
        // The backward pass must fit the budget too.
        let (gradients, value) = (plan(node::needs_grad(operands))?, plan(NeedsGrad::default())?);
        let (mut scores, is_argmax) = backend::scores(&value, &scored)?;
        let is_argmax = is_argmax.map(|is_argmax| is_argmax.reshape(token_ids.shape())).transpose()?;
        let scored = Scored { needs_argmax: false, ..scored };
        if gradients.needs_grad.any() {
            scores = node::attach_scores(scores, gradients, scored)?;
        }
        Ok(Scores { is_argmax, ..Scores::from_columns(&scores, token_ids.dims(), leading, options)? })
    }

    /// Computes a loss that is a function of scores or of all log-probabilities, and the value of its terms at each
    /// position.
    fn loss_from_terms(
        &self,
        objective: Objective,
        workspace_bytes: Option<usize>,
        counted: Option<&CountedPositions>,
        has_nll: bool,
    ) -> Result<(Loss, Tensor)> {
        let operands = self.operands();
        let task = objective.task(operands, node::needs_grad(operands))?;
        let planned = backend::plan(operands, task, workspace_bytes)?;
        let mut results = backend::loss(&planned, &objective)?;
        let values = results.objective.clone();
        if !has_nll {
            // Without ids there is no log-probability.
            results.nll = results.nll.zeros_like()?;
        }
        if let Some(counted) = counted {
            // The weights come in here, because the objective of each position must not have its weight: a weight that
            // underflows could not be divided out of it.
            results.sum = counted.weighted_sum(&values)?;
        }
        Ok((self.loss_from_results(results, planned, objective)?, values))
    }
}
