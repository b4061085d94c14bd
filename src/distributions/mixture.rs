//! The distributions of a mixture: each result is one of the backend's operations.

use candle_core::{DType, Tensor};

use super::{Distributions, Sealed};
use crate::backend;
use crate::backend::contract::LossResults;
use crate::backend::objective::Scored;
use crate::backend::operands::{accumulation_dtype, NeedsGrad};
use crate::backend::task::Task;
use crate::decoding::{DrawQuery, NextToken, NextTokenQuery, Sampler, TokenRequest, TopK};
use crate::error::Result;
use crate::loss::{CountedPositions, Loss, LossOptions, OutputShape, Reduction, Request};
use crate::mixture::{node, Mixture};
use crate::scores::{candidate_count, LogProbLoss, ScoreLoss, ScoreOptions, Scores};
use crate::tensors::autograd::Leaf;
use crate::tensors::checks::check_product;
use crate::tensors::transfer;

impl Sealed for Mixture {
    fn shape(&self) -> OutputShape<'_> {
        let operands = self.operands();
        OutputShape { leading: self.leading(), vocab: operands.sizes.vocab, like: &operands.contexts }
    }

    fn name(&self) -> &'static str {
        "a mixture"
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
        let needs_grad = node::needs_grad(operands);
        let plan = backend::plan(operands, Task::for_log_probs(needs_grad), None)?;
        let mut log_probs = backend::log_probs(operands, computed, &plan)?;
        if needs_grad.any() {
            log_probs = node::attach_log_probs(log_probs, operands.clone(), needs_grad, plan)?;
        }
        Ok(log_probs.reshape([self.leading(), &[operands.sizes.vocab]].concat())?.to_dtype(dtype)?)
    }

    fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        options.validate()?;
        let leading = self.leading();
        let n = candidate_count("token_ids", token_ids, leading)?;
        let is_plain = !options.entropy && !options.outside && options.temperature == 1.0;
        if token_ids.dims() == leading && is_plain {
            let loss_options = LossOptions::new().with_reduction(Reduction::None).with_correct(options.is_argmax);
            let loss_options = LossOptions { workspace_bytes: options.workspace_bytes, ..loss_options };
            return Scores::from_loss(self.loss(token_ids, &loss_options));
        }
        let operands = self.operands().clone();
        let scored = options.scored(token_ids.reshape((operands.sizes.positions, n))?);
        let needs_grad = node::needs_grad(&operands);
        let plan = |needs_grad| {
            let task = Task::for_scores(&scored, &operands, needs_grad)?;
            backend::plan(&operands, task, options.workspace_bytes)
        };
        // The backward pass must fit the budget too.
        let (gradient_plan, value_plan) = (plan(needs_grad)?, plan(NeedsGrad::default())?);
        let (mut scores, is_argmax) = backend::scores(&operands, &scored, &value_plan)?;
        let is_argmax = is_argmax.map(|is_argmax| is_argmax.reshape(token_ids.shape())).transpose()?;
        let scored = Scored { needs_argmax: false, ..scored };
        let variable = Some(operands.weight.clone()).filter(Tensor::is_variable);
        if needs_grad.any() {
            scores = node::attach_scores(scores, operands, scored, needs_grad, gradient_plan)?;
        }
        let leaves = variable.map(|variable| Leaf { node: scores.id(), variable }).into_iter().collect();
        Ok(Scores { is_argmax, leaves, ..Scores::from_columns(&scores, token_ids.dims(), leading, options)? })
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

    fn next_tokens(&self, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
        let operands = self.operands();
        backend::visit(operands, &NextTokenQuery::new(requests, operands.sizes.positions, operands.sizes.vocab)?)
    }

    fn loss_from_scores(&self, loss: &ScoreLoss) -> Result<(Loss, Tensor)> {
        let (operands, needs_grad) = (self.operands(), node::needs_grad(self.operands()));
        let n = candidate_count("token_ids", &loss.token_ids, self.leading())?;
        let scored = loss.options.scored(loss.token_ids.reshape((operands.sizes.positions, n))?);
        let task = Task::for_scores(&scored, operands, needs_grad)?;
        let plan = backend::plan(operands, task, loss.options.workspace_bytes)?;
        let terms = loss.terms.clone();
        let results = backend::score_loss(operands, &scored, &*terms, needs_grad, &plan)?;
        let nll = match n {
            // Without ids there is no log-probability.
            0 => results.nll.zeros_like()?,
            _ => results.nll.clone(),
        };
        let (values, results) = (results.objective.clone(), weighted(results, loss.counted.as_ref())?);
        let loss = self.loss_from_results(LossResults { nll, ..results }, needs_grad, move |operands| {
            Ok(backend::score_loss(operands, &scored, &*terms, needs_grad, &plan)?.gradients)
        })?;
        Ok((loss, values))
    }

    fn loss_from_log_probs(&self, loss: &LogProbLoss) -> Result<(Loss, Tensor)> {
        let (operands, needs_grad) = (self.operands(), node::needs_grad(self.operands()));
        let plan = backend::plan(operands, Task::for_log_prob_terms(needs_grad), loss.workspace_bytes)?;
        let terms = loss.terms.clone();
        let results = backend::log_prob_loss(operands, &*terms, needs_grad, &plan)?;
        let (values, results) = (results.objective.clone(), weighted(results, loss.counted.as_ref())?);
        let loss = self.loss_from_results(results, needs_grad, move |operands| {
            Ok(backend::log_prob_loss(operands, &*terms, needs_grad, &plan)?.gradients)
        })?;
        Ok((loss, values))
    }
}

/// Sums the objectives with the weights of the counted positions, if there are any. They come in here, because the objective
/// of each position must not have its weight: a weight that underflows could not be divided out of it.
fn weighted(results: LossResults, counted: Option<&CountedPositions>) -> Result<LossResults> {
    match counted {
        Some(counted) => Ok(LossResults { sum: counted.weighted_sum(&results.objective)?, ..results }),
        None => Ok(results),
    }
}
