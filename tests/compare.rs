//! The comparison itself: it accepts rounding errors, and rejects every wrong result below, in every dtype.

mod common;

use approx::{abs_diff_eq, relative_eq};
use candle_core::{DType, Device, Result, Tensor};
use common::case::{upstream, Case, Head, Sizes};
use common::check::{backward, gradients, Gradients};
use common::compare::{compare, Errors, Tolerance};
use common::composed::Operands;
use common::objective::Objective;
use common::reference::{truth, Truth};
use common::values::{numbers, Numbers};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
const SIZES: Sizes = Sizes::new(6, 6, 3, 29);

/// A case with the results of the reference and of the composed form.
struct Trial {
    dtype: DType,
    case: Case,
    truth: Truth,
    composed: Gradients,
}

impl Trial {
    fn new(dtype: DType) -> Result<Self> {
        Self::with_targets(dtype, |y| y)
    }

    fn with_targets(dtype: DType, target: impl Fn(i64) -> i64) -> Result<Self> {
        let mut case = Case::random(Head::Mixture, SIZES, &[12], 3).rounded(dtype)?;
        case.targets.iter_mut().for_each(|y| *y = target(*y));
        let tensors = case.variables(dtype, &Device::Cpu)?;
        let operands = Operands::project(case.head, &tensors, case.activation)?;
        let (value, nll) = operands.loss(&case.targets, &Objective::default(), case.logits)?;
        let store = backward(&value, &upstream(1, 0)).expect("backward");
        let mut composed = gradients(&store, &tensors);
        composed.insert("nll", numbers(&nll));
        Ok(Self { dtype, truth: answer(&case), case, composed })
    }

    /// The verdict on each array of `got`: an error is a rejection.
    fn judge(&self, got: &Truth) -> Vec<std::result::Result<Errors, String>> {
        let nll = (&got.nll, &self.truth.nll, "nll", Tolerance::value(self.dtype));
        let gradient = |(name, gradient)| {
            let tolerance = Tolerance::gradient(self.dtype);
            (gradient, &self.truth.gradients[name], *name, tolerance)
        };
        std::iter::once(nll)
            .chain(got.gradients.iter().map(gradient))
            .map(|(got, truth, name, tolerance)| {
                compare(got, truth, self.composed.get(name).map(|numbers| &**numbers), tolerance)
            })
            .collect()
    }

    fn assert_rejects(&self, mutant: &Truth, what: &str) {
        assert!(self.judge(mutant).iter().any(|verdict| verdict.is_err()), "{what} is accepted in {:?}", self.dtype);
    }

    /// The case with one number of an operand replaced.
    fn with(&self, name: &str, index: usize, value: f64) -> Case {
        let mut case = self.case.clone();
        case.values.get_mut(name).expect(name)[index] = value;
        case
    }
}

fn answer(case: &Case) -> Truth {
    truth(case, &Objective::default(), &upstream(1, 0))
}

#[test]
fn rounding_errors_are_accepted() -> Result<()> {
    for dtype in DTYPES {
        let trial = Trial::new(dtype)?;
        let mut rounded = trial.truth.clone();
        rounded.nll = trial.composed["nll"].to_vec();
        for (name, gradient) in &mut rounded.gradients {
            gradient.copy_from_slice(&trial.composed[name]);
        }
        for verdict in trial.judge(&rounded) {
            verdict.expect("the composed form is within twice its own error");
        }
    }
    Ok(())
}

#[test]
fn a_dropped_vocabulary_column_is_rejected() -> Result<()> {
    for dtype in DTYPES {
        for column in 0..SIZES.vocab {
            // Not a target, so that the loss stays finite.
            let trial =
                Trial::with_targets(dtype, |y| if y == column as i64 { (y + 1) % SIZES.vocab as i64 } else { y })?;
            let mutant = answer(&trial.with("decoder.bias", column, f64::NEG_INFINITY));
            trial.assert_rejects(&mutant, &format!("dropped column {column}"));
        }
    }
    Ok(())
}

#[test]
fn a_dropped_component_is_rejected() -> Result<()> {
    for dtype in DTYPES {
        let trial = Trial::new(dtype)?;
        for component in 0..SIZES.components {
            let mut case = trial.case.clone();
            let log_priors = case.values.get_mut("log_priors").expect("log_priors");
            for log_priors in log_priors.chunks_mut(SIZES.components) {
                log_priors[component] = f64::NEG_INFINITY;
            }
            trial.assert_rejects(&answer(&case), "a dropped component");
        }
    }
    Ok(())
}

#[test]
fn a_bias_added_twice_is_rejected() -> Result<()> {
    for dtype in DTYPES {
        let trial = Trial::new(dtype)?;
        let mutant = answer(&trial.case.clone().scaled("decoder.bias", 2.0));
        trial.assert_rejects(&mutant, "a bias added twice");
    }
    Ok(())
}

#[test]
fn the_gradient_of_one_operand_zeroed_is_rejected() -> Result<()> {
    for dtype in DTYPES {
        let trial = Trial::new(dtype)?;
        for name in trial.case.values.keys() {
            let mut mutant = trial.truth.clone();
            let gradient = mutant.gradients.get_mut(name).expect(name);
            gradient.fill(0.0);
            trial.assert_rejects(&mutant, &format!("a zero gradient of {name}"));
        }
    }
    Ok(())
}

#[test]
fn a_gradient_that_misses_one_position_is_rejected() -> Result<()> {
    for dtype in DTYPES {
        let trial = Trial::new(dtype)?;
        for t in 0..trial.case.positions() {
            let objective = Objective {
                position_weights: Some((0..12).map(|i| f64::from(u8::from(i != t))).collect()),
                reduction: mos_head::Reduction::Sum,
                ..Objective::default()
            };
            let upstream = [upstream(1, 0)[0] / trial.truth.count];
            let mut mutant = truth(&trial.case, &objective, &upstream);
            mutant.nll.clone_from(&trial.truth.nll);
            trial.assert_rejects(&mutant, &format!("gradients without position {t}"));
        }
    }
    Ok(())
}

/// A comparison takes what is not finite for itself alone.
fn assert_only_itself(accepts: impl Fn(&[f64], &[f64]) -> bool) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    assert!(accepts(&[1.0, nan, inf, -inf], &[1.0, nan, inf, -inf]));
    assert!(!accepts(&[nan, 1.0], &[1.0, nan]), "a NaN moved");
    assert!(!accepts(&[1.0, 1.0], &[1.0, nan]), "a NaN lost");
    assert!(!accepts(&[nan, 1.0], &[1.0, 1.0]), "a NaN made");
    assert!(!accepts(&[-inf], &[inf]), "the other infinity");
    assert!(!accepts(&[nan], &[inf]), "a NaN for an infinity");
    assert!(!accepts(&[f64::MAX], &[inf]), "a large number for an infinity");
}

#[test]
fn a_misplaced_nan_or_infinity_is_rejected() {
    let tolerance = Tolerance::value(DType::BF16);
    let accepts = |got: &[f64], truth: &[f64]| compare(got, truth, None, tolerance).is_ok();
    assert_only_itself(accepts);
    assert!(!accepts(&[1.0], &[1.0, 1.0]), "a missing number");
}

#[test]
fn an_undefined_composed_form_leaves_only_the_ceiling() {
    let tolerance = Tolerance::value(DType::F32);
    let judge = |got: f64| compare(&[got], &[1.0], Some(&[f64::NAN]), tolerance);
    assert!(judge(1.0 + 1e-6).is_ok());
    assert!(judge(1.0 + 1e-3).is_err());
}

#[test]
fn the_message_shows_the_first_mismatches() {
    let message = compare(&[1.0, 2.0], &[1.0, 3.0], None, Tolerance::value(DType::F64)).unwrap_err();
    assert!(message.contains("[1] got 2e0, expected 3e0"), "{message}");
    assert!(message.contains("1 of 2"), "{message}");
}

/// Numbers without a shape.
fn given(values: &[f64]) -> Numbers {
    values.to_vec().into()
}

#[test]
fn closeness_is_relative_to_the_largest_number() {
    let truth = [-8.0, 1.0, 0.0];
    // Both errors are of the last number, which is zero.
    assert!(relative_eq!(given(&[-8.0, 1.0, 7.99e-5]), truth, max_relative = 1e-5));
    assert!(!relative_eq!(given(&[-8.0, 1.0, 8.01e-5]), truth, max_relative = 1e-5));
    assert!(abs_diff_eq!(given(&[-8.0, 1.0, 7.99e-5]), truth, epsilon = 8e-5));
    assert!(!abs_diff_eq!(given(&[-8.0, 1.0, 8.01e-5]), truth, epsilon = 8e-5));
    // The larger of both bounds counts.
    assert!(relative_eq!(given(&[-8.0, 1.0, 0.01]), truth, epsilon = 0.011, max_relative = 1e-5));
    // An array that is too large does not raise its own bound.
    assert!(!relative_eq!(given(&[-17.0, 1.0, 0.0]), truth, max_relative = 1.0));
    assert!(!relative_eq!(given(&truth), [-17.0, 1.0, 0.0], max_relative = 1.0));
}

#[test]
fn without_a_bound_numbers_are_equal() {
    assert!(relative_eq!(given(&[1.0]), [1.0]) && abs_diff_eq!(given(&[1.0]), [1.0]));
    let next = 1.0 + f64::EPSILON;
    assert!(!relative_eq!(given(&[next]), [1.0]) && !abs_diff_eq!(given(&[next]), [1.0]));
    assert!(!abs_diff_eq!(given(&[1e-300]), [0.0]));
}

#[test]
fn numbers_that_are_not_finite_match_only_themselves() {
    let inf = f64::INFINITY;
    let accepts = |found: &[f64], truth: &[f64]| {
        let (relative, absolute) = (
            relative_eq!(given(found), *truth, epsilon = f64::MAX, max_relative = 1.0),
            abs_diff_eq!(given(found), *truth, epsilon = f64::MAX),
        );
        assert_eq!(relative, absolute);
        relative
    };
    assert_only_itself(accepts);
    assert!(!accepts(&[inf], &[f64::MAX]), "an infinity for a large number");
    // An infinity does not raise the bound of the others.
    assert!(!relative_eq!(given(&[inf, 1.1]), [inf, 1.0], max_relative = 0.01));
}

#[test]
fn numbers_of_another_length_or_shape_are_not_close() -> Result<()> {
    assert!(!relative_eq!(given(&[1.0]), [1.0, 1.0], max_relative = 1.0), "a missing number");
    assert!(!relative_eq!(given(&[1.0, 1.0]), [1.0], max_relative = 1.0), "a number too many");
    assert!(!relative_eq!(given(&[]), [1.0], max_relative = 1.0), "no numbers");
    let square = numbers(&Tensor::ones((2, 2), DType::F32, &Device::Cpu)?);
    let row = numbers(&Tensor::ones((1, 4), DType::F32, &Device::Cpu)?);
    assert!(!relative_eq!(square, row, max_relative = 1.0) && square != row, "another shape");
    assert!(relative_eq!(square, [1.0; 4]) && square == [1.0; 4]);
    // Each of several arrays counts for itself.
    let (some, all) = ([given(&[1.0])], [given(&[1.0]), given(&[100.0])]);
    assert!(!relative_eq!(some[..], all[..], max_relative = 1.0));
    let near = [given(&[1.01]), given(&[100.0])];
    assert!(!relative_eq!(near[..], all[..], max_relative = 1e-3));
    Ok(())
}

#[test]
fn a_dropped_column_is_not_close_in_any_dtype() -> Result<()> {
    for (dtype, max_relative) in [(DType::F64, 1e-11), (DType::F32, 1e-5), (DType::BF16, 1.5e-2)] {
        let trial = Trial::new(dtype)?;
        let case = trial.with("decoder.bias", 0, f64::NEG_INFINITY);
        let mutant = answer(&case);
        for name in ["contexts", "decoder.weight", "decoder.bias"] {
            let truth = &trial.truth.gradients[name];
            assert!(!relative_eq!(given(&mutant.gradients[name]), *truth, max_relative = max_relative), "{name}");
        }
    }
    Ok(())
}
