//! The log-probabilities of all ids of a chunk's positions.

use std::ops::Range;

use rayon::prelude::*;

use super::first_product::FirstProduct;
use super::mix::{PositionLogits, Scratch};
use super::passes::TwoPasses;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::operands::Sizes;

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

impl<T: Element, X: FirstProduct<T>> TwoPasses<'_, T, X> {
    /// Writes the log-probabilities of the chunk's positions, `[positions, vocab]`, to `to`.
    pub(crate) fn log_prob_rows<O: Element<Acc = T::Acc>>(&mut self, positions: Range<usize>, to: &mut [O]) {
        let Sizes { components, vocab, .. } = self.inputs.sizes;
        let (isa, stride, softcap) = (self.inputs.isa, self.stride, self.inputs.softcap);
        let log_priors = &self.inputs.log_priors[positions.start * components..];
        self.logits
            .par_chunks_exact_mut(components * stride)
            .zip(log_priors.par_chunks_exact(components))
            .zip(self.lse.par_chunks_exact(components))
            .zip(to.par_chunks_exact_mut(vocab))
            .for_each_init(
                || Scratch::new(components, stride, true, false),
                |scratch, (((rows, log_priors), lse), to)| {
                    let logits = PositionLogits { rows, stride, vocab, lse, log_priors, softcap };
                    T::Acc::dispatch(isa, LogProbRow { logits, scratch });
                    for (to, &from) in to.iter_mut().zip(&scratch.log_probs) {
                        *to = O::narrow(from);
                    }
                },
            );
    }
}
