//! A loss on a GPU: the steps of its chunks, its results and its gradients.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::arguments::{self, Argument};
use super::chunks::{is_argmax, matrix, Chunks, Mixed};
use super::device::{Buffer, DeviceMatrix, DeviceProduct, Gpu, BLOCK};
use super::device_scores::DeviceScores;
use super::gradients::DeviceGradients;
use super::objective::DeviceObjective;
use super::own_targets::OwnTargets;
use super::shared_targets::{of_all_ranks, SharedTargets};
use crate::backend::contract::{Gradients, LossResults};
use crate::backend::objective::{GradientSoFar, Objective};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::error::Result;

pub(super) fn loss<G: Gpu>(
    gpu: &G,
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let prepared = DeviceObjective::new(gpu, objective, operands)?;
    let (own, shared) = match objective {
        Objective::Targets(loss) => (OwnTargets::new(operands, loss)?, SharedTargets::new(loss)?),
        Objective::LogProbs { .. } => (None, None),
    };
    let shard = objective.shard();
    let chunks = Chunks::new(gpu, operands, plan)?;
    let targets = match (&own, shared) {
        (Some(own), _) => DeviceTargets::Own(Buffer::new(gpu, own.logits.flatten_all()?)?),
        (None, Some(shared)) => DeviceTargets::Shared(shared),
        (None, None) if prepared.is_soft() => DeviceTargets::Soft(chunks.log_prob_rows()?),
        (None, None) => DeviceTargets::Hard,
    };
    let mut chunks = LossChunks::new(chunks, prepared, targets, objective.so_far(), needs_grad)?;
    chunks.run_loss(plan, needs_grad)?;

    let positions = operands.sizes.positions;
    let of_positions = |padded: &Tensor| padded.narrow(0, 0, positions);
    let LossChunks { objective, results: DeviceResults { nll, losses, argmax }, .. } = &chunks;
    let [nll, losses] = [nll, losses].map(|buffer| &buffer.tensor);
    let Some(ids) = &objective.ids else {
        // The caller has the log-probabilities, and needs only the gradients.
        let (objective, nll) = (of_positions(losses)?, of_positions(nll)?);
        let (sum, count) = (losses.sum_all()?, losses.zeros_like()?.sum_all()?);
        let gradients = chunks.into_gradients(needs_grad)?;
        return Ok(LossResults { objective, nll, sum, count, is_correct: None, gradients });
    };
    let weighted = weigh(&ids.weights.tensor, losses)?;
    // A distribution of NaN has no most probable id. The id of an ignored target is no token's.
    let is_correct = || is_argmax(&argmax.tensor, &ids.ids.tensor, &nll.neg()?)?.narrow(0, 0, positions);
    let is_correct = objective.terms.needs_correct.then(is_correct).transpose()?;
    let (objective, nll) = (of_positions(&weighted)?, of_positions(nll)?);
    let (sum, count) = (weighted.sum_all()?, ids.count.clone());
    let of_own_logits = chunks.own_gradient()?;
    let gradients = chunks.into_gradients(needs_grad)?;
    let gradients = match own.zip(of_own_logits) {
        Some((own, of_logits)) => own.add_to(gradients, &of_logits, operands)?,
        None => gradients,
    };
    let gradients = match shard {
        Some(shard) => of_all_ranks(shard, gradients)?,
        None => gradients,
    };
    Ok(LossResults { objective, nll, sum, count, is_correct, gradients })
}

/// `weights * values`, and zero where the weight is zero, even for an infinite value or NaN.
fn weigh(weights: &Tensor, values: &Tensor) -> candle_core::Result<Tensor> {
    weights.eq(0f32)?.where_cond(&values.zeros_like()?, &(values * weights)?)
}

pub(super) struct LossChunks<'a, G> {
    pub(super) chunks: Chunks<'a, G>,
    pub(super) objective: DeviceObjective,
    pub(super) targets: DeviceTargets<'a>,
    results: DeviceResults,
    gradients: Option<DeviceGradients>,
}

/// What the targets need besides the logits of the vocabulary.
pub(super) enum DeviceTargets<'a> {
    /// Each target is one id of the vocabulary.
    Hard,
    /// All ids have mass: the mixture's log-probabilities, `[positions of a chunk, stride]`.
    Soft(Buffer),
    /// Each target is an entry of its own: its logits, `[positions, K]`.
    Own(Buffer),
    /// Each target is one id of the vocabulary, of which this rank has a part.
    Shared(SharedTargets<'a>),
    /// Ids have mass through the scores of each position.
    Scored(&'a DeviceScores),
}

impl DeviceTargets<'_> {
    /// The log-probabilities of all ids, if masses depend on them.
    fn log_probs(&self) -> Option<&Buffer> {
        match self {
            DeviceTargets::Soft(log_probs) => Some(log_probs),
            DeviceTargets::Scored(scores) => scores.log_probs.as_ref(),
            DeviceTargets::Hard | DeviceTargets::Own(_) | DeviceTargets::Shared(_) => None,
        }
    }
}

/// The results of all positions, `[positions]` each.
struct DeviceResults {
    nll: Buffer,
    losses: Buffer,
    argmax: Buffer,
}

impl<'a, G: Gpu> LossChunks<'a, G> {
    pub(super) fn new(
        chunks: Chunks<'a, G>,
        objective: DeviceObjective,
        targets: DeviceTargets<'a>,
        so_far: Option<&GradientSoFar>,
        needs_grad: NeedsGrad,
    ) -> Result<Self> {
        let positions = chunks.inputs.sizes.positions.max(1);
        let zeros = |n, dtype| Buffer::zeros(chunks.gpu, n, dtype, chunks.logits.tensor.device());
        let gradients = || {
            let so_far = so_far.filter(|_| needs_grad.weight).and_then(GradientSoFar::take);
            let has_own = matches!(targets, DeviceTargets::Own(_));
            DeviceGradients::new(&chunks, has_own, so_far, needs_grad)
        };
        Ok(LossChunks {
            results: DeviceResults {
                nll: zeros(positions, DType::F32)?,
                losses: zeros(positions, DType::F32)?,
                argmax: zeros(positions, DType::U32)?,
            },
            gradients: needs_grad.any().then(gradients).transpose()?,
            targets,
            objective,
            chunks,
        })
    }

    /// The gradient of the logits of targets that are entries of their own, `[positions, K]`.
    fn own_gradient(&self) -> Result<Option<Tensor>> {
        let Sizes { positions, components, .. } = self.chunks.inputs.sizes;
        let Some(own) = self.gradients.as_ref().and_then(|gradients| gradients.own.as_ref()) else { return Ok(None) };
        let gradient = own.tensor.narrow(0, 0, positions * components)?.reshape((positions, components))?;
        Ok(Some(gradient.broadcast_mul(&self.objective.factor)?))
    }

    /// The gradients. The kernels leave the factor of all positions to this step only for the log-priors.
    pub(super) fn into_gradients(self, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Sizes { positions, components, vocab, .. } = self.chunks.inputs.sizes;
        let Some(gradients) = self.gradients else { return Ok(Gradients::default()) };
        let shaped = |gradient: Option<Buffer>, shape: &[usize]| {
            gradient.map(|g| g.tensor.narrow(0, 0, shape.iter().product())?.reshape(shape)).transpose()
        };
        let log_priors = shaped(Some(gradients.log_priors), &[positions, components])?;
        let scaled = |gradient: Tensor| gradient.broadcast_mul(&self.objective.factor);
        let (mut contexts, mut decoder) = (Vec::new(), Vec::new());
        for (part, gradient) in self.chunks.inputs.parts.iter().zip(gradients.parts) {
            contexts.extend(shaped(gradient.contexts, &[positions, components, part.width])?);
            decoder.push(shaped(gradient.decoder, &[vocab, part.width])?);
        }
        let mut decoder = decoder.into_iter();
        Ok(Gradients {
            contexts: if contexts.is_empty() { None } else { Some(Tensor::cat(&contexts, 2)?) },
            log_priors: log_priors.filter(|_| needs_grad.log_priors).map(scaled).transpose()?,
            weight: decoder.next().flatten(),
            adapter: decoder.next().flatten(),
            bias: shaped(gradients.bias.map(|bias| bias.sum), &[vocab])?,
        })
    }

    pub(super) fn arguments(&self, positions: &Range<usize>) -> [Argument; 3] {
        let own = if let DeviceTargets::Own(logits) = &self.targets { Some(logits) } else { None };
        self.chunks.arguments(positions, self.objective.argument(positions.start), own)
    }
}

impl<G: Gpu> Steps for LossChunks<'_, G> {
    fn first_product(&mut self, positions: Range<usize>) -> Result<()> {
        self.chunks.logits(&positions, &self.arguments(&positions))?;
        match &self.targets {
            DeviceTargets::Shared(targets) => self.chunks.join_ranks(targets.shard, &targets.owners[positions]),
            _ => Ok(()),
        }
    }

    fn objective(&mut self, positions: Range<usize>) -> Result<()> {
        let (gpu, Sizes { vocab, components, .. }) = (self.chunks.gpu, self.chunks.inputs.sizes);
        let rows = self.chunks.inputs.rows(&positions);
        let position_blocks = positions.len().div_ceil(BLOCK);
        let arguments @ [logits, objective, row_values] = self.arguments(&positions);
        let [position_count, components] = [positions.len(), components].map(|n| Argument::Int(n as i32));

        let DeviceResults { nll, losses, argmax } = &self.results;
        let [nll, losses, argmax] = [nll, losses, argmax].map(|buffer| buffer.at(positions.start));
        let [of_nll, of_losses] = [nll, losses].map(Argument::Write);
        let position_loss = [objective, row_values, of_nll, of_losses, position_count, components];
        gpu.launch("position_loss", position_blocks, &position_loss)?;

        let soft = if let DeviceTargets::Soft(log_probs) = &self.targets { Some(log_probs) } else { None };
        let log_probs = Argument::Read(self.targets.log_probs().map_or(0, |log_probs| log_probs.at(0)));
        let scored = match &self.targets {
            DeviceTargets::Scored(scores) => scores.argument(&positions),
            _ => arguments::ScoredArgument::default(),
        };
        let scored_values = Argument::Scored(scored);
        if soft.is_some() || self.objective.terms.needs_correct {
            let to = soft.map(|log_probs| (log_probs, 0, self.chunks.stride));
            let argmax = if self.objective.terms.needs_correct { argmax } else { 0 };
            self.chunks.mix(&positions, &arguments, Mixed { log_probs: to, losses, argmax })?;
        }
        if soft.is_some() || matches!(self.targets, DeviceTargets::Scored(_)) {
            let arguments = [logits, objective, row_values, scored_values, log_probs];
            gpu.launch("row_soft_mass", rows.len(), &arguments)?;
        }
        let Some(gradients) = &self.gradients else { return Ok(()) };
        let own = gradients.own.as_ref().map_or(0, |own| own.at(rows.start));
        let [log_priors, own] = [gradients.log_priors.at(rows.start), own].map(Argument::Write);
        let arguments = [objective, row_values, log_priors, own, position_count, components];
        gpu.launch("position_scales", position_blocks, &arguments)?;
        let matrix_of_logits = gradients.logit_matrix(&self.chunks);
        let kernel = format!("row_gradient_{}", matrix_of_logits.dtype.as_str());
        let to = Argument::Write(matrix_of_logits.address);
        gpu.launch(&kernel, rows.len(), &[logits, objective, row_values, scored_values, log_probs, to])?;

        let Some(bias) = &gradients.bias else { return Ok(()) };
        gpu.multiply(&DeviceProduct {
            m: vocab,
            n: 1,
            k: rows.len(),
            lhs: DeviceMatrix { transposed: true, ..matrix_of_logits },
            rhs: matrix(&bias.ones, 0, 1),
            out: bias.sum.at(0),
            out_stride: 1,
            alpha: self.objective.alpha(),
            accumulate: positions.start > 0,
        })
    }

    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let Chunks { gpu, inputs, .. } = &self.chunks;
        let Some(gradients) = &self.gradients else { return Ok(()) };
        let rows = inputs.rows(&positions);
        for (part, gradient) in inputs.parts.iter().zip(&gradients.parts) {
            let Some(contexts) = &gradient.contexts else { continue };
            gpu.multiply(&DeviceProduct {
                m: rows.len(),
                n: part.width,
                k: inputs.sizes.vocab,
                lhs: gradients.logit_matrix(&self.chunks),
                rhs: part.decoder(false),
                out: contexts.at(rows.start * part.width),
                out_stride: part.width,
                alpha: self.objective.alpha(),
                accumulate: false,
            })?;
        }
        Ok(())
    }

    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let Chunks { gpu, inputs, .. } = &self.chunks;
        let Some(gradients) = &self.gradients else { return Ok(()) };
        let rows = inputs.rows(&positions);
        for (part, gradient) in inputs.parts.iter().zip(&gradients.parts) {
            let Some(decoder) = &gradient.decoder else { continue };
            gpu.multiply(&DeviceProduct {
                m: inputs.sizes.vocab,
                n: part.width,
                k: rows.len(),
                lhs: DeviceMatrix { transposed: true, ..gradients.logit_matrix(&self.chunks) },
                rhs: matrix(&part.contexts, rows.start, part.width),
                out: decoder.at(0),
                out_stride: part.width,
                alpha: self.objective.alpha(),
                // Otherwise the first chunk overwrites.
                accumulate: positions.start > 0 || gradient.has_so_far,
            })?;
        }
        Ok(())
    }
}
