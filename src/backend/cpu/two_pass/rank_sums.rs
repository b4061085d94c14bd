//! The sums over all ids of a position that ranks add up between its log-sum-exps and its gradient, if its objective
//! depends on all ids.

use super::mix::{IdMasses, PositionLogits, Scratch};
use crate::backend::cpu::objective::components::{Components, SoftMasses, Target};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};
use crate::backend::shard::ELSEWHERE;

/// The numbers of some positions that the ranks have exchanged.
#[derive(Clone, Copy)]
pub(super) struct RankTerms<'a, F> {
    /// `[positions, K]`: the target's logits, which one rank has.
    pub(super) target_logits: &'a [F],
    /// `[positions, K + 2]`, as [`RankSums`] writes them, added up; empty if the objective does not need them.
    pub(super) sums: &'a [f64],
}

/// Returns how many numbers the ranks add up of a position.
pub(super) fn numbers(components: usize) -> usize {
    components + 2
}

impl<F: Float> RankTerms<'_, F> {
    /// Returns the numbers of the i-th position.
    pub(super) fn position(&self, i: usize, components: usize) -> Self {
        let numbers = if self.sums.is_empty() { 0 } else { numbers(components) };
        RankTerms {
            target_logits: &self.target_logits[i * components..][..components],
            sums: &self.sums[i * numbers..][..numbers],
        }
    }

    /// Returns whether no rank has an id that is more probable than the target.
    pub(super) fn is_correct(&self) -> bool {
        self.sums.last() == Some(&0.0)
    }

    /// Adds the masses of all ids to the components', and returns the objective of these masses.
    pub(super) fn add_to(&self, components: &mut Components<F>) -> f64 {
        let (masses, position_sums) = self.sums.split_at(components.mass.len());
        components.mass.iter_mut().zip(masses).for_each(|(to, &mass)| *to += F::from_f64(mass));
        position_sums[0]
    }
}

/// The kernel that computes what the ids of this rank add to the sums of a position: the soft masses of each component,
/// the objective of these masses, and one if an id is more probable than the target.
pub(super) struct RankSums<'a, F> {
    pub(super) logits: PositionLogits<'a, F>,
    pub(super) target: Target<'a, F>,
    /// `[K]`.
    pub(super) target_logits: &'a [F],
    /// Whether these ids are lower than the target, if another rank has it.
    pub(super) are_lower: bool,
    pub(super) scratch: &'a mut Scratch<F>,
    /// `[K + 2]`.
    pub(super) to: &'a mut [f64],
}

impl<F: Float> Kernel<F> for RankSums<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let RankSums { logits, target, target_logits, are_lower, scratch, to } = self;
        let components = logits.log_priors.len();
        scratch.components.set(logits.lse, logits.log_priors);
        if let Some(SoftMasses::Given(masses)) = target.soft {
            let (masses, is_single) = (IdMasses::Given(masses), components == 1);
            if !is_single {
                logits.mix(v, Some(masses), scratch);
            }
            scratch.components.mass.fill(F::zero());
            to[components] = logits.add_masses(v, masses, is_single, scratch);
            to.iter_mut().zip(&scratch.components.mass).for_each(|(to, sum)| *to = sum.f64());
        }
        if let (true, Some((y, _))) = (target.terms.needs_correct, target.hard) {
            let is_beaten = match y {
                ELSEWHERE => logits.has_more_probable(v, target_logits, are_lower, &scratch.components),
                y => logits.argmax_among(v, &[y], &scratch.components) != Some(y),
            };
            to[components + 1] = f64::from(u8::from(is_beaten));
        }
    }
}
