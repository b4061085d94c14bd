//! Distributions that are renormalised over sets of allowed ids: every result and every gradient equals plain loops in
//! f64, central differences and candle's operations, for each way in which they are computed.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::allowed::{assert_config, assert_near, cases, ids, of_lists, tensors, values, variables, Case, Sets};
use common::check::numbers;
use common::scores::compare;
use common::{exact, on, on_each_device};
use mos_head::decode::{Sampler, Sampling};
use mos_head::sampled::{Negatives, NoiseDistribution};
use mos_head::score::ScoreOptions;
use mos_head::sets::AllowedIds;
use mos_head::{Distributions, Error, LossOptions, Mixture, OptionName, Reduction, Result};

/// The relative tolerance of values, and of gradients.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (1e-12, 1e-11),
        DType::F32 => (1e-5, 4e-5),
        _ => (1e-5, 1e-2),
    }
}

/// Losses, log-probabilities, scores and entropies of every case, in every dtype.
#[test]
fn values_equal_plain_loops() -> Result<()> {
    for case in cases() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let (tolerance, _) = tolerance(dtype);
            let name = format!("{case:?} {dtype:?}");
            let operands = case.operands(dtype)?;
            let (lists, targets, n) = (case.lists(), case.targets(), case.positions);
            let of_values = |temperature| case.restricted(&values(&operands), &lists, temperature);
            let truth = of_values(1.0);
            let restricted = case.mixture(&operands)?.restricted(&case.allowed())?;

            let mut expected = vec![f64::NEG_INFINITY; n * case.vocab];
            for (t, list) in lists.iter().enumerate() {
                list.iter().zip(&truth[t]).for_each(|(&id, &x)| expected[t * case.vocab + id as usize] = x);
            }
            let found = restricted.log_probs_as(DType::F64)?;
            assert_eq!(found.dims(), [n, case.vocab]);
            assert_near(&name, &numbers(&found), &expected, tolerance);

            let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
            let nll: Vec<f64> = (0..n).map(|t| -truth[t][place(t)]).collect();
            let loss = restricted.loss(&ids(&targets, &[n]), &LossOptions::new().with_reduction(Reduction::None))?;
            assert_near(&name, &numbers(&loss.nll), &nll, tolerance);
            assert_near(&name, &numbers(&loss.value), &nll, tolerance);
            assert_near(&name, &numbers(&restricted.log_prob(&ids(&targets, &[n]))?.affine(-1., 0.)?), &nll, tolerance);

            let tempered = of_values(case.temperature);
            let entropy = |of: &[Vec<f64>]| -> Vec<f64> {
                of.iter().map(|row| -row.iter().map(|x| x * x.exp()).sum::<f64>()).collect()
            };
            let options = ScoreOptions::new().with_temperature(case.temperature).with_entropy(true);
            let first: Vec<u32> = (0..n).flat_map(|t| [lists[t][0], targets[t]]).collect();
            let scores = restricted.score(&ids(&first, &[n, 2]), &options)?;
            let expected: Vec<f64> = (0..n).flat_map(|t| [tempered[t][0], tempered[t][place(t)]]).collect();
            assert_near(&name, &numbers(&scores.log_prob), &expected, tolerance);
            assert_near(&name, &numbers(&scores.entropy.expect("asked for")), &entropy(&tempered), tolerance);
            assert_near(&name, &numbers(&restricted.entropy()?), &entropy(&truth), tolerance);
        }
    }
    Ok(())
}

/// A function of every result, by whose gradients they are compared.
fn value_of(case: &Case, operands: &[Tensor; 4], part: usize) -> Result<Tensor> {
    let restricted = case.mixture(operands)?.restricted(&case.allowed())?;
    let targets = ids(&case.targets(), &[case.positions]);
    let weights = upstream(case.positions, operands[0].dtype())?;
    match part {
        0 => {
            let options = LossOptions::new().with_position_weights(weights).with_reduction(Reduction::Sum);
            Ok(restricted.loss(&targets, &options)?.value)
        }
        1 => {
            let options = ScoreOptions::new().with_temperature(case.temperature).with_entropy(true);
            let scores = restricted.score(&targets, &options)?;
            let entropy = scores.entropy.expect("asked for");
            Ok(((scores.log_prob * &weights)?.sum_all()? + (entropy * weights)?.sum_all()?)?)
        }
        _ => {
            let log_probs = restricted.log_probs()?;
            let mut sum = Tensor::zeros((), log_probs.dtype(), &Device::Cpu)?;
            for (t, list) in case.lists().iter().enumerate() {
                let of_list = log_probs.get(t)?.index_select(&Tensor::new(list.as_slice(), &Device::Cpu)?, 0)?;
                sum = (sum + (of_list.sqr()?.sum_all()? * weights.get(t)?)?)?;
            }
            Ok(sum)
        }
    }
}

/// The same from candle's operations.
fn composed_value(case: &Case, operands: &[Tensor; 4], part: usize) -> Result<Tensor> {
    let (lists, targets) = (case.lists(), case.targets());
    let weights = upstream(case.positions, operands[0].dtype())?;
    let temperature = if part == 1 { case.temperature } else { 1.0 };
    let mut sum = Tensor::zeros((), operands[0].dtype(), &Device::Cpu)?;
    for (t, row) in case.composed(operands, &lists, temperature)?.iter().enumerate() {
        let place = lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
        let of_target = row.get(place)?;
        let term = match part {
            0 => of_target.neg()?,
            1 => (of_target - (row.exp()? * row)?.sum_all()?)?,
            _ => row.sqr()?.sum_all()?,
        };
        sum = (sum + (term * weights.get(t)?)?)?;
    }
    Ok(sum)
}

fn upstream(n: usize, dtype: DType) -> Result<Tensor> {
    let values: Vec<f64> = (0..n).map(|i| 0.3 + ((i * 5) % 7) as f64 / 4.0).collect();
    Ok(Tensor::from_vec(values, n, &Device::Cpu)?.to_dtype(if dtype == DType::F64 { dtype } else { DType::F32 })?)
}

const NAMES: [&str; 4] = ["contexts", "log-priors", "weight", "bias"];

#[test]
fn gradients_equal_composed_operations() -> Result<()> {
    for case in cases() {
        for part in 0..3 {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                // Rounded log-probabilities have other gradients.
                if part == 2 && dtype == DType::BF16 {
                    continue;
                }
                let vars = variables(&case.operands(dtype)?);
                let truth = variables(&tensors(&vars).map(|t| t.to_dtype(DType::F64).expect("f64")));
                let found = value_of(&case, &tensors(&vars), part)?.backward()?;
                let expected = composed_value(&case, &tensors(&truth), part)?.backward()?;
                for (i, name) in NAMES.into_iter().enumerate() {
                    if i == 1 && case.components == 1 || i == 3 && !case.bias {
                        continue;
                    }
                    let (Some(found), Some(expected)) = (found.get(&vars[i]), expected.get(&truth[i])) else {
                        panic!("no gradient of {name}: {case:?} {part}");
                    };
                    assert_eq!(found.dtype(), dtype, "{name}");
                    let name = format!("{name} {part}");
                    compare(&name, &case, dtype, found, expected, tolerance(dtype).1)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    const STEP: f64 = 1e-5;
    for case in cases().into_iter().filter(|case| case.vocab < 100 && case.vocab > 1) {
        let (operands, lists, targets) = (case.operands(DType::F64)?, case.lists(), case.targets());
        let vars = variables(&operands);
        let gradients = value_of(&case, &tensors(&vars), 0)?.backward()?;
        let weights = numbers(&upstream(case.positions, DType::F64)?);
        let value = |values: &[Vec<f64>; 4]| -> f64 {
            let rows = case.restricted(values, &lists, 1.0);
            let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
            (0..case.positions).map(|t| -weights[t] * rows[t][place(t)]).sum()
        };
        for (i, var) in vars.iter().enumerate() {
            let Some(gradient) = gradients.get(var) else {
                assert!(i == 1 && case.components == 1 || i == 3 && !case.bias, "{case:?}: {}", NAMES[i]);
                continue;
            };
            let gradient = numbers(gradient);
            for j in (0..gradient.len()).step_by(1 + gradient.len() / 23) {
                let moved = |by: f64| {
                    let mut values = values(&operands);
                    values[i][j] += by;
                    value(&values)
                };
                let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!((gradient[j] - expected).abs() < 1e-7, "{}[{j}]: {} {expected}", NAMES[i], gradient[j]);
            }
        }
    }
    Ok(())
}

/// `Loss::backward` spares a copy of the decoder's gradient, and `Scores::backward` does.
#[test]
fn a_backward_pass_with_a_copy_less_has_the_same_gradients() -> Result<()> {
    for case in cases() {
        let vars = variables(&case.operands(DType::F64)?);
        let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
        let targets = ids(&case.targets(), &[case.positions]);
        let loss = restricted.loss(&targets, &LossOptions::new())?;
        let scores = restricted.score(&targets, &ScoreOptions::new().with_entropy(true))?;
        let value = (scores.log_prob.sum_all()? + scores.entropy.as_ref().expect("asked for").sqr()?.sum_all()?)?;
        let pairs = [(loss.backward()?, loss.value.backward()?), (scores.backward(&value)?, value.backward()?)];
        for (found, expected) in pairs {
            let (found, expected) = (found.get(&vars[2]).expect("one"), expected.get(&vars[2]).expect("one"));
            compare("weight", &case, DType::F64, found, expected, 1e-14)?;
        }
    }
    Ok(())
}

/// With all ids allowed nothing changes: not a bit if the set is for all positions.
#[test]
fn all_ids_allowed_equal_the_plain_loss() -> Result<()> {
    for components in [1, 3] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let case = Case { components, ..cases()[2 * 3] };
            let vars = variables(&case.operands(dtype)?);
            let mixture = case.mixture(&tensors(&vars))?;
            let targets = ids(&case.targets(), &[case.positions]);
            let all: Vec<u32> = (0..case.vocab as u32).collect();
            let options = LossOptions::new();
            let plain = mixture.loss(&targets, &options)?;
            let expected = plain.backward()?;
            let mask = Tensor::ones(case.vocab, DType::U8, &Device::Cpu)?;
            for (allowed, tolerance) in [
                (AllowedIds::new(&all), 0.0),
                (AllowedIds::from_mask(&mask)?, 0.0),
                (AllowedIds::new(&[]).with_empty_as_full(true), 0.0),
                (of_lists(&vec![all.clone(); case.positions]), tolerance(dtype).0),
                (of_lists(&vec![vec![]; case.positions]).with_empty_as_full(true), tolerance(dtype).0),
            ] {
                let restricted = mixture.restricted(&allowed)?;
                let loss = restricted.loss(&targets, &options)?;
                let (exact, of_gradients) = (tolerance, if dtype == DType::BF16 { 1e-2 } else { 4.0 * tolerance });
                compare("nll", &case, dtype, &loss.nll, &plain.nll, exact)?;
                compare("log-probs", &case, dtype, &restricted.log_probs()?, &mixture.log_probs()?, of_gradients)?;
                compare("entropy", &case, dtype, &restricted.entropy()?, &mixture.entropy()?, exact)?;
                let found = loss.backward()?;
                for i in [0, 2, 3] {
                    let (a, b) = (found.get(&vars[i]).expect("one"), expected.get(&vars[i]).expect("one"));
                    compare(NAMES[i], &case, dtype, a, b, if tolerance == 0.0 { 0.0 } else { of_gradients })?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_single_allowed_id_has_no_loss_and_no_gradient() -> Result<()> {
    for components in [1, 3] {
        for shared in [true, false] {
            let case = Case { components, sets: if shared { Sets::Shared(1) } else { Sets::Each(1) }, ..cases()[3] };
            let vars = variables(&case.operands(DType::F32)?);
            let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
            let targets = ids(&case.targets(), &[case.positions]);
            let loss = restricted.loss(&targets, &LossOptions::new())?;
            assert_eq!(numbers(&loss.nll), vec![0.0; case.positions]);
            let gradients = loss.backward()?;
            for i in [0, 2, 3] {
                let gradient = numbers(gradients.get(&vars[i]).expect(NAMES[i]));
                assert!(gradient.iter().all(|g| g.abs() < 1e-6), "{}: {gradient:?}", NAMES[i]);
            }
            assert_eq!(restricted.argmax()?.to_vec1::<u32>()?, case.targets());
        }
    }
    Ok(())
}

/// The softcap comes first: a mask before it would leave masked ids `exp(-cap)`.
#[test]
fn ids_are_restricted_after_the_softcap() -> Result<()> {
    let weight = Tensor::new(&[[1f64], [2.], [3.]], &Device::Cpu)?;
    let mixture = Mixture::new(&Tensor::ones((1, 1, 1), DType::F64, &Device::Cpu)?, None, &weight, None)?;
    let restricted = mixture.with_softcap(0.5)?.restricted(&AllowedIds::new(&[0, 2]))?;
    let z = [1.0f64, 3.0].map(|z| 0.5 * (z / 0.5).tanh());
    let of_first = z[0] - (z[0].exp() + z[1].exp()).ln();
    let found = numbers(&restricted.log_probs()?);
    assert!((found[0] - of_first).abs() < 1e-14 && found[1] == f64::NEG_INFINITY, "{found:?}");
    Ok(())
}

#[test]
fn repeated_ids_count_once_in_any_order() -> Result<()> {
    for components in [1, 3] {
        let case = Case { components, ..cases()[9] };
        let mixture = case.mixture(&case.operands(DType::F64)?)?;
        let lists = case.lists();
        let repeated: Vec<Vec<u32>> =
            lists.iter().map(|list| list.iter().rev().chain(list).copied().collect()).collect();
        let of = |allowed: AllowedIds| mixture.restricted(&allowed)?.log_probs();
        assert_eq!(numbers(&of(of_lists(&lists))?), numbers(&of(of_lists(&repeated))?));
        assert_eq!(numbers(&of(AllowedIds::new(&lists[0]))?), numbers(&of(AllowedIds::new(&repeated[0]))?));
    }
    Ok(())
}

/// A target outside its set is an error that names it, or a member of the set.
#[test]
fn targets_outside_their_sets_are_errors_or_added() -> Result<()> {
    for case in cases().into_iter().filter(|case| case.vocab > 30 && case.sets != Sets::Shared(30)) {
        let operands = case.operands(DType::F64)?;
        let mixture = case.mixture(&operands)?;
        let (mut lists, mut targets) = (case.lists(), case.targets());
        let last = case.positions - 1;
        let outside = (0..case.vocab as u32).find(|id| !lists[last].contains(id)).expect("not all are allowed");
        targets[last] = outside;
        let of_targets = ids(&targets, &[case.positions]);
        let restricted = mixture.restricted(&case.allowed())?;
        let errors = [
            restricted.loss(&of_targets, &LossOptions::new()).map(|_| ()),
            restricted.score(&of_targets, &ScoreOptions::new()).map(|_| ()),
        ];
        for error in errors.map(|result| result.expect_err("a target outside")) {
            assert!(
                matches!(error, Error::NotAllowed { position, got } if position == last && got == i64::from(outside)),
                "{error:?}"
            );
            let message = error.to_string();
            assert!(message.contains(&format!("{outside} at position {last} is not among")), "{message}");
        }
        let restricted = mixture.restricted(&case.allowed().with_targets_added(true))?;
        let loss = restricted.loss(&of_targets, &LossOptions::new())?;
        lists[last].push(outside);
        let truth = case.restricted(&values(&operands), &lists, 1.0);
        let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
        let nll: Vec<f64> = (0..case.positions).map(|t| -truth[t][place(t)]).collect();
        assert_near("nll", &numbers(&loss.nll), &nll, 1e-12);
        let scores = restricted.score(&of_targets, &ScoreOptions::new().with_entropy(true))?;
        assert_near("log_prob", &numbers(&scores.log_prob.affine(-1.0, 0.0)?), &nll, 1e-12);
        let entropy: Vec<f64> = truth.iter().map(|row| -row.iter().map(|x| x * x.exp()).sum::<f64>()).collect();
        assert_near("entropy", &numbers(&scores.entropy.expect("asked for")), &entropy, 1e-12);
    }
    Ok(())
}

#[test]
fn empty_sets_are_errors_or_allow_all_ids() -> Result<()> {
    for components in [1, 3] {
        let case = Case { components, ..cases()[9] };
        let operands = case.operands(DType::F64)?;
        let mixture = case.mixture(&operands)?;
        let (mut lists, targets) = (case.lists(), ids(&case.targets(), &[case.positions]));
        lists[2] = vec![];
        let allowed = of_lists(&lists);
        let restricted = mixture.restricted(&allowed)?;
        let mut sampler = Sampler::new(Sampling::new(), 1)?;
        for error in [
            restricted.loss(&targets, &LossOptions::new()).map(|_| ()),
            restricted.log_probs().map(|_| ()),
            restricted.score(&targets, &ScoreOptions::new()).map(|_| ()),
            restricted.top_k(2).map(|_| ()),
            restricted.argmax().map(|_| ()),
            restricted.sample(&mut sampler).map(|_| ()),
        ] {
            let error = error.expect_err("an empty set");
            assert!(matches!(error, Error::EmptySet { position: 2 }), "{error:?}");
            assert_eq!(error.to_string(), "no id is allowed at position 2");
        }
        let none = mixture.restricted(&AllowedIds::new(&[]))?;
        assert!(matches!(none.top_k(1), Err(Error::EmptySet { position: 0 })));
        assert!(matches!(none.loss(&targets, &LossOptions::new()), Err(Error::EmptySet { position: 0 })));

        let restricted = mixture.restricted(&allowed.with_empty_as_full(true))?;
        lists[2] = (0..case.vocab as u32).collect();
        let truth = case.restricted(&values(&operands), &lists, 1.0);
        let found = restricted.log_probs()?.get(2)?;
        assert_near("log_probs", &numbers(&found), &truth[2], 1e-12);
        let nll = numbers(&restricted.loss(&targets, &LossOptions::new())?.nll);
        assert!((nll[2] + truth[2][case.targets()[2] as usize]).abs() < 1e-12, "{nll:?}");
        assert_eq!(restricted.top_k(case.vocab)?.token_ids.dims(), [case.positions, case.vocab]);
    }
    Ok(())
}

/// Ignored positions need neither a valid target nor a set, and may hold NaN.
#[test]
fn ignored_positions_need_no_set() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15], cases()[21], cases()[27]] {
        let [contexts, logits, weight, bias] = case.operands(DType::F64)?;
        let nan = Tensor::full(f64::NAN, (1, case.components, case.d), &Device::Cpu)?;
        let contexts = Tensor::cat(&[&nan, &contexts.narrow(0, 1, case.positions - 1)?], 0)?;
        let operands = [contexts, logits, weight, bias];
        let vars = variables(&operands);
        let mixture = case.mixture(&tensors(&vars))?;
        let mut lists = case.lists();
        let shared = matches!(case.sets, Sets::Shared(_));
        let allowed = if shared {
            case.allowed()
        } else {
            lists[0] = vec![];
            of_lists(&lists)
        };
        let mut targets: Vec<i64> = case.targets().into_iter().map(i64::from).collect();
        targets[0] = -100;
        let targets = Tensor::new(targets.as_slice(), &Device::Cpu)?;
        let loss = mixture.restricted(&allowed)?.loss(&targets, &LossOptions::new().with_ignore_index(-100))?;
        assert_eq!(numbers(&loss.count), [(case.positions - 1) as f64]);
        assert_eq!(numbers(&loss.nll)[0], 0.0);
        let gradients = loss.backward()?;
        let rest = case.lists();
        for i in [0, 2, 3] {
            let gradient = numbers(gradients.get(&vars[i]).expect(NAMES[i]));
            assert!(gradient.iter().all(|g| g.is_finite()), "{} {case:?}", NAMES[i]);
            assert!(gradient.iter().any(|g| *g != 0.0), "{} {case:?}", NAMES[i]);
        }
        let finite = values(&case.operands(DType::F64)?);
        let truth = case.restricted(&finite, &rest, 1.0);
        let place = |t: usize| rest[t].iter().position(|id| *id == case.targets()[t]).expect("allowed");
        let mean = (1..case.positions).map(|t| -truth[t][place(t)]).sum::<f64>() / (case.positions - 1) as f64;
        assert!((numbers(&loss.value)[0] - mean).abs() < 1e-12 * mean.max(1.0), "{case:?}");
        // All ignored.
        let none = Tensor::full(-100i64, case.positions, &Device::Cpu)?;
        for allowed in [allowed, AllowedIds::new(&[])] {
            let loss = mixture.restricted(&allowed)?.loss(&none, &LossOptions::new().with_ignore_index(-100))?;
            assert_eq!((numbers(&loss.value), numbers(&loss.count)), (vec![0.0], vec![0.0]));
        }
    }
    Ok(())
}

/// Nothing is computed of an ignored position: neither ids without a probability, in its set or elsewhere, nor a NaN
/// change the gradients, which are those of the other positions.
#[test]
fn an_ignored_position_has_no_part_in_the_gradients() -> Result<()> {
    let impossible = f64::NEG_INFINITY;
    for (components, shared, bias) in [
        (2, false, [impossible, 0.0, 0.0, 0.0]),
        (1, false, [impossible, 0.0, 0.0, 0.0]),
        (2, true, [impossible, 0.0, 0.0, 0.0]),
        (1, true, [impossible, 0.0, 0.0, 0.0]),
        // The ignored position has the last id alone.
        (2, false, [0.0, 0.3, -0.2, impossible]),
        (1, false, [0.0, 0.3, -0.2, impossible]),
    ] {
        let contexts = Var::from_tensor(&Tensor::ones((2, components, 1), DType::F64, &Device::Cpu)?)?;
        let log_priors = Var::from_tensor(&(Tensor::ones((2, components), DType::F64, &Device::Cpu)? * 0.5)?.log()?)?;
        let weight = Var::from_tensor(&Tensor::new(&[[0.1], [0.2], [-0.3], [0.4]], &Device::Cpu)?)?;
        let bias = Var::from_tensor(&Tensor::new(&bias, &Device::Cpu)?)?;
        let mixture = |positions: usize| {
            let of = |var: &Var| var.narrow(0, 0, positions);
            let log_priors = Some(of(&log_priors)?).filter(|_| components > 1);
            Mixture::new(&of(&contexts)?, log_priors.as_ref(), &weight, Some(&bias))
        };
        let (both, alone) = if shared {
            // With targets added, sets are lists.
            let ids = AllowedIds::new(&[2]).with_targets_added(true);
            (ids.clone(), ids)
        } else {
            (of_lists(&[vec![1, 2], vec![3]]), of_lists(&[vec![1, 2]]))
        };
        let options = LossOptions::new().with_ignore_index(-100);
        let targets = Tensor::new(&[1i64, -100], &Device::Cpu)?;
        let loss = mixture(2)?.restricted(&both)?.loss(&targets, &options)?;
        let expected = mixture(1)?.restricted(&alone)?.loss(&targets.narrow(0, 0, 1)?, &options)?;
        assert_eq!(numbers(&loss.value), numbers(&expected.value));
        assert_eq!(numbers(&loss.nll), [numbers(&expected.nll)[0], 0.0]);
        let (found, expected) = (loss.backward()?, expected.backward()?);
        for var in [&contexts, &log_priors, &weight, &bias].into_iter().filter(|var| expected.get(var).is_some()) {
            let found = numbers(found.get(var).expect("a gradient"));
            assert_eq!(found, numbers(expected.get(var).expect("a gradient")), "K = {components}, shared {shared}");
            assert!(found.iter().all(|g| g.is_finite()));
        }
        // If all are ignored, nothing has a gradient.
        let none = Tensor::full(-100i64, 2, &Device::Cpu)?;
        let loss = mixture(2)?.restricted(&both)?.loss(&none, &options)?;
        assert_eq!(numbers(&loss.value), [0.0]);
        let gradients = loss.backward()?;
        for var in [&contexts, &weight, &bias] {
            assert!(numbers(gradients.get(var).expect("a gradient")).iter().all(|g| *g == 0.0));
        }
    }
    Ok(())
}

/// A NaN stays at its position; ids of logit minus infinity have no probability and no NaN gradient; a set of these
/// alone has no distribution.
#[test]
fn infinite_and_undefined_logits_stay_where_they_are() -> Result<()> {
    for components in [1, 3] {
        for case in
            [Case { components, ..cases()[9] }, Case { components, ..cases()[15] }, Case { components, ..cases()[3] }]
        {
            let [contexts, logits, weight, bias] = case.operands(DType::F64)?;
            let (lists, targets) = (case.lists(), case.targets());
            // Forbidden by the bias: an id of position 1 that is no target.
            let forbidden = lists.iter().flatten().copied().find(|id| !targets.contains(id)).expect("another id");
            let mut of_bias = numbers(&bias);
            of_bias[forbidden as usize] = f64::NEG_INFINITY;
            let bias = Tensor::new(of_bias.as_slice(), &Device::Cpu)?;
            let vars = variables(&[contexts.clone(), logits.clone(), weight.clone(), bias.clone()]);
            let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
            let of_targets = ids(&targets, &[case.positions]);
            let scores = restricted.score(&of_targets, &ScoreOptions::new().with_entropy(true))?;
            let truth =
                case.restricted(&values(&[contexts.clone(), logits.clone(), weight.clone(), bias]), &lists, 1.0);
            let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
            let expected: Vec<f64> = (0..case.positions).map(|t| truth[t][place(t)]).collect();
            assert_near("log_prob", &numbers(&scores.log_prob), &expected, 1e-12);
            let value = (scores.log_prob.sum_all()? + scores.entropy.expect("asked for").sum_all()?)?;
            let gradients = value.backward()?;
            for i in [0, 2, 3] {
                let gradient = numbers(gradients.get(&vars[i]).expect(NAMES[i]));
                assert!(gradient.iter().all(|g| g.is_finite()), "{} {case:?}", NAMES[i]);
            }

            let nan = Tensor::full(f64::NAN, (1, components, case.d), &Device::Cpu)?;
            let contexts = Tensor::cat(&[&nan, &contexts.narrow(0, 1, case.positions - 1)?], 0)?;
            let mixture = case.mixture(&[contexts, logits, weight, vars[3].as_tensor().detach()])?;
            let restricted = mixture.restricted(&case.allowed())?;
            let nll = numbers(&restricted.loss(&of_targets, &LossOptions::new())?.nll);
            assert!(nll[0].is_nan() && nll[1..].iter().all(|x| x.is_finite()), "{nll:?}");
            assert!(matches!(restricted.top_k(1), Err(Error::Distribution { position: 0 })));
            let only = AllowedIds::new(&[forbidden]);
            let last = mixture.restricted(&only)?.log_probs()?.get(1)?;
            assert!(numbers(&last)[forbidden as usize].is_nan());
            let lists = [vec![vec![targets[0]]], vec![vec![forbidden]; case.positions - 1]].concat();
            let of_finite = case.mixture(&case.operands(DType::F64)?)?;
            assert!(of_finite.restricted(&of_lists(&lists))?.top_k(1).is_ok());
        }
    }
    Ok(())
}

#[test]
fn a_set_without_probability_is_no_distribution() -> Result<()> {
    for components in [1, 2] {
        let weight = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
        let bias = Tensor::new(&[0f32, f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0], &Device::Cpu)?;
        let contexts = Tensor::ones((3, components, 2), DType::F32, &Device::Cpu)?;
        let log_priors = Tensor::full(-(components as f32).ln(), (3, components), &Device::Cpu)?;
        let log_priors = Some(&log_priors).filter(|_| components > 1);
        let mixture = Mixture::new(&contexts, log_priors, &weight, Some(&bias))?;
        let mut sampler = Sampler::new(Sampling::new().with_top_p(0.5), 1)?;
        let lists = of_lists(&[vec![0, 1], vec![3], vec![1, 2]]);
        for (allowed, expected) in [(lists, 2), (AllowedIds::new(&[2, 1]), 0)] {
            let restricted = mixture.restricted(&allowed)?;
            for result in [restricted.top_k(2).map(|_| ()), restricted.sample(&mut sampler).map(|_| ())] {
                let is_expected = matches!(result, Err(Error::Impossible { position }) if position == expected);
                assert!(is_expected, "{components} {result:?}");
            }
        }
    }
    Ok(())
}

on_each_device! {
    fn sets_of_each_device_equal_plain_loops(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for case in cases() {
            let operands = case.operands(dtype)?;
            let truth = case.restricted(&values(&operands), &case.lists(), 1.0);
            let vars = operands.map(|t| Var::from_tensor(&t.to_device(device).expect("a copy")).expect("a variable"));
            let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
            let targets = on(device, &ids(&case.targets(), &[case.positions]))?;
            let loss = restricted.loss(&targets, &LossOptions::new())?;
            let place = |t: usize| case.lists()[t].iter().position(|id| *id == case.targets()[t]).expect("allowed");
            let nll: Vec<f64> = (0..case.positions).map(|t| -truth[t][place(t)]).collect();
            assert_near("nll", &numbers(&loss.nll), &nll, 1e-5);
            assert!(loss.backward()?.get(&vars[2]).is_some());
            let top = restricted.top_k(1)?;
            for (t, id) in top.token_ids.flatten_all()?.to_vec1::<u32>()?.into_iter().enumerate() {
                assert!(case.lists()[t].contains(&id));
            }
        }
        Ok(())
    }

    fn an_empty_batch_of_each_device_has_no_positions(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let weight = Var::from_tensor(&Tensor::ones((20, 6), dtype, device)?)?;
        for components in [1, 2] {
            let log_priors = Tensor::zeros((0, components), dtype, device)?;
            let log_priors = Some(&log_priors).filter(|_| components > 1);
            let contexts = Tensor::zeros((0, components, 6), dtype, device)?;
            let mixture = Mixture::new(&contexts, log_priors, &weight, None)?;
            for allowed in [AllowedIds::new(&[3, 5]), AllowedIds::new(&[]), AllowedIds::per_position(&[], &[0])?] {
                let restricted = mixture.restricted(&allowed)?;
                let loss = restricted.loss(&Tensor::zeros(0, DType::U32, device)?, &LossOptions::new())?;
                assert_eq!(numbers(&loss.value), [0.0]);
                assert!(numbers(loss.backward()?.get(&weight).expect("a gradient")).iter().all(|g| *g == 0.0));
                assert_eq!(restricted.log_probs()?.dims(), [0, 20]);
                assert_eq!(restricted.entropy()?.dims(), [0]);
                assert_eq!(restricted.top_k(2)?.token_ids.dims(), [0, 2]);
                assert_eq!(restricted.sample(&mut Sampler::new(Sampling::new(), 1)?)?.dims(), [0]);
            }
        }
        Ok(())
    }
}

/// The options of a loss over one set for all positions are those of a small vocabulary.
#[test]
fn options_of_one_set_are_those_of_a_small_vocabulary() -> Result<()> {
    let case = cases()[3];
    let vars = variables(&case.operands(DType::F64)?);
    let list = case.lists()[0].clone();
    let index = Tensor::new(list.as_slice(), &Device::Cpu)?;
    let small =
        Mixture::new(&vars[0], None, &vars[2].index_select(&index, 0)?, Some(&vars[3].index_select(&index, 0)?))?;
    let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
    let place = |id: &u32| list.iter().position(|other| other == id).expect("allowed") as u32;
    let targets = case.targets();
    let places = ids(&targets.iter().map(place).collect::<Vec<_>>(), &[case.positions]);
    let targets = ids(&targets, &[case.positions]);
    let class_weights = upstream(case.vocab, DType::F64)?;
    let plain = LossOptions::new().with_position_weights(upstream(case.positions, DType::F64)?);
    for (options, of_small) in [
        (plain.clone().with_label_smoothing(0.2), plain.clone().with_label_smoothing(0.2)),
        (plain.clone().with_z_loss(0.1), plain.clone().with_z_loss(0.1)),
        (plain.clone().with_correct(true), plain.clone().with_correct(true)),
        (plain.clone().with_denominator(7.0), plain.clone().with_denominator(7.0)),
        (
            plain.clone().with_class_weights(class_weights.clone()),
            plain.with_class_weights(class_weights.index_select(&index, 0)?),
        ),
    ] {
        let (found, expected) = (restricted.loss(&targets, &options)?, small.loss(&places, &of_small)?);
        assert_eq!(numbers(&found.value), numbers(&expected.value));
        assert_eq!(numbers(&found.count), numbers(&expected.count));
        assert_eq!(found.correct.as_ref().map(numbers), expected.correct.as_ref().map(numbers));
        let (found, expected) = (found.backward()?, expected.backward()?);
        for i in [0, 2, 3] {
            let (a, b) = (found.get(&vars[i]).expect("one"), expected.get(&vars[i]).expect("one"));
            compare(NAMES[i], &case, DType::F64, a, b, 1e-14)?;
        }
    }
    Ok(())
}

/// Class weights, the reduction and the denominator of lists follow the options too; others are refused.
#[test]
fn options_of_lists_follow_the_conventions_or_are_refused() -> Result<()> {
    let case = cases()[9];
    let mixture = case.mixture(&case.operands(DType::F64)?)?;
    let restricted = mixture.restricted(&case.allowed())?;
    let targets = ids(&case.targets(), &[case.positions]);
    let (of_positions, of_classes) = (upstream(case.positions, DType::F64)?, upstream(case.vocab, DType::F64)?);
    let options = LossOptions::new().with_position_weights(of_positions.clone()).with_class_weights(of_classes.clone());
    let loss = restricted.loss(&targets, &options)?;
    let weights: Vec<f64> = numbers(&(of_positions * of_classes.index_select(&targets, 0)?)?);
    let sum: f64 = numbers(&loss.nll).iter().zip(&weights).map(|(nll, weight)| nll * weight).sum();
    let count: f64 = weights.iter().sum();
    assert_near("mean", &numbers(&loss.value), &[sum / count], 1e-13);
    let halved = restricted.loss(&targets, &options.with_denominator(2.0 * count))?;
    assert_near("denominator", &numbers(&halved.value), &[sum / count / 2.0], 1e-13);
    assert!(!restricted.loss(&targets, &LossOptions::evaluation())?.value.track_op());

    let shared = mixture.restricted(&AllowedIds::new(&case.lists()[0]).with_targets_added(true))?;
    let negatives: Negatives = NoiseDistribution::log_uniform(case.vocab)?.draw(4, 1)?;
    let refused: [(OptionName, LossOptions); 4] = [
        (OptionName::LabelSmoothing, LossOptions::new().with_label_smoothing(0.1)),
        (OptionName::ZLoss, LossOptions::new().with_z_loss(0.1)),
        (OptionName::SampledSoftmax, LossOptions::new().with_sampled_softmax(negatives.clone())),
        (OptionName::Nce, LossOptions::new().with_nce(negatives)),
    ];
    for (expected, options) in refused {
        for restricted in [&restricted, &shared] {
            let error = restricted.loss(&targets, &options).expect_err("not supported");
            assert!(matches!(error, Error::Unsupported { option, .. } if option == expected), "{error:?}");
        }
    }
    Ok(())
}

#[test]
fn sets_that_do_not_fit_are_refused() -> Result<()> {
    let mixture = cases()[3].mixture(&cases()[3].operands(DType::F32)?)?; // 5 positions, 37 ids
    assert_config(mixture.restricted(&AllowedIds::new(&[36, 37])), "allowed ids", "below vocab_size 37, got 37");
    let lists = [vec![1], vec![2, 99], vec![3], vec![], vec![5]];
    assert_config(mixture.restricted(&of_lists(&lists)), "allowed ids", "below vocab_size 37, got 99 at position 1");
    assert_config(mixture.restricted(&of_lists(&lists[2..])), "allowed ids", "each of 5 positions, got 3");
    assert_config(AllowedIds::per_position(&[1, 2], &[]), "offsets", "got none");
    assert_config(AllowedIds::per_position(&[1, 2], &[1, 2]), "offsets", "got 1 first");
    assert_config(AllowedIds::per_position(&[1, 2], &[0, 1]), "offsets", "got 1 last");
    assert_config(AllowedIds::per_position(&[1, 2], &[0, 2, 1, 2]), "offsets", "got 1 after 2 at index 2");
    assert_config(AllowedIds::per_position(&[1], &[0]), "offsets", "got 0 last");
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let mask = AllowedIds::from_mask(&zeros(&[36], DType::U8)?)?;
    assert!(matches!(mixture.restricted(&mask), Err(Error::Shape { argument: "mask", .. })));
    let matrix = AllowedIds::from_mask(&zeros(&[2, 37], DType::U8)?);
    assert!(matches!(matrix, Err(Error::Shape { argument: "mask", .. })));
    let wide = AllowedIds::from_mask(&zeros(&[37], DType::U32)?);
    assert!(matches!(wide, Err(Error::DType { argument: "mask", .. })));
    let restricted = mixture.restricted(&AllowedIds::new(&[3]))?;
    assert_config(restricted.top_k(0), "k", "1 to vocab_size 37");
    assert_config(restricted.top_k(38), "k", "1 to vocab_size 37");
    let targets = Tensor::new(&[3u32, 3, 37, 3, 3], &Device::Cpu)?;
    let error = restricted.loss(&targets, &LossOptions::new());
    assert!(matches!(error, Err(Error::Target { position: 2, got: 37, vocab_size: 37, .. })), "{error:?}");
    let error = restricted.loss(&ids(&[3], &[1]), &LossOptions::new());
    assert!(matches!(error, Err(Error::Shape { argument: "targets", .. })), "{error:?}");
    Ok(())
}

/// The log-prior of a single component cancels; it has a gradient, which is zero.
#[test]
fn the_log_prior_of_one_component_changes_nothing() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15]] {
        let vars = variables(&case.operands(DType::F64)?);
        let log_priors = Var::from_tensor(&upstream(case.positions, DType::F64)?.unsqueeze(1)?)?;
        let targets = ids(&case.targets(), &[case.positions]);
        let without = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
        let with = Mixture::new(&vars[0], Some(&log_priors), &vars[2], Some(&vars[3]))?.restricted(&case.allowed())?;
        let (a, b) = (with.loss(&targets, &LossOptions::new())?, without.loss(&targets, &LossOptions::new())?);
        assert_near("nll", &numbers(&a.nll), &numbers(&b.nll), 1e-12);
        let (a, b) = (a.backward()?, b.backward()?);
        compare("weight", &case, DType::F64, a.get(&vars[2]).expect("one"), b.get(&vars[2]).expect("one"), 1e-12)?;
        assert!(numbers(a.get(&log_priors).expect("one")).iter().all(|g| g.abs() < 1e-14));
    }
    Ok(())
}

/// Each row of the decoder's gradient is the sum of one task: results have the same bits with any number of threads.
#[test]
fn the_number_of_threads_changes_no_bit() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15], cases()[27]] {
        let operands = case.operands(DType::F32)?;
        let results = |threads: usize| -> Result<Vec<Vec<f64>>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| {
                let vars = variables(&operands);
                let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
                let loss = restricted.loss(&ids(&case.targets(), &[case.positions]), &LossOptions::new())?;
                let gradients = loss.backward()?;
                let of = |i: usize| numbers(gradients.get(&vars[i]).expect(NAMES[i]));
                Ok(vec![numbers(&loss.nll), of(0), of(2), of(3)])
            })
        };
        let one = results(1)?;
        for threads in [2, 5] {
            assert_eq!(results(threads)?, one, "{case:?} {threads}");
        }
    }
    Ok(())
}
