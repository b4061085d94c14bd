//! The row kernels of a chunk's positions, which turn logits into their gradient: their buffers, what ranks add up
//! before them, and the rows that the second and third product read after them.

use std::ops::Range;

use super::mix::{PositionLogits, Scratch};
use super::passes::{LiveRows, TwoPasses};
use super::rank_sums::{self, RankSums, RankTerms};
use super::rows::{LossRows, RowGradients};
use crate::backend::collectives::Numbers;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::objective::components::PositionLoss;
use crate::backend::cpu::objective::ranks::Ranks;
use crate::backend::cpu::objective::targets::Targets;
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::vector::math::LogSumExp;
use crate::backend::operands::Sizes;
use crate::backend::parallel;
use crate::error::Result;

/// The most parts into which a chunk's positions are split if the bias needs a gradient. Each part accumulates its own
/// gradient, and these are added in order, so that the sum does not depend on the number of threads.
pub(super) const BIAS_PARTS: usize = 16;

/// The operands that the row kernels of a chunk's positions share.
struct ChunkOperands<'c, F: Accumulator> {
    inputs: &'c Inputs<'c, F>,
    targets: &'c Targets<F>,
    stride: usize,
    /// The chunk's first position.
    first: usize,
    /// `[rows of the chunk]`.
    lse: &'c [LogSumExp<F>],
    /// The terms of all the chunk's positions, if ranks share the vocabulary.
    rank_terms: Option<RankTerms<'c, F>>,
    needs_gradients: bool,
}

/// The destinations of one position.
struct PositionResults<'r, F> {
    /// `[K, stride]`: the logits, which their gradient replaces.
    logits: &'r mut [F],
    loss: &'r mut PositionLoss,
    /// `[K]`: the gradient of the log-priors.
    log_priors: &'r mut [F],
    /// `[stride]`: the gradient of the bias, which is added to.
    bias: Option<&'r mut [F]>,
    /// `[K]`: whether the rows have a gradient.
    live: &'r mut [bool],
}

impl<F: Accumulator> ChunkOperands<'_, F> {
    /// Computes the loss of the chunk's i-th position and, if they are needed, the gradients of its logits (over the
    /// logits) and log-priors. An ignored position is left as it is.
    fn position_loss(&self, i: usize, to: PositionResults<'_, F>, scratch: &mut Scratch<F>) {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let position = self.first + i;
        let Some(target) = self.targets.position(position) else { return };
        let kernel = LossRows {
            logits: PositionLogits {
                rows: to.logits,
                stride: self.stride,
                vocab,
                lse: &self.lse[i * components..][..components],
                log_priors: &self.inputs.log_priors[position * components..][..components],
                logit_map: self.inputs.logit_map,
            },
            target,
            rank_terms: self.rank_terms.map(|terms| terms.position(i, components)),
            gradients: self.needs_gradients.then(|| RowGradients {
                scale: self.targets.scale(position),
                logit_scale: self.inputs.logit_scale,
                log_priors: to.log_priors,
                bias: to.bias,
                live: to.live,
            }),
            scratch,
        };
        *to.loss = F::dispatch(self.inputs.isa, kernel);
    }
}

impl<F: Accumulator> TwoPasses<'_, F> {
    /// Computes the results of the chunk's positions, and writes the gradients of their logits over these. The targets
    /// are those of the passes, or those that follow from the chunk's results.
    pub(crate) fn objective_rows(&mut self, targets: &Targets<F>, positions: Range<usize>) -> Result<()> {
        let sums = self.sum_over_ranks(targets, positions.clone())?;
        let rows = self.rows(positions.clone());
        let (components, stride) = (self.inputs.sizes.components, self.stride);
        let gradients = &mut self.gradients;
        let rank_terms = RankTerms { target_logits: &self.target_logits, sums: &sums };
        let operands = ChunkOperands {
            inputs: &self.inputs,
            targets,
            stride,
            first: positions.start,
            lse: &self.lse,
            rank_terms: self.ranks.is_some().then_some(rank_terms),
            needs_gradients: gradients.are_needed,
        };

        let needs_bias = gradients.decoder.bias.is_some();
        let parts = if needs_bias { BIAS_PARTS } else { usize::MAX };
        let part = positions.len().div_ceil(parts.min(positions.len())).max(1);
        let parts = positions.len().div_ceil(part);
        let mut bias_parts = zeros(if needs_bias { parts * stride } else { 0 });
        let mut bias_slots: Vec<Option<&mut [F]>> = bias_parts.chunks_exact_mut(stride).map(Some).collect();
        bias_slots.resize_with(parts, || None);
        let mut live = vec![false; rows.len()];
        let mut unused = zeros(if gradients.are_needed { 0 } else { rows.len() });
        let log_priors = if gradients.are_needed { &mut gradients.log_priors[rows.clone()] } else { &mut unused[..] };

        let parts = self.logits[..rows.len() * stride]
            .chunks_mut(part * components * stride)
            .zip(self.losses[positions.clone()].chunks_mut(part))
            .zip(live.chunks_mut(part * components))
            .zip(log_priors.chunks_mut(part * components))
            .zip(bias_slots)
            .enumerate();
        let scratch = || Scratch::new(components, stride, targets.are_soft(), targets.are_soft());
        parallel::for_each_with(parts, scratch, |scratch, (i, ((((logits, losses), live), log_priors), mut bias))| {
            let results = logits
                .chunks_exact_mut(components * stride)
                .zip(losses)
                .zip(live.chunks_exact_mut(components))
                .zip(log_priors.chunks_exact_mut(components));
            for (j, (((logits, loss), live), log_priors)) in results.enumerate() {
                let to = PositionResults { logits, loss, log_priors, bias: bias.as_deref_mut(), live };
                operands.position_loss(i * part + j, to, scratch);
            }
        });

        if let Some(bias) = &mut gradients.decoder.bias {
            for part in bias_parts.chunks_exact(stride) {
                for (sum, &g) in bias.iter_mut().zip(part) {
                    *sum += g;
                }
            }
        }
        if gradients.are_needed {
            self.gather_live_rows(rows, &live);
        }
        Ok(())
    }

    /// Adds up over the ranks what all ids of each position contribute, `[positions, K + 2]`, if ranks share the
    /// vocabulary and the objective needs it; otherwise the result is empty.
    fn sum_over_ranks(&mut self, targets: &Targets<F>, positions: Range<usize>) -> Result<Vec<f64>> {
        let is_needed = |_: &&Ranks<F>| targets.are_soft() || targets.needs_correct();
        let Some(ranks) = self.ranks.as_ref().filter(is_needed) else { return Ok(vec![]) };
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, logit_map) = (self.inputs.isa, self.stride, self.inputs.logit_map);
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        let numbers = rank_sums::numbers(components);
        let mut sums = vec![0.0; positions.len() * numbers];
        let rows = self
            .logits
            .chunks_exact_mut(components * stride)
            .zip(self.lse.chunks_exact(components))
            .zip(log_priors.chunks_exact(components))
            .zip(self.target_logits.chunks_exact(components))
            .zip(sums.chunks_exact_mut(numbers))
            .enumerate();
        let scratch = || Scratch::new(components, stride, targets.are_soft(), targets.are_soft());
        parallel::for_each_with(rows, scratch, |scratch, (i, ((((rows, lse), log_priors), target_logits), to))| {
            let position = positions.start + i;
            let (Some(target), Some(id)) = (targets.position(position), targets.id(position)) else { return };
            let logits = PositionLogits { rows, stride, vocab, lse, log_priors, logit_map };
            let are_lower = ranks.shard.range().end <= id;
            F::dispatch(isa, RankSums { logits, target, target_logits, are_lower, scratch, to });
        });
        ranks.shard.collectives().all_reduce_sum(Numbers::F64(&mut sums))?;
        Ok(sums)
    }

    /// Moves the live rows of the logits' gradient to the front, where a live row from behind replaces each dead one,
    /// and copies their contexts to `chunk_contexts`.
    fn gather_live_rows(&mut self, rows: Range<usize>, live: &[bool]) {
        let count = live.iter().filter(|&&live| live).count();
        if count == live.len() {
            self.live_rows = LiveRows::All(count);
            return;
        }
        let (d, stride) = (self.inputs.sizes.context_dim, self.stride);
        let mut behind = (count..live.len()).filter(|&row| live[row]);
        // In front, as many rows are dead as are live behind.
        let order: Vec<usize> =
            (0..count).filter_map(|row| if live[row] { Some(row) } else { behind.next() }).collect();
        self.chunk_contexts.clear();
        for (to, &from) in order.iter().enumerate() {
            if to != from {
                self.logits.copy_within(from * stride..(from + 1) * stride, to * stride);
            }
            let row = rows.start + from;
            self.inputs.contexts.slice(row * d..(row + 1) * d).append_to(&mut self.chunk_contexts);
        }
        self.live_rows = LiveRows::Some(order);
    }
}
