//! Which of the two computations serves scores: what is not asked for costs nothing.

use super::*;
use crate::backend::objective::Scored;

#[test]
fn only_scores_that_need_all_ids_take_two_passes() -> Result<()> {
    for components in [1, 3] {
        for needs_grad in [false, true] {
            let case = Case::new(12, components, 19, 40);
            let (operands, _) = case.operands()?;
            let operands = Operands { log_priors: operands.log_priors.filter(|_| components > 1), ..operands };
            let needs_grad = NeedsGrad { contexts: needs_grad, ..NeedsGrad::default() };
            let computation =
                |needs_entropy: bool, needs_outside: bool, needs_collision: bool| -> Result<Computation> {
                    let token_ids = Tensor::zeros((12, 2), DType::U32, &Device::Cpu)?;
                    let (needs_argmax, temperature) = (false, 1.0);
                    let scored =
                        Scored { token_ids, needs_entropy, needs_outside, needs_collision, needs_argmax, temperature };
                    Ok(cpu::plan(&operands, scored.task(&operands, needs_grad)?, None)?.plan.computation)
                };
            assert_eq!(computation(false, false, false)?, Computation::OnePass);
            assert_eq!(computation(false, true, false)?, Computation::OnePass);
            // The entropy of a single softmax is a moment of its exponentials.
            let entropy = computation(true, true, false)?;
            assert_eq!(entropy == Computation::OnePass, components == 1 && !needs_grad.any());
            assert_eq!(computation(false, false, true)?, Computation::TwoPasses);
        }
    }
    Ok(())
}
