//! Edge cases: smallest and largest sizes, every rank and layout, numbers at every scale, infinities.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, Var, D};
use common::case::{Case, Head, Sizes, ENTRIES, HEADS};
use common::check::{backward, build, gradients, Check, Layer};
use common::compare::{assert_close, Tolerance};
use common::objective::Objective;
use common::values::{numbers, Numbers};
use common::{dtypes, exact, on_each_device, strided};
use mos_head::{Distributions, LossOptions, Mixture, OutputLayer, Reduction, Result};

const SIZES: Sizes = Sizes::new(5, 3, 3, 7);

/// `f32`, and `f64` if the device has it: the dtypes that are exact enough for these cases.
fn strict(device: &Device) -> impl Iterator<Item = DType> {
    dtypes(device).iter().copied().filter(|d| d.size_in_bytes() >= 4)
}

on_each_device! {
    fn every_size_from_one_up_equals_the_reference(device: &Device) -> Result<()> {
        let sizes = [
            Sizes::new(1, 1, 1, 1),
            Sizes::new(1, 1, 3, 2),
            Sizes::new(3, 1, 2, 5),
            Sizes::new(5, 7, 1, 9),
            Sizes::new(7, 5, 2, 1),
            Sizes::new(4, 3, 32, 11),
            Sizes::new(2, 17, 3, 129),
            Sizes::new(31, 33, 2, 67),
            Sizes::new(65, 63, 5, 257),
        ];
        for dtype in strict(device) {
            for (seed, sizes) in (30..).zip(sizes) {
                for positions in [1, 2, 5] {
                    for head in ENTRIES {
                        // A vocabulary of one id has gradients of exactly zero, which are differences of probabilities
                        // that a GPU computes by functions with errors of two units in the last place.
                        let least_scale = if device.is_cpu() { 1e-2 } else { 3e-2 };
                        let check = Check { least_scale, ..Check::new(dtype) };
                        check.run(&Case::random(head, sizes, &[positions], seed), &Objective::default(), device)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn widths_around_those_of_models_equal_the_reference(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            // One sum over the whole width on a GPU, in the order of the units; pieces of it on the CPU.
            let condition = if device.is_cpu() { 1.0 } else { 10.0 };
            let check = Check { condition, least_scale: 1e-2, ..Check::new(dtype) };
            let run = |d, components, vocab, positions| {
                let case = Case::random(Head::Mixture, Sizes::new(d, d, components, vocab), &[positions], d as u64);
                // Logits of the same size at every width.
                let case = case.scaled("decoder.weight", 3.0 / (d as f64).sqrt());
                check.run(&case, &Objective::default(), device)
            };
            for d in [1, 31, 33, 1000, 2049, 4096] {
                for (vocab, positions) in [(1, 3), (15, 50), (17, 3)] {
                    run(d, 1, vocab, positions)?;
                }
            }
            // More rows than the third product sums over at a time; more tiles than it computes at a time.
            run(33, 3, 17, 200)?;
            run(33, 1, 128_257, 3)?;
            if device.is_cpu() {
                // A tile unit multiplies its operands in three parts, and the decoder in several blocks of columns.
                run(700, 1, 8200, 260)?;
            }
        }
        Ok(())
    }

    fn a_vocabulary_of_two_hundred_thousand_equals_the_reference(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            for head in ENTRIES {
                let case = Case::random(head, Sizes::new(3, 2, 2, 200_000), &[2], 40);
                Check::new(dtype).run(&case, &Objective::default(), device)?;
            }
        }
        Ok(())
    }

    fn many_positions_in_many_chunks_equal_the_reference(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            for head in ENTRIES {
                let case = Case::random(head, Sizes::new(5, 6, 3, 2001), &[5, 17], 41);
                let check = Check { workspace: Some(2), ..Check::new(dtype) };
                check.run(&case, &Objective::default(), device)?;
            }
        }
        Ok(())
    }

    fn any_number_of_leading_dimensions_is_accepted(device: &Device) -> Result<()> {
        let leads: [&[usize]; 6] = [&[], &[4], &[2, 3], &[2, 1, 3], &[1, 2, 1, 2], &[1, 1, 1, 1, 2]];
        for lead in leads {
            for head in ENTRIES {
                for reduction in [Reduction::Mean, Reduction::None] {
                    let case = Case::random(head, SIZES, lead, 42);
                    Check::new(exact(device)).run(&case, &Objective::reduced(reduction), device)?;
                }
            }
        }
        Ok(())
    }

    fn an_empty_batch_has_loss_zero_and_zero_gradients(device: &Device) -> Result<()> {
        let leads: [&[usize]; 3] = [&[0], &[0, 5], &[3, 0]];
        for dtype in strict(device) {
            for lead in leads {
                for head in ENTRIES {
                    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                        let case = Case::random(head, SIZES, lead, 43);
                        Check::new(dtype).run(&case, &Objective::reduced(reduction), device)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn an_empty_batch_needs_no_workspace(device: &Device) -> Result<()> {
        let (hidden, targets) = (Var::zeros((0, 3), exact(device), device)?, Tensor::zeros(0, DType::U32, device)?);
        let weight = Var::zeros((7, 3), exact(device), device)?;
        let mixture = Mixture::new(&hidden.unsqueeze(1)?, None, &weight, None)?;
        for options in [LossOptions::new(), LossOptions::evaluation()] {
            let options = options.with_workspace_bytes(1);
            assert_eq!(mixture.plan(&options)?.workspace_bytes, 0);
            assert_eq!(numbers(&mixture.loss(&targets, &options)?.value), [0.0]);
        }
        Ok(())
    }

    fn an_all_ignored_batch_has_loss_zero_and_zero_gradients(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                    let mut case = Case::random(head, SIZES, &[2, 3], 44);
                    case.targets.fill(-100);
                    let tensors = case.variables(dtype, device)?;
                    let options = LossOptions::new()
                        .with_reduction(reduction)
                        .with_ignore_index(-100)
                        .with_label_smoothing(0.1)
                        .with_z_loss(0.1)
                        .with_correct(true);
                    let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?;
                    for result in [&loss.value, &loss.sum, &loss.count, &loss.nll, loss.correct.as_ref().expect("correct")] {
                        assert!(numbers(result).iter().all(|&x| x == 0.0), "{head:?} {reduction:?}: {result}");
                    }
                    let found = gradients(&loss.value.sum_all()?.backward()?, &tensors);
                    assert_eq!(found.len(), tensors.len(), "{head:?}: every operand has a gradient");
                    for (name, gradient) in found {
                        assert!(gradient.iter().all(|&g| g == 0.0), "{head:?} {name}: {gradient:?}");
                    }
                }
            }
        }
        Ok(())
    }

    fn logits_at_any_scale_equal_the_reference(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            for head in ENTRIES {
                for scale in [1.0, 10.0, 100.0, 1e3, 1e4] {
                    for name in ["decoder.weight", "decoder.bias"] {
                        let case = Case::random(head, Sizes::new(9, 11, 3, 41), &[7], 45).scaled(name, scale);
                        let check = Check { condition: scale, ..Check::new(dtype) };
                        check.run(&case, &Objective::default(), device)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn ids_of_probability_zero_equal_the_reference(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            for head in ENTRIES {
                for label_smoothing in [0.0, 0.1] {
                    let mut case = Case::random(head, Sizes::new(5, 6, 3, 40), &[7], 46);
                    let impossible = [0, 1, 20, 39];
                    for id in impossible {
                        case.values.get_mut("decoder.bias").expect("decoder.bias")[id] = f64::NEG_INFINITY;
                    }
                    case.targets.iter_mut().for_each(|y| *y = 2 + *y % 17);
                    // Smoothing gives these ids mass unless their class weight is zero.
                    let class_weight = |id| if impossible.contains(&id) { 0.0 } else { 1.0 };
                    let class_weights = (label_smoothing > 0.0).then(|| (0..40).map(class_weight).collect());
                    let objective = Objective { label_smoothing, class_weights, ..Objective::default() };
                    Check::new(dtype).run(&case, &objective, device)?;
                }
            }
        }
        Ok(())
    }

    fn an_impossible_target_has_infinite_loss_and_affects_no_other(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                let mut case = Case::random(head, SIZES, &[3], 47);
                case.values.get_mut("decoder.bias").expect("decoder.bias")[2] = f64::NEG_INFINITY;
                case.targets = vec![1, 2, 3];
                let layer = Layer::new(&case, &case.constants(dtype, device)?)?;
                let targets = case.target_tensor(device)?;
                let loss = layer.loss(&targets, &LossOptions::evaluation())?;
                assert_eq!(numbers(&loss.value), [f64::INFINITY], "{head:?}");
                let nll = numbers(&loss.nll);
                assert!(nll[0].is_finite() && nll[1] == f64::INFINITY && nll[2].is_finite(), "{head:?} {nll:?}");
                let options = LossOptions::evaluation().with_ignore_index(2);
                let loss = layer.loss(&targets, &options)?;
                assert!(numbers(&loss.value)[0].is_finite(), "{head:?}");
                // Smoothing gives the impossible id mass at the positions that are not ignored.
                let loss = layer.loss(&targets, &options.with_label_smoothing(0.1))?;
                assert_eq!(numbers(&loss.value), [f64::INFINITY], "{head:?}");
                assert!(numbers(&loss.nll).iter().all(|x| x.is_finite()), "{head:?}");
            }
        }
        Ok(())
    }

    fn a_vocabulary_of_impossible_ids_has_nan_in_loss_and_gradients(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            // Two computations on the CPU: counted predictions take the second. And the loss alone, of few rows and of
            // many.
            for (positions, correct) in [(1, false), (1, true), (9, false)] {
                let hidden = Var::ones((positions, 2), dtype, device)?;
                let weight = Var::ones((3, 2), dtype, device)?;
                let bias = Var::from_tensor(&Tensor::full(f32::NEG_INFINITY, 3, device)?.to_dtype(dtype)?)?;
                let mixture = Mixture::new(&hidden.unsqueeze(1)?, None, &weight, Some(&bias))?;
                let targets = Tensor::zeros(positions, DType::U32, device)?;
                let loss = mixture.loss(&targets, &LossOptions::new().with_correct(correct))?;
                assert!(numbers(&loss.value).iter().chain(&numbers(&loss.nll)).all(|x| x.is_nan()), "{dtype:?}");
                let gradients = loss.backward()?;
                for variable in [&hidden, &weight, &bias] {
                    let gradient = numbers(gradients.get(variable).unwrap());
                    assert!(gradient.iter().all(|x| x.is_nan()), "{dtype:?}, correct {correct}: {gradient:?}");
                }
                let loss = mixture.loss(&targets, &LossOptions::evaluation())?;
                assert!(numbers(&loss.value)[0].is_nan());
            }
        }
        Ok(())
    }

    fn priors_above_one_are_reported_as_certain_with_the_gradient_of_the_formula(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            // P(0) = 2 * 0.9 * 0.75.
            let hidden = Var::zeros((1, 2, 1), dtype, device)?;
            let bias = Var::from_tensor(&Tensor::new(&[3f64.ln(), 0.0], &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)?;
            let log_priors = Var::from_tensor(&Tensor::full(0.9f32.ln(), (1, 2), device)?.to_dtype(dtype)?)?;
            let weight = Tensor::zeros((2, 1), dtype, device)?;
            let mixture = Mixture::new(&hidden, Some(&log_priors), &weight, Some(&bias))?;
            let loss = mixture.loss(&Tensor::zeros(1, DType::U32, device)?, &LossOptions::new())?;
            assert_eq!([numbers(&loss.value)[0], numbers(&loss.nll)[0]], [0.0; 2]);
            let gradients = loss.backward()?;
            for (var, expected) in [(&log_priors, [-0.5, -0.5]), (&bias, [-0.25, 0.25])] {
                assert_abs_diff_eq!(numbers(gradients.get(var).unwrap()), expected, epsilon = 1e-6);
            }
        }
        Ok(())
    }

    fn one_hot_priors_equal_the_reference(device: &Device) -> Result<()> {
        for dtype in strict(device) {
            let mut case = Case::random(Head::Mixture, SIZES, &[6], 48);
            let log_priors = case.values.get_mut("log_priors").expect("log_priors");
            for (t, log_priors) in log_priors.chunks_mut(SIZES.components).enumerate() {
                log_priors.fill(f64::NEG_INFINITY);
                log_priors[t % SIZES.components] = 0.0;
            }
            Check::new(dtype).run(&case, &Objective::default(), device)?;
            for head in [Head::MixtureOfContexts, Head::MixtureOfSoftmaxes] {
                let case = Case::random(head, SIZES, &[6], 49).scaled("prior.weight", 1e4);
                let check = Check { condition: 1e4, least_scale: 1e-3, ..Check::new(dtype) };
                check.run(&case, &Objective::default(), device)?;
            }
        }
        Ok(())
    }

    fn a_nan_stays_at_its_position(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                let mut case = Case::random(head, SIZES, &[4], 50);
                let whole = answers(&case, dtype, device)?;
                let name = if head == Head::Mixture { "contexts" } else { "hidden" };
                let width = case.values[name].len() / 4;
                case.values.get_mut(name).expect(name)[2 * width + 1] = f64::NAN;
                let (nll, value, log_probs) = answers(&case, dtype, device)?;
                for t in 0..4 {
                    let row = t * SIZES.vocab..(t + 1) * SIZES.vocab;
                    if t == 2 {
                        assert!(nll[t].is_nan() && value[t].is_nan(), "{head:?}");
                        assert!(log_probs[row].iter().all(|x| x.is_nan()), "{head:?}");
                    } else {
                        assert_eq!((nll[t], value[t]), (whole.0[t], whole.1[t]), "{head:?}");
                        assert_eq!(log_probs[row.clone()], whole.2[row], "{head:?}");
                    }
                }
            }
        }
        Ok(())
    }

    fn the_inputs_of_an_ignored_position_reach_no_gradient(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                let names: &[_] = if head == Head::Mixture { &["contexts", "log_priors"] } else { &["hidden"] };
                let ask = |spoiler: f64| -> Result<_> {
                    let mut case = Case::random(head, SIZES, &[2, 3], 56);
                    case.targets[4] = -100;
                    for name in names {
                        let values = case.values.get_mut(name).expect(name);
                        let width = values.len() / 6;
                        values[4 * width..5 * width].fill(spoiler);
                    }
                    let tensors = case.variables(dtype, device)?;
                    let options = LossOptions::new().with_ignore_index(-100).with_label_smoothing(0.1);
                    let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?;
                    Ok((numbers(&loss.value), numbers(&loss.nll), gradients(&loss.backward()?, &tensors)))
                };
                let expected = ask(0.0)?;
                assert!(expected.2.values().flatten().all(|g| g.is_finite()), "{head:?}");
                for spoiler in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    assert_eq!(ask(spoiler)?, expected, "{head:?} {spoiler}");
                }
            }
        }
        Ok(())
    }

    fn a_nan_or_plus_infinity_in_the_decoder_makes_every_result_nan(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                for spoiler in [f64::NAN, f64::INFINITY] {
                    let mut case = Case::random(head, SIZES, &[4], 51);
                    case.values.get_mut("decoder.bias").expect("decoder.bias")[5] = spoiler;
                    let (nll, value, log_probs) = answers(&case, dtype, device)?;
                    let mut all = nll.iter().chain(&value).chain(&log_probs);
                    assert!(all.all(|x| x.is_nan()), "{head:?} {spoiler}");
                }
            }
        }
        Ok(())
    }

    fn the_layout_of_the_inputs_does_not_matter(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in HEADS {
            let case = Case::random(head, SIZES, &[2, 3], 52);
            let tensors = case.constants(dtype, device)?;
            let layer = build(&case, &tensors)?;
            let (hidden, targets) = (&tensors["hidden"], case.target_tensor(device)?);
            let expected = ask(layer.as_ref(), &Var::from_tensor(hidden)?, &targets)?;

            // The same numbers as a transposed view, and as a window of a larger tensor.
            let turned = Var::from_tensor(&hidden.transpose(0, 2)?.contiguous()?)?;
            let view = turned.transpose(0, 2)?;
            let turned_targets = targets.t()?.contiguous()?.t()?;
            let got = ask_view(layer.as_ref(), &view, &turned, &turned_targets)?;
            let gradient = got.1.transpose(0, 2)?;
            assert_eq!((got.0, numbers(&gradient)), (expected.0.clone(), numbers(&expected.1)), "{head:?} turned");

            let wide = Var::from_tensor(&Tensor::cat(&[hidden, hidden, hidden], 1)?)?;
            let view = wide.narrow(1, 3, 3)?;
            let wide_targets = Tensor::cat(&[&targets, &targets, &targets], 1)?.narrow(1, 3, 3)?;
            let got = ask_view(layer.as_ref(), &view, &wide, &wide_targets)?;
            let gradient = got.1.narrow(1, 3, 3)?;
            assert_eq!((got.0, numbers(&gradient)), (expected.0, numbers(&expected.1)), "{head:?} narrowed");
        }
        Ok(())
    }

    fn broadcast_inputs_equal_their_copies(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in HEADS {
            let case = Case::random(head, SIZES, &[1, 3], 53);
            let tensors = case.constants(dtype, device)?;
            let layer = build(&case, &tensors)?;
            let hidden = Var::from_tensor(&tensors["hidden"])?;
            let view = hidden.broadcast_as((4, 3, SIZES.hidden))?;
            let targets = case.target_tensor(device)?.broadcast_as((4, 3))?;
            let got = ask_view(layer.as_ref(), &view, &hidden, &targets)?;
            let copies = Var::from_tensor(&view.contiguous()?)?;
            let expected = ask(layer.as_ref(), &copies, &targets.contiguous()?)?;
            assert_eq!(got.0, expected.0, "{head:?}");
            let (got, expected) = (numbers(&got.1), numbers(&expected.1.sum_keepdim(0)?));
            assert_close("hidden", &got, &expected, None, Tolerance::gradient(dtype));
        }
        Ok(())
    }

    fn the_layout_of_the_parameters_does_not_matter(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[5], 54);
            let expected = answers(&case, dtype, device)?;
            let mut tensors = case.constants(dtype, device)?;
            for tensor in tensors.values_mut() {
                *tensor = match tensor.rank() {
                    1 => strided(tensor)?,
                    _ => tensor.transpose(0, D::Minus1)?.contiguous()?.transpose(0, D::Minus1)?,
                };
            }
            let layer = Layer::new(&case, &tensors)?;
            let loss = layer.loss(&case.target_tensor(device)?, &LossOptions::evaluation())?;
            assert_close("nll", &numbers(&loss.nll), &expected.0, None, Tolerance::value(dtype));
            assert_close("log_probs", &numbers(&layer.log_probs()?), &expected.2, None, Tolerance::value(dtype));
        }
        Ok(())
    }

    fn targets_of_either_integer_type_give_the_same(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[2, 3], 55);
            let layer = Layer::new(&case, &case.constants(DType::F32, device)?)?;
            let targets = case.target_tensor(device)?;
            // An ignored index outside u32 must not affect the targets.
            let options = LossOptions::evaluation().with_ignore_index(-1);
            let long = layer.loss(&targets, &options)?;
            let short = layer.loss(&targets.to_dtype(DType::U32)?, &options)?;
            assert_eq!(numbers(&long.nll), numbers(&short.nll), "{head:?}");
        }
        Ok(())
    }

    fn one_component_needs_no_log_priors(device: &Device) -> Result<()> {
        let sizes = Sizes { components: 1, ..SIZES };
        let case = Case::random(Head::Mixture, sizes, &[4], 56).without("log_priors");
        Check::new(exact(device)).run(&case, &Objective::default(), device)?;
        let tensors = case.constants(DType::F32, device)?;
        let zeros = tensors["contexts"].narrow(2, 0, 1)?.squeeze(2)?.zeros_like()?;
        let with = |log_priors| Mixture::new(&tensors["contexts"], log_priors, &tensors["decoder.weight"], None);
        let (with, without) = (with(Some(&zeros))?, with(None)?);
        assert_eq!(numbers(&with.log_probs()?), numbers(&without.log_probs()?));
        Ok(())
    }
}

/// Negative log-likelihoods, losses without reduction, and log-probabilities.
fn answers(case: &Case, dtype: DType, device: &Device) -> Result<(Numbers, Numbers, Numbers)> {
    let layer = Layer::new(case, &case.constants(dtype, device)?)?;
    let options = LossOptions::evaluation().with_reduction(Reduction::None);
    let loss = layer.loss(&case.target_tensor(device)?, &options)?;
    Ok((numbers(&loss.nll), numbers(&loss.value), numbers(&layer.log_probs()?)))
}

/// The negative log-likelihoods, and the gradient of the hidden states.
fn ask(layer: &dyn OutputLayer, hidden: &Var, targets: &Tensor) -> Result<(Numbers, Tensor)> {
    ask_view(layer, hidden, hidden, targets)
}

/// The same through a view of a variable.
fn ask_view(layer: &dyn OutputLayer, view: &Tensor, variable: &Var, targets: &Tensor) -> Result<(Numbers, Tensor)> {
    let loss = layer.loss(view, targets, &LossOptions::new())?;
    let store = backward(&loss.value, &[1.0])?;
    let gradient = store.get(variable.as_tensor()).expect("a gradient of the hidden states");
    Ok((numbers(&loss.nll), gradient.clone()))
}
