//! Every option of a loss, alone and with others, for every head: values and gradients against the reference.

#[path = "options/choices.rs"]
mod choices;
mod common;

use candle_core::{DType, Device, Tensor, Var};
use choices::Choice::{self, *};
use choices::{ALONE, CHOICES, COMBINED, MOST, MOST_UNREDUCED};
use common::case::{upstream, weights, Case, Head, Logits, Sizes, ENTRIES};
use common::check::{backward, gradients, Check, Layer};
use common::compare::{assert_close, Tolerance};
use common::composed::Operands;
use common::objective::Objective;
use common::random::{config, problems, LEAST_SCALE};
use common::reference::truth;
use common::values::numbers;
use common::{devices, dtypes, exact, on_each_device};
use mos_head::parts::LogitFunction;
use mos_head::{Distributions, LossOptions, Mixture, Reduction, Result};
use proptest::prelude::*;

const SIZES: Sizes = Sizes::new(7, 6, 3, 33);
const POSITIONS: usize = 10;

fn case(head: Head, seed: u64) -> Case {
    Case::random(head, SIZES, &[2, 5], seed)
}

/// An ignored index that some of the targets have.
fn frequent(case: &mut Case) -> i64 {
    case.targets.iter_mut().skip(3).step_by(5).for_each(|y| *y = -100);
    -100
}

/// The loss of these choices, and the logits of its case.
fn objective(choices: &[Choice], case: &mut Case) -> Objective {
    let on = |choice| choices.contains(&choice);
    let function = match (on(Sigsoftmax), on(Softcap)) {
        (true, _) => LogitFunction::Sigsoftmax,
        (_, true) => LogitFunction::Softcap(1.5),
        _ => LogitFunction::Identity,
    };
    case.logits = Logits { scale: if on(LogitScale) { 0.6 } else { 1.0 }, function };
    Objective {
        reduction: match (on(SumReduction), on(NoReduction)) {
            (true, _) => Reduction::Sum,
            (_, true) => Reduction::None,
            _ => Reduction::Mean,
        },
        ignore_index: on(IgnoredIndex).then(|| frequent(case)),
        position_weights: on(PositionWeights).then(|| weights(case.positions(), 1)),
        class_weights: on(ClassWeights).then(|| weights(case.sizes.vocab, 2)),
        label_smoothing: if on(LabelSmoothing) { 0.15 } else { 0.0 },
        z_loss: if on(ZLoss) { 0.02 } else { 0.0 },
    }
}

proptest! {
    #![proptest_config(config("tests/options.proptest-regressions"))]

    #[test]
    fn random_options_of_random_problems_equal_the_reference(
        problem in problems(),
        choices in proptest::sample::subsequence(&CHOICES[..], 0..=CHOICES.len()),
        workspace in proptest::option::of(1..4_usize),
    ) {
        for device in devices() {
            for &dtype in dtypes(&device).iter().filter(|d| d.size_in_bytes() >= 4) {
                for head in ENTRIES {
                    let mut case = problem.case(head);
                    let objective = objective(&choices, &mut case);
                    let check = Check { workspace, least_scale: LEAST_SCALE, ..Check::new(dtype) };
                    check.run(&case, &objective, &device)?;
                }
            }
        }
    }
}

/// Compares every entry with the reference under each choice of options.
fn check_choices(dtype: DType, choices: &[&[Choice]], seed: u64, device: &Device) -> Result<()> {
    for head in ENTRIES {
        for &choices in choices {
            let mut case = case(head, seed);
            let objective = objective(choices, &mut case);
            eprintln!("options {choices:?}");
            Check::new(dtype).run(&case, &objective, device)?;
        }
    }
    Ok(())
}

on_each_device! {
    fn each_option_alone_equals_the_reference(device: &Device) -> Result<()> {
        dtypes(device).iter().try_for_each(|&dtype| check_choices(dtype, &ALONE, 60, device))
    }

    fn combined_options_equal_the_reference(device: &Device) -> Result<()> {
        let dtypes = dtypes(device).iter().filter(|dtype| dtype.size_in_bytes() >= 4);
        dtypes.into_iter().try_for_each(|&dtype| check_choices(dtype, &COMBINED, 61, device))
    }

    fn all_options_at_once_in_small_chunks_equal_the_reference(device: &Device) -> Result<()> {
        for head in ENTRIES {
            for choices in [MOST, MOST_UNREDUCED] {
                let mut case = case(head, 62);
                let objective = objective(choices, &mut case);
                Check { workspace: Some(1), ..Check::new(DType::F32) }.run(&case, &objective, device)?;
            }
        }
        Ok(())
    }

    fn a_function_of_the_logits_applies_to_every_result_of_a_mixture(device: &Device) -> Result<()> {
        for function in [LogitFunction::Softcap(1.5), LogitFunction::Sigsoftmax] {
        let dtype = exact(device);
        let case = case(Head::Mixture, 73);
        let composed = case.variables(DType::F64, &Device::Cpu)?;
        let logits = Logits { scale: 1.0, function };
        let (truth, _) = Operands::project(case.head, &composed, case.activation)?.log_probs(logits)?;
        let upstream = upstream(POSITIONS * SIZES.vocab, 5);
        let slopes = gradients(&backward(&truth, &upstream)?, &composed);
        let nll = truth.gather(&case.target_tensor(&Device::Cpu)?.reshape((POSITIONS, 1))?, 1)?.neg()?;

        let tensors = case.variables(dtype, device)?;
        let bias = tensors.get("decoder.bias");
        let mixture = Mixture::new(&tensors["contexts"], tensors.get("log_priors"), &tensors["decoder.weight"], bias)?;
        let mixture = mixture.with_logit_function(function)?;
        let log_probs = mixture.log_probs()?;
        assert_close("log_probs", &numbers(&log_probs), &numbers(&truth), None, Tolerance::value(dtype));
        for (name, gradient) in gradients(&backward(&log_probs, &upstream)?, &tensors) {
            assert_close(name, &gradient, &slopes[name], None, Tolerance::gradient(dtype));
        }
        assert_eq!(numbers(&mixture.argmax()?.flatten_all()?), numbers(&truth.argmax(1)?));
        let loss = mixture.loss(&case.target_tensor(device)?, &LossOptions::new())?;
        assert_close("nll", &numbers(&loss.nll), &numbers(&nll), None, Tolerance::value(dtype));
        }
        Ok(())
    }

    fn an_ignored_index_may_be_an_id_of_the_vocabulary(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let mut case = case(head, 63);
            case.targets[1] = 4;
            case.targets[7] = 4;
            let objective = Objective { ignore_index: Some(4), label_smoothing: 0.1, ..Objective::default() };
            let truth = Check::new(exact(device)).run(&case, &objective, device)?;
            assert_eq!(truth.count, 8.0);
        }
        Ok(())
    }

    fn the_sum_over_the_count_is_the_mean_of_all_batches(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            let mut case = case(head, 64);
            let objective = objective(&[IgnoredIndex, PositionWeights, ClassWeights, LabelSmoothing], &mut case);
            let tensors = case.constants(dtype, device)?;
            let targets = case.target_tensor(device)?;
            let (mut sum, mut count) = (0.0, 0.0);
            for half in 0..2 {
                let mut part = tensors.clone();
                for name in ["hidden", "contexts", "log_priors"] {
                    if let Some(tensor) = part.get_mut(name) {
                        *tensor = tensor.narrow(0, half, 1)?;
                    }
                }
                let position_weights = objective.position_weights.as_ref().map(|w| w[half * 5..][..5].to_vec());
                let options = Objective { position_weights, ..objective.clone() }.options(&[1, 5], device)?;
                let loss = Layer::new(&case, &part)?.loss(&targets.narrow(0, half, 1)?, &options)?;
                sum += numbers(&loss.sum)[0];
                count += numbers(&loss.count)[0];
            }
            let mean = truth(&case, &objective, &[1.0]).value;
            assert_close("mean", &[sum / count], &mean, None, Tolerance::value(dtype));
        }
        Ok(())
    }

    fn without_weights_the_count_is_the_number_of_positions_not_ignored(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let mut case = case(head, 65);
            let options = LossOptions::new().with_ignore_index(frequent(&mut case)).with_label_smoothing(0.3);
            let layer = Layer::new(&case, &case.constants(DType::F32, device)?)?;
            let loss = layer.loss(&case.target_tensor(device)?, &options)?;
            assert_eq!(numbers(&loss.count), [(POSITIONS - 2) as f64]);
        }
        Ok(())
    }

    fn correct_predictions_are_counted_only_on_request(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let mut case = case(head, 66);
            let layer = Layer::new(&case, &case.constants(DType::F32, device)?)?;
            let targets = case.target_tensor(device)?;
            assert!(layer.loss(&targets, &LossOptions::new())?.correct.is_none());
            // One target is not the argmax, and one is ignored.
            case.targets = layer.argmax()?.flatten_all()?.to_vec1::<u32>()?.into_iter().map(i64::from).collect();
            case.targets[0] = (case.targets[0] + 1) % SIZES.vocab as i64;
            case.targets[9] = -1;
            let options = LossOptions::evaluation().with_correct(true).with_ignore_index(-1);
            let loss = layer.loss(&case.target_tensor(device)?, &options)?;
            let (is_correct, correct) = (loss.is_correct.expect("is_correct"), loss.correct.expect("correct"));
            assert_eq!((is_correct.dims(), is_correct.dtype()), (loss.nll.dims(), DType::U8));
            let expected: Vec<f64> = (0..POSITIONS).map(|t| if t == 0 || t == 9 { 0.0 } else { 1.0 }).collect();
            assert_eq!(numbers(&is_correct), expected, "{head:?}");
            assert_eq!(numbers(&correct), [(POSITIONS - 2) as f64], "{head:?}");
        }
        Ok(())
    }

    fn evaluation_gives_the_same_value_and_no_graph(device: &Device) -> Result<()> {
        for head in ENTRIES {
            for choices in [&[][..], &[NoReduction], MOST, MOST_UNREDUCED] {
                let mut case = case(head, 67);
                let objective = objective(choices, &mut case);
                let tensors = case.variables(DType::F32, device)?;
                let layer = Layer::new(&case, &tensors)?;
                let targets = case.target_tensor(device)?;
                let ask = |options| -> Result<_> {
                    layer.loss(&targets, &objective.apply(options, &case.lead, device)?)
                };
                let (training, evaluation) = (ask(LossOptions::new())?, ask(LossOptions::evaluation())?);
                for (trained, evaluated) in [(&training.value, &evaluation.value), (&training.nll, &evaluation.nll)] {
                    let tolerance = Tolerance::value(DType::F32);
                    assert_close(&format!("{choices:?}"), &numbers(evaluated), &numbers(trained), None, tolerance);
                }
                assert!(training.value.track_op() && !evaluation.value.track_op());
                let found = gradients(&evaluation.value.sum_all()?.backward()?, &tensors);
                assert!(found.is_empty(), "{head:?}: an evaluation has gradients {:?}", found.keys());
            }
        }
        Ok(())
    }

    fn only_the_value_is_differentiable(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let mut case = case(head, 68);
            let objective = objective(&[ClassWeights, LabelSmoothing], &mut case);
            let options = objective.options(&case.lead, device)?.with_correct(true);
            let layer = Layer::new(&case, &case.variables(DType::F32, device)?)?;
            let loss = layer.loss(&case.target_tensor(device)?, &options)?;
            assert!(loss.value.track_op());
            let correct = loss.correct.as_ref().expect("asked for");
            for detached in [&loss.sum, &loss.count, &loss.nll, correct] {
                assert!(!detached.track_op(), "{head:?}");
            }
        }
        Ok(())
    }

    fn results_are_in_single_precision_or_better(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            let expected = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            for head in ENTRIES {
                let case = case(head, 69);
                let layer = Layer::new(&case, &case.constants(dtype, device)?)?;
                let loss = layer.loss(&case.target_tensor(device)?, &LossOptions::new().with_correct(true))?;
                for tensor in [&loss.value, &loss.sum, &loss.count, &loss.nll] {
                    assert_eq!(tensor.dtype(), expected, "{head:?} in {dtype:?}");
                }
                assert_eq!(layer.log_probs()?.dtype(), dtype, "{head:?} in {dtype:?}");
                assert_eq!(layer.argmax()?.dtype(), DType::U32);
            }
        }
        Ok(())
    }

    fn results_are_never_minus_zero(device: &Device) -> Result<()> {
        for positions in [0, 3] {
            let case = Case::random(Head::Mixture, SIZES, &[positions], 78);
            let layer = Layer::new(&case, &case.constants(DType::F32, device)?)?;
            let options = LossOptions::new().with_reduction(Reduction::Sum);
            let loss = layer.loss(&case.target_tensor(device)?, &options)?;
            let Layer::Mixture(mixture) = layer else { unreachable!() };
            let pruned = mixture.prune(0.0)?.total_variation;
            for result in [&loss.sum, &loss.count, &pruned] {
                let values = numbers(result);
                assert!(values.iter().all(|x| x.is_sign_positive()), "{positions}: {values:?}");
            }
        }
        Ok(())
    }

    fn an_infinite_upstream_gradient_of_an_ignored_position_spoils_no_other(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let mut case = case(head, 79);
            case.targets[4] = -100;
            let tensors = case.variables(exact(device), device)?;
            let options = LossOptions::new().with_reduction(Reduction::None).with_ignore_index(-100);
            let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?;
            // Its loss is zero, and the slope of the square root infinite there.
            let found = gradients(&loss.value.sqrt()?.sum_all()?.backward()?, &tensors);
            assert_eq!(found.len(), tensors.len(), "{head:?}");
            assert!(found.values().flatten().all(|g| g.is_finite()), "{head:?}: {found:?}");
        }
        Ok(())
    }

    fn a_z_loss_that_cancels_the_mass_loses_no_gradient(device: &Device) -> Result<()> {
        for weight in [-1.0, 1.0] {
            // One id with logit z: the gradient of z is 2 zeta z, and 1 + 2 zeta z = 0 if z = -1.
            let tensor = |shape: &[usize], value: f32| Var::from_tensor(&Tensor::full(value, shape, device)?);
            let (contexts, decoder) = (tensor(&[1, 1, 1], 1.0)?, tensor(&[1, 1], weight)?);
            let mixture = Mixture::new(&contexts, None, &decoder, None)?;
            let loss = mixture.loss(&Tensor::new(&[0u32], device)?, &LossOptions::new().with_z_loss(0.5))?;
            assert_eq!(numbers(loss.backward()?.get(&decoder).expect("a gradient")), [f64::from(weight)]);
        }
        Ok(())
    }

    fn impossible_ids_have_no_part_in_the_gradient_of_smoothing(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let mut case = case(head, 76);
            let impossible = [0, 17, 32];
            for id in impossible {
                case.values.get_mut("decoder.bias").expect("decoder.bias")[id] = f64::NEG_INFINITY;
            }
            case.targets.iter_mut().for_each(|y| *y = 1 + *y % 16);
            let dtype = exact(device);
            let tensors = case.variables(dtype, device)?;
            let options = LossOptions::new().with_reduction(Reduction::Sum).with_label_smoothing(0.1);
            let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?;
            assert_eq!(numbers(&loss.value), [f64::INFINITY], "{head:?}");
            let found = gradients(&loss.backward()?, &tensors);
            let possible = |v: usize| if impossible.contains(&v) { 0.0 } else { 1.0 };
            let class_weights = Some((0..SIZES.vocab).map(possible).collect());
            let objective = Objective { label_smoothing: 0.1, class_weights, ..Objective::reduced(Reduction::Sum) };
            for (name, truth) in truth(&case, &objective, &[1.0]).gradients {
                assert_close(name, &found[name], &truth, None, Tolerance::gradient(dtype));
            }
        }
        Ok(())
    }

    fn no_probability_is_above_one(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                let mut case = Case::random(head, Sizes::new(5, 6, 5, 9), &[400], 77).scaled("decoder.bias", 40.0);
                let bias = &case.values["decoder.bias"];
                let sure = (0..9).max_by(|&a, &b| bias[a].total_cmp(&bias[b])).expect("an id") as i64;
                case.targets.fill(sure);
                let layer = Layer::new(&case, &case.constants(dtype, device)?)?;
                let targets = case.target_tensor(device)?;
                for options in [LossOptions::new().with_reduction(Reduction::None), LossOptions::evaluation()] {
                    let loss = layer.loss(&targets, &options)?;
                    let losses = [&*numbers(&loss.nll), &*numbers(&loss.value)].concat();
                    assert!(losses.iter().all(|x| x.is_sign_positive()), "{head:?} {dtype:?}: {losses:?}");
                }
                assert!(numbers(&layer.log_probs()?).iter().all(|&x| x <= 0.0), "{head:?} {dtype:?}");
            }
        }
        Ok(())
    }

    fn weights_get_no_gradient_and_may_be_of_any_float_type(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let case = case(head, 72);
            let layer = Layer::new(&case, &case.constants(DType::F32, device)?)?;
            let targets = case.target_tensor(device)?;
            let values = |dtype| -> Result<_> {
                let position_weights = Tensor::new(weights(POSITIONS, 3), &Device::Cpu)?.reshape((2, 5))?.to_dtype(dtype)?;
                let class_weights = Tensor::new(weights(SIZES.vocab, 4), &Device::Cpu)?.to_dtype(dtype)?;
                let options = LossOptions::new()
                    .with_position_weights(position_weights.to_device(device)?)
                    .with_class_weights(class_weights.to_device(device)?);
                Ok(numbers(&layer.loss(&targets, &options)?.value))
            };
            for &dtype in dtypes(device) {
                assert_eq!(values(dtype)?, values(DType::F32)?, "{head:?} {dtype:?}");
            }
        }
        Ok(())
    }
}
