//! Scores, and losses that are functions of them: from one pass where the logits of the candidates and sums over the other
//! ids give what is asked, else from the log-probabilities of all ids, in two passes.

use std::ops::Range;

use candle_core::{Device, Tensor, WithDType};

use super::objective::components::PositionLoss;
use super::objective::listed_ids::Candidates;
use super::objective::results::{results, BufferedGradients};
use super::objective::targets::Targets;
use super::one_pass::{OnePass, OnePassRequest};
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::served::Products;
use super::two_pass::TwoPasses;
use super::vector::simd::Float;
use crate::backend::contract::LossResults;
use crate::backend::distribution::Real;
use crate::backend::objective::{ScoreTerms, Scored, OF_POSITION};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::{Computation, Plan};
use crate::backend::schedule::Steps;
use crate::error::Result;

/// The scores `[positions, n + 2]`, and whether each id is the most probable, `[positions, n]`, if that is asked for.
pub(super) fn scores<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    scored: &Scored,
    plan: &Plan,
) -> Result<(Tensor, Option<Tensor>)> {
    let sizes @ Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let candidates = Candidates::new(scored, vocab)?;
        let columns = candidates.n + OF_POSITION;
        let (mut scores, mut are_argmax) = (Vec::with_capacity(positions * columns), Vec::new());
        match plan.computation {
            Computation::OnePass => {
                let (inputs, none) = (inputs.tempered(scored.temperature), BufferedGradients::none(sizes));
                let request = OnePassRequest::Scores { candidates: &candidates, scored };
                let mut pass = OnePass::new(products, inputs, request, none, NeedsGrad::default(), plan);
                for positions in plan.chunks() {
                    pass.first_product(positions)?;
                    scores.extend(pass.scores(&candidates, scored));
                    are_argmax.extend(pass.are_argmax(&candidates));
                }
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::new(products, inputs, plan);
                for positions in plan.chunks() {
                    passes.first_product(positions.clone())?;
                    let (of_chunk, argmax) = passes.score_rows(positions, &candidates, scored);
                    scores.extend(of_chunk);
                    are_argmax.extend(argmax);
                }
            }
        }
        let are_argmax = || Tensor::from_vec(are_argmax, (positions, candidates.n), &Device::Cpu);
        let are_argmax = scored.is_argmax.then(are_argmax).transpose()?;
        Ok((Tensor::from_vec(scores, (positions, columns), &Device::Cpu)?, are_argmax))
    })
}

/// A loss whose terms are known once the scores of a chunk are.
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
        let columns = operands.adapter_columns()?;
        let gradients = BufferedGradients::new(sizes, vocab, columns, needs_grad, None, false);
        let mut losses = Vec::with_capacity(sizes.positions);
        let none = Targets::none(sizes);
        match plan.computation {
            Computation::OnePass => {
                let inputs = inputs.tempered(scored.temperature);
                let request = OnePassRequest::Scores { candidates: &candidates, scored };
                let mut pass = OnePass::new(products, inputs, request, gradients, needs_grad, plan);
                for positions in plan.chunks() {
                    pass.first_product(positions.clone())?;
                    let scores = pass.scores(&candidates, scored);
                    let upstream: Vec<T::Acc> = evaluated(terms, positions.clone(), scores, &mut losses)?;
                    if needs_grad.any() {
                        let (first, power) = (positions.start, T::Acc::from_f64(1.0));
                        let targets = Targets::of_scores(scored, &candidates, &upstream, first, power, sizes);
                        pass.objective_rows(&targets);
                        pass.chunk_gradients(positions, needs_grad)?;
                    }
                }
                results(sizes, needs_grad, &none, &losses, pass.gradients)
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::new(products, inputs, plan).with_targets(&none, gradients);
                for positions in plan.chunks() {
                    passes.first_product(positions.clone())?;
                    let (scores, _) = passes.score_rows(positions.clone(), &candidates, scored);
                    let upstream: Vec<T::Acc> = evaluated(terms, positions.clone(), scores, &mut losses)?;
                    if needs_grad.any() {
                        let (first, power) = (positions.start, T::Acc::from_f64(1.0 / scored.temperature));
                        let targets = Targets::of_scores(scored, &candidates, &upstream, first, power, sizes);
                        passes.objective_rows(&targets, positions.clone())?;
                        passes.chunk_gradients(positions, needs_grad)?;
                    }
                }
                results(sizes, needs_grad, &none, &losses, passes.gradients)
            }
        }
    })
}

/// Adds the values of some positions, which have these scores, to the losses, and returns the upstream gradients of the
/// scores.
fn evaluated<F: Float>(
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
