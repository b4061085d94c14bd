//! A loss that is a function of the log-probabilities of all ids, chunk by chunk, in two passes.

use candle_core::{Device, Tensor};

use super::memory::zeros;
use super::objective::components::PositionLoss;
use super::objective::results::{results, BufferedGradients, WeightBuffer};
use super::objective::targets::Targets;
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::served::Products;
use super::two_pass::TwoPasses;
use crate::backend::contract::LossResults;
use crate::backend::distribution::Real;
use crate::backend::objective::LogProbTerms;
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::error::Result;
use crate::tensors::autograd::take_values;

/// Computes the loss that `terms` defines, and the gradients of the operands that need one: for each chunk it is given the
/// log-probabilities of all ids, and returns the values of the positions and their derivatives by the log-probabilities.
pub(super) fn log_prob_loss<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    terms: &LogProbTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let sizes = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let gradients = BufferedGradients::new(operands, needs_grad, WeightBuffer::Zeros)?;
        let mut losses = Vec::with_capacity(sizes.positions);
        let mut passes = TwoPasses::for_chunk_targets(products, inputs, gradients, plan);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            let mut log_probs = zeros::<T::Acc>(positions.len() * sizes.vocab);
            passes.log_prob_rows::<T::Acc>(positions.clone(), &mut log_probs);
            let log_probs = Tensor::from_vec(log_probs, (positions.len(), sizes.vocab), &Device::Cpu)?;
            let (values, upstream) = terms(positions.clone(), log_probs)?;
            let values = values.to_vec1::<T::Acc>()?.into_iter().map(Real::f64);
            losses.extend(values.map(|value| PositionLoss { nll: value, objective: value, ..PositionLoss::default() }));
            if needs_grad.any() {
                let upstream = take_values(&upstream)?;
                let targets = Targets::from_log_prob_upstream(upstream, positions.start, sizes.vocab);
                passes.objective_rows(&targets, positions.clone())?;
                passes.chunk_gradients(positions, needs_grad)?;
            }
        }
        results(sizes, needs_grad, None, &losses, passes.gradients)
    })
}
