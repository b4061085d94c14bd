//! The reference itself: against candle's autograd on the composed form, and against its own central differences.

mod common;

use approx::assert_relative_eq;
use candle_core::{DType, Device, Result};
use common::case::{upstream, weights, Case, Logits, Sizes, ENTRIES};
use common::check::{backward, central_differences, gradients};
use common::compare::{assert_close, Tolerance};
use common::composed::Operands;
use common::objective::Objective;
use common::reference::truth;
use common::values::{numbers, Numbers};
use mos_head::parts::LogitFunction;
use mos_head::Reduction;

const SIZES: Sizes = Sizes::new(4, 3, 3, 7);

/// All options that the composed form has, together.
fn everything(reduction: Reduction) -> Objective {
    Objective {
        reduction,
        ignore_index: Some(2),
        position_weights: Some(weights(6, 1)),
        class_weights: Some(weights(SIZES.vocab, 2)),
        label_smoothing: 0.1,
        z_loss: 0.01,
    }
}

#[test]
fn the_reference_equals_the_composed_form_in_f64() -> Result<()> {
    let tolerance = Tolerance::value(DType::F64);
    for head in ENTRIES {
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            for (objective, function) in [
                (Objective::reduced(reduction), LogitFunction::Identity),
                (everything(reduction), LogitFunction::Softcap(2.0)),
                (everything(reduction), LogitFunction::Sigsoftmax),
            ] {
                let logits = Logits { scale: 0.7, function };
                let case = Case { logits, ..Case::random(head, SIZES, &[2, 3], 5) };
                let upstream = upstream(if reduction == Reduction::None { 6 } else { 1 }, 3);
                let truth = truth(&case, &objective, &upstream);
                let tensors = case.variables(DType::F64, &Device::Cpu)?;
                let operands = Operands::project(head, &tensors, case.activation)?;
                let (value, nll) = operands.loss(&case.targets, &objective, case.logits)?;
                assert_close("value", &numbers(&value), &truth.value, None, tolerance);
                assert_close("nll", &numbers(&nll), &truth.nll, None, tolerance);
                let log_probs = numbers(&operands.log_probs(case.logits)?.0);
                assert_close("log_probs", &log_probs, &truth.log_probs, None, tolerance);
                let found = gradients(&backward(&value, &upstream).expect("backward"), &tensors);
                assert_eq!(found.len(), case.values.len(), "every operand has a gradient");
                for (name, gradient) in &found {
                    let truth = &truth.gradients[name];
                    assert_close(name, gradient, truth, None, Tolerance::gradient(DType::F64));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_reference_gradients_equal_its_central_differences() {
    for head in ENTRIES {
        let case = Case::random(head, SIZES, &[6], 7);
        let objective = everything(Reduction::None);
        let upstream = upstream(6, 4);
        let expected = central_differences(&case, |case| {
            let value = truth(case, &objective, &upstream).value;
            Ok(value.iter().zip(&upstream).map(|(a, b)| a * b).sum())
        })
        .expect("numbers");
        for (name, gradient) in truth(&case, &objective, &upstream).gradients {
            let found = Numbers::from(gradient).named(format!("{name} of {head:?}"));
            assert_relative_eq!(found, *expected[name], epsilon = 1e-8, max_relative = 1e-8);
        }
    }
}
