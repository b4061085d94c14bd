//! The log-probabilities of all ids, in two passes over a chunk's logits.

use candle_core::{Device, Tensor};

use super::memory::filled;
use super::operands::dtype::Element;
use super::operands::inputs::Inputs;
use super::served::Products;
use super::two_pass::TwoPasses;
use crate::backend::operands::{Operands, Sizes};
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::error::Result;

/// Computes log-probabilities `[positions, vocab]` in `O`, which is `T` or its accumulation type.
pub(super) fn log_probs<T: Element, O: Element<Acc = T::Acc>, X: Products<T>>(
    products: X,
    operands: &Operands,
    plan: &Plan,
) -> Result<Tensor> {
    let Sizes { positions, vocab, .. } = operands.sizes;
    Inputs::with(operands, |inputs: Inputs<'_, T>| {
        let mut passes = TwoPasses::for_distributions(products, inputs, plan);
        let mut log_probs = filled(O::zero(), positions * vocab);
        for positions in plan.chunks() {
            passes.first_product(positions.clone())?;
            let to = &mut log_probs[positions.start * vocab..positions.end * vocab];
            passes.log_prob_rows(positions, to);
        }
        Ok(Tensor::from_vec(log_probs, (positions, vocab), &Device::Cpu)?)
    })
}
