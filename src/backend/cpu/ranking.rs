//! The most probable ids of each position: of many positions of a single component from one pass, which ranks logits while
//! they are computed, else from the mixture's probabilities, in two passes.

use candle_core::{Device, Tensor, WithDType};

use super::inputs::Inputs;
use super::one_pass::OnePass;
use super::results::BufferedGradients;
use super::served::Products;
use super::targets::Targets;
use super::visit_all;
use crate::backend::contract::{NeedsGrad, Operands};
use crate::backend::cpu::dtype::Element;
use crate::backend::plan::{Computation, Plan};
use crate::backend::ranking::{tensors, Best};
use crate::backend::schedule::Steps;
use crate::error::Result;

/// The `k` most probable ids and their log-probabilities, each `[positions, k]`.
pub(super) fn top_k<T: Element, X: Products<T>>(
    products: X,
    operands: &Operands,
    k: usize,
    plan: &Plan,
) -> Result<(Tensor, Tensor)> {
    let best = match plan.computation {
        Computation::OnePass => Inputs::with(operands, |inputs: Inputs<'_, T>| {
            let (targets, none) = (Targets::none(operands.sizes), BufferedGradients::none(operands.sizes));
            let pass = OnePass::new(products, inputs, &targets, none, NeedsGrad::default(), plan);
            let (mut pass, mut best) = (pass.with_ranks(k), Vec::with_capacity(operands.sizes.positions));
            for positions in plan.chunks() {
                pass.logits(positions)?;
                best.extend(pass.most_probable(k)?);
            }
            Ok(best)
        }),
        Computation::TwoPasses => visit_all::<T, _, _>(products, operands, plan, &Best { k }),
    }?;
    tensors(&best, k, T::Acc::DTYPE, &Device::Cpu)
}
