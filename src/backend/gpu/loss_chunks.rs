//! The chunks of a loss on a GPU: the steps of each, its results and its gradients.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::arguments::{Read, RowsArgument, ScoredArgument, Write};
use super::chunks::{is_argmax, ChunkArguments, Chunks, DeviceOperands, LogProbRows, MixtureResults};
use super::device::{Buffer, DeviceMatrix, DeviceProduct, Gpu, BLOCK, WARPS};
use super::device_scores::DeviceScores;
use super::gradients::{BiasGradient, DeviceGradients, LogitGradient, Sums};
use super::kernels::{
    KernelArguments, LogPriorGradientsArguments, PositionLossArguments, RowExponentialsArguments, RowFactorsArguments,
    RowGradientArguments, RowSoftMassArguments, RowTargetGradientArguments, WeighLossesArguments,
};
use super::objective::DeviceObjective;
use super::plan::has_relative_exponentials;
use super::shared_targets::SharedTargets;
use super::target_ids::DeviceTargetIds;
use crate::backend::objective::{GradientSoFar, Gradients, LossResults};
use crate::backend::operands::{Precision, Sizes};
use crate::backend::plan::Steps;
use crate::error::Result;

/// The chunks of a loss.
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

    /// The kernels' argument for the candidates of a chunk's positions.
    fn scored(&self, positions: &Range<usize>) -> ScoredArgument {
        match self {
            DeviceTargets::Scored(scores) => scores.argument(positions),
            _ => ScoredArgument::default(),
        }
    }
}

/// The results of all positions, `[positions]` each.
struct DeviceResults {
    nll: Buffer,
    losses: Buffer,
    argmax: Buffer,
}

/// The losses of all positions times their weights, and what a reduction makes of them.
struct Weighed {
    objectives: Tensor,
    sum: Tensor,
    /// The sum over the denominator of the mean.
    mean: Tensor,
}

impl<'a, G: Gpu> LossChunks<'a, G> {
    /// Memory for the results and gradients. The weight's gradient starts from `so_far`, if there is one.
    pub(super) fn new(
        chunks: Chunks<'a, G>,
        objective: DeviceObjective,
        targets: DeviceTargets<'a>,
        sums: Sums,
        so_far: Option<&GradientSoFar>,
    ) -> Result<Self> {
        let needs_grad = chunks.planned.needs_grad;
        // The gradients of operands that were rounded from f32 stay in f32.
        let sums = if chunks.planned.operands.precision == Precision::Full { sums } else { Sums::Continued };
        let positions = chunks.inputs.sizes.positions;
        let unwritten = |n, dtype| Buffer::unwritten(chunks.gpu, n, dtype, chunks.logits.tensor.device());
        let gradients = || {
            let so_far = so_far.filter(|_| needs_grad.weight).and_then(GradientSoFar::take);
            let has_own_targets = matches!(targets, DeviceTargets::Own(_));
            let DeviceOperands { dtype, logit_function, .. } = chunks.inputs;
            let is_relative = sums == Sums::Final
                && matches!(targets, DeviceTargets::Hard)
                && has_relative_exponentials(chunks.gpu.kind(), dtype, logit_function, &objective.terms);
            DeviceGradients::new(&chunks, has_own_targets, is_relative, sums, so_far)
        };
        Ok(LossChunks {
            results: DeviceResults {
                nll: unwritten(positions, DType::F32)?,
                losses: unwritten(positions, DType::F32)?,
                argmax: unwritten(positions, DType::U32)?,
            },
            gradients: needs_grad.any().then(gradients).transpose()?,
            targets,
            objective,
            chunks,
        })
    }

    /// The results after all chunks, without the gradients.
    pub(super) fn results(&self) -> Result<LossResults> {
        let DeviceResults { nll, losses, argmax } = &self.results;
        let nll = &nll.tensor;
        let targets = self.objective.targets.as_ref();
        let (objective, sum, count, mean) = match targets {
            Some(targets) => {
                let Weighed { objectives, sum, mean } = self.weigh(targets, losses)?;
                (objectives, sum, targets.count()?, Some(mean))
            }
            // Without targets, the caller has the log-probabilities, and needs only the gradients.
            None => (losses.tensor.clone(), losses.tensor.sum_all()?, losses.tensor.zeros_like()?.sum_all()?, None),
        };
        let is_correct = match targets {
            // A distribution of NaN has no most probable id. The id of an ignored target is no token's.
            Some(targets) if self.objective.terms.needs_correct => {
                Some(is_argmax(&argmax.tensor, &targets.ids.tensor, &nll.neg()?)?)
            }
            _ => None,
        };
        // The buffers have an element even for an empty batch.
        let positions = self.chunks.inputs.sizes.positions;
        Ok(LossResults {
            objective: objective.narrow(0, 0, positions)?,
            nll: nll.narrow(0, 0, positions)?,
            sum,
            count,
            mean,
            is_correct: is_correct.map(|is_correct| is_correct.narrow(0, 0, positions)).transpose()?,
            gradients: Gradients::default(),
        })
    }

    /// Weighs the losses of all positions.
    fn weigh(&self, targets: &DeviceTargetIds, losses: &Buffer) -> Result<Weighed> {
        let Chunks { gpu, inputs, logits, .. } = &self.chunks;
        let (positions, device) = (inputs.sizes.positions, logits.tensor.device());
        let objectives = Buffer::unwritten(*gpu, positions, DType::F32, device)?;
        let values = Buffer::unwritten(*gpu, 2, DType::F32, device)?;
        let arguments = WeighLossesArguments {
            weights: Read(targets.weights.at(0)),
            losses: Read(losses.at(0)),
            count: Read(targets.count_at()),
            objectives: Write(objectives.at(0)),
            values: Write(values.at(0)),
            positions: positions as i32,
        };
        arguments.launch(*gpu, 1)?;
        let value = |i| values.tensor.narrow(0, i, 1)?.squeeze(0);
        Ok(Weighed { mean: value(0)?, sum: value(1)?, objectives: objectives.tensor })
    }

    /// The gradient of the logits of own targets, `[positions, K]`.
    pub(super) fn own_gradient(&self) -> Result<Option<Tensor>> {
        let Sizes { positions, components, .. } = self.chunks.inputs.sizes;
        let Some(own) = self.gradients.as_ref().and_then(|gradients| gradients.own.as_ref()) else { return Ok(None) };
        own.shaped((positions, components)).map(Some)
    }

    /// The gradients.
    pub(super) fn into_gradients(self) -> Result<Gradients> {
        let Sizes { positions, components, vocab, .. } = self.chunks.inputs.sizes;
        let Some(gradients) = self.gradients else { return Ok(Gradients::default()) };
        let shaped =
            |gradient: Option<Buffer>, shape: &[usize]| gradient.map(|gradient| gradient.shaped(shape)).transpose();
        let log_priors = shaped(Some(gradients.log_priors), &[positions, components])?;
        let (gpu, is_final) = (self.chunks.gpu, gradients.sums == Sums::Final);
        let (mut contexts, mut decoder, mut bias) = (Vec::new(), Vec::new(), None);
        for (i, (columns, gradient)) in self.chunks.inputs.columns.iter().zip(gradients.columns).enumerate() {
            if let Some(padded) = &gradient.contexts {
                let rows = positions * components;
                let gradient = match gradient.unscaled {
                    Some(_) => padded.tensor.narrow(0, 0, rows * columns.width)?,
                    None => columns.without_padding(gpu, padded, rows, is_final)?,
                };
                contexts.push(gradient.reshape((positions, components, columns.width))?);
            }
            if let (Some(padded), true) = (&gradient.decoder, columns.has_ones) {
                bias = Some(columns.bias_gradient(padded, vocab)?);
            }
            let unpadded = |padded: &Buffer| columns.without_padding(gpu, padded, vocab, is_final && i == 0);
            decoder.push(gradient.decoder.as_ref().map(unpadded).transpose()?);
        }
        if let Some(BiasGradient::Product { sum, .. }) = gradients.bias {
            bias = shaped(Some(sum), &[vocab])?;
        }
        let mut decoder = decoder.into_iter();
        Ok(Gradients {
            contexts: if contexts.is_empty() { None } else { Some(Tensor::cat(&contexts, 2)?) },
            log_priors: log_priors.filter(|_| self.chunks.planned.needs_grad.log_priors),
            weight: decoder.next().flatten(),
            adapter: decoder.next().flatten(),
            bias,
        })
    }

    /// The arguments of the chunk that has the given positions.
    pub(super) fn arguments(&self, positions: &Range<usize>) -> ChunkArguments {
        let ChunkArguments { logits, rows, .. } = self.chunks.arguments(positions);
        let own_logits = match &self.targets {
            DeviceTargets::Own(logits) => logits.at(self.chunks.inputs.rows(positions).start),
            _ => 0,
        };
        let objective = self.objective.argument(positions.start);
        ChunkArguments { logits, objective, rows: RowsArgument { own_logits, ..rows } }
    }

    /// Computes the part of the loss of each position that depends on its target.
    fn target_losses(&self, positions: &Range<usize>) -> Result<()> {
        let ChunkArguments { objective, rows, .. } = self.arguments(positions);
        let arguments = PositionLossArguments {
            objective,
            rows,
            nll: Write(self.results.nll.at(positions.start)),
            loss: Write(self.results.losses.at(positions.start)),
            positions: positions.len() as i32,
            components: self.chunks.inputs.sizes.components as i32,
        };
        arguments.launch(self.chunks.gpu, positions.len().div_ceil(WARPS))
    }

    /// Adds to the loss of each position, and to the masses of its rows, what they have from all ids or from
    /// candidates, and finds its most probable id, each if it is needed.
    fn soft_losses(&self, positions: &Range<usize>) -> Result<()> {
        let arguments @ ChunkArguments { logits, objective, rows } = self.arguments(positions);
        let soft = if let DeviceTargets::Soft(log_probs) = &self.targets { Some(log_probs) } else { None };
        let needs_argmax = self.objective.terms.needs_correct;
        if soft.is_some() || needs_argmax {
            let results = MixtureResults {
                log_probs: soft.map(|buffer| LogProbRows { buffer, first: 0, stride: self.chunks.stride }),
                losses: self.results.losses.at(positions.start),
                argmax: if needs_argmax { self.results.argmax.at(positions.start) } else { 0 },
            };
            self.chunks.mix(positions, arguments, results)?;
        }
        if soft.is_some() || matches!(self.targets, DeviceTargets::Scored(_)) {
            let scored = self.targets.scored(positions);
            let arguments = RowSoftMassArguments { logits, objective, rows, scored, log_probs: self.log_probs() };
            arguments.launch(self.chunks.gpu, self.chunks.inputs.rows(positions).len())?;
        }
        Ok(())
    }

    /// Computes the gradients of the chunk's log-priors, of its own targets' logits, and of its logits.
    fn row_gradients(&self, positions: &Range<usize>, gradients: &DeviceGradients) -> Result<()> {
        let ChunkArguments { logits, objective, rows: row_values } = self.arguments(positions);
        let rows = self.chunks.inputs.rows(positions);
        let arguments = LogPriorGradientsArguments {
            objective,
            rows: row_values,
            log_prior_gradient: Write(gradients.log_priors.at(rows.start)),
            own_gradient: Write(gradients.own.as_ref().map_or(0, |own| own.at(rows.start))),
            gradient_factor: Read(self.objective.factor.at(0)),
            count: rows.len() as i64,
            components: self.chunks.inputs.sizes.components as i32,
        };
        arguments.launch(self.chunks.gpu, rows.len().div_ceil(BLOCK))?;
        let DeviceMatrix { address, dtype, .. } = gradients.logit_matrix(&self.chunks);
        if let LogitGradient::Relative { .. } = &gradients.logits {
            let factors = match &gradients.bias {
                Some(BiasGradient::Product { vector, .. }) => vector.at(0),
                Some(BiasGradient::Column) | None => 0,
            };
            let arguments = RowFactorsArguments {
                logits,
                objective,
                rows: row_values,
                exponentials: Write(address),
                factors: Write(factors),
                count: rows.len() as i64,
            };
            return arguments.launch_for(self.chunks.gpu, dtype, rows.len().div_ceil(WARPS));
        }
        if self.has_only_targets() && self.chunks.inputs.logit_function.is_identity() {
            let arguments =
                RowTargetGradientArguments { logits, objective, rows: row_values, gradient: Write(address) };
            return arguments.launch_for(self.chunks.gpu, dtype, rows.len());
        }
        let arguments = RowGradientArguments {
            logits,
            objective,
            rows: row_values,
            scored: self.targets.scored(positions),
            log_probs: self.log_probs(),
            gradient: Write(address),
        };
        arguments.launch_for(self.chunks.gpu, dtype, rows.len())
    }

    /// Adds the chunk's rows to the gradient of the bias.
    fn bias_gradient(
        &self,
        positions: &Range<usize>,
        gradients: &DeviceGradients,
        sum: &Buffer,
        vector: &Buffer,
    ) -> Result<()> {
        self.chunks.gpu.multiply(&DeviceProduct {
            m: self.chunks.inputs.sizes.vocab,
            n: 1,
            k: self.chunks.inputs.rows(positions).len(),
            lhs: DeviceMatrix { is_transposed: true, ..gradients.logit_matrix(&self.chunks) },
            rhs: vector.matrix(0, 1),
            out: sum.at(0),
            out_dtype: DType::F32,
            out_stride: 1,
            alpha: self.objective.alpha(),
            accumulates: positions.start > 0,
        })
    }

    /// Whether no id has mass but targets. Own targets are never with a function of the logits, which a sampled softmax
    /// refuses.
    fn has_only_targets(&self) -> bool {
        !matches!(self.targets, DeviceTargets::Soft(_) | DeviceTargets::Scored(_))
    }

    /// The log-probabilities of all ids of a chunk's positions, if masses depend on them.
    fn log_probs(&self) -> Read {
        Read(self.targets.log_probs().map_or(0, |log_probs| log_probs.at(0)))
    }
}

impl<G: Gpu> Steps for LossChunks<'_, G> {
    fn first_product(&mut self, positions: Range<usize>) -> Result<()> {
        let arguments @ ChunkArguments { logits, objective, rows } = self.arguments(&positions);
        match self.gradients.as_ref().map(|gradients| &gradients.logits) {
            Some(LogitGradient::Relative { exponentials, product: Some(product) }) => {
                product.compute(&self.chunks, &positions, arguments, exponentials)?;
            }
            Some(LogitGradient::Relative { exponentials, product: None }) => {
                self.chunks.first_product(&positions)?;
                let exponentials_at = Write(exponentials.at(0));
                let arguments = RowExponentialsArguments { logits, objective, rows, exponentials: exponentials_at };
                let rows = self.chunks.inputs.rows(&positions).len();
                arguments.launch_for(self.chunks.gpu, exponentials.tensor.dtype(), rows)?;
            }
            _ => self.chunks.compute_logits(&positions, arguments)?,
        }
        match &self.targets {
            DeviceTargets::Shared(targets) => self.chunks.join_ranks(targets.shard, &targets.owners[positions]),
            _ => Ok(()),
        }
    }

    fn objective(&mut self, positions: Range<usize>) -> Result<()> {
        self.target_losses(&positions)?;
        self.soft_losses(&positions)?;
        let Some(gradients) = &self.gradients else { return Ok(()) };
        self.row_gradients(&positions, gradients)?;
        match &gradients.bias {
            Some(BiasGradient::Product { sum, vector }) => self.bias_gradient(&positions, gradients, sum, vector),
            Some(BiasGradient::Column) | None => Ok(()),
        }
    }

    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let Chunks { gpu, inputs, .. } = &self.chunks;
        let Some(gradients) = &self.gradients else { return Ok(()) };
        let rows = inputs.rows(&positions);
        for (columns, gradient) in inputs.columns.iter().zip(&gradients.columns) {
            let Some(contexts) = &gradient.contexts else { continue };
            let (out, out_dtype) = match &gradient.unscaled {
                Some(unscaled) => (unscaled.at(0), DType::F32),
                None => (contexts.at(rows.start * columns.stride), contexts.tensor.dtype()),
            };
            gpu.multiply(&DeviceProduct {
                m: rows.len(),
                n: columns.stride,
                k: columns.decoder_rows,
                lhs: gradients.logit_matrix(&self.chunks),
                rhs: columns.decoder(false),
                out,
                out_dtype,
                out_stride: columns.stride,
                alpha: self.objective.alpha(),
                accumulates: false,
            })?;
            if let Some(unscaled) = &gradient.unscaled {
                let to = Write(contexts.at(rows.start * columns.width));
                columns.round(*gpu, unscaled, self.chunks.row_factors(), to, rows.len())?;
            }
        }
        Ok(())
    }

    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let Chunks { gpu, inputs, .. } = &self.chunks;
        let Some(gradients) = &self.gradients else { return Ok(()) };
        let rows = inputs.rows(&positions);
        for (columns, gradient) in inputs.columns.iter().zip(&gradients.columns) {
            let Some(decoder) = &gradient.decoder else { continue };
            let contexts = match &gradient.scaled_contexts {
                Some(scaled) => {
                    columns.scale_contexts(*gpu, &rows, self.chunks.row_factors(), scaled)?;
                    scaled.matrix(0, columns.stride)
                }
                None => columns.contexts.matrix(rows.start, columns.stride),
            };
            gpu.multiply(&DeviceProduct {
                m: columns.decoder_rows,
                n: columns.stride,
                k: rows.len(),
                lhs: DeviceMatrix { is_transposed: true, ..gradients.logit_matrix(&self.chunks) },
                rhs: contexts,
                out: decoder.at(0),
                out_dtype: decoder.tensor.dtype(),
                out_stride: columns.stride,
                alpha: self.objective.alpha(),
                // If it does not accumulate, the first chunk overwrites.
                accumulates: positions.start > 0 || gradient.has_so_far,
            })?;
        }
        Ok(())
    }
}
