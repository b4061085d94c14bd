//! A loss whose targets are known before the first chunk: over target ids, or the inner product of log-probabilities and
//! their upstream gradients. It takes one pass or two, as planned.

use candle_core::WithDType;

use super::objective::results::{results, BufferedGradients, WeightBuffer};
use super::objective::targets::Targets;
use super::one_pass::{OnePass, OnePassRequest};
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::served::Products;
use super::two_pass::TwoPasses;
use crate::backend::contract::LossResults;
use crate::backend::objective::{GradientSoFar, Objective};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::{Computation, Plan};
use crate::backend::schedule::Steps;
use crate::error::Result;
use crate::tensors::autograd::take_values;

/// Computes the objective, and the gradients of the operands that need one.
pub(super) fn objective_loss<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<LossResults> {
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let targets = Targets::new(objective, operands.sizes, operands.weight_rows()?)?;
        let weight = weight_buffer::<T, X>(operands, objective, needs_grad, plan)?;
        let gradients = BufferedGradients::new(operands, needs_grad, weight)?;
        let (losses, mut gradients, ranks) = match plan.computation {
            Computation::OnePass => {
                let request = OnePassRequest::Loss { targets: &targets, shard: objective.shard() };
                let mut pass = OnePass::new(products, inputs, request, gradients, needs_grad, plan);
                pass.run_loss(plan, needs_grad)?;
                (pass.losses, pass.gradients, pass.ranks)
            }
            Computation::TwoPasses => {
                let shard = objective.shard();
                let mut passes = TwoPasses::for_targets(products, inputs, &targets, shard, gradients, plan);
                passes.run_loss(plan, needs_grad)?;
                (passes.losses, passes.gradients, passes.ranks)
            }
        };
        if let Some(mut ranks) = ranks {
            ranks.finish_sum(&mut gradients.contexts)?;
        }
        results(operands.sizes, needs_grad, Some(&targets), &losses, gradients)
    })
}

/// Chooses the buffer of the weight's gradient: the gradient of earlier losses, if this loss adds to it. Otherwise a single
/// chunk in one pass writes the gradient rounded, if the products have such a form and the weight has no rows of targets
/// outside the vocabulary.
fn weight_buffer<T: Element, X: Products<T>>(
    operands: &Operands,
    objective: &Objective,
    needs_grad: NeedsGrad,
    plan: &Plan,
) -> Result<WeightBuffer<T::Acc>> {
    if let Some(so_far) = objective.so_far().filter(|_| needs_grad.weight).and_then(GradientSoFar::take) {
        return Ok(WeightBuffer::SoFar(take_values(&so_far.to_dtype(T::Acc::DTYPE)?)?));
    }
    let is_single_chunk = plan.chunks().nth(1).is_none();
    let is_whole = operands.weight_rows()? == operands.sizes.vocab;
    let is_rounded = X::rounds_gradients() && plan.computation == Computation::OnePass && is_single_chunk && is_whole;
    Ok(if is_rounded { WeightBuffer::Rounded } else { WeightBuffer::Zeros })
}
