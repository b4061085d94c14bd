//! Properties of every mixture, on random problems of random, mostly irregular sizes.

mod common;

use candle_core::{DType, Device, Tensor};
use common::case::{weights, Case, Head, Sizes, Tensors, ENTRIES};
use common::check::{gradients, least_workspace, Check, Gradients, Layer};
use common::compare::{assert_close, Tolerance};
use common::composed::Operands;
use common::objective::Objective;
use common::random::{config, problems, LEAST_SCALE};
use common::values::{numbers, Numbers};
use common::{devices, dtypes, exact};
use mos_head::{Distributions, Loss, LossOptions, Mixture, Reduction, Result};
use proptest::prelude::*;

/// One loss with its gradients.
struct Answer {
    loss: Loss,
    gradients: Gradients,
}

/// The options that change no shape, so that all code paths are taken.
fn options(case: &Case, device: &Device) -> Result<LossOptions> {
    let objective = Objective {
        class_weights: Some(weights(case.sizes.vocab, 1)),
        label_smoothing: 0.1,
        z_loss: 0.01,
        ..Objective::default()
    };
    Ok(objective.options(&case.lead, device)?)
}

fn ask(case: &Case, tensors: &Tensors, options: &LossOptions) -> Result<Answer> {
    let targets = case.target_tensor(tensors["decoder.weight"].device())?;
    let loss = Layer::new(case, tensors)?.loss(&targets, options)?;
    let gradients = gradients(&loss.backward()?, tensors);
    Ok(Answer { loss, gradients })
}

fn assert_same(got: &Answer, expected: &Answer, dtype: DType) {
    let value = Tolerance::value(dtype);
    let pairs = [(&got.loss.value, &expected.loss.value), (&got.loss.nll, &expected.loss.nll)];
    for (got, expected) in pairs {
        assert_close("loss", &numbers(got), &numbers(expected), None, value);
    }
    assert_eq!(got.gradients.len(), expected.gradients.len());
    for (name, expected) in &expected.gradients {
        let tolerance = Tolerance::gradient(dtype).least_scale(LEAST_SCALE);
        assert_close(name, &got.gradients[name], expected, None, tolerance);
    }
}

fn assert_identical(got: &Answer, expected: &Answer) {
    assert_eq!(numbers(&got.loss.value), numbers(&expected.loss.value));
    assert_eq!(numbers(&got.loss.nll), numbers(&expected.loss.nll));
    assert_eq!(got.gradients, expected.gradients);
}

proptest! {
    #![proptest_config(config("tests/laws.proptest-regressions"))]

    #[test]
    fn random_problems_equal_the_reference(problem in problems()) {
        for device in devices() {
            // In half precision some of these sums cancel down to rounding errors.
            for &dtype in dtypes(&device).iter().filter(|d| d.size_in_bytes() >= 4) {
                for head in ENTRIES {
                    let check = Check { least_scale: LEAST_SCALE, ..Check::new(dtype) };
                    check.run(&problem.case(head), &Objective::default(), &device)?;
                }
            }
        }
    }

    #[test]
    fn probabilities_sum_to_one(problem in problems()) {
        for device in devices() {
            let dtype = exact(&device);
            for head in ENTRIES {
                let case = problem.case(head);
                let log_probs = Layer::new(&case, &case.constants(dtype, &device)?)?.log_probs()?;
                let sums = numbers(&log_probs.exp()?.sum(1)?);
                assert_close("sums", &sums, &vec![1.0; problem.positions], None, Tolerance::value(dtype));
            }
        }
    }

    #[test]
    fn nll_is_not_negative_and_is_minus_the_log_prob_of_the_target(problem in problems()) {
        for device in devices() {
            for head in ENTRIES {
                let case = problem.case(head);
                let targets = case.target_tensor(&device)?;
                let layer = Layer::new(&case, &case.constants(DType::F32, &device)?)?;
                let nll = numbers(&layer.loss(&targets, &LossOptions::evaluation())?.nll);
                prop_assert!(nll.iter().all(|&x| x >= -1e-6), "{nll:?}");
                let chosen = layer.log_probs()?.gather(&targets.unsqueeze(1)?, 1)?.neg()?;
                assert_close("nll", &nll, &numbers(&chosen), None, Tolerance::value(DType::F32));
            }
        }
    }

    #[test]
    fn argmax_is_the_largest_log_prob(problem in problems()) {
        for device in devices() {
            for head in ENTRIES {
                let case = problem.case(head);
                let layer = Layer::new(&case, &case.constants(DType::F32, &device)?)?;
                let ids: Vec<u32> = layer.argmax()?.to_vec1()?;
                let rows: Vec<Vec<f32>> = layer.log_probs()?.to_vec2()?;
                for (id, row) in ids.into_iter().zip(rows) {
                    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    prop_assert_eq!(row[id as usize], largest);
                }
            }
        }
    }

    #[test]
    fn one_component_equals_softmax(problem in problems()) {
        for device in devices() {
            let dtype = exact(&device);
            let sizes = Sizes { components: 1, ..problem.sizes };
            let case = Case::random(Head::MixtureOfSoftmaxes, sizes, &[problem.positions], problem.seed);
            assert_equals_softmax(&case, dtype, &device)?;
        }
    }

    #[test]
    fn a_mixture_of_contexts_is_the_softmax_of_the_mixed_context(problem in problems()) {
        for device in devices() {
            assert_equals_softmax(&problem.case(Head::MixtureOfContexts), exact(&device), &device)?;
        }
    }

    #[test]
    fn equal_components_equal_softmax(problem in problems()) {
        for device in devices() {
            let dtype = exact(&device);
            let mut case = problem.case(Head::Mixture);
            let Sizes { context, components, .. } = case.sizes;
            let contexts = case.values.get_mut("contexts").expect("contexts");
            for contexts in contexts.chunks_mut(components * context) {
                for k in 1..components {
                    contexts.copy_within(..context, k * context);
                }
            }
            let tensors = case.constants(dtype, &device)?;
            let mixture = Layer::new(&case, &tensors)?.log_probs()?;
            let single = tensors["contexts"].narrow(1, 0, 1)?;
            let bias = tensors.get("decoder.bias");
            let softmax = Mixture::new(&single, None, &tensors["decoder.weight"], bias)?.log_probs()?;
            assert_close("log_probs", &numbers(&mixture), &numbers(&softmax), None, Tolerance::value(dtype));
        }
    }

    #[test]
    fn the_order_of_the_components_does_not_matter(problem in problems()) {
        for device in devices() {
            let dtype = exact(&device);
            let case = problem.case(Head::Mixture);
            let mut reversed = case.clone();
            let Sizes { context, components, .. } = case.sizes;
            for (name, width) in [("contexts", context), ("log_priors", 1)] {
                reverse_blocks(reversed.values.get_mut(name).expect(name), components, width);
            }
            let options = options(&case, &device)?;
            let expected = ask(&case, &case.variables(dtype, &device)?, &options)?;
            let mut got = ask(&reversed, &reversed.variables(dtype, &device)?, &options)?;
            for (name, width) in [("contexts", context), ("log_priors", 1)] {
                reverse_blocks(got.gradients.get_mut(name).expect(name), components, width);
            }
            assert_same(&got, &expected, dtype);
        }
    }

    #[test]
    fn shifting_all_logits_changes_nothing(problem in problems(), shift in -30.0..30.0_f64) {
        for device in devices() {
            let dtype = exact(&device);
            for head in ENTRIES {
                let case = problem.case(head);
                let mut shifted = case.clone();
                let bias = shifted.values.get_mut("decoder.bias").expect("decoder.bias");
                bias.iter_mut().for_each(|b| *b += shift);
                let options = LossOptions::new().with_label_smoothing(0.1);
                let expected = ask(&case, &case.variables(dtype, &device)?, &options)?;
                let got = ask(&shifted, &shifted.variables(dtype, &device)?, &options)?;
                assert_same(&got, &expected, dtype);
            }
        }
    }

    #[test]
    fn the_workspace_budget_changes_nothing(problem in problems(), factor in 1..20_usize) {
        for device in devices() {
            for head in ENTRIES {
                let case = problem.case(head);
                let options = options(&case, &device)?;
                let tensors = case.variables(DType::F32, &device)?;
                let expected = ask(&case, &tensors, &options)?;
                let layer = Layer::new(&case, &tensors)?;
                let least = least_workspace(&layer, &case.target_tensor(&device)?, &options);
                for bytes in [least, least + 1, least * factor, 1 << 24] {
                    let got = ask(&case, &tensors, &options.clone().with_workspace_bytes(bytes))?;
                    assert_same(&got, &expected, DType::F32);
                }
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing(problem in problems()) {
        for device in devices() {
            for head in ENTRIES {
                let case = problem.case(head);
                let options = options(&case, &device)?;
                let tensors = case.variables(DType::F32, &device)?;
                let expected = ask(&case, &tensors, &options)?;
                for threads in 1..=3 {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
                    let got = pool.install(|| ask(&case, &tensors, &options))?;
                    assert_same(&got, &expected, DType::F32);
                    let again = pool.install(|| ask(&case, &tensors, &options))?;
                    assert_identical(&again, &got);
                }
            }
        }
    }

    #[test]
    fn the_same_call_twice_gives_the_same_bits(problem in problems()) {
        for device in devices() {
            for head in ENTRIES {
                let case = problem.case(head);
                let options = options(&case, &device)?;
                let tensors = case.variables(DType::F32, &device)?;
                assert_identical(&ask(&case, &tensors, &options)?, &ask(&case, &tensors, &options)?);
            }
        }
    }

    #[test]
    fn a_split_batch_adds_up(problem in problems(), cut in 0.0..1.0_f64) {
        for device in devices() {
            let dtype = exact(&device);
            let first = (cut * problem.positions as f64) as usize;
            for head in ENTRIES {
                let case = problem.case(head);
                let options = options(&case, &device)?.with_reduction(Reduction::Sum);
                let whole = ask(&case, &case.variables(dtype, &device)?, &options)?;
                let mut parts = vec![];
                for positions in [0..first, first..problem.positions] {
                    let part = case.at(positions);
                    parts.push(ask(&part, &part.variables(dtype, &device)?, &options)?);
                }
                assert_adds_up(&parts, &whole, dtype);
            }
        }
    }
}

/// Asserts that a head with one softmax has the log-probabilities and loss of a softmax over the context it computes.
fn assert_equals_softmax(case: &Case, dtype: DType, device: &Device) -> Result<()> {
    let tensors = case.constants(dtype, device)?;
    let layer = Layer::new(case, &tensors)?;
    let mixed = Operands::project(case.head, &tensors, case.activation)?.contexts;
    let softmax = Mixture::new(&mixed, None, &tensors["decoder.weight"], tensors.get("decoder.bias"))?;
    let tolerance = Tolerance::value(dtype);
    let (got, expected) = (numbers(&layer.log_probs()?), numbers(&softmax.log_probs()?));
    assert_close("log_probs", &got, &expected, None, tolerance);
    let (targets, options) = (case.target_tensor(device)?, options(case, device)?);
    let value = |loss: Loss| numbers(&loss.value);
    let (got, expected) = (layer.loss(&targets, &options)?, softmax.loss(&targets, &options)?);
    assert_close("loss", &value(got), &value(expected), None, tolerance);
    Ok(())
}

/// Reverses the order of the components of `[.., components, width]`.
fn reverse_blocks(values: &mut [f64], components: usize, width: usize) {
    for block in values.chunks_mut(components * width) {
        let reversed: Vec<f64> = block.rchunks(width).flatten().copied().collect();
        block.copy_from_slice(&reversed);
    }
}

/// Asserts that sums, counts and gradients of parameters add up, and that results per position are concatenated.
fn assert_adds_up(parts: &[Answer], whole: &Answer, dtype: DType) {
    let sum = |values: &dyn Fn(&Answer) -> Numbers| {
        let mut parts = parts.iter().map(values);
        let mut sum = parts.next().expect("two parts");
        for part in parts {
            sum.iter_mut().zip(part).for_each(|(x, y)| *x += y);
        }
        sum
    };
    let chain = |values: &dyn Fn(&Answer) -> Numbers| -> Numbers { parts.iter().flat_map(values).collect() };
    let value = Tolerance::value(dtype);
    let totals: [fn(&Loss) -> &Tensor; 3] = [|l| &l.value, |l| &l.sum, |l| &l.count];
    for total in totals {
        let got = sum(&|answer| numbers(total(&answer.loss)));
        assert_close("total", &got, &numbers(total(&whole.loss)), None, value);
    }
    let got = chain(&|answer| numbers(&answer.loss.nll));
    assert_close("nll", &got, &numbers(&whole.loss.nll), None, value);
    for (&name, expected) in &whole.gradients {
        let gradient = |answer: &Answer| answer.gradients[name].clone();
        let is_per_position = ["hidden", "contexts", "log_priors"].contains(&name);
        let got = if is_per_position { chain(&gradient) } else { sum(&gradient) };
        let tolerance = Tolerance::gradient(dtype).least_scale(LEAST_SCALE);
        assert_close(name, &got, expected, None, tolerance);
    }
}
