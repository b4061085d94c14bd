//! Scores, and losses that are functions of them. One pass serves them if the logits of the candidates, and sums over the
//! other ids, suffice. Other scores take two passes, as they depend on the log-probabilities of all ids.

use std::ops::Range;

use candle_core::{Device, Tensor, WithDType};

use super::objective::components::PositionLoss;
use super::objective::listed_ids::Candidates;
use super::objective::results::{results, BufferedGradients, WeightBuffer};
use super::objective::targets::Targets;
use super::one_pass::{OnePass, OnePassRequest};
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::served::Products;
use super::two_pass::TwoPasses;
use super::vector::simd::Float;
use crate::backend::contract::LossResults;
use crate::backend::distribution::Real;
use crate::backend::objective::{ScoreTerms, Scored, POSITION_SCORES};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::{Computation, Plan};
use crate::backend::schedule::Steps;
use crate::error::Result;

/// Computes the scores `[positions, n + 2]`, and, if the caller asks for it, whether each candidate is the most probable
/// id, `[positions, n]`.
pub(super) fn scores<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    scored: &Scored,
    plan: &Plan,
) -> Result<(Tensor, Option<Tensor>)> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let candidates = Candidates::new(scored, vocab)?;
        let columns = candidates.n + POSITION_SCORES;
        let (mut scores, mut are_argmax) = (Vec::with_capacity(positions * columns), Vec::new());
        match plan.computation {
            Computation::OnePass => {
                let (inputs, none) = (inputs.tempered(scored.temperature), BufferedGradients::none());
                let request = OnePassRequest::Scores { candidates: &candidates, scored };
                let mut pass = OnePass::new(products, inputs, request, none, NeedsGrad::default(), plan);
                for positions in plan.chunks() {
                    pass.first_product(positions)?;
                    scores.extend(pass.scores(&candidates, scored));
                    are_argmax.extend(pass.are_argmax(&candidates));
                }
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::for_distributions(products, inputs, plan);
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

/// Computes a loss whose terms are known once the scores of a chunk are, and the gradients of the operands that need one.
pub(super) fn score_loss<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    scored: &Scored,
    terms: &ScoreTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let sizes @ Sizes { vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let candidates = Candidates::new(scored, vocab)?;
        let gradients = BufferedGradients::new(operands, needs_grad, WeightBuffer::Zeros)?;
        let mut losses = Vec::with_capacity(sizes.positions);
        match plan.computation {
            Computation::OnePass => {
                let inputs = inputs.tempered(scored.temperature);
                let request = OnePassRequest::Scores { candidates: &candidates, scored };
                let mut pass = OnePass::new(products, inputs, request, gradients, needs_grad, plan);
                for positions in plan.chunks() {
                    pass.first_product(positions.clone())?;
                    let scores = pass.scores(&candidates, scored);
                    let upstream: Vec<T::Acc> = add_losses(terms, positions.clone(), scores, &mut losses)?;
                    if needs_grad.any() {
                        let (first, power) = (positions.start, T::Acc::from_f64(1.0));
                        let targets = Targets::from_score_upstream(scored, &candidates, &upstream, first, power);
                        pass.objective_rows(&targets);
                        pass.chunk_gradients(positions, needs_grad)?;
                    }
                }
                results(sizes, needs_grad, None, &losses, pass.gradients)
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::for_chunk_targets(products, inputs, gradients, plan);
                for positions in plan.chunks() {
                    passes.first_product(positions.clone())?;
                    let (scores, _) = passes.score_rows(positions.clone(), &candidates, scored);
                    let upstream: Vec<T::Acc> = add_losses(terms, positions.clone(), scores, &mut losses)?;
                    if needs_grad.any() {
                        let (first, power) = (positions.start, T::Acc::from_f64(1.0 / scored.temperature));
                        let targets = Targets::from_score_upstream(scored, &candidates, &upstream, first, power);
                        passes.objective_rows(&targets, positions.clone())?;
                        passes.chunk_gradients(positions, needs_grad)?;
                    }
                }
                results(sizes, needs_grad, None, &losses, passes.gradients)
            }
        }
    })
}

/// Evaluates the terms of a chunk's positions, which have these scores. Adds the values to the losses, and returns the
/// upstream gradients of the scores.
fn add_losses<F: Float>(
    terms: &ScoreTerms,
    positions: Range<usize>,
    scores: Vec<F>,
    losses: &mut Vec<PositionLoss>,
) -> Result<Vec<F>> {
    let columns = scores.len() / positions.len().max(1);
    let nll: Vec<f64> = scores.chunks_exact(columns).map(|scores| -Real::f64(scores[0])).collect();
    let (values, upstream) =
        terms(positions.clone(), &Tensor::from_vec(scores, (positions.len(), columns), &Device::Cpu)?)?;
    let values = values.to_vec1::<F>()?.into_iter().map(Real::f64).zip(nll);
    losses.extend(values.map(|(objective, nll)| PositionLoss { objective, nll, ..PositionLoss::default() }));
    Ok(upstream.flatten_all()?.to_vec1()?)
}
