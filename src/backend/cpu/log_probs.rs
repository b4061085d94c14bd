//! Log-probabilities of all ids, and scores: log-probabilities of candidates, the entropy, the mass outside and the
//! collision probability.

use candle_core::{Device, Tensor};

use super::inputs::Inputs;
use super::memory::zeros;
use super::objective::results::BufferedGradients;
use super::objective::targets::Candidates;
use super::one_pass::OnePassRequest;
use super::operands::dtype::Element;
use super::plan::{logit_tiles, one_pass, Served};
use super::products::multiplier::Multiplier;
use super::two_pass::TwoPasses;
use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::backend::plan::{Computation, Planned, Steps};
use crate::error::Result;

/// Computes log-probabilities `[positions, vocab]` in `O`, in two passes.
pub(super) fn log_probs<F: Served, O: Element<Acc = F>>(multiplier: Multiplier, planned: &Planned) -> Result<Tensor> {
    let Planned { operands, plan, .. } = planned;
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let mut passes = TwoPasses::for_distributions(logit_tiles(multiplier), inputs, plan);
        let mut log_probs = zeros::<O>(positions * vocab);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            let to = &mut log_probs[positions.start * vocab..positions.end * vocab];
            passes.log_prob_rows(positions, to);
        }
        Ok(Tensor::from_vec(log_probs, (positions, vocab), &Device::Cpu)?)
    })
}

/// Computes the scores `[positions, n + 3]`, and, if the caller asks for it, whether each candidate is the most
/// probable id, `[positions, n]`.
pub(super) fn scores<F: Served>(
    multiplier: Multiplier,
    planned: &Planned,
    scored: &Scored,
) -> Result<(Tensor, Option<Tensor>)> {
    let Planned { operands, plan, .. } = planned;
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let candidates = Candidates::new(scored, vocab)?;
        let columns = candidates.n + POSITION_SCORES;
        let (mut scores, mut are_argmax) = (Vec::with_capacity(positions * columns), Vec::new());
        match plan.computation {
            Computation::OnePass => {
                let (inputs, none) = (inputs.tempered(scored.temperature), BufferedGradients::none());
                let request = OnePassRequest::Scores { candidates: &candidates, scored };
                let mut pass = one_pass(multiplier, inputs, request, none, planned);
                for positions in plan.chunks() {
                    pass.first_product(positions)?;
                    scores.extend(pass.scores(&candidates, scored));
                    are_argmax.extend(pass.are_argmax(&candidates));
                }
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::for_distributions(logit_tiles(multiplier), inputs, plan);
                for positions in plan.chunks() {
                    passes.first_product(positions.clone())?;
                    let (chunk_scores, chunk_argmax) = passes.score_rows(positions, &candidates, scored);
                    scores.extend(chunk_scores);
                    are_argmax.extend(chunk_argmax);
                }
            }
        }
        let are_argmax = || Tensor::from_vec(are_argmax, (positions, candidates.n), &Device::Cpu);
        let are_argmax = scored.needs_argmax.then(are_argmax).transpose()?;
        Ok((Tensor::from_vec(scores, (positions, columns), &Device::Cpu)?, are_argmax))
    })
}
