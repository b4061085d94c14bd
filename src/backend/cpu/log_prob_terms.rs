//! A loss that is a function of the log-probabilities of all ids, chunk by chunk, in two passes.

use candle_core::{Device, Tensor};

use super::memory::zeros;
use super::objective::components::PositionLoss;
use super::objective::results::{results, BufferedGradients};
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

pub(super) fn log_prob_loss<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    terms: &LogProbTerms,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    let sizes = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let columns = operands.adapter_columns()?;
        let gradients = BufferedGradients::new(sizes, sizes.vocab, columns, needs_grad, None, false);
        let mut losses = Vec::with_capacity(sizes.positions);
        let none = Targets::none(sizes);
        let mut passes = TwoPasses::new(products, inputs, plan).with_targets(&none, gradients);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            let mut log_probs = zeros::<T::Acc>(positions.len() * sizes.vocab);
            passes.log_prob_rows::<T::Acc>(positions.clone(), &mut log_probs);
            let log_probs = Tensor::from_vec(log_probs, (positions.len(), sizes.vocab), &Device::Cpu)?;
            let (values, upstream) = terms(positions.clone(), log_probs)?;
            let values = values.to_vec1::<T::Acc>()?.into_iter().map(Real::f64);
            losses.extend(values.map(|value| PositionLoss { nll: value, objective: value, ..PositionLoss::default() }));
            if needs_grad.any() {
                let targets = Targets::of_upstream(take_values(&upstream)?, positions.start, sizes);
                passes.objective_rows(&targets, positions.clone())?;
                passes.chunk_gradients(positions, needs_grad)?;
            }
        }
        results(sizes, needs_grad, &none, &losses, passes.gradients)
    })
}
