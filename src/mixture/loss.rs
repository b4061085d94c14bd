//! The loss of a mixture: over all ids by the fused operation, or over a sample of the vocabulary.

use candle_core::{Tensor, TensorId};

use super::node::{self, needs_grad, KnownGradients};
use super::sample::Sample;
use super::sampled_softmax;
use super::{shard_loss, Mixture};
use crate::backend;
use crate::backend::objective::{GradScale, Objective, TargetKind, TargetLoss, Task};
use crate::backend::operands::{accumulation_dtype, NeedsGrad, Operands, Sizes};
use crate::backend::plan::Plan;
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, LossOptions, Reduction, Request, SampledLoss, UncheckedTargets};
use crate::tensors::autograd::variable_ids;
use crate::tensors::id_lists::matrix_rows;

impl Mixture {
    /// Computes the loss of the targets and, in the same three matrix products, the gradients of contexts, priors,
    /// weight and bias as far as they depend on a variable. The logits of one chunk of positions are held at a time:
    /// see [`Plan`].
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If the shape or dtype of the targets is wrong, a target is not in the vocabulary, or an option is out of range.
    /// On a GPU a target that is not in the vocabulary makes its loss NaN instead, because reading it would wait for
    /// the device; [`Loss::sum_and_count`] waits and names the target.
    ///
    /// # Numerics
    ///
    /// The loss is computed in f32 (f64 for f64) for every dtype, in log space, without a floor under the
    /// probabilities. On CUDA the gradient of the logits is rounded to the dtype of the contexts, as an operand of the
    /// products. A target of probability zero has an infinite loss and, for K > 1, NaN gradients. With label smoothing,
    /// ids of probability zero make the loss infinite and are skipped in the gradient. If a logit of a position is NaN
    /// or plus infinity, or all are minus infinity, the loss of this position and all gradients are NaN; the losses of
    /// other positions are not affected. If the priors of a position sum to more than one, a target may have a
    /// probability above one: its negative log-likelihood is then reported as zero, while the gradient remains the
    /// formula's. On the CPU, gradients of logits below 1e-30 (f64: 1e-290) are flushed to zero: products with
    /// subnormal numbers are up to 20 times slower on some processors.
    pub fn loss(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let Operands { contexts, sizes, .. } = &self.operands;
        let request = Request::new(&self.leading, Some(sizes.vocab), contexts, targets, options)?;
        self.masked(&request)?.loss_from_request(&request)
    }

    /// Sets the contexts of ignored positions to zero if [`Request::needs_mask`] says so.
    pub(super) fn masked(&self, request: &Request) -> Result<Mixture> {
        let Operands { contexts, sizes: Sizes { components, context_dim, .. }, .. } = &self.operands;
        let contexts = if request.needs_mask() {
            let unflattened = contexts.reshape([&self.leading[..], &[*components, *context_dim]].concat())?;
            request.mask(&unflattened)?.reshape(contexts.shape())?
        } else {
            contexts.clone()
        };
        Ok(self.with_operands(Operands { contexts, ..self.operands.clone() }))
    }

    /// Computes the loss from a checked request. The contexts must be masked at ignored positions, see
    /// [`Request::mask`].
    pub(crate) fn loss_from_request(&self, request: &Request) -> Result<Loss> {
        if request.options.sampled_step().is_some() {
            return self.sampled_loss(|ids| matrix_rows(&self.operands.weight, ids), request);
        }
        let loss = self.exact_loss(request)?;
        let unchecked = (!request.targets.device().is_cpu()).then(|| UncheckedTargets {
            targets: request.targets.clone(),
            ignore_index: request.options.ignore_index,
            vocab_size: self.operands.sizes.vocab,
        });
        Ok(Loss { unchecked, ..loss })
    }

    /// Computes the loss over all ids, which an evaluation of a sampled loss has too.
    fn exact_loss(&self, request: &Request) -> Result<Loss> {
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        self.fused_loss(request.target_loss(dtype)?, request)
    }

    /// Computes the loss by the fused operation, with gradients if the options ask for them, as a node of the graph.
    pub(super) fn fused_loss(&self, objective: TargetLoss, request: &Request) -> Result<Loss> {
        let options = request.options;
        let operands = Operands { precision: self.loss_precision(options), ..self.operands.clone() };
        let needs_grad = if options.train { needs_grad(&operands) } else { NeedsGrad::default() };
        // If there is no reduction, the upstream gradient is known only in the backward pass.
        let now = if options.reduction == Reduction::None { NeedsGrad::default() } else { needs_grad };
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
        let so_far = options.gradient_sum.as_ref().filter(|_| now.weight && operands.weight.is_variable());
        let so_far = so_far.map(|sum| sum.so_far(&operands.weight));
        let is_sum = so_far.is_some();
        let with_sum = TargetLoss { so_far, ..objective.clone() };
        let results = backend::loss(&planned, &Objective::Targets(with_sum))?;

        let objectives = || Ok(results.objective.reshape(self.leading.as_slice())?);
        let value = request.value(&results.sum, &results.count, objectives)?;
        let value = if needs_grad.any() {
            let known = now.any().then_some(KnownGradients { gradients: results.gradients, is_sum });
            node::attach_loss(value, gradients, options.reduction, known, move |planned, upstream| {
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
            })?
        } else {
            value
        };
        let nll = results.nll.reshape(self.leading.as_slice())?;
        let loss = Loss {
            decoder: Some(self.operands.weight.clone()).filter(Tensor::is_variable),
            is_evaluation: !options.train,
            ..Loss::new(value, results.sum, results.count, nll)
        };
        match results.is_correct {
            Some(is_correct) => loss.with_is_correct(is_correct.reshape(self.leading.as_slice())?),
            None => Ok(loss),
        }
    }

    /// Computes the loss of a training step over a sample of the vocabulary. The contexts must be masked at ignored
    /// positions. `rows` returns the weight's rows of some ids `[n]`.
    pub(crate) fn sampled_loss(&self, rows: impl Fn(&Tensor) -> Result<Tensor>, request: &Request) -> Result<Loss> {
        let Some(sampled) = request.options.sampled_step() else { return self.loss_from_request(request) };
        self.check_sampled(sampled, request)?;
        if request.options.decoder_rows && self.operands.adapter.is_some() {
            return Err(Error::Unsupported { option: OptionName::DecoderRows, head: "a decoder with an adapter" });
        }
        if request.positions() == 0 {
            return self.exact_loss(request);
        }
        let (SampledLoss::Softmax(negatives) | SampledLoss::Nce(negatives)) = sampled;
        let sample = Sample::new(&self.operands, rows, negatives, request)?;
        let loss = match sampled {
            SampledLoss::Softmax(_) => {
                let (operands, objective) = sampled_softmax::operands_and_loss(&sample, request)?;
                self.with_operands(operands).fused_loss(objective, request)?
            }
            SampledLoss::Nce(_) => request.loss_from_nll(&sample.nce()?.reshape(self.leading.as_slice())?)?,
        };
        Ok(Loss { decoder_rows: sample.decoder_rows, spared: self.spared(request.options), ..loss })
    }

    /// Returns the variables of the decoder, if a sampled loss has the gradients of the rows that it reads instead.
    fn spared(&self, options: &LossOptions) -> Vec<TensorId> {
        let decoder = [Some(&self.operands.weight), self.operands.bias.as_ref()];
        decoder.into_iter().flatten().filter(|_| options.decoder_rows).flat_map(variable_ids).collect()
    }

    /// Returns an error if the options, or the mixture itself, are not supported by the loss over a sample.
    fn check_sampled(&self, sampled: &SampledLoss, request: &Request) -> Result<()> {
        match sampled {
            SampledLoss::Softmax(_) => {
                let head = "the sampled softmax";
                request.check_support(head, &[OptionName::SampledSoftmax, OptionName::DecoderRows])?;
                match self.operands.softcap {
                    Some(_) => Err(Error::Unsupported { option: OptionName::Softcap, head }),
                    None => Ok(()),
                }
            }
            SampledLoss::Nce(_) => {
                request.check_support("NCE", &[OptionName::Nce, OptionName::DecoderRows])?;
                match self.operands.sizes.components {
                    1 => Ok(()),
                    _ => Err(Error::Unsupported { option: OptionName::Nce, head: "a mixture of several softmaxes" }),
                }
            }
        }
    }

    /// Returns how [`Mixture::loss`] would split the work with these options.
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
}
