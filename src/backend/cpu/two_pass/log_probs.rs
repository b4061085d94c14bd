//! The log-probabilities of all ids of a chunk's positions from their rows of logits, and the scores: log-probabilities
//! of candidates, the entropy, and the logarithms of the mass outside the candidates and of the collision probability.

use std::ops::Range;

use super::mix::{PositionLogits, Scratch, Tempered};
use super::passes::TwoPasses;
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::objective::targets::Candidates;
use crate::backend::cpu::operands::dtype::{Accumulator, Element};
use crate::backend::cpu::vector::math::not_negative;
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::backend::parallel;

/// The kernel that writes the log-probabilities of one position to `scratch.log_probs`.
struct LogProbRow<'a, F> {
    logits: PositionLogits<'a, F>,
    scratch: &'a mut Scratch<F>,
}

impl<F: Float> Kernel<F> for LogProbRow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        self.scratch.components.set(self.logits.lse, self.logits.log_priors);
        self.logits.mix(v, None, self.scratch);
    }
}

/// The kernel that computes the scores of one position.
struct ScoreRow<'a, F> {
    logits: PositionLogits<'a, F>,
    /// The candidates.
    ids: &'a [usize],
    /// The inverse of the temperature.
    power: F,
    scored: &'a Scored,
    /// The place for the most probable of all ids if it is a candidate; `None` if the caller does not need it.
    argmax: Option<&'a mut Option<usize>>,
    scratch: &'a mut Scratch<F>,
    /// `[candidates + 3]`.
    to: &'a mut [F],
}

impl<F: Float> Kernel<F> for ScoreRow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let ScoreRow { logits, ids, power, scored, argmax, scratch, to } = self;
        let &Scored { needs_entropy, needs_outside, needs_collision, .. } = scored;
        scratch.components.set(logits.lse, logits.log_priors);
        if let Some(argmax) = argmax {
            *argmax = logits.argmax_among(v, ids, &scratch.components);
        }
        let is_tempered = power != F::one();
        if is_tempered || needs_outside || needs_collision {
            logits.mix(v, None, scratch);
        }
        let tempered = Tempered::new(v, &scratch.log_probs, power);
        let (log_probs, position_scores) = to.split_at_mut(ids.len());
        for (to, &id) in log_probs.iter_mut().zip(ids) {
            let log_p = scratch.components.log_prob(|k| logits.rows[k * logits.stride + id]).value();
            // `neg` would make a minus zero.
            *to = F::zero() - not_negative(-tempered.log_prob(log_p));
        }
        position_scores[0] = match (needs_entropy, is_tempered) {
            (true, true) => tempered.entropy(v, &scratch.log_probs, logits.vocab),
            (true, false) => logits.entropy(v, scratch),
            (false, _) => F::zero(),
        };
        // Before the log-probabilities of the candidates are left out.
        position_scores[2] = if needs_collision { tempered.collision(v, &scratch.log_probs).log } else { F::zero() };
        position_scores[1] = if needs_outside {
            tempered.log_outside(tempered.outside(v, &mut scratch.log_probs, ids.iter().copied()))
        } else {
            F::zero()
        };
    }
}

impl<F: Accumulator> TwoPasses<'_, F> {
    /// Writes the log-probabilities of the chunk's positions, `[positions, vocab]`, to `to`.
    pub(crate) fn log_prob_rows<O: Element<Acc = F>>(&mut self, positions: Range<usize>, to: &mut [O]) {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, logit_map) = (self.inputs.isa, self.stride, self.inputs.logit_map);
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        let rows = self
            .logits
            .chunks_exact_mut(components * stride)
            .zip(log_priors.chunks_exact(components))
            .zip(self.lse.chunks_exact(components))
            .zip(to.chunks_exact_mut(vocab));
        let scratch = || Scratch::new(components, stride, true, false);
        parallel::for_each_with(rows, scratch, |scratch, (((rows, log_priors), lse), to)| {
            let logits = PositionLogits { rows, stride, vocab, lse, log_priors, logit_map };
            F::dispatch(isa, LogProbRow { logits, scratch });
            for (to, &from) in to.iter_mut().zip(&scratch.log_probs) {
                *to = O::narrow(from);
            }
        });
    }

    /// Computes the scores of the chunk's positions, `[positions, n + 3]`, and whether each candidate is the most
    /// probable id, `[positions, n]`, or nothing if the caller does not ask for it.
    pub(crate) fn score_rows(
        &mut self,
        positions: Range<usize>,
        candidates: &Candidates,
        scored: &Scored,
    ) -> (Vec<F>, Vec<u8>) {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, logit_map) = (self.inputs.isa, self.stride, self.inputs.logit_map);
        let (n, needs_argmax) = (candidates.n, scored.needs_argmax);
        let power = F::from_f64(1.0 / scored.temperature);
        let needs_log_probs = scored.is_tempered() || scored.needs_outside || scored.needs_collision;
        let mut scores = zeros(positions.len() * (n + POSITION_SCORES));
        let mut argmax = vec![None; positions.len()];
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        let rows = self
            .logits
            .chunks_exact_mut(components * stride)
            .zip(log_priors.chunks_exact(components))
            .zip(self.lse.chunks_exact(components))
            .zip(&mut argmax)
            .zip(scores.chunks_exact_mut(n + POSITION_SCORES))
            .enumerate();
        let scratch = || Scratch::new(components, stride, needs_log_probs, false);
        parallel::for_each_with(rows, scratch, |scratch, (i, ((((rows, log_priors), lse), argmax), to))| {
            let logits = PositionLogits { rows, stride, vocab, lse, log_priors, logit_map };
            let ids = candidates.given(positions.start + i);
            let argmax = needs_argmax.then_some(argmax);
            F::dispatch(isa, ScoreRow { logits, ids, power, scored, argmax, scratch, to });
        });
        let mark_argmax = |(t, argmax): (usize, Option<usize>)| {
            candidates.given(t).iter().map(move |&id| u8::from(argmax == Some(id)))
        };
        let are_argmax = if needs_argmax { positions.zip(argmax).flat_map(mark_argmax).collect() } else { vec![] };
        (scores, are_argmax)
    }
}
