//! The scores of one position from its K rows of logits: log-probabilities of some ids, the entropy, and the logarithm
//! of the mass outside these ids.

use super::mix::{PositionLogits, Scratch, Tempered};
use crate::backend::cpu::vector::math::not_negative;
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};

pub(super) struct ScoreRows<'a, F> {
    pub(super) logits: PositionLogits<'a, F>,
    pub(super) ids: &'a [usize],
    /// The inverse of the temperature.
    pub(super) power: F,
    pub(super) entropy: bool,
    pub(super) outside: bool,
    /// Where the most probable of all ids is written if it is one of `ids`, if that is needed.
    pub(super) argmax: Option<&'a mut Option<usize>>,
    pub(super) scratch: &'a mut Scratch<F>,
    /// `[ids + 2]`
    pub(super) to: &'a mut [F],
}

impl<F: Float> Kernel<F> for ScoreRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let ScoreRows { logits, ids, power, entropy, outside, argmax, scratch, to } = self;
        scratch.components.set(logits.lse, logits.log_priors);
        if let Some(argmax) = argmax {
            *argmax = logits.argmax_among(v, ids, &scratch.components);
        }
        let is_tempered = power != F::one();
        if is_tempered || outside {
            logits.mix(v, None, scratch);
        }
        let tempered = Tempered::new(v, &scratch.log_probs, power);
        let (of_ids, of_position) = to.split_at_mut(ids.len());
        for (to, &id) in of_ids.iter_mut().zip(ids) {
            let log_p = scratch.components.log_prob(|k| logits.rows[k * logits.stride + id]).value();
            // Not `neg`, which makes a minus zero.
            *to = F::zero() - not_negative(-tempered.log_prob(log_p));
        }
        of_position[0] = match (entropy, is_tempered) {
            (true, true) => tempered.entropy(v, &scratch.log_probs, logits.vocab),
            (true, false) => logits.entropy(v, scratch),
            (false, _) => F::zero(),
        };
        of_position[1] = if outside {
            tempered.log_outside(tempered.outside(v, &mut scratch.log_probs, ids.iter().copied()))
        } else {
            F::zero()
        };
    }
}
