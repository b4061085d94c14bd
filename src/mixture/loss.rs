//! The loss of a mixture: over all ids by the fused operation, or over a sample of the vocabulary.

use candle_core::Tensor;

use super::node::{self, needs_grad, KnownGradients};
use super::sample::Sample;
use super::{sampled_softmax, shard_loss, Mixture};
use crate::backend;
use crate::backend::objective::{GradScale, LossResults, Objective, TargetKind, TargetLoss, Task};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::{Plan, Planned};
use crate::backend::weight::Weight;
use crate::error::{Error, OptionName, Result};
use crate::loss::{DecoderRows, Loss, LossOptions, Reduction, Request, SampledLoss, UncheckedTargets};
use crate::tensors::autograd::{into_variable, variable_ids};
use crate::tensors::checks::accumulation_dtype;

impl Mixture {
    /// Sets the contexts of ignored positions to zero if [`Request::needs_mask`] says so.
    pub(crate) fn masked(&self, request: &Request) -> Result<Mixture> {
        let Operands { contexts, sizes: Sizes { components, context_dim, .. }, .. } = &self.operands;
        let contexts = if request.needs_mask() {
            let unflattened = contexts.reshape([&self.leading[..], &[*components, *context_dim]].concat())?;
            request.positions.mask(&unflattened)?.reshape(contexts.shape())?
        } else {
            contexts.clone()
        };
        Ok(self.with_operands(Operands { contexts, ..self.operands.clone() }))
    }

    /// Computes the loss from a checked request: over a sample if the options ask for a sampled loss, otherwise over
    /// all ids. The contexts must be masked at ignored positions, see
    /// [`Positions::mask`](crate::loss::Positions::mask).
    pub(crate) fn loss_from_request(&self, request: &Request) -> Result<Loss> {
        let Some(loss) = request.options.sampled_step() else { return self.exact_loss(request) };
        if request.options.decoder_rows {
            let unsupported = |head| Err(Error::Unsupported { option: OptionName::DecoderRows, head });
            if self.operands.weight.is_quantised() {
                return unsupported("a quantised decoder");
            }
            if self.operands.adapter.is_some() {
                return unsupported("a decoder with an adapter");
            }
        }
        let Operands { sizes, contexts, logit_function, .. } = &self.operands;
        match Sample::new(loss, contexts, sizes.vocab, *logit_function, request)? {
            Some(sample) => self.sampled_loss(&sample, request),
            None => self.exact_loss(request),
        }
    }

    /// Computes the loss over all ids.
    fn exact_loss(&self, request: &Request) -> Result<Loss> {
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        let loss = self.fused_loss(request.target_loss(dtype)?, request)?;
        let unchecked = (!request.targets.device().is_cpu()).then(|| UncheckedTargets {
            targets: request.targets.clone(),
            ignore_index: request.options.positions.ignore_index,
            vocab_size: self.operands.sizes.vocab,
        });
        Ok(Loss { unchecked, ..loss })
    }

    /// Computes the loss by the fused operation, with gradients if the options ask for them, as a node of the graph.
    pub(super) fn fused_loss(&self, objective: TargetLoss, request: &Request) -> Result<Loss> {
        let options = request.options;
        let operands = Operands { precision: self.loss_precision(options), ..self.operands.clone() };
        let needs_grad = if options.train { needs_grad(&operands) } else { NeedsGrad::default() };
        // If there is no reduction, the upstream gradient is known only in the backward pass.
        let now = if options.positions.reduction == Reduction::None { NeedsGrad::default() } else { needs_grad };
        // The backward pass must fit the budget too: a budget that is too small for it is an error before any work.
        let plan = |needs_grad| {
            let planned = backend::plan(&operands, objective.task(needs_grad), options.workspace_bytes);
            match &objective.shard {
                Some(shard) => shard.agreed(planned),
                None => planned,
            }
        };
        let gradients = plan(needs_grad)?;
        let planned = if now == needs_grad { gradients.clone() } else { plan(now)? };
        // The rows of a sample are another variable in each step, or none.
        let variable = operands.weight.variable().filter(|_| now.weight && objective.own_shifts.is_none());
        let so_far = options.gradient_sum.as_ref().zip(variable).map(|(sum, variable)| sum.so_far(&variable));
        let is_sum = so_far.is_some();
        let with_sum = TargetLoss { so_far, ..objective.clone() };
        let results = backend::loss(&planned, &Objective::Targets(with_sum))?;

        let objectives = || Ok(results.objective.reshape(self.leading.as_slice())?);
        let value = request.positions.value(&results.sum, &results.count, results.mean.as_ref(), objectives)?;
        let value = if needs_grad.any() {
            let known = now.any().then_some(KnownGradients { gradients: results.gradients, is_sum });
            let compute = move |planned: &Planned, upstream: Option<Tensor>| {
                let mut objective = objective.clone();
                // Ranks that count correct positions compute in two passes, as their plan says.
                objective.terms.needs_correct &= objective.shard.is_some();
                if let Some(shard) = &objective.shard {
                    shard_loss::agree_on_backward(shard, upstream.as_ref())?;
                }
                if let Some(upstream) = upstream {
                    objective.scale = GradScale::Upstream(upstream);
                }
                Ok(backend::loss(planned, &Objective::Targets(objective))?.gradients)
            };
            node::attach_loss(value, gradients, options.positions.reduction, known, Box::new(compute))?
        } else {
            value
        };
        let nll = results.nll.reshape(self.leading.as_slice())?;
        let loss = Loss { is_evaluation: !options.train, ..Loss::new(value, results.sum, results.count, nll) };
        match results.is_correct {
            Some(is_correct) => loss.with_is_correct(is_correct.reshape(self.leading.as_slice())?),
            None => Ok(loss),
        }
    }

    /// Computes the loss over a sample from the decoder's rows of its ids, which are variables if the options say so.
    fn sampled_loss(&self, sample: &Sample, request: &Request) -> Result<Loss> {
        let operands = self.operands.select_ids(&sample.token_ids)?;
        if !request.options.decoder_rows {
            return self.with_operands(operands).loss_over_sample(sample, request);
        }
        let whole = self.operands.weight.tensor()?;
        let weight = into_variable(operands.weight.tensor()?.detach())?;
        let bias = operands.bias.as_ref().map(|bias| into_variable(bias.detach())).transpose()?;
        let variables =
            Operands { weight: Weight::Dense(weight.as_tensor().clone()), bias: bias.as_deref().cloned(), ..operands };
        let loss = self.with_operands(variables).loss_over_sample(sample, request)?;
        let decoder_rows = Some(DecoderRows { token_ids: sample.token_ids.clone(), weight, bias });
        let decoder = [Some(whole), self.operands.bias.as_ref()];
        // These variables need no gradient, because the rows have it.
        let spared = decoder.into_iter().flatten().flat_map(variable_ids).collect();
        Ok(Loss { decoder_rows, spared, ..loss })
    }

    /// Computes the loss over a sample, whose ids are the whole vocabulary of this mixture.
    pub(crate) fn loss_over_sample(&self, sample: &Sample, request: &Request) -> Result<Loss> {
        let operands = self.operands.join_adapter()?;
        match sample.loss {
            SampledLoss::Softmax(_) => {
                let (operands, objective) = sampled_softmax::operands_and_loss(operands, sample, request)?;
                self.with_operands(operands).fused_loss(objective, request)
            }
            SampledLoss::Nce(_) => request.loss_from_nll(&sample.nce(&operands)?.reshape(self.leading.as_slice())?),
        }
    }

    /// Returns how [`Distributions::loss`](crate::Distributions::loss) would split the work with these options.
    ///
    /// # Errors
    ///
    /// If an option is out of its range, or the budget cannot hold one position.
    ///
    /// # Examples
    ///
    /// The kernels use the threads of rayon's current pool:
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::{LossOptions, Mixture};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let contexts = Tensor::randn(0f32, 1., (8, 1, 16), &Device::Cpu)?; // 8 positions, K = 1, d = 16
    /// let weight = Tensor::randn(0f32, 1., (1000, 16), &Device::Cpu)?;
    /// let mixture = Mixture::new(&contexts, None, &weight, None)?;
    /// let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build()?;
    /// let plan = pool.install(|| mixture.plan(&LossOptions::default()))?;
    /// assert_eq!(plan.threads, 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn plan(&self, options: &LossOptions) -> Result<Plan> {
        options.validate()?;
        let needs_grad = if options.train { needs_grad(&self.operands) } else { NeedsGrad::default() };
        let mut operands = Operands { precision: self.loss_precision(options), ..self.operands.clone() };
        let mut targets = TargetKind::Ids;
        if let Some(SampledLoss::Softmax(negatives)) = options.sampled_step() {
            operands.sizes = sampled_softmax::sizes(operands.sizes, negatives);
            targets = TargetKind::Own;
        }
        let task = Task::Loss { terms: options.terms(), targets, needs_grad };
        Ok(backend::plan(&operands, task, options.workspace_bytes)?.plan)
    }

    /// Makes the loss whose value is the sum of these results of an objective. The first backward pass takes their
    /// gradients; a second one computes them again.
    pub(crate) fn loss_from_results(
        &self,
        results: LossResults,
        planned: Planned,
        objective: Objective,
    ) -> Result<Loss> {
        let value = results.sum.clone();
        let value = if planned.needs_grad.any() {
            let known = Some(KnownGradients { gradients: results.gradients, is_sum: false });
            let compute = move |planned: &Planned, _: Option<Tensor>| Ok(backend::loss(planned, &objective)?.gradients);
            node::attach_loss(value, planned, Reduction::Sum, known, Box::new(compute))?
        } else {
            value
        };
        let nll = results.nll.reshape(self.leading.as_slice())?;
        Ok(Loss::new(value, results.sum, results.count, nll))
    }
}
