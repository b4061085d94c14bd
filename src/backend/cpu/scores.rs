//! Scores, and losses that are functions of them: from one pass where the target's log-probability and moments of the
//! logits give what is asked, else from the log-probabilities of all ids, in two passes.

use std::ops::Range;

use candle_core::{Device, Tensor};

use super::components::PositionLoss;
use super::dtype::Element;
use super::inputs::Inputs;
use super::one_pass::OnePass;
use super::results::{results, BufferedGradients};
use super::served::Products;
use super::simd::Float;
use super::targets::{scored_ids, Targets};
use super::two_pass::TwoPasses;
use crate::backend::contract::{LossResults, NeedsGrad, Operands, Real, ScoreTerms, Scored, Sizes};
use crate::backend::plan::{Computation, Plan};
use crate::backend::schedule::Steps;
use crate::error::Result;

/// `[positions, n + 1]`
pub(super) fn scores<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    scored: &Scored,
    plan: &Plan,
) -> Result<Tensor> {
    let sizes @ Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let (ids, n) = (scored_ids(scored, vocab)?, scored.token_ids.dim(1)?);
        let scores = match plan.computation {
            Computation::OnePass => {
                // Without ids, any target will do.
                let any = std::iter::repeat_n(0, if n == 0 { positions } else { 0 });
                let targets = Targets::of_ids(ids.into_iter().chain(any).collect(), sizes);
                let (inputs, none) = (inputs.tempered(scored.temperature), BufferedGradients::none(sizes));
                let needs_grad = NeedsGrad::default();
                let pass = OnePass::new(products, inputs, &targets, none, needs_grad, plan);
                let mut pass = pass.with_entropy(scored.entropy);
                pass.run_loss(plan, needs_grad)?;
                pass.losses.iter().flat_map(|loss| score(loss).into_iter().skip(1 - n)).collect()
            }
            Computation::TwoPasses => {
                let mut passes = TwoPasses::new(products, inputs, plan);
                let mut scores = Vec::with_capacity(positions * (n + 1));
                for positions in plan.chunks() {
                    passes.logits(positions.clone())?;
                    let ids = &ids[positions.start * n..positions.end * n];
                    scores.extend(passes.score_rows(positions, ids, scored));
                }
                scores
            }
        };
        Ok(Tensor::from_vec(scores, (positions, n + 1), &Device::Cpu)?)
    })
}

/// The log-probability of a position's target, and its entropy.
fn score<F: Float>(loss: &PositionLoss) -> [F; 2] {
    [F::of(0.0 - loss.nll), F::of(loss.entropy)]
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
        let (ids, n) = (scored_ids(scored, vocab)?, scored.token_ids.dim(1)?);
        let columns = operands.adapter_columns()?;
        let gradients = BufferedGradients::new(sizes, vocab, columns, needs_grad, None, false);
        let mut losses = Vec::with_capacity(sizes.positions);
        match plan.computation {
            Computation::OnePass => {
                let (inputs, targets) = (inputs.tempered(scored.temperature), Targets::of_ids(ids, sizes));
                let pass = OnePass::new(products, inputs, &targets, gradients, needs_grad, plan);
                let mut pass = pass.with_entropy(scored.entropy);
                for positions in plan.chunks() {
                    pass.logits(positions.clone())?;
                    pass.loss_rows(positions.clone())?;
                    let scores = pass.losses[positions.clone()].iter().flat_map(score).collect();
                    let upstream: Vec<T::Acc> = evaluated(terms, positions.clone(), (scores, n), &mut losses)?;
                    if needs_grad.any() {
                        // The objective is the negative log-likelihood.
                        let scales: Vec<T::Acc> = upstream.chunks_exact(n + 1).map(|row| -row[0]).collect();
                        pass.rows_scaled_by(positions.clone(), Some(&scales));
                        pass.gradients_of_rows(positions, needs_grad)?;
                    }
                }
                results(sizes, needs_grad, &targets, &losses, pass.gradients)
            }
            Computation::TwoPasses => {
                let none = Targets::of_scores(scored, &[], &[], 0, sizes);
                let mut passes = TwoPasses::new(products, inputs, plan).with_targets(&none, gradients);
                for positions in plan.chunks() {
                    passes.logits(positions.clone())?;
                    let of_chunk = &ids[positions.start * n..positions.end * n];
                    let scores = passes.score_rows(positions.clone(), of_chunk, scored);
                    let upstream: Vec<T::Acc> = evaluated(terms, positions.clone(), (scores, n), &mut losses)?;
                    if needs_grad.any() {
                        let targets = Targets::of_scores(scored, of_chunk, &upstream, positions.start, sizes);
                        passes.objective_rows(&targets, positions.clone());
                        passes.gradients_of_rows(positions, needs_grad)?;
                    }
                }
                results(sizes, needs_grad, &none, &losses, passes.gradients)
            }
        }
    })
}

/// Adds the values of some positions, which have `n + 1` scores each, to the losses, and returns the upstream gradients
/// of the scores.
fn evaluated<F: Float>(
    terms: &ScoreTerms,
    positions: Range<usize>,
    (scores, n): (Vec<F>, usize),
    losses: &mut Vec<PositionLoss>,
) -> Result<Vec<F>> {
    let nll: Vec<f64> = scores.chunks_exact(n + 1).map(|scores| -Real::f64(scores[0])).collect();
    let (values, upstream) =
        terms(positions.clone(), &Tensor::from_vec(scores, (positions.len(), n + 1), &Device::Cpu)?)?;
    let values = values.to_vec1::<F>()?.into_iter().map(Real::f64).zip(nll);
    losses.extend(values.map(|(objective, nll)| PositionLoss { objective, nll, ..PositionLoss::default() }));
    Ok(upstream.flatten_all()?.to_vec1()?)
}
